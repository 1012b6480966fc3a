"""The sinks with Spark: one action, files written in the tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backend import foreach_batch
from backend.process import ProcessOperator
from backend.sinks.parquet import ParquetSink
from tests.support.collecting import CollectSink
from tests.support.packed import pack

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

SCHEMA = "shard int, version bigint, results binary, errors binary, metrics string"


def frames(spark: Any, version: int, tasks: Any) -> Any:
    """Two shards, three rows; every evaluation of a row adds to `tasks`."""
    packed = pack(pa.table({"window_start": pa.array([0, 3_600_000]), "n": [1, 2]}))

    def emit(batches: Any) -> Any:
        for batch in batches:
            tasks.add(batch.num_rows)
            yield batch

    rows = [
        (0, version, packed, None, '{"late": 1}'),
        (1, version, packed, packed, None),
        (2, version, None, None, None),
    ]
    return spark.createDataFrame(rows, SCHEMA).repartition(2).mapInArrow(emit, SCHEMA)


def written(sink: Any, made: Any, version: int) -> Any:
    """What the operator's tasks give for a sink of files: they write what they made."""
    writing = sink.writing()

    def write(batches: Any) -> Any:
        for batch in batches:
            for row in range(batch.num_rows):
                yield writing.write(batch.slice(row, 1), version)

    return made.mapInArrow(write, writing.ddl)


def test_parquet_is_written_by_one_action_and_read_by_spark(spark: Any, tmp_path: Path) -> None:
    tasks = spark.sparkContext.accumulator(0)
    sink = ParquetSink(tmp_path / "out", tmp_path / "err")
    sink.open("q")
    for _ in range(2):  # the micro-batch runs again after a crash
        summary = sink.publish(written(sink, frames(spark, 3, tasks), 3), 3)
    assert summary == [
        {"shard": 0, "results": 2, "errors": 0, "metrics": {"late": 1}},
        {"shard": 1, "results": 2, "errors": 2, "metrics": {}},
        {"shard": 2, "results": 0, "errors": 0, "metrics": {}},
    ]
    assert tasks.value == 6  # three frames, evaluated once per publication
    rows = spark.read.parquet(str(tmp_path / "out"))
    assert sorted((row.id, row.batch, row.n) for row in rows.collect()) == [
        ("3-0-0", 3, 1), ("3-0-1", 3, 2), ("3-1-0", 3, 1), ("3-1-1", 3, 2),
    ]  # fmt: skip
    assert dict(rows.dtypes)["window_start"] == "timestamp"


def test_a_failing_task_publishes_nothing(spark: Any, tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path / "out", tmp_path / "err")
    sink.open("q")
    with pytest.raises(Exception, match="handed to the sink as micro-batch 4"):
        sink.publish(written(sink, frames(spark, 3, spark.sparkContext.accumulator(0)), 4), 4)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["_rewind"]
    assert [path.name for path in (tmp_path / "out" / "_rewind").iterdir()] == ["owner.json"]


def test_the_collecting_sink_takes_frames_from_spark(spark: Any) -> None:
    tasks = spark.sparkContext.accumulator(0)
    sink = CollectSink()
    sink.publish(frames(spark, 5, tasks), 5)
    assert sink.results[5].column("n").to_pylist() == [1, 2, 1, 2]
    assert tasks.value == 3


def test_a_function_may_run_many_actions_on_its_dataframes_and_the_operator_runs_once(
    spark: Any, tmp_path: Path
) -> None:
    tasks = spark.sparkContext.accumulator(0)
    seen: list[Any] = []

    def function(results: Any, errors: Any, version: int) -> None:
        keys = results.groupBy("n").count()
        rows = results.join(keys, "n").orderBy("id")
        seen.append((version, [(row.id, row.n, row["count"]) for row in rows.collect()], results.count()))
        seen.append((dict(results.dtypes)["window_start"], dict(errors.dtypes)["event_time"], errors.count()))

    sink = foreach_batch(function)
    result = pa.schema([("window_start", pa.int64()), ("n", pa.int64())])
    sink.begin(
        str(tmp_path / "out[1]{a,b}*?"), ProcessOperator(lambda batch, context: None, result, stores=[], fields=[])
    )
    sink.open("q")
    assert [one["errors"] for one in sink.publish(written(sink, frames(spark, 3, tasks), 3), 3)] == [0, 2, 0]
    assert tasks.value == 3
    assert seen == [
        (3, [("3-0-0", 1, 2), ("3-0-1", 2, 2), ("3-1-0", 1, 2), ("3-1-1", 2, 2)], 4),
        ("timestamp", "timestamp", 2),
    ]
