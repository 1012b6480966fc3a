"""Sources: a stream that can be read again from any offset. A source is an object, not a base class.

Every source gives rows of `COLUMNS`, whatever it reads. `fields` holds the parsed value; `malformed` says why a value
could not be parsed, and only then `raw` holds its bytes: bad input travels to the errors output, it is never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

TopicPartition = tuple[str, int]
"""(topic, partition)."""
OffsetRange = tuple[int, int]
"""Half-open: (first offset, offset after the last)."""

COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "fields", "raw", "malformed")
"""`topic string, partition int, offset bigint, timestamp timestamp, key binary, fields struct<...>, raw binary,
malformed string`."""


class Source(Protocol):
    """A replayable stream of messages, by topic, partition and offset."""

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics, in the order in which the manifest numbers them."""

    def stream(self, spark: SparkSession) -> DataFrame:
        """Give the streaming DataFrame of `COLUMNS`."""

    def batch(self, spark: SparkSession, ranges: Mapping[TopicPartition, OffsetRange]) -> DataFrame:
        """Give exactly the messages in half-open offset ranges, parsed as the stream parses them: the replay.

        Raises:
            HistoryLost: The source no longer has a part of the ranges.
        """

    def offsets(self, spark: SparkSession) -> dict[TopicPartition, OffsetRange]:
        """Give what is there now: the earliest offset, and the one after the latest."""

    def fields(self) -> StructType:
        """Give the schema of the column `fields`; needs an active Spark session."""

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry: what must stay the same for a replay to give the same messages."""


@runtime_checkable
class Bundling(Source, Protocol):
    """A source that can also hand over its rows as bundles (`backend.spark.bundles`), when its values are columns."""

    @property
    def bundled(self) -> bool:
        """Tell whether this source does: the job may then use the two methods."""

    def stream_bundles(self, spark: SparkSession, names: Collection[str]) -> DataFrame:
        """Give the streaming DataFrame of bundles, column `bundle`; the same offsets as `stream`.

        Args:
            spark: The session.
            names: Fields of the values that are needed; at least these are in the bundles.
        """

    def pieces(
        self, spark: SparkSession, ranges: Mapping[TopicPartition, OffsetRange], names: Collection[str]
    ) -> tuple[Sequence[Any], Callable[[Any], Iterator[pa.RecordBatch]]]:
        """Give what `batch` gives as pieces, and the function that reads one where a task runs; both can be pickled.

        Args:
            spark: The session.
            ranges: Half-open.
            names: Fields of the values that are needed.

        Raises:
            HistoryLost: The source no longer has a part of the ranges.
            SourceGap: Offsets are missing within it.
        """


@runtime_checkable
class Mixing(Source, Protocol):
    """A source whose rows cross the JVM as bundles where its reader understands them, as rows where only Spark does.

    A row has either `bundle` (`backend.spark.bundles`) or what `COLUMNS` says. Behind a bundle come the rows that
    belong between its own, as many as its `offset` says; with these, rows are in order of offset in a task.
    """

    @property
    def mixed(self) -> bool:
        """Tell whether this source does: the job may then use the other methods."""

    def first_positions(self) -> dict[TopicPartition, int]:
        """Give where a new query would begin now."""

    def stream_mixed(
        self, spark: SparkSession, names: Collection[str], first: Mapping[TopicPartition, int]
    ) -> DataFrame:
        """Give the streaming DataFrame of `bundle` and `COLUMNS`; the same offsets as `stream`.

        Args:
            spark: The session.
            names: Fields of the values that are needed; at least these are in the bundles.
            first: Where the query begins if it is new: `first_positions`, as of its first start.
        """

    def batch_mixed(
        self, spark: SparkSession, ranges: Mapping[TopicPartition, OffsetRange], names: Collection[str]
    ) -> DataFrame:
        """Give `bundle` and `COLUMNS` of exactly the messages in half-open offset ranges; raises as `batch` does."""


def replay_tasks(spark: SparkSession) -> int:
    """Give how many tasks a replay has, as far as its ranges can be cut.

    Two for each core: long and short partitions keep all cores at work, and what a task costs besides, which is much
    beside reading a piece of an archive, comes seldom.
    """
    return 2 * int(spark.sparkContext.defaultParallelism)
