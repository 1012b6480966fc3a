"""Sources: a stream that can be read again from any offset. A source is an object, not a base class.

Every source gives rows of `COLUMNS`, whatever it reads. `fields` holds the parsed value; `malformed` says why a value
could not be parsed, and only then `raw` holds its bytes: bad input travels to the errors output, it is never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
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
