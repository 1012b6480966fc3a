"""The Parquet sink: results and errors as files, one directory per micro-batch.

Not Spark's own file sink: with checkpoint format 2, a kill between its log and the commit log leaves a query that
cannot start again. Results are published before errors; a crash between the two is repaired when the micro-batch runs
again.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from backend.sinks.directory import VersionedDirectory
from backend.sinks.tables import ERRORS, RESULTS, check_version, merge_metrics, readable, summary, unpack, warm_up
from backend.storage import storage
from recovery.killpoints import kill_point

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_KINDS = (RESULTS, ERRORS)
_REPORT = pa.schema(
    [
        pa.field("shard", pa.int32()),
        pa.field("version", pa.int64()),
        *[
            field
            for kind in _KINDS
            for field in (
                pa.field(f"{kind}_file", pa.string()),
                pa.field(f"{kind}_rows", pa.int64()),
                pa.field(f"{kind}_bytes", pa.int64()),
            )
        ],
        pa.field("metrics", pa.string()),
    ]
)
_REPORT_DDL = "shard int, version bigint, " + "".join(
    f"{kind}_file string, {kind}_rows bigint, {kind}_bytes bigint, " for kind in _KINDS
)


class ParquetSink:
    """Writes `<results>/batch=<version>/*.parquet` and `<errors>/batch=<version>/*.parquet`.

    A file per shard that has something to say; a micro-batch without rows publishes no directory. Columns: `ID_FIELDS`,
    then the operator's or `ERROR_SCHEMA`; times are UTC timestamps.

    Args:
        results: Directory on a POSIX filesystem, under the same path on the driver and all executors.
        errors: Another one.

    Raises:
        ValueError: Of a path that is not local, or the same path twice.
    """

    def __init__(self, results: str | Path, errors: str | Path) -> None:
        roots = {RESULTS: _local(results, RESULTS), ERRORS: _local(errors, ERRORS)}
        if roots[RESULTS] == roots[ERRORS]:
            raise ValueError(f"errors={str(errors)!r}: must be another directory than results")
        self._directories = {kind: VersionedDirectory(root) for kind, root in roots.items()}

    def open(self, query: str) -> None:
        """Take both directories for the query; see `backend.sinks.Sink.open`."""
        for directory in self._directories.values():
            directory.open(query)

    def publish(self, frames: DataFrame, version: int) -> list[dict[str, Any]]:
        """Write in the tasks, then make both directories of this version visible, durable on return."""
        attempts = {kind: directory.attempt(version) for kind, directory in self._directories.items()}
        write = partial(write_frames, version=version, attempts={kind: str(path) for kind, path in attempts.items()})
        try:
            rows = frames.mapInArrow(write, _REPORT_DDL + "metrics string").collect()
        except Exception:
            for path in attempts.values():
                shutil.rmtree(path, ignore_errors=True)
            raise
        return self.finish([row.asDict() for row in rows], version, attempts)

    def finish(self, rows: list[dict[str, Any]], version: int, attempts: dict[str, Path]) -> list[dict[str, Any]]:
        """Publish the files that the tasks reported: the second half of `publish`."""
        for kind, point in zip(_KINDS, ("before_publish", "during_publish"), strict=True):
            kill_point(point, version)
            files = [(row[f"{kind}_file"], row[f"{kind}_bytes"]) for row in rows if row[f"{kind}_file"]]
            self._directories[kind].publish(version, attempts[kind], files)
        kill_point("after_publish", version)
        return [
            summary(row["shard"], row["results_rows"], row["errors_rows"], merge_metrics([row["metrics"]]))
            for row in sorted(rows, key=lambda row: row["shard"])
        ]

    def describe(self) -> dict[str, object]:
        """Give the kind and the directories."""
        return {"kind": "parquet", **{kind: str(directory.root) for kind, directory in self._directories.items()}}


class _ShardWriter:
    """The files of one shard in one attempt, open until the task ends."""

    def __init__(self, shard: int, version: int, attempts: dict[str, str]) -> None:
        self.shard, self.version, self.attempts = shard, version, attempts
        self.rows = dict.fromkeys(_KINDS, 0)
        self.metrics: list[str | None] = []
        self._open: dict[str, tuple[Path, pq.ParquetWriter]] = {}

    def add(self, kind: str, data: bytes | None) -> None:
        if data is None:
            return
        table = readable(unpack(data), kind, self.version, self.shard, self.rows[kind])
        if table.num_rows == 0:
            return
        if kind not in self._open:
            path = Path(self.attempts[kind], f"{kind}-{self.shard:05d}-{uuid.uuid4().hex}.parquet")
            self._open[kind] = path, pq.ParquetWriter(path, table.schema, compression="zstd", write_page_checksum=True)
        self._open[kind][1].write_table(table)
        self.rows[kind] += table.num_rows

    def close(self) -> dict[str, Any]:
        report: dict[str, Any] = {"shard": self.shard, "version": self.version}
        for kind in _KINDS:
            name, length = None, 0
            if kind in self._open:
                path, writer = self._open[kind]
                writer.close()
                with path.open("rb") as handle:
                    os.fsync(handle.fileno())
                name, length = path.name, path.stat().st_size
            report |= {f"{kind}_file": name, f"{kind}_rows": self.rows[kind], f"{kind}_bytes": length}
        return report | {"metrics": json.dumps(merge_metrics(self.metrics))}


def write_frames(
    batches: Iterator[pa.RecordBatch], *, version: int, attempts: dict[str, str]
) -> Iterator[pa.RecordBatch]:
    """Write a task's frames into the attempt's directories; gives one report row per shard. Runs in a task.

    Args:
        batches: Of `FRAME_COLUMNS`.
        version: What every frame must say.
        attempts: `results` and `errors` -> directory of this attempt.
    """
    warm_up()
    writers: dict[int, _ShardWriter] = {}
    for batch in batches:
        for row in batch.to_pylist():
            check_version(row["version"], version)
            shard = row["shard"]
            if shard not in writers:
                writers[shard] = _ShardWriter(shard, version, attempts)
            with storage(attempts[RESULTS]):
                for kind in _KINDS:
                    writers[shard].add(kind, row[kind])
            writers[shard].metrics.append(row["metrics"])
    if writers:
        with storage(attempts[RESULTS]):
            reports = [writers[shard].close() for shard in sorted(writers)]
        yield pa.RecordBatch.from_pylist(reports, schema=_REPORT)


def _local(path: str | Path, option: str) -> Path:
    parts = urlsplit(str(path))
    if parts.scheme == "file":
        return Path(parts.path).absolute()
    if len(parts.scheme) > 1 or not str(path):
        raise ValueError(f"{option}={str(path)!r}: must be a directory on a POSIX filesystem")
    return Path(path).absolute()
