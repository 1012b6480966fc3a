"""Sinks: where results and errors go, exactly one copy per micro-batch.

A sink gets the output of the stateful operator: one row per shard of `FRAME_COLUMNS`, the tables packed as Arrow IPC
streams. It runs exactly one action on it: a second one would run the operator twice, and Spark would keep the state of
the first run. `publish` is called before Spark commits the micro-batch, and again with the same version after a crash
in between, so a sink replaces what it published under a version before.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from backend.sinks.foreach import Consumer, ForeachSink
    from backend.sinks.parquet import ParquetSink

FRAME_COLUMNS = ("shard", "version", "results", "errors", "metrics")
"""`shard int, version bigint, results binary, errors binary, metrics string`; null when there is nothing."""


class Sink(Protocol):
    """An idempotent output, by micro-batch."""

    def open(self, query: str) -> None:
        """Prepare for a query before it starts: check that the output is this query's, clear what a crash left.

        Args:
            query: Id of the query, the same across restarts from one checkpoint.

        Raises:
            ManifestMismatch: The output belongs to another query.
        """

    def publish(self, frames: DataFrame, version: int) -> list[dict[str, Any]]:
        """Publish a micro-batch with one action, replacing what this version published before.

        Returns:
            Per shard, in order: `{"shard": int, "results": rows, "errors": rows, "metrics": {name: number}}`.
        """

    def describe(self) -> dict[str, object]:
        """Give what `rewind show` says of it."""


def parquet_sink(results: str | Path, errors: str | Path) -> ParquetSink:
    """Write both outputs as Parquet, one directory per micro-batch; see `backend.sinks.parquet`."""
    from backend.sinks.parquet import ParquetSink

    return ParquetSink(results, errors)


def foreach_sink(function: Consumer) -> ForeachSink:
    """Call `function(results, errors, version)` per micro-batch, at least once; see `backend.sinks.foreach`."""
    from backend.sinks.foreach import ForeachSink

    return ForeachSink(function)
