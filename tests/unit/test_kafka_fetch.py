"""Where a range of offsets ends, and what is said instead of a message: with a client that says what the test wants."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from backend.errors import (
    AccessRefused,
    ChangelogDamaged,
    ChangelogUnavailable,
    HistoryLost,
    SourceDamaged,
    SourceUnavailable,
    SourceWentBack,
    TopicMissing,
)
from backend.kafka_client.settings import KafkaSettings
from backend.sources import kafka_fetch, kafka_reader
from backend.sources.formats import Parse
from backend.sources.kafka import kafka
from backend.sources.kafka_fetch import RECORDS, fetch
from backend.sources.kafka_reader import TOGETHER, KafkaStreamReader, Piece, Pieces, cut
from backend.spark.pack.assembling import Packed, assemble
from backend.spark.pack.pack_input import PackInput, pack_input
from backend.spark.pack.packing import PackPlan, pack
from recovery.changelog.kafka import reader as changelog_reader
from recovery.changelog.kafka.reader import PartitionReader


class Message:
    def __init__(
        self,
        offset: int,
        error: int | None = None,
        *,
        fatal: bool = False,
        partition: int | None = 1,
        text: str = "told",
    ) -> None:
        self._partition = partition
        self._offset, self._error = offset, None if error is None else KafkaError(error, text, fatal)

    def error(self) -> Any:
        return self._error

    def offset(self) -> int:
        return self._offset

    def partition(self) -> int | None:
        return self._partition

    def value(self) -> bytes:
        return b"v%d" % self._offset

    def key(self) -> bytes:
        return b"k%d" % self._offset

    def timestamp(self) -> tuple[int, int]:
        return 1, 1000 + self._offset


class Client:
    """Gives what it was told to, one answer per call."""

    made: list[Client]
    ends: tuple[int, int] | None = 100, 200
    unknown: bool | None = True
    script: list[list[Message]]

    def __init__(self, configuration: dict[str, str]) -> None:
        self.configuration, self.assigned, self.closed = configuration, [], False
        self.made.append(self)

    def assign(self, places: list[Any]) -> None:
        self.assigned += [(place.topic, place.partition, place.offset) for place in places]

    def incremental_unassign(self, places: list[Any]) -> None:
        self.assigned += [("-", place.partition) for place in places]

    def incremental_assign(self, places: list[Any]) -> None:
        self.assigned += [("+", place.partition, place.offset) for place in places]

    def unassign(self) -> None:
        self.assigned.append("nothing")

    def poll(self, wait_s: float) -> Message | None:
        if not self.assigned or self.assigned[-1] == "nothing":
            return None
        self.answer = list(self.script.pop(0)) if self.script else []
        return self.answer.pop(0) if self.answer else None

    def consume(self, at_most: int, timeout: float) -> list[Message]:
        return self.answer[:at_most]

    def list_topics(self, topic: str, timeout: float) -> Any:
        if self.unknown is None:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT, "no answer"))
        error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART) if self.unknown else None
        return SimpleNamespace(topics={topic: SimpleNamespace(error=error)})

    def get_watermark_offsets(self, place: Any, timeout: float, *, cached: bool) -> tuple[int, int]:
        assert not cached
        if self.ends is None:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT, "no answer"))
        return self.ends

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Client]]:
    import confluent_kafka

    kind = type("Scripted", (Client,), {"made": [], "script": []})
    monkeypatch.setattr(confluent_kafka, "Consumer", kind)
    monkeypatch.setattr(kafka_fetch, "_idle", {})
    monkeypatch.setattr(kafka_fetch, "AGAIN_S", 0.0)
    yield kind
    assert gc.isenabled()


def read(start: int, end: int, **configuration: str) -> list[int]:
    return [offset for records in fetch(configuration, "t", {1: (start, end)}) for offset in offsets(records)]


def offsets(records: pa.RecordBatch) -> list[int]:
    assert records.schema == RECORDS
    assert {*records.column("topic").to_pylist()} <= {"t", "other"}
    assert {*records.column("partition").to_pylist()} == {1}
    return list(records.column("offset").to_pylist())


def test_a_range_is_read_exactly(client: Any) -> None:
    client.script += [[Message(n) for n in (5, 6, 8)], [Message(9), Message(12), Message(13)]]
    parts = list(fetch({}, "t", {1: (5, 12)}))
    assert [offsets(part) for part in parts] == [[5, 6, 8], [9]]
    at = datetime(1970, 1, 1, 0, 0, 1, 9_000, UTC)
    assert parts[1].to_pylist() == [
        {"topic": "t", "partition": 1, "offset": 9, "timestamp": at, "key": b"k9", "value": b"v9"}
    ]
    assert client.made[0].assigned == [("t", 1, 5), "nothing"]
    assert client.made[0].configuration["auto.offset.reset"] == "error"


def test_markers_at_the_end_of_a_range_are_not_waited_for(client: Any) -> None:
    """The last offsets of a transaction's range have no message: the end of the partition says so."""
    client.script += [[Message(3)], [], [Message(6, KafkaError._PARTITION_EOF)]]
    assert read(3, 6) == [3]


def test_the_end_of_the_partition_before_the_end_of_the_range_is_waited_out(client: Any) -> None:
    client.script += [[Message(3), Message(4, KafkaError._PARTITION_EOF)], [Message(4)], [Message(5)]]
    assert read(3, 6) == [3, 4, 5]


def test_a_message_behind_the_range_ends_it(client: Any) -> None:
    client.script += [[Message(99)]]
    assert read(3, 6) == []


@pytest.mark.parametrize("given", [[Message(2)], [Message(3), Message(3)], [Message(3), Message(4, partition=0)]])
def test_messages_of_another_range_are_never_taken_for_these(client: Any, given: list[Message]) -> None:
    client.script += [given]
    with pytest.raises(SourceDamaged, match="offset 3 comes next"):
        read(3, 9)
    assert client.made[0].closed


@pytest.mark.parametrize("code", [KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE])
def test_an_end_that_is_lost_is_no_matter_of_retention(client: Any, code: int) -> None:
    """An unclean election, between the plan of a micro-batch and its tasks."""
    client.ends = 0, 3
    client.script += [[Message(3)], [Message(-1001, code)]]
    with pytest.raises(SourceWentBack, match="offset 4 comes next, it holds offsets up to 2") as caught:
        read(3, 9)
    assert caught.value.where == "t-1"
    assert "retention" not in caught.value.command


@pytest.mark.parametrize("ends", [(0, 200), None])
def test_an_end_that_is_lost_is_told_though_the_partition_has_grown_again(client: Any, ends: Any) -> None:
    client.ends = ends
    text = "Partition log truncation detected"
    client.script += [[Message(3)], [Message(-1001, KafkaError._AUTO_OFFSET_RESET, text=text)]]
    with pytest.raises(SourceWentBack, match=r"offset 4 comes next, .*truncation"):
        read(3, 9)


@pytest.mark.parametrize("code", [KafkaError._AUTO_OFFSET_RESET, KafkaError.TOPIC_AUTHORIZATION_FAILED])
def test_an_error_of_another_partition_that_the_client_read_before_is_passed_over(client: Any, code: int) -> None:
    client.script += [[Message(-1001, code, partition=0)], [Message(3), Message(4)]]
    assert read(3, 5) == [3, 4]


def test_a_client_without_a_right_to_the_group_that_is_not_used_reads(client: Any) -> None:
    refused = Message(-1001, KafkaError.GROUP_AUTHORIZATION_FAILED)
    client.script += [[refused], [Message(3), refused, Message(4)]]
    assert read(3, 5) == [3, 4]


@pytest.mark.parametrize("code", [KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE])
def test_offsets_that_are_gone(client: Any, code: int) -> None:
    client.script += [[Message(3)], [Message(-1001, code)]]
    with pytest.raises(HistoryLost, match="offset 4 comes next") as caught:
        read(3, 9)
    assert caught.value.where == "t-1"
    assert "rewind reset" in caught.value.command
    assert client.made[0].closed


@pytest.mark.parametrize(
    ("code", "named"),
    [
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, AccessRefused),
        (KafkaError.SASL_AUTHENTICATION_FAILED, AccessRefused),
    ],
)
def test_what_does_not_pass_is_not_waited_out(client: Any, code: int, named: type[Exception]) -> None:
    client.script += [[Message(3)], [Message(-1001, code)]]
    with pytest.raises(named, match="where: t-1"):
        read(3, 9)
    assert client.made[0].closed


UNKNOWN = pytest.mark.parametrize("code", [KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC])


@UNKNOWN
def test_a_topic_that_a_broker_does_not_know_for_a_moment_is_read_on(client: Any, code: int) -> None:
    client.script += [[Message(3)], [Message(-1001, code)], [], [Message(4)], [Message(5)]]
    assert read(3, 6) == [3, 4, 5]


@UNKNOWN
def test_a_topic_that_no_broker_knows_is_missing(client: Any, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The client says it once; it is not waited for as long as a broker that is silent."""
    now = [0.0]

    def a_second_later() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(kafka_fetch.time, "monotonic", a_second_later)
    client.script += [[Message(3)], [Message(-1001, code)]]
    with pytest.raises(TopicMissing, match=r"where: t-1; why: .*told"):
        read(3, 9)
    assert kafka_fetch.SETTLE_S < now[0] < kafka_fetch.STALL_S
    assert client.made[0].closed


@UNKNOWN
@pytest.mark.parametrize("unknown", [False, None])
def test_a_topic_that_is_there_after_all_is_waited_for_as_ever(
    client: Any, monkeypatch: pytest.MonkeyPatch, code: int, unknown: bool | None
) -> None:
    """Its partition's leader may be away for longer, or nobody answers."""
    monkeypatch.setattr(kafka_fetch, "SETTLE_S", -1.0)
    client.unknown = unknown
    client.script += [[Message(3)], [Message(-1001, code)], [], [Message(4, KafkaError._TRANSPORT)], [], [Message(4)]]
    assert read(3, 5) == [3, 4]


@UNKNOWN
def test_who_answers_for_a_partition_knows_its_topic(client: Any, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(kafka_fetch, "SETTLE_S", 0.0)
    unknown, at_end = Message(-1001, code), Message(4, KafkaError._PARTITION_EOF)
    client.script += [[Message(3)], [unknown, at_end], [], [Message(4)], [Message(5)]]
    assert read(3, 6) == [3, 4, 5]


def test_a_broker_that_gives_nothing_is_waited_for_within_a_bound(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr(kafka_fetch.time, "monotonic", lambda: float(next(clock)))
    client.script += [[Message(3)], *[[]] * 5, [Message(4, KafkaError._TRANSPORT)], [Message(4)]]
    with pytest.raises(SourceUnavailable, match=r"nothing for 120 s at offset 5 of 9: told") as caught:
        read(3, 9, **{"sasl.password": "told"[::-1]})
    assert "check the brokers" in caught.value.command


def test_secrets_stay_out_of_what_is_told(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_fetch, "STALL_S", -1.0)
    client.script += [[Message(-1001, KafkaError._TRANSPORT)]]
    with pytest.raises(SourceUnavailable) as caught:
        read(3, 9, **{"sasl.password": "told"})
    assert "told" not in str(caught.value)


def test_a_client_is_kept_until_it_fails_or_others_come(client: Any) -> None:
    client.script += [[Message(1)], [Message(2)]]
    assert read(1, 2) + read(2, 3) == [1, 2]
    assert len(client.made) == 1
    client.script += [[Message(-1001, KafkaError._AUTO_OFFSET_RESET)], [Message(3)]]
    with pytest.raises(HistoryLost):
        read(3, 4)
    assert read(3, 4) == [3]
    assert [one.closed for one in client.made] == [True, False]
    client.script += [[Message(1)]]
    assert [offset for records in fetch({}, "other", {1: (1, 2)}) for offset in offsets(records)] == [1]
    assert [one.closed for one in client.made] == [True, False, False]  # a topic's client reads no other
    for number in range(kafka_fetch.IDLE_CLIENTS + 1):
        client.script += [[Message(1)]]
        read(1, 2, **{"client.id": str(number)})
    assert [one.closed for one in client.made].count(False) == kafka_fetch.IDLE_CLIENTS


def test_two_ranges_at_once_have_a_client_each(client: Any) -> None:
    client.script += [[Message(1)], [Message(7)], [Message(2)], [Message(8)]]
    one, other = fetch({}, "t", {1: (1, 3)}), fetch({}, "t", {1: (7, 9)})
    assert [offsets(next(each)) for each in (one, other, one, other)] == [[1], [7], [2], [8]]
    assert list(one) + list(other) == []
    assert [len(client.made), [c.closed for c in client.made].count(True)] == [2, 1]


def test_a_reader_that_stops_early_closes_its_client(client: Any) -> None:
    client.script += [[Message(1)]]
    reading = fetch({}, "t", {1: (1, 9)})
    next(reading)
    assert not gc.isenabled()
    reading.close()
    assert client.made[0].closed


@pytest.mark.parametrize(
    ("start", "end", "per_task", "lengths"),
    [
        (0, 0, 10, []),
        (7, 8, 10, [1]),
        (0, 90, 80, [90]),  # an eighth more than a task's share
        (0, 91, 80, [45, 46]),
        (3, 2_003, 1_000, [1_000, 1_000]),
        (0, 2_010, 1_000, [1_005, 1_005]),  # none for the ten above
        (0, 2_251, 1_000, [750, 750, 751]),
        (5, 9, 1, [1, 1, 1, 1]),
    ],
)
def test_a_range_is_cut_into_even_pieces(start, end, per_task, lengths):
    pieces = cut("t", 3, start, end, per_task)
    assert [piece.end - piece.start for piece in pieces] == lengths
    bounds = [piece.start for piece in pieces] + [end]
    assert bounds == [start, *(piece.end for piece in pieces)] or not pieces
    assert {(piece.topic, piece.partition) for piece in pieces} <= {("t", 3)}


def test_a_damaged_batch_that_comes_again_and_again_is_damage(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_fetch, "STALL_S", 0.05)
    client.script += [[Message(3)], *([Message(0, KafkaError._BAD_MSG)] for _ in range(10_000))]
    with pytest.raises(SourceDamaged, match="offset 4 of 9"):
        read(3, 9)


LOST = [KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE]


@pytest.mark.parametrize("code", LOST)
def test_a_client_that_loses_its_place_in_a_damaged_batch_says_nothing_of_retention(
    client: Any, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """It takes bytes of the batch for an offset and asks for that, each time."""
    monkeypatch.setattr(kafka_fetch, "STALL_S", 0.05)
    client.ends = 0, 200
    damaged = [Message(4, KafkaError._BAD_MSG, text="failed CRC32C check")]
    client.script += [[Message(3)], *([damaged, [Message(2**60, code)]] * 10_000)]
    with pytest.raises(SourceDamaged, match="offset 4 of 9: failed CRC32C check"):
        read(3, 9)
    assert {*client.made[0].assigned[1:]} == {("t", 1, 4)}


@pytest.mark.parametrize("ends", [(0, 200), None])
@pytest.mark.parametrize("code", LOST)
def test_offsets_that_are_there_are_asked_for_again(client: Any, code: int, ends: tuple[int, int] | None) -> None:
    client.ends = ends
    client.script += [[Message(3)], [Message(2**60, code)], [Message(4)]]
    assert read(3, 5) == [3, 4]
    assert client.made[0].assigned == [("t", 1, 3), ("t", 1, 4), "nothing"]


def test_a_partition_that_seems_to_be_empty_has_not_lost_its_first_offsets(client: Any) -> None:
    answers = [(200, 200), (200, 200), (0, 200)]
    client.get_watermark_offsets = lambda *_, timeout, cached: answers.pop(0)
    client.script += [[Message(3)], [Message(-1001, KafkaError._AUTO_OFFSET_RESET)], [Message(4)]]
    assert read(3, 5) == [3, 4]
    assert answers == []


@pytest.mark.parametrize("code", [KafkaError._BAD_MSG, KafkaError._NOT_IMPLEMENTED])
@pytest.mark.parametrize("behind", [Message(6), Message(6, KafkaError._PARTITION_EOF)])
def test_what_comes_behind_a_damaged_batch_is_not_taken(client: Any, code: int, behind: Message) -> None:
    """The client may have taken bytes of it for an offset, and read on there."""
    client.script += [[Message(3), Message(4, code), behind], [Message(4), Message(5)]]
    assert read(3, 6) == [3, 4, 5]
    assert client.made[0].assigned == [("t", 1, 3), ("t", 1, 4), "nothing"]


def test_a_timestamp_that_microseconds_cannot_say_is_none(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Message, "timestamp", lambda self: (1, 1_700_000_000_000 * 10 ** (6 * (self.offset() % 2))))
    client.script += [[Message(3), Message(4)]]
    (records,) = fetch({}, "t", {1: (3, 5)})
    assert records.column("timestamp").is_null().to_pylist() == [True, False]
    assert offsets(records) == [3, 4]


def test_a_record_without_a_timestamp_has_none(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Message, "timestamp", lambda self: (0, -1) if self.offset() == 3 else (1, 0))
    client.script += [[Message(3), Message(4)]]
    (records,) = fetch({}, "t", {1: (3, 5)})
    assert records.column("timestamp").to_pylist() == [None, datetime(1970, 1, 1, tzinfo=UTC)]


def test_a_damaged_batch_of_the_changelog_ends_its_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = PartitionReader.__new__(PartitionReader)
    reader._settings, reader._topic, reader._consumer = KafkaSettings("nowhere:1"), "log", None
    monkeypatch.setattr(changelog_reader, "STALLED_S", 0.05)
    came = iter([[Message(0), Message(1)]])
    for code, kind in ((KafkaError._BAD_MSG, ChangelogDamaged), (KafkaError._TRANSPORT, ChangelogUnavailable)):
        found: list[int] = []
        monkeypatch.setattr(
            changelog_reader,
            "next_messages",
            lambda *_, code=code: next(came, [Message(0, code)]),  # and again
        )
        with pytest.raises(kind, match="nothing came"):
            reader._read(1, 0, 6, lambda _key, _value, offset, found=found: found.append(offset))
        assert found == ([0, 1] if kind is ChangelogDamaged else [])


def test_a_client_that_loses_its_place_in_the_changelog_behind_a_damaged_batch_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = PartitionReader.__new__(PartitionReader)
    reader._settings, reader._topic, reader._consumer = KafkaSettings("nowhere:1"), "log", Mock()
    damaged, lost = Message(1, KafkaError._BAD_MSG, text="failed CRC"), Message(9, KafkaError._AUTO_OFFSET_RESET)
    unknown = Message(2, KafkaError._NOT_IMPLEMENTED)
    came = iter([[Message(0), damaged, unknown], [lost], [Message(1), Message(2)]])
    monkeypatch.setattr(changelog_reader, "next_messages", lambda *_: next(came))
    monkeypatch.setattr(changelog_reader, "AGAIN_S", 0)
    found: list[int] = []
    reader._read(1, 0, 3, lambda _key, _value, offset: found.append(offset))
    assert found == [0, 1, 2], "the batch was sound when it was read again"
    [[place]] = [call.args[0] for call in reader._consumer.assign.call_args_list]
    assert (place.partition, place.offset) == (1, 1)
    came = cycle([[damaged, unknown], [lost]])
    monkeypatch.setattr(changelog_reader, "STALLED_S", 0.1)
    with pytest.raises(ChangelogDamaged) as caught:
        reader._read(1, 0, 6, lambda *_: None)
    assert (caught.value.why, caught.value.command) == ("failed CRC", "rewind verify <checkpoint>")
    came = iter([[damaged], [Message(1)], [lost]])
    with pytest.raises(KafkaException):  # messages have come since
        reader._read(1, 0, 6, lambda *_: None)


def test_an_error_of_another_shard_is_no_matter_of_the_changelog_s_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = PartitionReader.__new__(PartitionReader)
    reader._settings, reader._topic, reader._consumer = KafkaSettings("nowhere:1"), "log", None
    came = iter([[Message(-1001, KafkaError._AUTO_OFFSET_RESET, partition=0)], [Message(4), Message(5)]])
    monkeypatch.setattr(changelog_reader, "next_messages", lambda *_: next(came))
    found: list[int] = []
    reader._read(1, 0, 6, lambda _key, _value, offset: found.append(offset))
    assert found == [4, 5]


def test_a_partition_that_seems_to_be_empty_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two requests of the client one was refused: it gives the answer to the other for both."""
    reader = PartitionReader.__new__(PartitionReader)
    reader._settings, reader._topic = KafkaSettings("nowhere:1"), "log"
    for given, wanted in (([(9, 9), (2, 9)], (2, 9)), ([(9, 9)] * 3, (9, 9)), ([(0, 0)], (0, 0)), ([(2, 9)], (2, 9))):
        answers = iter(given)
        reader._consumer = SimpleNamespace(
            get_watermark_offsets=lambda _, timeout, cached, answers=answers: next(answers),
            errors=SimpleNamespace(begin=lambda: None),
        )
        assert reader.watermarks(0) == wanted
        assert list(answers) == []


def read_all(ranges: dict[int, tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {number: [] for number in ranges}
    for records in fetch({}, "t", ranges):
        [number] = {*records.column("partition").to_pylist()}
        found[number] += records.column("offset").to_pylist()
    return found


def test_ranges_of_several_partitions_are_read_with_one_assignment(client: Any) -> None:
    mixed = [Message(3), Message(7, partition=0), Message(4), Message(8, partition=0), Message(5)]
    client.script += [mixed, [], [Message(9, KafkaError._PARTITION_EOF, partition=0), Message(1, partition=2)]]
    assert read_all({0: (7, 9), 1: (3, 6), 2: (0, 2)}) == {0: [7, 8], 1: [3, 4, 5], 2: [1]}
    assert client.made[0].assigned == [("t", 0, 7), ("t", 1, 3), ("t", 2, 0), "nothing"]


def test_markers_at_the_end_of_one_of_several_ranges_are_not_waited_for(client: Any) -> None:
    client.script += [[Message(3), Message(7, partition=0)], [Message(9, KafkaError._PARTITION_EOF, partition=0)]]
    client.script += [[Message(4)]]
    assert read_all({0: (7, 9), 1: (3, 5)}) == {0: [7], 1: [3, 4]}


def test_a_partition_that_is_read_to_its_end_is_read_no_further_while_others_are_waited_for(client: Any) -> None:
    at_end = Message(9, KafkaError._PARTITION_EOF, partition=0)
    client.script += [[Message(7, partition=0), Message(8, partition=0)], [at_end], [Message(9, partition=0)]]
    client.script += [[Message(-1001, KafkaError.OFFSET_OUT_OF_RANGE, partition=0)], [Message(3)]]
    assert read_all({0: (7, 8), 1: (3, 4)}) == {0: [7], 1: [3]}
    assert client.made[0].assigned == [("t", 0, 7), ("t", 1, 3), ("-", 0), "nothing"]


@pytest.mark.parametrize("given", [Message(2), Message(7, partition=2)])
def test_of_several_ranges_too_nothing_is_taken_that_was_not_asked_for(client: Any, given: Message) -> None:
    client.script += [[Message(7, partition=0)], [given]]
    with pytest.raises(SourceDamaged, match="offset 3 comes next"):
        read_all({0: (7, 8), 1: (3, 9)})


def test_a_damaged_batch_of_one_partition_is_asked_for_again_and_the_others_go_on(client: Any) -> None:
    torn = Message(4, KafkaError._BAD_MSG)
    client.script += [[Message(3), torn, Message(7, partition=0), Message(6)], [Message(8, partition=0)]]
    client.script += [[torn], [Message(4), Message(5)]]
    assert read_all({0: (7, 9), 1: (3, 6)}) == {0: [7, 8], 1: [3, 4, 5]}
    assert client.made[0].assigned == [
        ("t", 0, 7), ("t", 1, 3), ("-", 1), ("+", 1, 4), ("t", 1, 4), "nothing",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "named"),
    [(KafkaError.TOPIC_AUTHORIZATION_FAILED, AccessRefused), (KafkaError._AUTO_OFFSET_RESET, HistoryLost)],
)
def test_of_several_partitions_the_one_that_fails_is_named(client: Any, code: int, named: type[Exception]) -> None:
    client.script += [[Message(3), Message(7, partition=0)], [Message(-1001, code)]]
    with pytest.raises(named) as caught:
        read_all({0: (7, 9), 1: (3, 9)})
    assert caught.value.where == "t-1"  # type: ignore[attr-defined]


def test_of_several_partitions_the_one_whose_broker_is_silent_is_named(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr(kafka_fetch.time, "monotonic", lambda: float(next(clock)))
    client.script += [[Message(3), Message(7, partition=0)], [Message(-1, KafkaError._TRANSPORT, partition=None)]]
    client.script += [[Message(n, partition=0)] for n in range(8, 200)]
    with pytest.raises(SourceUnavailable, match=r"nothing for 120 s at offset 4 of 9: told") as caught:
        read_all({0: (7, 400), 1: (3, 9)})
    assert caught.value.where == "t-1"


def test_what_is_done_with_one_partition_s_records_is_no_silence_of_the_others(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(kafka_fetch.time, "monotonic", lambda: now[0])
    client.script += [[Message(7, partition=0)], [], [Message(3)]]
    reading = fetch({}, "t", {0: (7, 8), 1: (3, 4)})
    next(reading)
    now[0] += 2 * kafka_fetch.STALL_S
    assert [offsets(records) for records in reading] == [[3]]


def reader(together: int, per_task: int = 100_000) -> KafkaStreamReader:
    return KafkaStreamReader(KafkaSettings("h:1"), ("a", "b"), "read_committed", None, per_task, together=together)


def test_a_short_micro_batch_has_a_task_per_topic() -> None:
    start, end = {"a": {"0": 5, "1": 0}}, {"a": {"0": 1_005, "1": 999, "2": 0}, "b": {"3": 1}}
    pieces = [Piece("a", 0, 5, 1_005), Piece("a", 1, 0, 999), Piece("b", 3, 0, 1)]
    for _ in range(2):
        assert reader(2_000).partitions(start, end) == [Pieces((pieces[0], pieces[1])), pieces[2]]
    assert reader(1_999).partitions(start, end) == pieces
    assert reader(2_000, per_task=1_999).partitions(start, end) == pieces, "where a range may be cut"
    assert reader(2_000).partitions(end, end) == []


def test_messages_of_streams_with_steps_are_read_by_a_task_per_partition() -> None:
    """A step may take long for each message."""
    source = kafka("t", servers="h:1", value="n int")
    assert source.stream_reader({"n"}, {}).together == TOGETHER
    assert source.stream_reader(None, {}).together == 0
    slow = kafka("t", servers="h:1", value="n int", format=lambda values: values)
    assert slow.stream_reader({"n"}, {}).together == 0
    for bound, together in ((TOGETHER, 0), (TOGETHER + 1, TOGETHER)):
        bounded = kafka("t", servers="h:1", value="n int", max_offsets_per_trigger=bound)
        assert bounded.stream_reader({"n"}, {}).together == together


def test_a_short_share_hears_of_its_end_soon_and_a_long_one_may_lie_in_remote_storage(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def read(configuration: Any, *pieces: Piece) -> Any:
        asked.append((configuration.get("fetch.wait.max.ms", ""), len(pieces)))
        return iter(())

    monkeypatch.setattr(kafka_reader, "read_records", read)
    half = TOGETHER // 2
    shares = [
        Pieces((Piece("t", 0, 0, half), Piece("t", 1, 0, half))), Piece("t", 0, 0, TOGETHER),
        Piece("t", 0, 0, TOGETHER + 1),
    ]  # fmt: skip
    for share in shares:
        list(reader(0).read(share))
    assert asked == [("10", 2), ("10", 1), ("", 1)]


@pytest.mark.parametrize("by_partition", [False, True])
def test_partitions_that_are_read_together_come_to_the_shards_as_if_apart(client: Any, by_partition: bool) -> None:
    """Positions, what was newest before each message, and the messages: the last of partition 1 comes last."""
    what = PackInput({"t": 0}, None, ("k",), by_partition, 2, ((pa.field("k", pa.string()), "k"),), widen=False)
    plan = PackPlan((0, 1), (pa.field("k", pa.string()),), by_partition, None, {0: "t"})
    parse = Parse("typed", None, "")
    messages = [Message(7, partition=0), Message(3), Message(8, partition=0), Message(4)]

    def rows(records: pa.RecordBatch) -> list[dict[str, Any]]:
        value = pa.StructArray.from_arrays([records.column("key").cast(pa.string())], ["k"])
        typed = records.set_column(records.schema.get_field_index("value"), "value", value)
        return pack(pack_input(parse(typed), what), plan, 0).to_pylist()

    def shards(share: Piece | Pieces) -> list[dict[str, Any]]:
        client.script += [messages, [Message(5)]] if isinstance(share, Pieces) else [
            [*filter(lambda one: one.partition() == share.partition, [*messages, Message(5)])]
        ]  # fmt: skip
        batches = list(reader(0).read(share))
        assert len(batches) == 1
        assert batches[0].select(["partition", "offset"]).to_pylist() == sorted(
            batches[0].select(["partition", "offset"]).to_pylist(), key=lambda row: (row["partition"], row["offset"])
        )
        return rows(batches[0])

    pieces = (Piece("t", 0, 7, 9), Piece("t", 1, 3, 6))
    apart, together = [row for one in pieces for row in shards(one)], shards(Pieces(pieces))
    for shard in (0, 1):
        one, other = (
            assemble([Packed(row["header"], row["frame"], row["errors"]) for row in given if row["shard"] == shard], {})
            for given in (together, apart)
        )
        assert one.messages is not None
        assert one.messages.equals(other.messages)
        assert (one.after, one.came) == (other.after, other.came)
