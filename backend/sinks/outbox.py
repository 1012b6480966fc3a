"""The outbox: a micro-batch's results and errors as Parquet files that tasks write once, beside the checkpoint.

A sink that publishes from here runs one action, and may then read the rows as often as it likes without running the
operator again. Tasks never learn where the rows go. Nothing in here outlives its publication: a micro-batch that runs
again is written again, so all the care that it needs is to clear it at a start and behind each publication.

Files are `<outbox>/<uuid of the run>-<version>/{results,errors}-<shard>-<rows>-<digest>-<uuid>.parquet`, as in the
Parquet sink.
"""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from backend.batch import Operator
from backend.errors import StorageFailed
from backend.sinks.parquet import REPORT_DDL, contents, summaries, write_frames
from backend.sinks.record import Content, check_accepted
from backend.sinks.sealing import Sealing, Writing, check_run
from backend.sinks.table_rows import plain_schema
from backend.sinks.tables import ERRORS, RESULTS, empty_outputs
from backend.store.storage import reached
from recovery.files import Files, LocalFiles, make_directory, open_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger("rewind.sink")

BATCH_ROWS = 20_000
"""Rows that `Written.batches` holds at once."""


@dataclass(frozen=True, slots=True)
class Written:
    """A micro-batch in the outbox.

    Attributes:
        uri: Its directory.
        reports: What the tasks said, by shard.
    """

    uri: str
    reports: list[dict[str, Any]]

    def paths(self, kind: str) -> list[str]:
        """Return the files of `RESULTS` or `ERRORS`, by shard, as URIs."""
        return [f"{self.uri}/{name}" for report in self.reports if (name := report[f"{kind}_file"])]

    def content(self, kind: str) -> Content:
        """Return number and digest of all rows of an output; the digest is a number of 63 bits, as hex."""
        found = contents(path.rpartition("/")[2] for path in self.paths(kind)) or {}
        text = "\n".join(f"{shard} {rows} {digest}" for shard, (rows, digest) in sorted(found.items()))
        return sum(rows for rows, _ in found.values()), f"{xxhash.xxh3_64_intdigest(text.encode()) >> 1:016x}"

    def batches(self, kind: str) -> Iterator[pa.RecordBatch]:
        """Read an output's rows in order of (shard, sequence)."""
        for path in self.paths(kind):
            filesystem, name = fsspec.core.url_to_fs(path)
            with reached(path), filesystem.open(name, "rb") as handle:
                yield from pq.ParquetFile(handle, page_checksum_verification=True).iter_batches(BATCH_ROWS)


class OutboxSink(Sealing):
    """What sinks share that publish what tasks wrote to the outbox.

    Args:
        accept_published: See `backend.kafka_sink`.
        outbox: Path or URI where tasks write, which the driver and all executors see; None is beside the checkpoint.

    Raises:
        ValueError: A bad option, by name.
    """

    _dated = True
    """Our own times of results are null in the files where Spark has no date for them."""

    def __init__(self, accept_published: int | None, outbox: str | None = None) -> None:
        check_accepted(accept_published)
        self._accept = accept_published
        self._own = open_files(outbox) if outbox is not None else None
        self._files = self._own
        self._run = ""
        self._planned: int | None = None
        self._empty: dict[str, pa.Table] = {}
        self._schemas: dict[str, pa.Schema] = {}

    def begin(self, outbox: str, operator: Operator) -> None:
        """Take note of where tasks may write and of whose results come, before `open`; makes nothing."""
        self._files = self._own or open_files(outbox)
        self._empty = empty_outputs(operator)
        self._schemas = {kind: plain_schema(table.schema) for kind, table in self._empty.items()}

    def resume_from(self, planned: int) -> None:
        """Take note of the newest micro-batch that the checkpoint has planned: later ones cannot run again yet."""
        self._planned = planned

    def open(self, query: str) -> None:
        """Clear what a crash left."""
        for folder in self._outbox.folders():
            self._remove(folder)

    def writing(self) -> Writing:
        """Give what the operator's tasks call, from here on until it is called again."""
        self._run = uuid.uuid4().hex
        return Writing(partial(write_outbox, uri=self._outbox.uri, run=self._run, dated=self._dated), REPORT_DDL)

    def publish(self, frames: DataFrame, version: int) -> list[dict[str, Any]]:
        """Let the tasks write to the outbox by one action, then bring that out; durable on return.

        Raises:
            OutputDiffers: The version is out with other rows; they stay.
            SinkConflict: A later version is out, or another writer is at work.
            SinkUnavailable: The output does not answer.
        """
        folder = self.folder(version)
        try:
            reports = self.collect(frames, version)
        except Exception:
            self._remove(folder)
            raise
        return self.finish(self.written(folder, reports), version)

    def folder(self, version: int) -> str:
        """Make the directory for the tasks of one attempt and give its name; a run makes a version once."""
        check_run(self._run)
        name = f"{self._run}-{version}"
        if isinstance(self._outbox, LocalFiles):
            make_directory(self._outbox.root / name)
        return name

    def written(self, folder: str, reports: list[dict[str, Any]]) -> Written:
        """Return what the tasks wrote. Files that no report names do not count."""
        return Written(f"{self._outbox.uri}/{folder}", sorted(reports, key=lambda row: int(row["shard"])))

    def finish(self, written: Written, version: int) -> list[dict[str, Any]]:
        """Bring out what the tasks wrote: the second half of `publish`."""
        try:
            self._bring_out(written, version)
        finally:
            self._remove(written.uri.rpartition("/")[2])
        return summaries(written.reports)

    def _bring_out(self, written: Written, version: int) -> None:
        raise NotImplementedError

    def _remove(self, folder: str) -> None:
        """Remove an attempt; one that a store keeps changes nothing of what is out."""
        try:
            self._outbox.delete_folder(folder)
        except StorageFailed as error:
            log.warning("%s/%s is not deleted: %s", self._outbox.uri, folder, error.why)

    @property
    def _outbox(self) -> Files:
        if self._files is None:
            raise RuntimeError("this sink is begun by Pipeline.start(sink=...)")
        return self._files


def write_outbox(frames: pa.RecordBatch, version: int, *, uri: str, run: str, dated: bool = True) -> pa.RecordBatch:
    """Write what one shard made into a folder of the outbox; gives one row that reports it. Runs in a task.

    Args:
        frames: As `backend.sinks` says.
        version: What every frame must say.
        uri: The outbox.
        run: Which run of the query it is.
        dated: As in `write_frames`.
    """
    files, folder = open_files(uri), f"{run}-{version}"
    if isinstance(files, LocalFiles):
        place = str(files.root / folder)
        return write_frames(frames, version, attempts={RESULTS: place, ERRORS: place}, private=True, dated=dated)
    with tempfile.TemporaryDirectory(prefix="rewind-outbox-") as scratch:
        report = write_frames(frames, version, attempts={RESULTS: scratch, ERRORS: scratch}, dated=dated)
        for path in sorted(Path(scratch).iterdir()):
            files.put(path, f"{folder}/{path.name}", link=False)
        return report
