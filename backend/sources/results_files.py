"""A job's Parquet results as a source of another job: what the Parquet sink published, in order, replayable.

Each result row is a message. Its source partition is the shard that made it, its offset the number of rows that the
shard published before it, its value the row. Names of the files say micro-batch, shard, number of rows and digest
(`backend.sinks.parquet`), so a listing is the index. Micro-batches are published in order and whole, and one that runs
again publishes the same rows or stops its query: offsets never change. Of outputs on object stores only what is whole
is read (`backend.sinks.objects`).

What was read is remembered by micro-batch and shard (`backend.sources.archive_seen`) with the offsets and the digest:
results that were taken away or replaced are `SourceWentBack`, never other offsets. A digest is of the file and of all
before it of its shard, so the newest ones are enough. A running query looks into directories that are new or were
replaced; what happens to single files of older ones is seen when it starts again.

A listing may miss what is published while it is made, and show what is published after that. So a local directory is
listed again until nothing up to the newest micro-batch of one listing is different in the next.
"""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar

import fsspec
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from fsspec.implementations.local import LocalFileSystem

from backend.errors import UNDECODABLE, HistoryLost, SourceDamaged, StorageFailed
from backend.sources import TopicPartition
from backend.sources.archive_files import batch_rows, cast, rows_of
from backend.sources.archive_footer import STRUCT, FileEntry, Span, readable
from backend.sources.archive_index import Archive, PartitionIndex, Slice
from backend.sources.listing import files_below, is_folder, names_in

if TYPE_CHECKING:
    from backend.sources.archive_reader import Piece

TOPIC = "results"
TRIES = 4
"""Of opening a file that another run of its micro-batch may have replaced; of a listing that another one confirms."""
REPLACED_S = 0.25
_FOLDER = re.compile(r"batch=(\d+)")
_FILE = re.compile(r"batch=(\d+)/results-(\d+)-(\d+)-([0-9a-f]{16})(?:-[0-9a-f]{32})?\.parquet")
REMEMBERED = 128
"""Files of a shard that are remembered, one for each planned micro-batch: the query may be taken back to each."""
RECENT = 64
"""Newest directories that are asked when they last changed: one may have the inode of another that is gone."""
_Found = tuple[int, int, int, str, str]
"""A file: micro-batch, shard, rows, digest and path."""


@dataclass(slots=True)
class ResultsArchive(Archive):
    """The index of a directory of results; looking again costs a listing of its names, and what is new.

    Attributes:
        files: The files by micro-batch and shard, as of the last look.
    """

    _listed: dict[int, int] = field(default_factory=dict)
    _chains: dict[int, str] = field(default_factory=dict)
    _changed: dict[int, int] = field(default_factory=dict)
    _by_inode: bool = True
    all_stay: ClassVar[bool] = True

    def begun(self, known: Sequence[FileEntry], ends: Mapping[TopicPartition, int]) -> list[FileEntry]:
        """Return what to remember: of each shard the file that is read last, and those that were remembered before."""
        before: dict[TopicPartition, list[str]] = {}
        for one in known:
            before.setdefault((one.spans[0].topic, one.spans[0].partition), []).append(one.path)
        found: list[FileEntry] = []
        for key, index in self.found.items():
            end = ends.get(key, 0)
            last = [_name(piece.path) for piece in index.cut(end - 1, end)[0]]
            named = {*last, *before.get(key, ())}
            own = [self.files[name] for name in named if name in self.files]
            own = sorted((one for one in own if one.spans[0].first < end), key=lambda one: one.spans[0].first)
            found += own[-REMEMBERED:]
        return sorted(found, key=lambda entry: entry.path)

    def _look(self) -> dict[TopicPartition, PartitionIndex]:
        """List the directory.

        Raises:
            HistoryLost: There is no such directory.
            StorageFailed: No two listings of it agree.
        """
        filesystem, root = fsspec.core.url_to_fs(self.uri)
        filesystem.invalidate_cache()
        if not is_folder(filesystem, root):
            raise HistoryLost(
                "there are no results of a job", where=self.uri, command="check the path given to results_of(...)"
            )
        newest = self._whole(filesystem, root)
        listed = self._micro_batches(filesystem, root, newest)
        other = self._has_changed(filesystem, root, listed)
        if listed == self._listed and not other:
            return self.found
        for tries_left in reversed(range(TRIES)):
            if self._listed.keys() - listed.keys() and tries_left:
                time.sleep(REPLACED_S)  # where a filesystem cannot exchange directories, one is away for a moment
                listed = self._micro_batches(filesystem, root, newest)
                continue
            if other or not self._goes_on(listed):
                self._listed, self.found, self.files, self._chains, other = {}, {}, {}, {}, False
            found = self._found(filesystem, root, listed.keys() - self._listed.keys())
            again = listed
            if newest is None:  # what is up to there was there before this listing began
                again = self._micro_batches(filesystem, root, max(listed, default=-1))
            if not tries_left and again.keys() == listed.keys() and again != listed:
                self._by_inode = False  # they are made up anew for each listing (FUSE)
                listed = again = dict.fromkeys(listed, 0)
            if again == listed:
                self._append(listed, found)
                return self.found
            listed = again
        raise StorageFailed(
            "the results of a job change while they are listed", where=self.uri, command="see who writes there"
        )

    def _micro_batches(self, filesystem: fsspec.AbstractFileSystem, root: str, newest: int | None) -> dict[int, int]:
        """List the micro-batches up to the newest one, each with the inode of its directory."""
        filesystem.invalidate_cache()
        matches = ((_FOLDER.fullmatch(name), inode) for name, inode in names_in(filesystem, root).items())
        found = {int(match[1]): inode if self._by_inode else 0 for match, inode in matches if match}
        return found if newest is None else {version: inode for version, inode in found.items() if version <= newest}

    def _has_changed(self, filesystem: fsspec.AbstractFileSystem, root: str, listed: Mapping[int, int]) -> bool:
        """Return whether one of the newest directories was changed or made anew since a look, where it is local."""
        if not isinstance(filesystem, LocalFileSystem):
            return False
        before, self._changed = self._changed, {}
        for version in heapq.nlargest(RECENT, listed):
            with suppress(FileNotFoundError):
                self._changed[version] = Path(root, f"batch={version}").stat().st_ctime_ns
        return any(self._changed.get(version, at) != at for version, at in before.items())

    def _goes_on(self, listed: Mapping[int, int]) -> bool:
        """Return whether all that is known is there as it was, and what is new comes behind it."""
        known = self._listed
        fresh = listed.keys() - known.keys()
        return known.items() <= listed.items() and max(known, default=-1) < min(fresh, default=2**63)

    def _found(self, filesystem: fsspec.AbstractFileSystem, root: str, versions: Collection[int]) -> list[_Found]:
        """Return the files of micro-batches in order; at the first look with one listing where the filesystem can."""
        if self._listed:
            folders = [f"batch={version}" for version in versions]
            paths = [f"{folder}/{name}" for folder in folders for name in files_below(filesystem, f"{root}/{folder}")]
        else:
            paths = [*files_below(filesystem, root)]
        return sorted(
            (int(match[1]), int(match[2]), int(match[3]), match[4], path)
            for path in paths
            if (match := _FILE.fullmatch(path)) and int(match[1]) in versions
        )

    def _append(self, listed: dict[int, int], found: Sequence[_Found]) -> None:
        slices: dict[int, list[Slice]] = {}
        for version, shard, rows, digest, path in found:
            if shard not in slices:
                index = self.found.get((TOPIC, shard))
                slices[shard] = [*index.slices] if index is not None else []
            before = slices[shard]
            first = before[-1].last + 1 if before else 0
            before.append(Slice(path, first, first + rows - 1, rows))
            chained = f"{self._chains.get(shard, '')} {version} {rows} {digest}"
            chain = self._chains[shard] = xxhash.xxh3_64_hexdigest(chained.encode())
            # the offsets are part of it: results that are taken away change those of all behind them
            span = Span(TOPIC, shard, first, first + rows - 1, rows)
            name = _name(path)
            self.files[name] = FileEntry(name, rows, [span], f"{first} {digest} {chain}", STRUCT)
        made = {(TOPIC, shard): PartitionIndex(tuple(own)) for shard, own in slices.items()}
        self._listed, self.found = listed, dict(sorted((self.found | made).items()))

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


def _name(path: str) -> str:
    """Return what a file is known by: a micro-batch that runs again names it anew.

    >>> _name(f"batch=7/results-00003-12-{'a' * 16}-{'b' * 32}.parquet")
    'batch=7/results-00003'
    """
    return "-".join(path.split("-", 2)[:2])


def _opened(filesystem: fsspec.AbstractFileSystem, root: str, path: str) -> IO[bytes]:
    """Open a file of results; where its micro-batch ran again, the file that has the same rows under another name.

    Raises:
        FileNotFoundError: There is none.
    """
    handle: IO[bytes]
    for _ in range(TRIES - 1):
        with suppress(FileNotFoundError):
            handle = filesystem.open(f"{root}/{path}", "rb")
            return handle
        path = _name_now(filesystem, root, path)
    handle = filesystem.open(f"{root}/{path}", "rb")
    return handle


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


def read_results(uri: str, wanted: Piece, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read the half-open offset range of one shard, as `archive_files.read_range` does.

    Raises:
        SourceDamaged: A file is gone, cannot be read, or has another number of rows than its name says.
    """
    filesystem, root = fsspec.core.url_to_fs(uri)
    names = [field.name for field in schema.field("value").type]
    for piece in wanted.slices:
        where, at = f"{root}/{piece.path}", piece.first
        with readable(where), _opened(filesystem, root, piece.path) as handle:
            parquet = pq.ParquetFile(handle, page_checksum_verification=True)
            if parquet.metadata.num_rows != piece.count:
                raise OSError(f"{parquet.metadata.num_rows} rows, its name says {piece.count}")
            here = [name for name in names if name in parquet.schema_arrow.names] or ["sequence"]
            rows_at_once = batch_rows(parquet, range(parquet.num_row_groups), here, 0)
            for batch in parquet.iter_batches(rows_at_once, columns=here, use_threads=False):
                offsets = pa.array(np.arange(at, at + batch.num_rows), pa.int64())
                at += batch.num_rows
                columns = {
                    "offset": offsets,
                    "timestamp": pa.nulls(len(offsets), pa.timestamp("ms", "UTC")),
                    "value": pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema)),
                }
                rows = rows_of(pa.RecordBatch.from_pydict(columns), wanted)
                if rows.num_rows:
                    yield cast(rows, schema, where)
