"""A job's Parquet results as a source of another job: what the Parquet sink published, in order, replayable.

Each result row is a message. Its source partition is the shard that made it, its offset the number of rows that the
shard published before it, its value the row. Names of the files say micro-batch, shard, number of rows and digest
(`backend.sinks.parquet`), so a listing is the index. Micro-batches are published in order and whole, and one that runs
again publishes the same rows or stops its query: offsets never change. Of outputs on object stores only what is whole
is read (`backend.sinks.objects`).

What was read is remembered by micro-batch and shard (`backend.sources.archive_seen`) with the offsets and the digest:
results that were taken away or replaced are `SourceWentBack`, never other offsets.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import IO

import fsspec
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from backend.errors import UNDECODABLE, HistoryLost, SourceDamaged
from backend.sources import OffsetRange, TopicPartition
from backend.sources.archive_files import BATCH_ROWS, cast
from backend.sources.archive_footer import STRUCT, FileEntry, Span, readable
from backend.sources.archive_index import Archive, PartitionIndex, Slice, Stamp
from backend.sources.listing import files_below, is_folder

TOPIC = "results"
TRIES = 4
"""Of opening a file that another run of its micro-batch may have replaced."""
REPLACED_S = 0.25
_FILE = re.compile(r"batch=(\d+)/results-(\d+)-(\d+)-([0-9a-f]{16})(?:-[0-9a-f]{32})?\.parquet")


class ResultsArchive(Archive):
    """The index of a directory of results."""

    def _look(self) -> dict[TopicPartition, PartitionIndex]:
        """List the directory.

        Raises:
            HistoryLost: There is no such directory.
        """
        filesystem, root = fsspec.core.url_to_fs(self.uri)
        filesystem.invalidate_cache()
        if not is_folder(filesystem, root):
            raise HistoryLost(
                "there are no results of a job", where=self.uri, command="check the path given to results_of(...)"
            )
        newest = self._whole(filesystem, root)
        found = sorted(
            (int(match[1]), int(match[2]), int(match[3]), match[4], path)
            for path in files_below(filesystem, root)
            if (match := _FILE.fullmatch(path)) and (newest is None or int(match[1]) <= newest)
        )
        slices: dict[int, list[Slice]] = {}
        self._read = {}
        for version, shard, rows, digest, path in found:
            before = slices.setdefault(shard, [])
            first = before[-1].last + 1 if before else 0
            before.append(Slice(path, first, first + rows - 1, rows))
            name = f"batch={version}/results-{shard:05d}"
            # the offsets are part of it: results that are taken away change those of all behind them
            span = Span(TOPIC, shard, first, first + rows - 1, rows)
            self._read[name] = Stamp(rows, (), None), FileEntry(name, rows, [span], f"{first} {digest}", STRUCT)
        return {(TOPIC, shard): PartitionIndex(tuple(own)) for shard, own in sorted(slices.items())}

    def _whole(self, filesystem: fsspec.AbstractFileSystem, root: str) -> int | None:
        """Return the newest micro-batch that is whole; None where every one that is seen is."""
        where = f"{root}/_rewind/newest.json"
        try:
            return int(msgspec.json.decode(filesystem.cat_file(where))["version"])
        except FileNotFoundError:
            return None
        except UNDECODABLE as error:
            raise SourceDamaged(
                "the file that says which results are whole cannot be read", where=where, why=str(error)
            ) from error


def _opened(filesystem: fsspec.AbstractFileSystem, root: str, path: str) -> IO[bytes]:
    """Open a file of results; where its micro-batch ran again, the file that has the same rows under another name.

    Raises:
        FileNotFoundError: There is none.
    """
    for tries_left in reversed(range(TRIES)):
        try:
            handle: IO[bytes] = filesystem.open(f"{root}/{path}", "rb")
            return handle
        except FileNotFoundError:
            if not tries_left:
                raise
        path = _name_now(filesystem, root, path)
    raise AssertionError("the last try raised")


def _name_now(filesystem: fsspec.AbstractFileSystem, root: str, path: str) -> str:
    """Return the name by now of what a file held: its micro-batch, shard, rows and digest are in it."""
    folder, wanted = path.partition("/")[0], _FILE.fullmatch(path)
    filesystem.invalidate_cache()
    for name in files_below(filesystem, f"{root}/{folder}"):
        match = _FILE.fullmatch(f"{folder}/{name}")
        if match is not None and wanted is not None and match.groups() == wanted.groups():
            return f"{folder}/{name}"
    time.sleep(REPLACED_S)  # where a filesystem cannot exchange directories, there is none for a moment
    return path


def read_results(
    uri: str,
    topic: str,
    partition: int,
    wanted: OffsetRange,
    slices: Sequence[Slice],
    gaps: Sequence[OffsetRange],
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    """Read the half-open offset range of one shard, as `archive_files.read_range` does.

    Raises:
        SourceDamaged: A file is gone, cannot be read, or has another number of rows than its name says.
    """
    filesystem, root = fsspec.core.url_to_fs(uri)
    names = [field.name for field in schema.field("value").type]
    for piece in slices:
        where, at = f"{root}/{piece.path}", piece.first
        with readable(where), _opened(filesystem, root, piece.path) as handle:
            parquet = pq.ParquetFile(handle, page_checksum_verification=True)
            if parquet.metadata.num_rows != piece.count:
                raise OSError(f"{parquet.metadata.num_rows} rows, its name says {piece.count}")
            here = [name for name in names if name in parquet.schema_arrow.names] or ["sequence"]
            for batch in parquet.iter_batches(BATCH_ROWS, columns=here, use_threads=False):
                offsets = pa.array(np.arange(at, at + batch.num_rows), pa.int64())
                at += batch.num_rows
                value = pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
                columns = {
                    "topic": pa.repeat(pa.scalar(topic), len(offsets)),
                    "partition": pa.repeat(pa.scalar(partition, pa.int32()), len(offsets)),
                    "offset": offsets,
                    "timestamp": pa.nulls(len(offsets), pa.timestamp("ms", "UTC")),
                    "key": pa.nulls(len(offsets), pa.binary()),
                    "value": value,
                }
                within = pc.and_(pc.greater_equal(offsets, wanted[0]), pc.less(offsets, wanted[1]))
                rows = pa.RecordBatch.from_pydict(columns).filter(within)
                if rows.num_rows:
                    yield cast(rows, schema, where)
