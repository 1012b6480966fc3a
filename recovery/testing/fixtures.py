"""The pytest fixtures: a broker, topics on it, events in them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from backend.errors import RewindError

if TYPE_CHECKING:
    from recovery.testing.broker import Broker, LocalBroker
    from recovery.testing.events import Topics

NEEDED = (
    "No Kafka broker for the tests. One of these helps: set KAFKA_BOOTSTRAP_SERVERS to a broker that runs; or install "
    "Docker (and testcontainers); or install a Java 17 runtime and confluent-kafka, and let the jars be resolved once "
    "(or set REWIND_JARS to a folder that has them)."
)


def docker_answers() -> bool:
    """Tell whether a Docker engine answers here."""
    try:
        import docker
        import testcontainers.community.kafka  # noqa: F401
    except ImportError:
        return False
    try:
        client = docker.from_env(timeout=3)
    except docker.errors.DockerException:
        return False
    try:
        return bool(client.ping())
    except (docker.errors.DockerException, OSError):
        return False
    finally:
        client.close()


def open_broker() -> tuple[Broker, Callable[[], None]]:
    """Give a broker and how to end it: `KAFKA_BOOTSTRAP_SERVERS`, else testcontainers, else one from jars.

    Credentials for a broker of one's own come from `REWIND_KAFKA_*`.

    Raises:
        BrokerUnavailable: It does not answer or did not start.
        JarsUnavailable: Java or the jars are missing.
        ImportError: confluent-kafka is not installed.
    """
    from backend.errors import BrokerUnavailable
    from backend.sources.kafka_settings import KafkaSettings
    from recovery.testing.broker import ExternalBroker, LocalBroker, answers

    if servers := os.environ.get("KAFKA_BOOTSTRAP_SERVERS"):
        settings = KafkaSettings.from_environment(servers)
        if not answers(settings, timeout_s=15):
            raise BrokerUnavailable("KAFKA_BOOTSTRAP_SERVERS names a broker that does not answer", where=servers)
        return ExternalBroker(settings), lambda: None
    if docker_answers():
        from testcontainers.community.kafka import KafkaContainer

        container = KafkaContainer().with_kraft()
        container.start(timeout=120)
        return ExternalBroker(KafkaSettings(container.get_bootstrap_server())), container.stop
    broker = LocalBroker()
    broker.start()
    return broker, broker.close


@pytest.fixture(scope="session")
def kafka_broker() -> Iterator[Broker]:
    """A Kafka broker for the whole session; see `open_broker` for which. Never skips: without one the test fails."""
    try:
        broker, close = open_broker()
    except (RewindError, ImportError) as error:
        pytest.fail(f"{NEEDED}\n{error}", pytrace=False)
    try:
        yield broker
    finally:
        close()


@pytest.fixture(scope="session")
def local_kafka_broker(kafka_broker: Broker) -> Iterator[Broker]:
    """A broker that a test may kill and restart: the session's where that is ours, else one more from jars."""
    if kafka_broker.can_restart:
        yield kafka_broker
        return
    from recovery.testing.broker import LocalBroker

    with LocalBroker() as broker:
        yield broker


@pytest.fixture
def kafka_topics(kafka_broker: Broker) -> Iterator[Topics]:
    """Topics on the session's broker that go with the test: `create`, `grow`, `delete`, `produce`."""
    from recovery.testing.events import Topics

    topics = Topics(kafka_broker.settings)
    try:
        yield topics
    finally:
        topics.close()


@pytest.fixture
def secured_kafka_broker() -> Iterator[LocalBroker]:
    """A broker of one's own that wants SASL/PLAIN."""
    from recovery.testing.broker import LocalBroker

    with LocalBroker(users={"rewind": 'pa"ss\\word-7'}) as broker:
        yield broker
