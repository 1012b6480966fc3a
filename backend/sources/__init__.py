"""Sources: a stream that can be read again from any offset. A source is an object, not a base class.

Every source gives records (`backend.sources.formats.RECORD`) and what parses them, in Arrow, where a task runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import DataSourceStreamReader
    from pyspark.sql.types import StructType

    from backend.sources.formats import Parse

TopicPartition = tuple[str, int]
"""(topic, partition)."""
OffsetRange = tuple[int, int]
"""Half-open: (first offset, offset after the last)."""
GATHERED_ROWS, GATHERED_BYTES = 100_000, 16 * 1024 * 1024
"""Rows wait until there are so many, or so many bytes: the pack stage makes a frame per shard of what it gets."""


class Source(Protocol):
    """A replayable stream of messages, by topic, partition and offset."""

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics, in the order in which the manifest numbers them."""

    def offsets(self, spark: SparkSession) -> dict[TopicPartition, OffsetRange]:
        """Give what is there now: the earliest offset, and the one after the latest."""

    def parse(self, timezone: str) -> Parse:
        """Return what parses the records; needs an active Spark session.

        Args:
            timezone: The session's: of times in the values that name none.
        """

    def fields(self) -> StructType:
        """Return the schema of the parsed values; needs an active Spark session."""

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry: what must stay the same for a replay to give the same messages."""


class Remembering(Source, Protocol):
    """A source that can hold other messages than those it was read with, and so remembers what a query has read."""

    def remembering(self, topics: Sequence[str], checkpoint: str, number: int) -> Source:
        """Return this source as a checkpoint knows it.

        Args:
            topics: Those of the manifest; empty at the first start.
            checkpoint: Where what was read is remembered; "" for nowhere.
            number: Of the source, in the order of the plan.
        """


class BySpark(Source, Protocol):
    """A source that Spark reads."""

    def stream(self, spark: SparkSession) -> DataFrame:
        """Return the streaming DataFrame of records."""

    def batch(self, spark: SparkSession, ranges: Mapping[TopicPartition, OffsetRange]) -> DataFrame:
        """Return exactly the records in half-open offset ranges, none of which is empty: the replay.

        Not asked of a DataFrame, whose rows have no offsets of their own.

        Raises:
            HistoryLost: The source no longer has a part of the ranges.
        """


class Direct(Source, Protocol):
    """A source that is read in the Python workers (`backend.spark.reading`)."""

    @property
    def direct(self) -> bool:
        """Whether it is: else it is `BySpark`."""

    def stream_reader(
        self, names: Collection[str] | None = None, first: Mapping[TopicPartition, int] | None = None
    ) -> DataSourceStreamReader:
        """Return what plans the stream and reads a task's share; the same offsets as `BySpark.stream`.

        Args:
            names: Fields of the values that are needed; None for all.
            first: Where the query begins if it is new, of a source that has `first_positions`.
        """

    def pieces(
        self,
        spark: SparkSession,
        ranges: Mapping[TopicPartition, Sequence[OffsetRange]],
        names: Collection[str] | None = None,
    ) -> tuple[Sequence[Any], Callable[[Any], Iterator[pa.RecordBatch]], StructType]:
        """Return pieces of half-open offset ranges, the function that reads one where a task runs, and its schema.

        Each piece has `topic` and `partition`; all of it can be pickled.

        Args:
            spark: The session.
            ranges: In order of offset, apart.
            names: Fields of the values that are needed; None for all.

        Raises:
            HistoryLost: The source no longer has a part of the ranges.
            SourceGap: Offsets are missing within it.
        """


def is_direct(source: object) -> TypeGuard[Direct]:
    """Return whether a source can be read in the Python workers; one that hands on to another is what that one is.

    Asked of the object: from Python 3.12 on, `isinstance` with a protocol sees nothing that `__getattr__` gives.
    """
    return all(hasattr(source, name) for name in ("direct", "stream_reader", "pieces"))


def remembers(source: object) -> TypeGuard[Remembering]:
    """Return whether a source remembers what was read; see `is_direct`."""
    return hasattr(source, "remembering")


def replay_tasks(spark: SparkSession) -> int:
    """Give how many tasks a replay has, as far as its ranges can be cut.

    Two for each core: long and short partitions keep all cores at work, and what a task costs besides, which is much
    beside reading a piece of an archive, comes seldom.
    """
    from backend.spark.session.jvm import cores

    return 2 * cores(spark)
