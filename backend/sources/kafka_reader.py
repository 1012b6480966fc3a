"""Kafka topics read in the Python workers with confluent-kafka.

Spark's own connector hands every record through the JVM, which takes two thirds of a micro-batch. Here a task reads its
offset range in Python, and what the stage behind it makes of the records is all that crosses the JVM.

The offset of the stream is the connector's, `{"<topic>": {"<partition>": next offset}}`, and so are its rules: a
partition that is added is read from offset 0 on, a bound on a micro-batch is shared out by what lies ahead. So a
checkpoint goes on with either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from backend.boundary import PLANNING
from backend.errors import SourceWentBack
from backend.kafka_client.admin import admin_client, ends
from backend.kafka_client.identity import TopicIdentity
from backend.kafka_client.settings import KafkaSettings
from backend.sources import GATHERED_BYTES, GATHERED_ROWS, OffsetRange, TopicPartition
from backend.sources.spark_offsets import offset_json, positions_in

TOGETHER = 1_000
"""Another task costs as much as some thousand messages do."""
SHORT = {"fetch.wait.max.ms": "10", "fetch.message.max.bytes": str(1024 * 1024)}
"""How a short micro-batch is read. An end behind a transaction's marker is said by an empty answer, for which brokers
wait so long (not with more: those before 3.8 give up reading what lies in remote storage by then); and they send as
much of each partition, beyond what is asked for."""


@dataclass
class Piece(InputPartition):
    """One task's share: a half-open offset range of one source partition."""

    topic: str
    partition: int
    start: int
    end: int


@dataclass
class Pieces(InputPartition):
    """One task's share of a short micro-batch: a piece of each source partition of one topic that has news."""

    parts: tuple[Piece, ...]


def cut(topic: str, partition: int, start: int, end: int, per_task: int) -> list[Piece]:
    """Cut a range into even pieces of about `per_task` offsets, an eighth more at most.

    A bound on a micro-batch is shared out by lag, so one partition's share is a little above a round number: a task for
    the few offsets above it would run alone, when all others are done.

    >>> [(piece.start, piece.end) for piece in cut("t", 0, 100, 100 + 2_010, 1_000)]
    [(100, 1105), (1105, 2110)]
    >>> [piece.end - piece.start for piece in cut("t", 0, 0, 2_400, 1_000)]
    [800, 800, 800]
    """
    count = -(-(end - start) * 8 // (per_task * 9))
    bounds = [start + (end - start) * number // count for number in range(count + 1)] if count else []
    return [Piece(topic, partition, low, high) for low, high in pairwise(bounds)]


@dataclass(eq=False, repr=False)
class KafkaStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics.

    Attributes:
        settings: The cluster; `inlined`, tasks do not have its files.
        topics: The topics.
        isolation: As for `kafka`.
        per_batch: Bound on a micro-batch's offsets; None: none.
        per_task: A longer range of one partition is read by several tasks.
        first: Where a new query begins.
        known: Which topics they are.
        together: Of a micro-batch of no more offsets, one task reads all partitions of a topic.
    """

    settings: KafkaSettings
    topics: tuple[str, ...]
    isolation: str
    per_batch: int | None
    per_task: int
    first: Mapping[TopicPartition, int] = field(default_factory=dict)
    known: Mapping[str, TopicIdentity] = field(default_factory=dict)
    together: int = 0
    _target: dict[TopicPartition, int] | None = field(default=None, init=False)
    _newest: dict[TopicPartition, int] | None = field(default=None, init=False)
    _admin: Any = field(default=None, init=False)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Give where a new query begins."""
        return offset_json(self.first)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Give the bound."""
        return ReadAllAvailable() if self.per_batch is None else ReadMaxRows(self.per_batch)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Remember what is there: messages that come later are not read by this run."""
        self._target = self._look()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Give the topics' ends as last seen, for the lag in Spark's progress."""
        return offset_json(self._newest if self._newest is not None else self._look())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Give the end of the next micro-batch.

        Raises:
            SourceWentBack: A topic is another one than when the query began, or ends before what was already read.
        """
        known = positions_in(start)
        here = self._look()
        for key, position in sorted(known.items()):
            end = here.get(key, 0)
            if end < position:
                raise SourceWentBack(
                    "a topic lost offsets at its end, or was deleted and made again",
                    where=f"{key[0]}-{key[1]}",
                    why=f"the next offset to read is {position}, the topic ends at {end}",
                    command="start anew with another checkpoint",
                )
        ahead = {key: (known.get(key, 0), end) for key, end in here.items()}
        if self._target is not None:
            ahead = {
                key: (at, max(at, min(end, self._target[key])))
                for key, (at, end) in ahead.items()
                if key in self._target
            }
        if isinstance(limit, ReadMaxRows):
            ahead = shared_out(ahead, limit.max_rows)
        return offset_json({key: end for key, (_, end) in ahead.items()})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan one micro-batch: the same ranges for the same two offsets, always."""
        starts = positions_in(start)
        wanted = sorted(positions_in(end).items())
        pieces = [piece for key, stop in wanted for piece in cut(*key, starts.get(key, 0), stop, self.per_task)]
        if sum(piece.end - piece.start for piece in pieces) > min(self.together, self.per_task):
            return pieces
        topics = [tuple(own) for _, own in groupby(pieces, attrgetter("topic"))]  # no partition is cut
        return [Pieces(own) if len(own) > 1 else own[0] for own in topics]

    def read(self, partition: Piece | Pieces) -> Iterator[pa.RecordBatch]:
        """Read a task's share; runs in a task."""
        parts = partition.parts if isinstance(partition, Pieces) else (partition,)
        short = SHORT if sum(part.end - part.start for part in parts) <= TOGETHER else {}
        configuration = {**self.settings.for_client(), "isolation.level": self.isolation, **short}
        return read_records(configuration, *parts)

    def _look(self) -> dict[TopicPartition, int]:
        self._admin = self._admin or admin_client(self.settings)
        committed, seen = self.isolation == "read_committed", self._newest or ()
        found = ends(self.settings, self.topics, self._admin, committed_only=committed, known=self.known, expected=seen)
        self._newest = {key: end.offset for key, end in found.items()}
        return self._newest

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what plans, the client and wrapped methods: tasks get a copy of the reader, and call `read`."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_admin", *PLANNING)}


def shared_out(ahead: Mapping[TopicPartition, OffsetRange], most: int) -> dict[TopicPartition, OffsetRange]:
    """Cut what lies ahead down to a number of offsets in all, each partition by its share; one at least of each.

    >>> shared_out({("t", 0): (0, 300), ("t", 1): (50, 150), ("t", 2): (7, 7)}, 100)
    {('t', 0): (0, 75), ('t', 1): (50, 75), ('t', 2): (7, 7)}
    >>> shared_out({("t", 0): (0, 1000), ("t", 1): (0, 1)}, 10)
    {('t', 0): (0, 9), ('t', 1): (0, 1)}
    >>> shared_out({("t", 0): (0, 7), ("t", 1): (0, 7), ("t", 2): (0, 7)}, 10)
    {('t', 0): (0, 4), ('t', 1): (0, 3), ('t', 2): (0, 3)}
    """
    total = sum(end - at for at, end in ahead.values())
    if total <= most:
        return dict(ahead)
    share = {key: min(end - at, max(1, most * (end - at) // total)) for key, (at, end) in ahead.items()}
    left = most - sum(share.values())
    for key, (at, end) in ahead.items():  # rounding left less than one per partition
        if left > 0 and share[key] < end - at:
            share[key] += 1
            left -= 1
    return {key: (at, at + share[key]) for key, (at, _) in ahead.items()}


def read_records(configuration: Mapping[str, str], *pieces: Piece) -> Iterator[pa.RecordBatch]:
    """Read pieces and return their records as they are: `topic, partition, offset, timestamp, key, value`.

    Args:
        configuration: The client's, for reading.
        pieces: Of one topic, each of another partition; a batch has its rows in order of partition and offset.
    """
    from backend.sources.kafka_fetch import fetch  # not in the process that plans micro-batches

    parts: list[pa.RecordBatch] = []
    rows = size = 0
    ranges = {piece.partition: (piece.start, piece.end) for piece in pieces}
    for records in fetch(configuration, pieces[0].topic, ranges):
        parts.append(records)
        rows += records.num_rows
        size += records.nbytes
        if rows >= GATHERED_ROWS or size >= GATHERED_BYTES:
            yield _gathered(parts)
            parts, rows, size = [], 0, 0
    if parts:
        yield _gathered(parts)


def _gathered(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return one batch of batches that are of one source partition each, in order of these."""
    if len(parts) == 1:
        return parts[0]
    return pa.concat_batches(sorted(parts, key=lambda records: records.column("partition")[0].as_py()))
