"""What a local broker needs to ask for passwords and to encrypt: listener settings, users, a certificate.

One listener in the clear (`CLIENT`) and, where TLS is wanted, one encrypted (`TLS`). With users both ask for SASL and
take PLAIN and SCRAM. The certificate is made by Java's own keytool, for `localhost` and 127.0.0.1, valid for a few
days; it signs itself, so it is the authority's file too.
"""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path

from backend.errors import BrokerUnavailable
from backend.kafka_client.settings import MECHANISMS, KafkaSettings, quoted
from backend.spark.session import jars

CA_FILE = "ca.pem"
_KEYSTORE = "broker.p12"
_VALID_DAYS = "3"
_TIMEOUT_S = 60
_SCRAM_ITERATIONS = 4096
_SCRAM_LOGIN = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
_PLAIN_LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"


def protocol(users: Mapping[str, str], *, tls: bool) -> str:
    """Give a listener's security protocol.

    >>> protocol({}, tls=False), protocol({"ann": "x"}, tls=True)
    ('PLAINTEXT', 'SASL_SSL')
    """
    return ("SASL_" if users else "") + ("SSL" if tls else "PLAINTEXT")


def sasl_properties(users: Mapping[str, str], listeners: tuple[str, ...]) -> dict[str, object]:
    """Give the server's settings for logging in; the first user is the broker itself."""
    if not users:
        return {}
    first, password = next(iter(users.items()))
    known = " ".join(f'user_{name}="{quoted(secret)}"' for name, secret in users.items())
    plain = f'{_PLAIN_LOGIN} username="{first}" password="{quoted(password)}" {known};'
    settings: dict[str, object] = {
        "sasl.enabled.mechanisms": ",".join(MECHANISMS),
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
    }
    for listener in listeners:
        for mechanism in MECHANISMS:
            login = plain if mechanism == "PLAIN" else _SCRAM_LOGIN
            settings[f"listener.name.{listener.lower()}.{mechanism.lower()}.sasl.jaas.config"] = login
    return settings


def tls_properties(folder: Path) -> dict[str, object]:
    """Make a certificate in a folder, `ca.pem` beside its key store, and give the server's settings for it.

    Raises:
        BrokerUnavailable: keytool failed.
        JarsUnavailable: There is no Java.
    """
    password = secrets.token_urlsafe(16)
    store = [
        "-keystore",
        str(folder / _KEYSTORE),
        "-storetype",
        "PKCS12",
        "-storepass:env",
        "REWIND_STORE",
        "-alias",
        "b",
    ]
    names = ["-dname", "CN=localhost", "-ext", "SAN=dns:localhost,ip:127.0.0.1", "-ext", "bc:c=ca:true"]
    made = ["-keyalg", "EC", "-groupname", "secp256r1", "-validity", _VALID_DAYS]
    keytool = str(Path(jars.java()).resolve().with_name("keytool"))
    for command in (
        ["-genkeypair", *made, *names, *store],
        ["-exportcert", "-rfc", "-file", str(folder / CA_FILE), *store],
    ):
        run_tool([keytool, *command], "no certificate could be made", env={"REWIND_STORE": password})
    return {
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": folder / _KEYSTORE,
        "ssl.keystore.password": password,
        "ssl.key.password": password,
    }


def run_tool(command: list[str], failed: str, where: str = "", env: Mapping[str, str] | None = None) -> None:
    """Run a command to its end.

    Args:
        command: The command line.
        failed: What is said where it fails, with the end of what it printed.
        where: Likewise.
        env: Its environment; this process's unless given.

    Raises:
        BrokerUnavailable: It failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=env)
    if done.returncode != 0:
        raise BrokerUnavailable(failed, where=where, why=(done.stdout + done.stderr)[-1000:])


def add_scram_users(settings: KafkaSettings, users: Mapping[str, str]) -> None:
    """Tell a running broker the users' SCRAM credentials; it keeps them.

    Args:
        settings: How one of the users logs in by PLAIN.
        users: Name -> password.
    """
    from confluent_kafka.admin import AdminClient, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

    client = AdminClient(settings.for_client() | {"log_level": 0})
    for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):  # one of a user's per request
        credential = ScramCredentialInfo(mechanism, _SCRAM_ITERATIONS)
        wanted = [UserScramCredentialUpsertion(name, credential, secret.encode()) for name, secret in users.items()]
        for answer in client.alter_user_scram_credentials(wanted).values():
            answer.result(_TIMEOUT_S)
