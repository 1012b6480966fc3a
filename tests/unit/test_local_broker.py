"""What becomes of a local broker's data when it does not start: what clients may have written stays."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from backend.errors import BrokerUnavailable
from recovery.testing import broker
from recovery.testing.broker import START_TRIES, LocalBroker


class Scripted(LocalBroker):
    """Comes up, or not, as it was told."""

    def __init__(self, *comes_up: bool) -> None:
        super().__init__()
        self.comes_up = list(comes_up)

    @property
    def folder(self) -> Path | None:
        return self._folder

    def _format(self) -> None:
        assert self._folder is not None
        (self._folder / "data").write_text("acknowledged")

    def _start_process(self) -> bool:
        return self.comes_up.pop(0)


def test_a_broker_that_does_not_come_back_keeps_its_data_and_may_be_started_again() -> None:
    broker = Scripted(True, *[False] * START_TRIES, True)
    broker.start()
    folder = broker.folder
    assert folder is not None
    broker.kill()
    with pytest.raises(BrokerUnavailable, match=f"where: {folder}"):
        broker.restart()
    assert (folder / "data").read_text() == "acknowledged"
    broker.start()
    assert broker.folder == folder
    broker.close()
    assert not folder.exists()


def test_an_interrupted_restart_keeps_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Scripted(True)
    broker.start()
    folder = broker.folder
    assert folder is not None

    def interrupted() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(broker, "_start_process", interrupted)
    with pytest.raises(KeyboardInterrupt):
        broker.restart()
    assert (folder / "data").exists()
    broker.close()


def test_a_broker_that_never_came_up_leaves_nothing() -> None:
    broker = Scripted(*[False] * START_TRIES)
    with pytest.raises(BrokerUnavailable, match="did not start"):
        broker.start()
    assert broker.folder is None


def test_processes_that_are_seeded_alike_take_other_ports() -> None:
    def drawn() -> list[int]:
        random.seed(7)
        return [broker._free_port() for _ in range(3)]

    assert drawn() != drawn()


def test_kafka_opts_are_options_of_the_brokers_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.spark.session.jars.java", lambda: "java")
    monkeypatch.setattr("backend.spark.session.jars.resolve", lambda _jars: [Path("kafka.jar")])
    monkeypatch.setenv("KAFKA_OPTS", "-Dwhere='a b' -Xlog:gc=off")
    command = LocalBroker()._java("kafka.Kafka")
    assert command[0] == "java"
    assert {"-Dwhere=a b", "-Xlog:gc=off"} < set(command[1 : command.index("-cp")])
    assert command[-3:] == ["-cp", "kafka.jar", "kafka.Kafka"]


def test_a_broker_in_docker_can_do_transactions_and_makes_no_topics_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    testcontainers = pytest.importorskip("testcontainers.community.kafka")
    given: dict[str, str] = {}

    class Container:
        def with_kraft(self) -> Container:
            return self

        def with_env(self, name: str, value: str) -> Container:
            given[name] = value
            return self

        def start(self, timeout: int) -> None:
            given["started with"] = ", ".join(given)

        def get_bootstrap_server(self) -> str:
            return "h:1"

        def stop(self) -> None:
            given.clear()

    monkeypatch.delenv("KAFKA_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.setattr(broker, "docker_answers", lambda: True)
    monkeypatch.setattr(testcontainers, "KafkaContainer", Container)
    found, close = broker.open_broker()
    assert found.settings.servers == "h:1"
    log = "KAFKA_TRANSACTION_STATE_LOG"
    wanted = {f"{log}_REPLICATION_FACTOR": "1", f"{log}_MIN_ISR": "1", "KAFKA_AUTO_CREATE_TOPICS_ENABLE": "false"}
    assert given == {**wanted, "started with": ", ".join(wanted)}
    close()
    assert given == {}


def test_a_docker_that_gives_no_broker_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers, and has no registry to take the image from."""
    testcontainers = pytest.importorskip("testcontainers.community.kafka")

    class Container:
        def with_kraft(self) -> Container:
            return self

        def with_env(self, name: str, value: str) -> Container:
            return self

        def start(self, timeout: int) -> None:
            raise ValueError("no such image")

        def stop(self) -> None:
            raise KeyError("never started")

    monkeypatch.delenv("KAFKA_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.setattr(broker, "docker_answers", lambda: True)
    monkeypatch.setattr(testcontainers, "KafkaContainer", Container)
    monkeypatch.setattr(broker, "LocalBroker", lambda: Scripted(True))
    found, close = broker.open_broker()
    assert isinstance(found, Scripted)
    assert "Docker gives no broker, one from jars is started: no such image" in caplog.text
    close()
