"""The Kafka sink's writer where another one takes its producer's name: whose the output is, is asked first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from confluent_kafka import KafkaError, KafkaException

from backend.errors import SinkConflict, SinkUnavailable
from backend.kafka_client.settings import KafkaSettings
from backend.sinks.kafka import writer as kafka_writer
from backend.sinks.kafka.commits import Published
from backend.sinks.kafka.delivery import Publication

FENCED = KafkaException(KafkaError(KafkaError._FENCED, "fenced"))
LOST = KafkaException(KafkaError(KafkaError._TIMED_OUT, "the answer to a commit"))
FATAL = KafkaException(KafkaError(KafkaError._FATAL, "cannot go on"))


class Fenced(kafka_writer.TransactionalWriter):
    """A writer whose transactions end as it is told; it notes what it does."""

    def __init__(self, errors: Sequence[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(Publication(KafkaSettings("h:1"), {"results": "r"}, (), "q", {}, 0.03), "commits")
        self._claimed, self._delivery = True, Delivered()  # type: ignore[assignment]
        self.errors, self.refused, self.done = [*errors], list[Exception](), list[str]()
        self.latest = Published("q", 0, 0, {}, self._id, {})
        monkeypatch.setattr(kafka_writer, "newest", self.asked)

    def asked(self, *_: Any) -> Published:
        self.done.append("ask")
        return self.latest

    def _open_producer(self) -> None:
        self.done.append("open")
        if self.refused:
            raise self.refused.pop(0)
        self._delivery = Delivered()  # type: ignore[assignment]

    def _transact(self, record: Published, messages: Any) -> None:
        if self.errors:
            self.done.append("failed")
            raise self.errors.pop(0)
        self.done.append("out")


class Delivered:
    def drop(self) -> None:
        """Nothing is in flight."""


def wanted(writer: Fenced) -> Published:
    return msgspec.structs.replace(writer.latest, version=1)


@pytest.mark.parametrize("error", [FENCED, FATAL])
def test_a_writer_that_still_has_the_output_writes_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Fenced([error], monkeypatch)
    writer._write(wanted(writer), [])
    assert writer.done == ["failed", "ask", "open", "out"]


def test_no_producer_is_opened_before_it_was_asked_whose_the_output_is(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Fenced([FENCED] * 10, monkeypatch)
    with pytest.raises(SinkUnavailable):
        writer._write(wanted(writer), [])
    assert writer.done == ["failed", *["ask", "open", "failed"] * kafka_writer.TRIES]


def test_a_transaction_that_takes_longer_than_the_broker_lets_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker ends it, which looks like a fence; each try would take as long."""
    writer = Fenced([FENCED] * 2, monkeypatch)
    now = [1000.0]
    monkeypatch.setattr(kafka_writer.time, "monotonic", lambda: now[0])
    transact = writer._transact

    def slowly(record: Published, messages: Any) -> None:
        now[0] += kafka_writer.TRANSACTION_TIMEOUT_S
        transact(record, messages)

    monkeypatch.setattr(writer, "_transact", slowly)
    with pytest.raises(SinkUnavailable, match="3 messages were not out after 120 s") as caught:
        writer._write(wanted(writer), [None] * 3)  # type: ignore[list-item]
    assert "max_offsets_per_trigger" in caught.value.command
    assert writer.done == ["failed", "ask", "open"] * 2


def test_a_writer_that_has_lost_the_output_opens_none(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Fenced([FENCED], monkeypatch)
    writer.latest = Published("q", 0, 0, {}, "another", {})
    with pytest.raises(SinkConflict, match="another writer has taken the output over"):
        writer._write(wanted(writer), [])
    assert writer.done == ["failed", "ask"]


def test_nothing_is_asked_while_a_transaction_of_its_own_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a new producer ends; who asked first would wait for as long as the broker lets it stay open."""
    writer = Fenced([LOST], monkeypatch)
    writer._write(wanted(writer), [])
    assert writer.done == ["failed", "open", "out"]


def test_it_is_asked_again_where_a_producer_could_not_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Fenced([FENCED], monkeypatch)
    writer.refused = [SinkUnavailable("the cluster does not answer")]
    writer._write(wanted(writer), [])
    assert writer.done == ["failed", "ask", "open", "ask", "open", "out"]


def test_a_micro_batch_after_one_that_was_given_up_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Fenced([FENCED] * (kafka_writer.TRIES + 1), monkeypatch)
    with pytest.raises(SinkUnavailable):
        writer._write(wanted(writer), [])
    writer.latest, writer.done = Published("q", 0, 0, {}, "another", {}), []
    with pytest.raises(SinkConflict, match="another writer has taken the output over"):
        writer.check(1)
    assert writer.done == ["ask"]
