"""Any streaming DataFrame as a source: Spark reads it, and it cannot be read again.

What Spark gives for a micro-batch is known only while that micro-batch runs. So its rows have no offsets of a source's:
they get theirs in the shard's task (`backend.spark.ranking`), and messages that an operator keeps are logged
(`recovery.changelog.message_log`) instead of replayed.
"""

from __future__ import annotations

import logging
import reprlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from backend.batch import RESERVED
from backend.rows import RowCodec
from backend.sources import OffsetRange, TopicPartition
from backend.sources.formats import Parse
from backend.spark.session.jvm import analyzed_plan, is_same_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

log = logging.getLogger("rewind.start")
NAME = "dataframe"
END = 2**63 - 1
STATEFUL = {
    "Aggregate": "groupBy().agg()",
    "Distinct": "distinct()",
    "Deduplicate": "dropDuplicates()",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark()",
    "GlobalLimit": "limit()",
    "FlatMapGroupsWithState": "flatMapGroupsWithState()",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState()",
    "TransformWithState": "transformWithState()",
    "TransformWithStateInPySpark": "transformWithStateInPandas()",
    "TransformWithStateInPandas": "transformWithStateInPandas()",
}
"""Nodes of Spark's plan that keep state, and what makes them: a query has one stateful operator, Rewind's."""


@dataclass(frozen=True, slots=True)
class DataFrameSource:
    """What `stream` makes of a DataFrame.

    Attributes:
        dataframe: Streaming, of the session that the query is started in.
        name: Stands as `topic` in the errors.
    """

    dataframe: DataFrame
    name: str = NAME

    def __post_init__(self) -> None:
        """Check what can be checked without starting anything.

        Raises:
            ValueError: Names what is wrong.
        """
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"name={self.name!r}: must be a text that is not empty")
        if not self.dataframe.isStreaming:
            raise ValueError(
                "source: a batch DataFrame has no micro-batches: allowed is a streaming one, of spark.readStream;"
                " for a bounded run over files read them with readStream and start(..., until='end')"
            )
        names = self.dataframe.columns
        folded = [name.lower() for name in names]
        twice = sorted({name for name in folded if folded.count(name) > 1})
        if twice:
            raise ValueError(
                f"source: the DataFrame has the column {twice[0]!r} twice (Spark takes a and A for one):"
                " rename or drop one of them"
            )
        taken = sorted(set(names) & set(RESERVED))
        if taken:
            raise ValueError(f"source: the DataFrame's column {taken[0]!r} has a name that Rewind uses: rename it")

    @property
    def topics(self) -> tuple[str, ...]:
        """The name, as the only topic."""
        return (self.name,)

    def stream(self, spark: SparkSession) -> DataFrame:
        """Return the streaming DataFrame of records: a struct of all columns as the value."""
        from pyspark.sql import functions as f

        return self.dataframe.select(
            f.lit(self.name).alias("topic"),
            f.lit(0).alias("partition"),
            f.lit(0).cast("bigint").alias("offset"),
            f.lit(None).cast("timestamp").alias("timestamp"),
            f.lit(None).cast("binary").alias("key"),
            f.struct("*").alias("value"),
        )

    def offsets(self, spark: SparkSession) -> dict[TopicPartition, OffsetRange]:
        """Return all offsets that there can be: what of them is kept is the message log's to know."""
        return {(self.name, 0): (0, END)}

    def parse(self, timezone: str) -> Parse:
        """Return what passes the columns on."""
        return Parse("typed", None, "a row")

    def fields(self) -> StructType:
        """Return the columns.

        Raises:
            ValueError: A column's type cannot be carried to the shards.
        """
        from pyspark.sql.pandas.types import to_arrow_type

        schema = self.dataframe.schema
        for field in schema.fields:
            try:
                RowCodec(pa.schema([pa.field(field.name, to_arrow_type(field.dataType, timezone="UTC"))]))
            except Exception as error:  # Spark's own kinds, by version
                raise ValueError(
                    f"source: the DataFrame's column {field.name!r} of type {field.dataType.simpleString()} cannot be"
                    f" carried to the shards: cast or drop it ({error})"
                ) from None
        return schema

    def describe(self) -> dict[str, object]:
        """Return the manifest's entry; the fields that are used are in another one."""
        return {"kind": "dataframe", "name": self.name}

    def streaming_sources(self) -> int:
        """Return how many streaming sources of Spark's plan it reads."""
        return sum(not _children(node) and node.isStreaming() for node in _nodes(self._plan))

    def check_plan(self, spark: SparkSession, *, alone: bool) -> None:
        """Check that a query of a session can begin with it.

        Args:
            spark: The session of the query.
            alone: It is the job's only input.

        Raises:
            ValueError: It is another session's, keeps state of its own, or reads several sources in a join.
        """
        if not is_same_session(self.dataframe.sparkSession, spark):
            raise ValueError(
                "source: the DataFrame is of another Spark session than start() was given: make it with that one"
            )
        for node in _nodes(self._plan):
            kind = node.nodeName()
            streaming = [child for child in _children(node) if child.isStreaming()]
            if streaming and (kind in STATEFUL or (kind == "Join" and len(streaming) > 1)):
                what = STATEFUL.get(kind, "a join of two streams")
                raise ValueError(
                    f"source: the DataFrame keeps state of its own ({what}): allowed is what maps rows one by one;"
                    " let Rewind aggregate, join or dedupe instead"
                )
        sources = self.streaming_sources()
        if sources > 1 and not alone:
            raise ValueError(
                f"source: the DataFrame {self.name!r} reads {sources} streaming sources: in a join it may read one"
            )
        if not self._plan.deterministic():
            log.warning(
                "the DataFrame %r is not deterministic (rand, uuid, or a function that says so): a micro-batch that"
                " runs again has other rows, and ends the query with OutputDiffers if the first ones were published",
                self.name,
            )

    @property
    def _plan(self) -> Any:
        return analyzed_plan(self.dataframe)


def is_ranked(source: object) -> bool:
    """Return whether a source's rows have no offsets of their own."""
    return isinstance(source, DataFrameSource)


def is_dataframe(value: object) -> bool:
    """Return whether a value is a DataFrame of Spark."""
    module = sys.modules.get("pyspark.sql")
    return module is not None and isinstance(value, module.DataFrame)


def dataframe_source(dataframe: DataFrame, event_time: str | None, name: str | None) -> DataFrameSource:
    """Return a DataFrame as a source.

    Raises:
        ValueError: A bad option, by name.
    """
    source = DataFrameSource(dataframe, NAME if name is None else name)
    if event_time is None:
        raise ValueError(
            "event_time=None: a DataFrame's rows have no timestamp of their own: name the column, one of"
            f" {', '.join(dataframe.columns)}"
        )
    if event_time not in dataframe.columns:
        raise ValueError(f"event_time={reprlib.repr(event_time)}: allowed are {', '.join(dataframe.columns)}")
    return source


def _children(node: Any) -> list[Any]:
    children = node.children()
    return [children.apply(at) for at in range(children.size())]


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in _children(node):
        yield from _nodes(child)
