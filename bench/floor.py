"""What nothing built on Spark's stateful Python operator can be faster than: the same input without our work.

`packed` is the input alone: sources and pack stage, thrown away. `empty` is that and a stateful operator in Python that
reads the packed rows and gives nothing, with a sink that collects nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from backend.spark.session.settings import settings
from backend.spark.start import StartOptions, build_job
from bench.session import has_messages
from recovery.commit.option_sets import ByVersion

WAIT_S = 600.0
POLL_S = 0.1


class Empty(StatefulProcessor):
    """Consumes its rows and gives nothing."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Keep nothing."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:  # noqa: N802, N803
        """Read and forget."""
        for _ in rows:
            pass
        return iter(())

    def close(self) -> None:
        """Nothing is open."""


def empty(spark: Any, pipeline: Any, run: Path, shards: int, batches: int) -> list[Any]:
    """Run the packed rows of so many micro-batches into `Empty`; give their progress."""

    def written(rows: Any) -> Any:
        states = rows.groupBy("shard").transformWithStateInPandas(Empty(), "shard int", "Append", "ProcessingTime")
        return states.writeStream.foreachBatch(lambda frames, _: frames.collect())

    return _streamed(spark, pipeline, run, shards, batches, written)


def packed(spark: Any, pipeline: Any, run: Path, shards: int, batches: int) -> list[Any]:
    """Throw the packed rows of so many micro-batches away; give their progress."""
    return _streamed(spark, pipeline, run, shards, batches, lambda rows: rows.writeStream.format("noop"))


def _streamed(
    spark: Any, pipeline: Any, run: Path, shards: int, batches: int, written: Callable[[Any], Any]
) -> list[Any]:
    """Stream the packed rows to where `written` puts them, as `start` would."""
    options = StartOptions(shards=shards)
    job = build_job(pipeline, spark, options, stored=None, first_offsets=list)
    checkpoint = str(run / "checkpoint")
    with settings(spark, job, options.arrow_rows, checkpoint):
        plan = job.pack_plan(job.max_ahead_ms, job.operator)
        packed = job.streaming(spark, checkpoint, ByVersion.always(plan))
        writer = written(packed).option("checkpointLocation", checkpoint)
        query = writer.trigger(processingTime="0 seconds").start()
    return until_read(query, batches)


def until_read(query: Any, batches: int) -> list[Any]:
    """Let a query without an end read everything, and stop it; give the progress of micro-batches with messages."""
    deadline = time.monotonic() + WAIT_S
    while sum(has_messages(p) for p in query.recentProgress) < batches:
        if query.exception() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the query did not read everything: {query.exception()}")
        time.sleep(POLL_S)
    query.stop()
    return [p for p in query.recentProgress if has_messages(p)]
