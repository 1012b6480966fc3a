"""One place for a cluster's settings: what each client is given, and that secrets stay out of sight."""

from __future__ import annotations

import pytest

from backend.kafka_client.settings import KafkaSettings
from backend.sources.kafka import kafka

SECRET = 'p"w\\1'
SASL = KafkaSettings("a:1,b:2", mechanism="PLAIN", username="ann", password=SECRET)


def test_plaintext_needs_nothing_but_the_servers():
    plain = KafkaSettings("a:1,b:2")
    assert plain.for_client() == {"bootstrap.servers": "a:1,b:2", "security.protocol": "PLAINTEXT"}
    assert plain.for_spark() == {"kafka.bootstrap.servers": "a:1,b:2", "kafka.security.protocol": "PLAINTEXT"}


def test_sasl_reaches_both_clients_each_in_its_words():
    assert SASL.for_client() == {
        "bootstrap.servers": "a:1,b:2",
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "ann",
        "sasl.password": 'p"w\\1',
    }
    assert SASL.for_spark() == {
        "kafka.bootstrap.servers": "a:1,b:2",
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule required "
        'username="ann" password="p\\"w\\\\1";',
    }


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_scram_takes_its_own_login_module(mechanism):
    settings = KafkaSettings("a:1", mechanism=mechanism, username="ann", password="x", tls=True)
    assert settings.for_client()["security.protocol"] == "SASL_SSL"
    assert "scram.ScramLoginModule" in settings.for_spark()["kafka.sasl.jaas.config"]


def test_mutual_tls_reads_the_files_for_spark_and_names_them_for_the_client(tmp_path):
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(f"PEM of {name}")
    settings = KafkaSettings(
        "a:1",
        ca_file=str(tmp_path / "ca"),
        certificate_file=str(tmp_path / "cert"),
        key_file=str(tmp_path / "key"),
        key_password="kp-9",
        check_host=False,
    )
    spark = settings.for_spark()
    assert spark["kafka.security.protocol"] == "SSL"
    assert spark["kafka.ssl.truststore.certificates"] == "PEM of ca"
    assert spark["kafka.ssl.keystore.certificate.chain"] == "PEM of cert"
    assert spark["kafka.ssl.keystore.key"] == "PEM of key"
    assert spark["kafka.ssl.endpoint.identification.algorithm"] == ""
    client = settings.for_client()
    assert client["ssl.ca.location"] == str(tmp_path / "ca")
    assert client["ssl.key.password"] == "kp-9"
    assert client["ssl.endpoint.identification.algorithm"] == "none"
    assert "kp-9" not in repr(settings) + str(settings.describe())


def test_secrets_are_in_no_text_made_of_the_settings():
    text = f"{SASL!r} {SASL} {SASL.describe()}"
    assert SECRET not in text and "ann" not in text
    assert SASL.describe() == {"servers": "a:1,b:2", "protocol": "SASL_PLAINTEXT"}
    spark = SASL.for_spark()["kafka.sasl.jaas.config"]
    assert SASL.redact(f"failed with {spark} and {SECRET}") == (
        "failed with org.apache.kafka.common.security.plain.PlainLoginModule required "
        'username="ann" password="***"; and ***'
    )


def test_the_environment_gives_what_a_command_line_should_not():
    environment = {
        "REWIND_KAFKA_MECHANISM": "SCRAM-SHA-512",
        "REWIND_KAFKA_USERNAME": "u",
        "REWIND_KAFKA_PASSWORD": "p",
        "REWIND_KAFKA_TLS": "1",
        "REWIND_KAFKA_CA_FILE": "",
    }
    assert KafkaSettings.from_environment("a:1", environment) == KafkaSettings(
        "a:1", mechanism="SCRAM-SHA-512", username="u", password="p", tls=True
    )
    assert KafkaSettings.from_environment("a:1", {}) == KafkaSettings("a:1")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"servers": ""}, "servers="),
        ({"servers": "host"}, "servers='host'"),
        ({"mechanism": "GSSAPI", "username": "u", "password": "p"}, "mechanism='GSSAPI'"),
        ({"mechanism": "PLAIN"}, "together"),
        ({"username": "u", "password": "p"}, "together"),
        ({"certificate_file": "c"}, "key_file"),
        ({"key_password": "k"}, "key_password"),
        ({"tls": "false"}, "tls='false': allowed are True and False"),
        ({"check_host": 0}, "check_host=0: allowed are True and False"),
        ({"ca_file": b"ca.pem"}, "ca_file: must be the path of a PEM file, its text, or None; it is a bytes"),
    ],
)
def test_a_combination_that_cannot_work_is_refused_by_name(options, named):
    with pytest.raises(ValueError, match=named):
        KafkaSettings(**{"servers": "a:1", **options})


@pytest.mark.parametrize(
    ("tls", "protocol"), [("TRUE", "SSL"), ("1", "SSL"), ("False", "PLAINTEXT"), ("0", "PLAINTEXT")]
)
def test_encryption_is_on_or_off_in_any_spelling(tls, protocol):
    assert KafkaSettings.from_environment("a:1", {"REWIND_KAFKA_TLS": tls}).protocol == protocol


def test_encryption_that_is_neither_on_nor_off_is_refused():
    """It was off for all but two spellings of on, and the password went out in the clear."""
    with pytest.raises(ValueError, match="REWIND_KAFKA_TLS='yes': allowed are 1, true, 0 and false"):
        KafkaSettings.from_environment("a:1", {"REWIND_KAFKA_TLS": "yes"})


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: FileNotFoundError"),
        (b"\xff", "cannot be read: UnicodeDecodeError"),
        (b"text", "has no PEM in it"),
    ],
)
def test_a_file_that_is_no_certificate_is_refused_by_name(content, why, tmp_path):
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_bytes(content)
    settings = KafkaSettings("a:1", ca_file=file)
    assert settings.ca_file == str(file)
    with pytest.raises(ValueError, match=f"^ca_file='{file}': {why}"):
        settings.check_files()
    with pytest.raises(ValueError, match=r"^ca_file="):
        kafka("t", servers=settings, value="n int")
