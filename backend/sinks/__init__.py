"""Sinks: where results and errors go. README.md says which guarantee each gives.

A sink gets the output of the stateful operator: one row per shard of `FRAME_COLUMNS`, the tables packed as Arrow IPC
streams. It runs exactly one action on it: a second one would run the operator twice, and Spark would keep the state of
the first run. `publish` is called before Spark commits the micro-batch, and again with the same version after a crash
in between, so a sink replaces what it published under a version before, or passes over what it cannot take back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from backend.sinks.foreach import Consumer, ForeachSink
    from backend.sinks.kafka import KafkaSink
    from backend.sinks.parquet import ParquetSink
    from backend.sources.kafka_settings import KafkaSettings

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
            Per shard, in order: `{"shard": int, "results": rows, "errors": rows, "metrics": {name: number or text}}`.
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


def kafka_sink(
    results: str,
    errors: str,
    *,
    servers: str | KafkaSettings,
    key: str | Sequence[str] = (),
    guarantee: str = "exactly_once",
    commits: str | None = None,
) -> KafkaSink:
    """Write both outputs to Kafka topics, as JSON; see `backend.sinks.kafka` for what each guarantee rests on.

    Args:
        results: Topic of the results; it must exist.
        errors: Topic of the errors; it must exist.
        servers: `host:port,...`, with security from `REWIND_KAFKA_*` in the environment; or `KafkaSettings`.
        key: Columns of the results that make the message's key, the job's group key for one: all revisions of a window
            then lie in one partition, in order. Without it, and for errors, the key is the row's `id`.
        guarantee: `exactly_once` (transactions, through the driver) or `at_least_once` (from the tasks).
        commits: Topic that says which micro-batch is out, made where it does not exist; by default
            `<results>-commits`. It belongs to the output: delete both or none.

    Raises:
        ValueError: Of a bad option, naming it.
    """
    from backend.sinks.kafka import KafkaSink

    return KafkaSink(results, errors, servers=servers, key=key, guarantee=guarantee, commits=commits)
