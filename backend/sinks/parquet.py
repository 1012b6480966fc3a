"""The Parquet sink: results and errors as files, one directory per micro-batch.

Not Spark's own file sink: with checkpoint format 2, a kill between its log and the commit log leaves a query that
cannot start again. Results are published before errors; a crash between the two is repaired when the micro-batch runs
again.

A file's name says what it holds: `<kind>-<shard>-<rows>-<digest>-<uuid>.parquet`. So a micro-batch that runs again is
compared with what readers have seen (`backend.sinks.record`) before anything is replaced. Directories of micro-batches
that the checkpoint does not know when the query starts (it was taken back) are replaced without that, however many
starts it takes: they are noted (`VersionedDirectory.is_stale`).
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from backend.places import check_apart, plain_path
from backend.sinks.directory import VersionedDirectory
from backend.sinks.record import Content, Digest, check_same
from backend.sinks.sealing import Sealing, Writing, check_run, report_schema
from backend.sinks.tables import (
    ERRORS,
    KINDS,
    RESULTS,
    by_shard,
    merge_metrics,
    read_frames,
    summary,
)
from backend.store.staging import sync
from backend.store.storage import storage
from recovery.killpoints import kill_point

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NAME = re.compile(r"[a-z]+-(\d+)-(\d+)-([0-9a-f]{16})-[0-9a-f]{32}\.parquet")
REPORT_DDL = (
    "shard int, version bigint, "
    + "".join(f"{kind}_file string, {kind}_rows bigint, {kind}_bytes bigint, " for kind in KINDS)
    + "metrics string"
)
"""What `write_frames` gives, for Spark."""
_REPORT = report_schema(REPORT_DDL)


class ParquetSink(Sealing):
    """Writes `<results>/batch=<version>/*.parquet` and `<errors>/batch=<version>/*.parquet`.

    A file per shard that has something to say; a micro-batch without rows publishes no directory. Columns: `ID_FIELDS`,
    then the operator's or `ERROR_SCHEMA`; times are UTC timestamps.

    Args:
        results: Directory on a POSIX filesystem, under the same path on the driver and all executors.
        errors: Another one.

    Raises:
        ValueError: Of a path that is not local, the same directory twice under whatever names, or one inside the other.
    """

    def __init__(self, results: str | Path, errors: str | Path) -> None:
        roots = {RESULTS: _local(results, RESULTS), ERRORS: _local(errors, ERRORS)}
        check_apart([(ERRORS, str(errors)), (RESULTS, str(results))])
        self._directories = {kind: VersionedDirectory(root, kind) for kind, root in roots.items()}
        self._planned: int | None = None
        self._run = ""

    def resume_from(self, planned: int) -> None:
        """Take note of the newest micro-batch that the checkpoint has planned: later ones cannot run again yet."""
        self._planned = planned

    def places(self) -> dict[str, str]:
        """Return the directories, by option."""
        return {kind: str(directory.root) for kind, directory in self._directories.items()}

    def holds(self, query: str) -> bool:
        """Check whether both directories hold a query's output already; touches nothing."""
        return all(directory.is_of(query) for directory in self._directories.values())

    def open(self, query: str) -> None:
        """Take both directories for the query; see `backend.sinks.Sink.open`."""
        for directory in self._directories.values():
            directory.open(query, self._planned)

    def writing(self) -> Writing:
        """Give what the operator's tasks call, from here on until it is called again."""
        self._run = uuid.uuid4().hex
        attempts = {kind: directory.attempts(self._run) for kind, directory in self._directories.items()}
        return Writing(partial(write_attempt, attempts=attempts), REPORT_DDL)

    def publish(self, frames: DataFrame, version: int) -> list[dict[str, Any]]:
        """Let the tasks write, then make both directories of this version visible, durable on return.

        Args:
            frames: What they give, as `writing` has it.
            version: Spark's batch id.

        Raises:
            OutputDiffers: The version is out with other rows; they stay.
        """
        attempts = self.attempts(version)
        try:
            rows = self.collect(frames, version)
            return self.finish(rows, version, attempts)
        except Exception:
            for path in attempts.values():
                shutil.rmtree(path, ignore_errors=True)
            raise

    def attempts(self, version: int) -> dict[str, Path]:
        """Make the directories that tasks write a micro-batch into, by output."""
        check_run(self._run)
        return {kind: directory.attempt(version, self._run) for kind, directory in self._directories.items()}

    def finish(self, rows: list[dict[str, Any]], version: int, attempts: dict[str, Path]) -> list[dict[str, Any]]:
        """Publish the files that the tasks reported: the second half of `publish`."""
        files = {
            kind: [(row[f"{kind}_file"], row[f"{kind}_bytes"]) for row in rows if row[f"{kind}_file"]] for kind in KINDS
        }
        self._check(version, files)
        for kind, point in zip(KINDS, ("before_publish", "during_publish"), strict=True):
            kill_point(point, version)
            self._directories[kind].publish(version, attempts[kind], files[kind])
        kill_point("after_publish", version)
        return summaries(rows)

    def _check(self, version: int, files: dict[str, list[tuple[str, int]]]) -> None:
        """Compare with what is out under this version, unless the checkpoint took that back."""
        paths = {kind: directory.path(version) for kind, directory in self._directories.items()}
        compared = [kind for kind in KINDS if not self._directories[kind].is_stale(version)]
        known = {kind: contents(path.name for path in paths[kind].glob("*.parquet")) for kind in compared}
        check_same(
            {kind: content for kind, content in known.items() if content},
            {kind: contents(name for name, _ in files[kind]) or {} for kind in KINDS},
            version=version,
            where=str(paths[RESULTS]),
            command=f"to publish what it makes now instead, delete {paths[RESULTS]} and {paths[ERRORS]}, and start the"
            " query again",
        )

    def describe(self) -> dict[str, object]:
        """Give the kind and the directories."""
        return {"kind": "parquet", **self.places()}


def summaries(reports: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what `Sink.publish` does of what tasks report, `REPORT_DDL`."""
    return [
        summary(row["shard"], row["results_rows"], row["errors_rows"], merge_metrics([row["metrics"]]))
        for row in sorted(reports, key=lambda row: int(row["shard"]))
    ]


def contents(names: Iterable[str]) -> dict[int, Content] | None:
    """Return what files of one output hold by shard, out of their names; None where release 0.1 named one of them.

    >>> contents([f"results-00003-12-{'a' * 16}-{'b' * 32}.parquet"])
    {3: (12, 'aaaaaaaaaaaaaaaa')}
    """
    found = [_NAME.fullmatch(name) for name in names]
    if None in found:
        return None
    return {int(one[1]): (int(one[2]), one[3]) for one in found if one is not None}


def write_attempt(frames: pa.RecordBatch, version: int, *, attempts: dict[str, str]) -> pa.RecordBatch:
    """Write a shard's frames into what `VersionedDirectory.attempts` names for `results` and `errors`."""
    return write_frames(frames, version, attempts={kind: f"{run}{version}" for kind, run in attempts.items()})


def write_frames(
    frames: pa.RecordBatch, version: int, *, attempts: dict[str, str], private: bool = False, dated: bool = True
) -> pa.RecordBatch:
    """Write what one shard made into the attempt's directories; gives one row that reports it. Runs in a task.

    Args:
        frames: As `backend.sinks` says.
        version: What every frame must say.
        attempts: `results` and `errors` -> directory of this attempt.
        private: The files are this user's alone (0600), whatever the umask.
        dated: Our own times of results are null where Spark, which may read the files, has no date for them.
    """
    rows = frames.to_pylist()
    [(shard, given)] = by_shard(rows, version).items()
    report: dict[str, Any] = {"shard": shard, "version": version}
    with storage(attempts[RESULTS]):
        for kind in KINDS:
            tables = read_frames(given, kind, shard, version, dated=dated)
            report |= _write_output(kind, tables, shard, Path(attempts[kind]), private=private)
    report["metrics"] = json.dumps(merge_metrics(row["metrics"] for row in given))
    return pa.RecordBatch.from_pylist([report], schema=_REPORT)


def _write_output(
    kind: str, tables: Iterable[tuple[pa.Table, pa.Table]], shard: int, attempt: Path, *, private: bool
) -> dict[str, Any]:
    """Write a shard's rows of one output, synced; give what a report says of it."""
    digest, path = Digest(), attempt / f"{uuid.uuid4().hex}.part"
    name, length = None, 0
    writer: pq.ParquetWriter | None = None
    for made, table in tables:
        digest.add(made)
        if writer is None:
            if private:
                path.touch(0o600, exist_ok=False)
            writer = pq.ParquetWriter(path, table.schema, compression="zstd", write_page_checksum=True)
        writer.write_table(table)
    rows, checksum = digest.content
    if writer is not None:
        writer.close()
        path = path.rename(path.with_name(f"{kind}-{shard:05d}-{rows}-{checksum}-{path.stem}.parquet"))
        sync(path)
        name, length = path.name, path.stat().st_size
    return {f"{kind}_file": name, f"{kind}_rows": rows, f"{kind}_bytes": length}


def _local(path: str | Path, option: str) -> Path:
    text = plain_path(path)
    place = Path(text).absolute()
    there = next(one for one in (place, *place.parents) if one.exists())
    if len(urlsplit(text).scheme) > 1 or not text or not there.is_dir():
        raise ValueError(f"{option}={str(path)!r}: must be a directory on a POSIX filesystem")
    return place
