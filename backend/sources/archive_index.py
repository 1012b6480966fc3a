"""What an archive holds: per file and source partition the first and last offset and the count, and declared gaps.

An archive is a directory of Parquet files with the columns `topic, partition, offset, timestamp, key, value`: a topic
as it was archived. The names, times and sizes of the files mean nothing: a partition's files are ordered by their
offsets. One file may hold several partitions; the rows of one partition stand in offset order within it.

The index file `_rewind_archive.json` beside the data is optional. It caches what the footers say, so that a large
archive is not opened file by file, and it is the only place where a gap can be declared (format 1)::

    {"format": 1,
     "files": [{"path": "a.parquet", "bytes": 4711,
                "spans": [{"topic": "t", "partition": 0, "first": 0, "last": 99, "count": 98}]}],
     "gaps": [{"topic": "t", "partition": 0, "start": 10, "end": 12}]}

`last` is inclusive, as in the footers; a gap is half-open, `end` is the next offset that exists. An entry whose file
has another length, or was changed after the index was written, is not trusted: the footer is read again. Offsets that
are missing and not declared, or that come twice or step back, are `SourceGap`: the index finds what footers show before
a micro-batch is planned, the rows are checked when they are read, and a task that fails there has counted nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import Any, ClassVar

import fsspec
import msgspec
import numpy as np
import pyarrow as pa

from backend.errors import SourceDamaged, SourceGap, SourceInvalid, SourceUnavailable
from backend.sources import OffsetRange, TopicPartition
from backend.sources.archive_footer import BYTES, STRUCT, FileEntry, read_entry, readable, stepped_back
from backend.sources.listing import files_below, is_folder, is_shown
from backend.store.storage import reached
from recovery.files import decode_struct, is_object_store, move_file

FORMAT = 1
INDEX_NAME = "_rewind_archive.json"
_FIRST, _LAST = attrgetter("first"), attrgetter("last")
"""Of a slice."""
_START, _END = itemgetter(0), itemgetter(1)
"""Of a gap."""


class Gap(msgspec.Struct, frozen=True):
    """Offsets `[start, end)` that never reached the archive: transaction markers, compaction, filtering."""

    topic: str
    partition: int
    start: int
    end: int


class IndexFile(msgspec.Struct, frozen=True):
    """The index file as it is stored."""

    format: int
    files: list[FileEntry] = []
    gaps: list[Gap] = []


@dataclass(frozen=True, slots=True)
class Slice:
    """A span with its file: picklable, what a task needs to read and check it.

    Attributes:
        path: Relative to the archive.
        first: First offset in the file.
        last: Last offset in the file, inclusive.
        count: Rows of the partition in the file.
    """

    path: str
    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True)
class PartitionIndex:
    """All of one source partition: slices in offset order and the declared gaps, both checked and disjoint."""

    slices: tuple[Slice, ...]
    gaps: tuple[OffsetRange, ...] = ()

    @property
    def range(self) -> OffsetRange:
        """(earliest offset, offset after the latest)."""
        return self.slices[0].first, self.slices[-1].last + 1

    def cut(self, start: int, end: int) -> tuple[list[Slice], list[OffsetRange]]:
        """Give the slices and gaps that overlap `[start, end)`."""
        low, high = bisect_left(self.slices, start, key=_LAST), bisect_left(self.slices, end, key=_FIRST)
        after, before = bisect_right(self.gaps, start, key=_END), bisect_left(self.gaps, end, key=_START)
        return list(self.slices[low:high]), list(self.gaps[after:before])

    def next_present(self, offset: int) -> int:
        """Give the first offset at or after `offset` that no declared gap covers."""
        at = bisect_right(self.gaps, offset, key=_END)
        return self.gaps[at][1] if at < len(self.gaps) and self.gaps[at][0] <= offset else offset


@dataclass(slots=True)
class Archive:
    """An archive on any fsspec filesystem; remembers what it read, so that looking again costs one listing.

    Args:
        uri: Path or fsspec URI of the directory.
        value: Kind that the values must be of, `archive_footer.BYTES` or `STRUCT`; None takes both.
        topics: What is wrong with others, beside them, is not looked at; empty is all.

    Attributes:
        files: The files by their paths, as of the last look.
        found: The source partitions as of the last look.
        all_stay: A file that was read must still be there, since those behind it have their offsets by it.
    """

    uri: str
    value: str | None = None
    topics: tuple[str, ...] = ()
    files: dict[str, FileEntry] = field(default_factory=dict)
    found: dict[TopicPartition, PartitionIndex] = field(default_factory=dict)
    _stamps: dict[str, Stamp] = field(default_factory=dict)
    _seen: object = None
    all_stay: ClassVar[bool] = False

    def begun(self, known: Sequence[FileEntry], ends: Mapping[TopicPartition, int]) -> list[FileEntry]:
        """Return what to remember of the files that hold offsets below some, ascending by their paths.

        Args:
            known: What was remembered before.
            ends: The next offset to read, by source partition.
        """
        return [
            entry
            for _, entry in sorted(self.files.items())
            if any(span.first < ends.get((span.topic, span.partition), span.first) for span in entry.spans)
        ]

    def partitions(self) -> dict[TopicPartition, PartitionIndex]:
        """List the archive, read what is new, and check all offsets.

        Raises:
            SourceGap: Offsets are missing without being declared, or come twice, or step back; so say two listings.
            SourceUnavailable: There is no such directory.
            UnknownFormat: The index file is of a newer release.
            SourceInvalid: A file lacks a column of the archive or has one of a type that is not accepted.
            SourceDamaged: A file cannot be read.
            StorageFailed: The filesystem does not answer.
        """
        with reached(self.uri):
            return self._look()

    def _look(self) -> dict[TopicPartition, PartitionIndex]:
        filesystem, root = fsspec.core.url_to_fs(self.uri)
        shown = ""
        while True:
            try:
                return self._look_once(filesystem, root)
            except SourceGap as error:
                # a listing may miss a file that is made meanwhile and show a later one; the next listing shows both
                if str(error) == shown:
                    raise
                shown = str(error)

    def _look_once(self, filesystem: Any, root: str) -> dict[TopicPartition, PartitionIndex]:
        filesystem.invalidate_cache()  # another process may have written since
        if not is_folder(filesystem, root):
            raise SourceUnavailable(
                "there is no archive", where=self.uri, command="check the path given to archive(...)"
            )
        listed, index_stamp = _listed(filesystem, root)
        seen = (index_stamp, listed)
        if seen == self._seen:
            return self.found
        stored = read_index_file(filesystem, root) if index_stamp else IndexFile(FORMAT)
        cached = {entry.path: entry for entry in stored.files}
        files: dict[str, FileEntry] = {}

        def is_trusted(entry: FileEntry, stamp: Stamp, known: Stamp | None) -> bool:
            """Return whether the index may speak of a file: of one that changed in between only if it is newer."""
            if entry.bytes != stamp.bytes or stamp.newer_than(index_stamp):
                return False
            return known is None or (index_stamp is not None and index_stamp.newer_than(stamp))

        for path, stamp in listed.items():
            known, entry = self._stamps.get(path), cached.get(path)
            if known == stamp:
                entry = self.files[path]
            elif entry is None or not is_trusted(entry, stamp, known):
                try:
                    entry = _opened(filesystem, root, path, stamp, self.topics)
                except SourceDamaged:
                    if path in _listed(filesystem, root)[0]:
                        raise
                    continue  # it was taken away meanwhile
            files[path] = entry
        wanted = [entry for entry in map(self._of_topics, files.values()) if entry is not None]
        for entry in wanted:
            self._check_value(entry)
        self.files, self._stamps = files, {path: listed[path] for path in files}
        self._seen = None  # another look need not read it again
        self.found = check(wanted, [gap for gap in stored.gaps if not self.topics or gap.topic in self.topics])
        self._seen = seen
        return self.found

    def write_index(self, gaps: Sequence[Gap] = ()) -> None:
        """Write the index file: caches the footers and declares `gaps`. The archive must be free of other gaps.

        Raises:
            StorageFailed: The filesystem does not answer.
        """
        with reached(self.uri):
            filesystem, root = fsspec.core.url_to_fs(self.uri)
            filesystem.invalidate_cache()
            with suppress(FileNotFoundError):
                filesystem.rm_file(f"{root}/{INDEX_NAME}")
            listed, _ = _listed(filesystem, root)
            entries = [_opened(filesystem, root, path, stamp) for path, stamp in listed.items()]
            check(entries, gaps)
            data = msgspec.json.format(msgspec.json.encode(IndexFile(FORMAT, entries, list(gaps))), indent=1)
            target = f"{root}/{INDEX_NAME}"
            draft = target if is_object_store(filesystem) else f"{target}.part"
            filesystem.pipe_file(draft, data)
            if draft != target:
                move_file(filesystem, draft, target)

    def _of_topics(self, entry: FileEntry) -> FileEntry | None:
        """Give what a file holds of the topics that are read; None where it holds other ones alone."""
        spans = [span for span in entry.spans if not self.topics or span.topic in self.topics]
        return msgspec.structs.replace(entry, spans=spans) if spans or not entry.spans else None

    def _check_value(self, entry: FileEntry) -> None:
        if self.value is None or entry.value in ("", self.value):
            return
        formats = {BYTES: "json, avro, raw or a function", STRUCT: "typed"}
        raise SourceInvalid(
            f"archive file {entry.path}: the column value holds {_KINDS[entry.value]}",
            where=f"{self.uri}/{entry.path}",
            why=f"the format that archive(..., format=...) names needs {_KINDS[self.value]}",
            command=f"such values are read with format {formats[entry.value]}",
        )


_KINDS = {BYTES: "bytes or text", STRUCT: "structs"}


@dataclass(frozen=True, slots=True)
class Stamp:
    """What changes when a file is replaced; filesystems name the time differently, some have none.

    Attributes:
        bytes: Its length.
        changed: Whatever the filesystem says of the version: time, tag.
        at: When it was changed, in seconds; None where the filesystem gives no number.
    """

    bytes: int
    changed: tuple[str, ...]
    at: float | None

    def newer_than(self, other: Stamp | None) -> bool:
        """Return whether it is known to be changed after another file."""
        return other is not None and self.at is not None and other.at is not None and self.at > other.at


def _opened(filesystem: Any, root: str, path: str, stamp: Stamp, topics: Collection[str] = ()) -> FileEntry:
    where = f"{root}/{path}"
    with readable(where), filesystem.open(where, "rb") as handle:
        try:
            return read_entry(handle, path, stamp.bytes, topics)
        except (SourceGap, SourceInvalid) as error:
            place = f"{where}{error.where.removeprefix(path)}"
            raise type(error)(error.what, where=place, why=error.why, command=error.command) from error


def _listed(filesystem: Any, root: str) -> tuple[dict[str, Stamp], Stamp | None]:
    """Return the stamp of each data file, in order of their paths, and of the index file.

    Raises:
        SourceInvalid: A link leads to a directory: what lies there would be passed over.
    """
    index, data = None, {}
    for path, info in files_below(filesystem, root).items():
        if path == INDEX_NAME:
            index = _stamp(info)
        elif is_shown(path) and info.get("islink") and is_folder(filesystem, info["name"]):
            raise SourceInvalid(
                f"the archive has a link to a directory: {path}",
                where=info["name"],
                why="links to directories are not followed, and its files would never be read",
                command="link each file, or name the link with a leading _ or .",
            )
        elif is_shown(path) and path.endswith(".parquet"):
            data[path] = _stamp(info)
    return data, index


def read_index_file(filesystem: Any, root: str) -> IndexFile:
    """Read the index file of an archive.

    Raises:
        UnknownFormat: A newer release wrote it, or it is none.
    """
    where = f"{root}/{INDEX_NAME}"
    return decode_struct(
        filesystem.cat_file(where),
        IndexFile,
        FORMAT,
        where=where,
        what="the index of the archive cannot be read",
        command="install the release that wrote it, put the file back, or write the index again",
    )


def check(entries: Iterable[FileEntry], gaps: Sequence[Gap]) -> dict[TopicPartition, PartitionIndex]:
    """Order the spans of every partition by offset and account for each offset between its first and last.

    Raises:
        SourceGap: Naming the file and the offsets.
        ValueError: Of a declared gap that is empty.
    """
    spans: dict[TopicPartition, list[Slice]] = {}
    for entry in entries:
        for span in entry.spans:
            piece = Slice(entry.path, span.first, span.last, span.count)
            spans.setdefault((span.topic, span.partition), []).append(piece)
    declared: dict[TopicPartition, list[OffsetRange]] = {}
    for gap in gaps:
        if gap.end <= gap.start:
            raise ValueError(f"declared gap [{gap.start}, {gap.end}) of {gap.topic}-{gap.partition}: must not be empty")
        declared.setdefault((gap.topic, gap.partition), []).append((gap.start, gap.end))
    result = {}
    for (topic, partition), pieces in sorted(spans.items()):
        pieces.sort(key=lambda piece: (piece.first, piece.last))
        holes = _merged(declared.get((topic, partition), []))
        for before, after in pairwise(pieces):
            if after.first <= before.last:
                raise stepped_back(f"{after.path} (after {before.path})", topic, partition, before.last, after.first)
            check_absent(holes, before.last + 1, after.first, after.path, topic, partition)
        for piece in pieces:
            expected = piece.last + 1 - piece.first - covered(holes, piece.first, piece.last + 1)
            if piece.count != expected:
                raise SourceGap(
                    "offsets are missing in the archive or come twice",
                    where=f"{piece.path}, {topic}-{partition}, offsets {piece.first} to {piece.last}",
                    why=f"{piece.count} rows for {expected} offsets that no declared gap explains",
                    command=f"archive the file again, or declare the gap in {INDEX_NAME}",
                )
        result[topic, partition] = PartitionIndex(tuple(pieces), tuple(holes))
    return result


def covered(gaps: Sequence[OffsetRange], start: int, end: int) -> int:
    """Count the offsets of `[start, end)` that lie in gaps, which are sorted and disjoint: there may be very many.

    >>> covered([(2, 4), (8, 20)], 3, 10)
    3
    """
    total, at = 0, bisect_right(gaps, start, key=_END)
    while at < len(gaps) and gaps[at][0] < end:
        total += max(0, min(end, gaps[at][1]) - max(start, gaps[at][0]))
        at += 1
    return total


def check_absent(gaps: Sequence[OffsetRange], start: int, end: int, path: str, topic: str, partition: int) -> None:
    """Check that all offsets of `[start, end)`, which should come before (or in) a file and do not, lie in gaps.

    Raises:
        SourceGap: One is in no gap.
    """
    if start < end and covered(gaps, start, end) != end - start:
        raise SourceGap(
            "offsets are missing in the archive",
            where=f"{path}, {topic}-{partition}",
            why=f"offsets {start} to {end - 1} are in no file and in no declared gap",
            command=f"put the missing file back, or declare the gap in {INDEX_NAME}",
        )


def _merged(ranges: list[OffsetRange]) -> list[OffsetRange]:
    result: list[OffsetRange] = []
    for start, end in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def check_rows(
    offsets: pa.Array, expected: int, gaps: Sequence[OffsetRange], path: str, topic: str, partition: int
) -> int:
    """Check that offsets in file order go on from `expected` without a step back or an undeclared gap.

    Returns:
        The next expected offset.
    """
    if len(offsets) == 0:
        return expected
    values = offsets.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    breaks = (np.flatnonzero(values[1:] - values[:-1] != 1) + 1).tolist()
    for at in breaks if values[0] == expected else [0, *breaks]:
        low, high = int(values[at - 1]) + 1 if at else expected, int(values[at])
        if high < low:
            raise stepped_back(path, topic, partition, low - 1, high)
        check_absent(gaps, low, high, path, topic, partition)
    return int(values[-1]) + 1


_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
"""What filesystems call the time of a file's last change."""


def _stamp(info: Mapping[str, Any]) -> Stamp:
    times = [one for one in map(info.get, _TIMES) if one is not None]
    at = next((one for one in times if isinstance(one, int | float | datetime)), None)
    changed = (str(times[:1]), *(str(info.get(name)) for name in ("ETag", "etag", "ino")))
    return Stamp(int(info["size"]), changed, at.timestamp() if isinstance(at, datetime) else at)
