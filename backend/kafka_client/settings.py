"""Where a Kafka cluster is and how to be let in: one place for Spark's connector and for confluent-kafka.

Spark's connector speaks the Java client's language, confluent-kafka librdkafka's. `KafkaSettings` holds what both need
once, hides it in `repr`, and keeps it out of manifests (`describe`) and error texts (`redact`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

RIGHTS = (
    "check mechanism, user and password (KafkaSettings, or REWIND_KAFKA_* in the environment), and that the user has"
    " the rights that docs/kafka.md names; then start the query again"
)
"""What helps who was refused."""
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
HIDDEN = "***"
_SERVER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:,/\[\]]+):[0-9]{1,5}")
_TOPIC = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,249}")

_LOGIN = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_FILES = ("ca_file", "certificate_file", "key_file")
_TLS = {"": False, "0": False, "false": False, "1": True, "true": True}
_IN_ENVIRONMENT = ("mechanism", "username", "password", *_FILES, "key_password")
"""Each as `REWIND_KAFKA_` with its name in capitals, such as `REWIND_KAFKA_CA_FILE`."""


def check_topic(name: object, option: str, given: object = None) -> None:
    """Check that a cluster can have a topic of this name.

    Args:
        name: Of the topic.
        option: Where it stands.
        given: The option's value, where that is more than this name.

    Raises:
        ValueError: Names the option.
    """
    if not isinstance(name, str) or not _TOPIC.fullmatch(name):
        shown = name if given is None else given
        raise ValueError(
            f"{option}={shown!r}: must be the name of a topic: at most 249 of the letters a to z and A to Z, digits,"
            " '.', '_' and '-'; not '.' or '..'"
        )


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """Bootstrap servers and security of one Kafka cluster.

    Attributes:
        servers: `host:port,host:port`.
        mechanism: One of `MECHANISMS`; None without SASL.
        username: For SASL.
        password: For SASL.
        tls: Whether connections are encrypted; implied by `ca_file` and `certificate_file`.
        ca_file: Path of a PEM file of the authorities to trust, or its text (`inlined`); None trusts the system's.
        certificate_file: PEM file of the client's certificate chain, for mutual TLS, or its text.
        key_file: PEM file (PKCS#8) of the client's key, or its text.
        key_password: Of the key file.
        check_host: Whether the broker's name must be in its certificate.

    Raises:
        ValueError: The combination cannot work.
    """

    servers: str
    mechanism: str | None = None
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = field(default=None, repr=False)
    key_password: str | None = field(default=None, repr=False)
    check_host: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.servers, str) or not all(
            _SERVER.fullmatch(server) and int(server.rpartition(":")[2]) <= 65535 for server in self._each()
        ):
            raise ValueError(f"servers={self.servers!r}: must be host:port[,host:port...]")
        if self.mechanism is not None and self.mechanism not in MECHANISMS:
            raise ValueError(f"mechanism={self.mechanism!r}: must be one of {', '.join(MECHANISMS)}, or None")
        if (self.mechanism is None) != (self.username is None) or (self.username is None) != (self.password is None):
            raise ValueError("mechanism, username and password: must be given together, or none of them")
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file: must be given together, or none of them")
        if self.key_password is not None and self.key_file is None:
            raise ValueError("key_password: must come with key_file")
        for name in ("tls", "check_host"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: allowed are True and False")
        for name in _FILES:
            file = getattr(self, name)
            if not isinstance(file, str | os.PathLike | None):
                raise ValueError(
                    f"{name}: must be the path of a PEM file, its text, or None; it is a {type(file).__name__}"
                )
            object.__setattr__(self, name, file and os.fspath(file))

    def check_files(self) -> None:
        """See that the PEM files can be read: who makes a source or a sink asks, before anything starts.

        Raises:
            ValueError: One cannot, or is no PEM; names it.
        """
        for name in _FILES:
            file = getattr(self, name)
            try:
                whole = file is None or "-----BEGIN" in pem(file)
                why = "has no PEM in it"
            except (OSError, ValueError) as error:
                whole, why = False, f"cannot be read: {type(error).__name__}"
            if not whole:
                shown = repr(file) if "\n" not in str(file) else "a text"  # which may be a key
                raise ValueError(f"{name}={shown}: {why}; allowed are a PEM file and its text")

    def places(self, topic: str) -> list[str]:
        """Return the URIs by which a topic of this cluster may be named, one per server."""
        return [f"kafka://{server}/{topic}" for server in self._each()]

    def _each(self) -> list[str]:
        return [server.strip() for server in self.servers.split(",")]

    @classmethod
    def from_environment(cls, servers: str, environment: Mapping[str, str] | None = None) -> KafkaSettings:
        """Read everything but the servers from `REWIND_KAFKA_*`: how the command line gets its secrets.

        `REWIND_KAFKA_TLS=1` encrypts with the system's authorities.

        Raises:
            ValueError: As for the class; or `REWIND_KAFKA_TLS` is neither on nor off.
        """
        env = os.environ if environment is None else environment
        tls = env.get("REWIND_KAFKA_TLS", "")
        if tls.strip().lower() not in _TLS:
            raise ValueError(f"REWIND_KAFKA_TLS={tls!r}: allowed are 1, true, 0 and false")
        given = {name: text for name in _IN_ENVIRONMENT if (text := env.get(f"REWIND_KAFKA_{name.upper()}"))}
        return cls(servers=servers, tls=_TLS[tls.strip().lower()], **given)  # type: ignore[arg-type]

    @property
    def protocol(self) -> str:
        """Kafka's `security.protocol`.

        >>> KafkaSettings("a:1").protocol, KafkaSettings("a:1", ca_file="ca.pem").protocol
        ('PLAINTEXT', 'SSL')
        """
        encrypted = self.tls or self.ca_file is not None or self.certificate_file is not None
        return ("SASL_" if self.mechanism else "") + ("SSL" if encrypted else "PLAINTEXT")

    def for_spark(self) -> dict[str, str]:
        """Give the options of Spark's Kafka connector (the Java client's, prefixed with `kafka.`).

        Key and certificate are read here and travel as text, so they need not exist on the executors; the authorities'
        file does too.
        """
        options = self._of_both(unchecked="")
        if self.mechanism:
            options["sasl.mechanism"] = self.mechanism
            options["sasl.jaas.config"] = (
                f"{_LOGIN[self.mechanism]} required "
                f'username="{quoted(self.username)}" password="{quoted(self.password)}";'
            )
        if self.ca_file:
            options["ssl.truststore.type"] = "PEM"
            options["ssl.truststore.certificates"] = pem(self.ca_file)
        if self.certificate_file and self.key_file:
            options["ssl.keystore.type"] = "PEM"
            options["ssl.keystore.certificate.chain"] = pem(self.certificate_file)
            options["ssl.keystore.key"] = pem(self.key_file)
        return {f"kafka.{name}": value for name, value in options.items()}

    def for_client(self) -> dict[str, str]:
        """Give the configuration of confluent-kafka (librdkafka's names)."""
        options = self._of_both(unchecked="none")
        if self.mechanism:
            options |= {"sasl.mechanism": self.mechanism, "sasl.username": self.username or ""}
            options["sasl.password"] = self.password or ""
        files = {"ca": self.ca_file, "certificate": self.certificate_file, "key": self.key_file}
        options |= {f"ssl.{kind}.{_form(file)}": file for kind, file in files.items() if file}
        return options

    def _of_both(self, unchecked: str) -> dict[str, str]:
        """Give what both clients call the same; `unchecked` is a broker's name that need not be in its certificate."""
        options = {"bootstrap.servers": self.servers, "security.protocol": self.protocol}
        if self.protocol.endswith("SSL"):
            options["ssl.endpoint.identification.algorithm"] = "https" if self.check_host else unchecked
        if self.key_password:
            options["ssl.key.password"] = self.key_password
        return options

    def inlined(self) -> KafkaSettings:
        """Give a copy that holds the files' texts: it works where the files are not."""
        texts: dict[str, Any] = {name: pem(file) for name in _FILES if (file := getattr(self, name))}
        return replace(self, **texts)

    def describe(self) -> dict[str, str]:
        """Give what a manifest or report may hold: servers and protocol, nothing secret."""
        return {"servers": self.servers, "protocol": self.protocol}

    def redact(self, text: object) -> str:
        """Hide this object's secrets in a text, such as a client's error message."""
        out = str(text)
        for secret in filter(None, (self.password, self.key_password)):
            for form in (quoted(secret), secret):
                out = out.replace(form, HIDDEN)
        return out


def pem(file: str) -> str:
    """Give the text of a PEM file; what is a text already stays as it is."""
    return file if _form(file) == "pem" else Path(file).read_text()


def _form(file: str) -> str:
    return "pem" if file.lstrip().startswith("-----BEGIN") else "location"


def quoted(value: str | None) -> str:
    """Escape for a quoted value of a JAAS configuration."""
    return (value or "").replace("\\", "\\\\").replace('"', '\\"')
