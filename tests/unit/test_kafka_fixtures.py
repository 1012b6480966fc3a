"""What the fixtures do where a test leaves its broker dead."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from backend.kafka_client.settings import KafkaSettings
from recovery import ROOT
from recovery.testing.events import Topics

BROKER = """
import pytest
from recovery.testing.broker import LocalBroker

class Acted(LocalBroker):
    pid = None
    def start(self):
        self.pid = 1
    def kill(self):
        self.pid = None

@pytest.fixture(scope="session")
def kafka_broker():
    broker = Acted()
    broker.start()
    yield broker
    assert broker.pid == 1
"""
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(2))
def test_kill(local_kafka_broker, number):
    assert local_kafka_broker.pid == 1
    local_kafka_broker.kill()

def test_start(kafka_broker):
    assert kafka_broker.pid == 1
"""


def test_a_broker_that_a_test_leaves_dead_is_started_for_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(BROKER)
    (tmp_path / "test_dead.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "recovery.testing", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "3 passed" in done.stdout, done.stdout


class Client:
    """Ends each deletion as it is given."""

    def __init__(self, *ends: Exception | None) -> None:
        self.ends = ends
        self.waits = 0

    def delete_topics(self, names: list[str], **_: float) -> dict[str, Any]:
        return {name: self._deletion(end) for name, end in zip(names, self.ends, strict=True)}

    def _deletion(self, end: Exception | None) -> Future[None]:
        client = self

        class Deletion(Future[None]):
            def result(self, timeout: float | None = None) -> None:
                client.waits += 1
                return super().result(timeout)

        deletion = Deletion()
        if end is None:
            deletion.set_result(None)
        else:
            deletion.set_exception(end)
        return deletion


def failed(code: int) -> KafkaException:
    return KafkaException(KafkaError(code))


def topics(client: Client) -> Topics:
    made = Topics(KafkaSettings("127.0.0.1:1"))
    made._admin = client
    made.adopt("a", "b", "c")
    return made


@pytest.mark.parametrize(
    "silence",
    [TimeoutError(), *map(failed, (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN))],
)
def test_topics_of_a_broker_that_is_gone_are_waited_for_once(silence: Exception) -> None:
    client = Client(failed(KafkaError.UNKNOWN_TOPIC_OR_PART), silence, silence)
    topics(client).close()
    assert client.waits == 2


def test_a_topic_that_may_not_be_deleted_is_named() -> None:
    with pytest.raises(KafkaException):
        topics(Client(None, failed(KafkaError.TOPIC_AUTHORIZATION_FAILED), None)).close()
