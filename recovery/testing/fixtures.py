"""The pytest fixtures: a broker, topics on it, events in them."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.fixture(scope="session")
def kafka_broker() -> Iterator[Broker]:
    """A Kafka broker for the whole session; see `open_broker` for which. Never skips: without one the test fails."""
    from recovery.testing.broker import open_broker

    try:
        broker, close = open_broker()
    except (RewindError, ImportError) as error:
        raise pytest.fail.Exception(f"{NEEDED}\n{error}", pytrace=False) from error
    try:
        yield broker
    finally:
        close()


@pytest.fixture(scope="session")
def session_kafka_broker(kafka_broker: Broker) -> Iterator[LocalBroker]:
    """What `local_kafka_broker` gives each test: the session's where that is ours, else one more from jars."""
    from recovery.testing.broker import LocalBroker

    if isinstance(kafka_broker, LocalBroker):
        yield kafka_broker
        return
    with LocalBroker() as broker:
        yield broker


@pytest.fixture
def local_kafka_broker(session_kafka_broker: LocalBroker) -> Iterator[LocalBroker]:
    """A broker that a test may kill and restart; one that a test leaves dead is started for the next one."""
    _revive(session_kafka_broker)
    yield session_kafka_broker
    _revive(session_kafka_broker)


def _revive(broker: Broker) -> None:
    from recovery.testing.broker import LocalBroker

    if isinstance(broker, LocalBroker) and broker.pid is None:
        broker.restart()


@pytest.fixture
def kafka_topics(kafka_broker: Broker) -> Iterator[Topics]:
    """Topics on the session's broker that go with the test: `create`, `grow`, `delete`, `produce`."""
    from recovery.testing.events import Topics

    _revive(kafka_broker)
    topics = Topics(kafka_broker.settings)
    try:
        yield topics
    finally:
        _revive(kafka_broker)
        topics.close()


@pytest.fixture(scope="session")
def secured_kafka_broker() -> Iterator[LocalBroker]:
    """A broker of one's own, for the whole session, that wants SASL, in the clear or over TLS; see `settings_with`."""
    from recovery.testing.broker import LocalBroker

    with LocalBroker(users={"rewind": 'pa"ss\\word-7'}, tls=True) as broker:
        yield broker
