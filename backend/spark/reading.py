"""Sources that are read in the Python workers: a task reads its share, and a stage makes of it what is sent on.

So with the pack stage behind it only packed rows cross the JVM: no row is taken apart there, and no second Python
function reads what the first one wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from backend.boundary import OPTION, crossing, crossing_reader, token
from backend.sources import replay_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from backend.spark.pack.pack_input import Stage


def streamed(spark: SparkSession, reader: DataSourceStreamReader, schema: str | StructType, stage: Stage) -> DataFrame:
    """Return what a stage makes of a stream.

    Args:
        spark: The session.
        reader: Plans micro-batches; its `read` gives a task's share as Arrow batches.
        schema: Of what the stage gives.
        stage: For a task's share; runs where it was read.
    """

    class Read(DataSource):
        """Spark sends the class with what it refers to: it is made anew for each stream."""

        @classmethod
        def name(cls) -> str:
            return "rewind_source"

        def schema(self) -> str | StructType:
            return schema

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
            def read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
                # Spark has a stand-in for "no partitions at all"
                return iter(()) if type(partition) is InputPartition else stage(reader.read(partition))

            own = copy(reader)
            own.read = read
            return crossing_reader(own, self.options)

    spark.dataSource.register(Read)
    return spark.readStream.format(Read.name()).options(**{OPTION: token()}).load()


def replayed(
    spark: SparkSession,
    pieces: Sequence[Any],
    read: Callable[[Any], Iterator[pa.RecordBatch]],
    schema: str | StructType,
    stage: Stage,
) -> DataFrame:
    """Return what a stage makes of pieces of a source, which tasks read.

    Args:
        spark: The session.
        pieces: Shares of a task, at least one.
        read: Reads one.
        schema: Of what the stage gives.
        stage: For all pieces of a task.
    """

    def read_pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        numbers = (number for batch in batches for number in batch.column("id").to_pylist())
        return stage(rows for number in numbers for rows in read(pieces[number]))

    tasks = max(1, min(len(pieces), replay_tasks(spark)))
    return spark.range(0, len(pieces), 1, tasks).mapInArrow(crossing(read_pieces), schema)
