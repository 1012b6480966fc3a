"""Sinks: where results and errors go. docs/sinks.md says which guarantee each gives.

A sink gets the output of the stateful operator: one row per shard (`shard int, version bigint, queued_in bigint,
results binary, errors binary, metrics string`), the tables packed as Arrow IPC streams; of a shard that adopts its
queue, a row per micro-batch that it runs (`queued_in`, null for the one that is published). A sink runs exactly one
action on it: a second one would run the operator twice, and Spark would keep the state of the first run.
One with `writing` (`backend.sinks.sealing`) has this written by the operator's own tasks, and gets what they report.

`publish` is called before Spark commits the micro-batch, and again with the same version after a crash
in between, so a sink replaces what it published under a version before, or passes over what it cannot take back. It
keeps number and digest of what it published per shard, and where a micro-batch makes other rows when it runs again, it
stops the query by name (`backend.sinks.record`); a function of the user's alone has nothing to keep them in.

Here are the functions that make sinks whose library may be missing, and `parquet_sink`; `kafka_sink`, `foreach_sink`
and `foreach_batch` are beside their sinks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyspark.sql import DataFrame

    from backend.sinks.table_sink import KeyedSink


class Sink(Protocol):
    """An idempotent output, by micro-batch.

    A sink may have more, which is called before `open`: `begin(outbox: str, operator: Operator)`, told a directory
    beside the checkpoint that tasks may write to, and whose results come; it refuses what does not fit, and makes
    nothing. And `resume_from(planned: int)`, told the newest micro-batch that the checkpoint has planned; -1 for none,
    and at the first start with outputs that `rewind outputs --new` let in and the query has not written to before.
    `writing() -> Writing` is called after `open`, at each start of Spark's query. And `close()`, when the query has
    ended: the sink lets clients go, and may be opened again by another start.
    One without `seal_by` (`backend.sinks.sealing`) cannot be used with `queue_bytes`.
    """

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

        Raises:
            OutputDiffers: The version is out with other rows.
        """

    def describe(self) -> dict[str, object]:
        """Give what `rewind show` says of it."""


def parquet_sink(results: str | Path, errors: str | Path) -> Sink:
    """Write both outputs as Parquet, one directory per micro-batch.

    Args:
        results: A directory that the driver and all executors see under this name: a path (`backend.sinks.parquet`), or
            a URI of any filesystem that fsspec knows (`backend.sinks.objects`).
        errors: Another one, on the same filesystem.

    Raises:
        ValueError: Of a bad option, naming it.
    """
    for option, place in (("results", results), ("errors", errors)):
        if not isinstance(place, str | os.PathLike) or not os.fspath(place):
            raise ValueError(f"{option}={place!r}: must be a directory's path")
    if any("://" in str(place) and not str(place).startswith("file:") for place in (results, errors)):
        from backend.sinks.objects import object_files

        return object_files(results, errors)
    from backend.sinks.parquet import ParquetSink

    return ParquetSink(results, errors)


def delta_sink(
    path: str | Path,
    *,
    errors: str | Path | None = None,
    mode: str | None = None,
    key: str | Sequence[str] | None = None,
    storage_options: Mapping[str, str] | None = None,
    accept_published: int | None = None,
) -> KeyedSink:
    """Write both outputs to Delta tables, by delta-rs; see `backend.sinks.delta` and `backend.sinks.table_sink`.

    Args:
        path: Table of the results, a path or URI; made where there is none.
        errors: Table of the errors; by default `<path>-errors`.
        mode: `log` appends every row; `newest` keeps one row per window and group key, or per `key`. None is `log`, or
            `newest` where there is a `key`.
        key: Columns of the results of which the newest row stays, such as those of a `process()` job.
        storage_options: As deltalake takes them; they are written down nowhere.
        accept_published: See `kafka_sink`.

    Raises:
        ValueError: Of a bad option, naming it; what depends on the job, when it starts.
    """
    from backend.sinks.delta import delta_tables

    options = {"mode": mode, "key": key, "accept_published": accept_published}
    return delta_tables(path, errors, storage_options, options)


def iceberg_sink(
    table: str,
    *,
    catalog: str | Mapping[str, str] | Catalog,
    errors: str | None = None,
    mode: str | None = None,
    key: str | Sequence[str] | None = None,
    accept_published: int | None = None,
) -> KeyedSink:
    """Write both outputs to Iceberg tables, by pyiceberg; see `backend.sinks.iceberg`.

    Args:
        table: Table of the results, with its namespace; both are made where there is none.
        catalog: Name of a catalog in pyiceberg's configuration, properties of one, or one of pyiceberg's.
        errors: Table of the errors; by default `<table>_errors`.
        mode: As of `delta_sink`.
        key: As of `delta_sink`.
        accept_published: See `kafka_sink`.

    Raises:
        ValueError: Of a bad option, naming it.
    """
    from backend.sinks.iceberg import iceberg_tables

    return iceberg_tables(table, catalog, errors, {"mode": mode, "key": key, "accept_published": accept_published})


def sql_sink(
    url: str,
    table: str,
    *,
    errors: str | None = None,
    schema: str | None = None,
    mode: str | None = None,
    key: str | Sequence[str] | None = None,
    accept_published: int | None = None,
) -> KeyedSink:
    """Write both outputs to tables of a SQL database, by SQLAlchemy; see `backend.sinks.sql`.

    Args:
        url: Of the database, as SQLAlchemy takes it; its password is told nowhere.
        table: Table of the results; made where there is none.
        errors: Table of the errors; by default `<table>_errors`.
        schema: Schema of the tables; None for the connection's own.
        mode: As of `delta_sink`.
        key: As of `delta_sink`.
        accept_published: See `kafka_sink`.

    Raises:
        ValueError: Of a bad option, naming it.
    """
    from backend.sinks.sql import sql_tables

    options = {"mode": mode, "key": key, "accept_published": accept_published}
    return sql_tables(url, table, errors, schema, options)
