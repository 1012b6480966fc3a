"""Sources that are read in the Python workers: a task reads its share, and a stage makes of it what is sent on.

So with the pack stage behind it only packed rows cross the JVM: no row is taken apart there, and no second Python
function reads what the first one wrote.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from backend.allocation import begin_task
from backend.boundary import OPTION, crossing, crossing_reader, token
from backend.sources import replay_tasks
from backend.spark.deferred import Deferred
from backend.spark.session.jvm import own_format

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from backend.spark.pack.pack_input import Stage


LATER, LATER_MS = 1 / 20, 50.0
"""How much later than its trigger a micro-batch is planned: a share of the interval, milliseconds at most."""


def streamed(
    spark: SparkSession,
    reader: DataSourceStreamReader,
    schema: str | StructType,
    stage: Stage,
    trigger_ms: int = 0,
    name: str = "rewind_source",
) -> DataFrame:
    """Return what a stage makes of a stream.

    Args:
        spark: The session.
        reader: Plans micro-batches; its `read` gives a task's share, as Arrow batches where the stage takes those.
        schema: Of what the stage gives.
        stage: For a task's share; runs where it was read.
        trigger_ms: The interval of the query's trigger; 0 for none.
        name: Of the source, in Spark's plans.
    """
    own_name = own_format(spark, name)
    late = Deferred(stage)  # the processes that plan micro-batches never need it

    class Read(DataSource):
        """Spark sends the class with what it refers to: it is made anew for each stream."""

        @classmethod
        def name(cls) -> str:
            return own_name

        def schema(self) -> str | StructType:
            return schema

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
            def read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
                if type(partition) is InputPartition:  # Spark's stand-in for "no partitions at all"
                    return iter(())
                made = late()
                begin_task()  # behind it: what it imported is there by now
                return made(reader.read(partition))

            return crossing_reader(with_read(reader, read, trigger_ms), self.options)

    spark.dataSource.register(Read)
    return spark.readStream.format(own_name).options(**{OPTION: token()}).load()


def with_read(reader: DataSourceStreamReader, read: Callable[..., Any], trigger_ms: int) -> Any:
    """Return a copy of a reader with another `read`, which looks for what is new behind the trigger; see `streamed`."""
    own: Any = copy(reader)
    own.read = read
    if trigger_ms > 0:
        own.latestOffset = behind_trigger(own.latestOffset, trigger_ms)  # its own: what it sees, it reports
    return own


def behind_trigger(
    look: Callable[..., Any],
    trigger_ms: int,
    clock_ms: Callable[[], float] = lambda: time.time() * 1000,
    sleep: Callable[[float], None] = time.sleep,
) -> Callable[..., Any]:
    """Return a `latestOffset` that looks a moment after the trigger fires, if it has just fired.

    Spark's trigger fires at whole intervals of the wall clock, where most windows end as well. The messages sent just
    behind that end, which close a window, are on their way then; without them it is closed by the next micro-batch.

    Args:
        look: The reader's own.
        trigger_ms: Interval of the trigger.
        clock_ms: The wall clock, by which Spark's trigger goes.
        sleep: Waits for so many seconds.
    """

    def latest(*given: Any) -> Any:
        ahead_ms = min(LATER * trigger_ms, LATER_MS) - clock_ms() % trigger_ms
        if ahead_ms > 0:
            sleep(ahead_ms / 1000)
        return look(*given)

    return latest


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
        pieces: What tasks read, at least one.
        read: Reads one.
        schema: Of what the stage gives.
        stage: For all pieces of a task.
    """

    tasks = max(1, min(len(pieces), replay_tasks(spark)))
    of_tasks = np.array_split(np.arange(len(pieces)), tasks)  # the longer shares come first: all cores end together

    def read_pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        numbers = (number for batch in batches for task in batch.column("id").to_pylist() for number in of_tasks[task])
        return stage(rows for number in numbers for rows in read(pieces[number]))

    return spark.range(0, len(of_tasks), 1, len(of_tasks)).mapInArrow(crossing(read_pieces), schema)
