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
has another length is not trusted, the footer is read again. Offsets that are missing and not declared, or that come
twice or step back, are `SourceGap`: the index finds what footers show before a micro-batch is planned, the rows are
checked when they are read, and a task that fails there has counted nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import fsspec
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from backend.errors import UNDECODABLE, HistoryLost, SourceDamaged, SourceGap, UnknownFormat
from backend.sources import OffsetRange, TopicPartition

FORMAT = 1
INDEX_NAME = "_rewind_archive.json"
REQUIRED = ("topic", "partition", "offset", "timestamp", "key", "value")


class Span(msgspec.Struct, frozen=True):
    """Rows of one source partition in one file; `last` is inclusive."""

    topic: str
    partition: int
    first: int
    last: int
    count: int


class FileEntry(msgspec.Struct, frozen=True):
    """One file: its path relative to the archive, its length, its spans."""

    path: str
    bytes: int
    spans: list[Span]


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
        return (
            [piece for piece in self.slices if piece.first < end and piece.last >= start],
            [gap for gap in self.gaps if gap[0] < end and gap[1] > start],
        )

    def next_present(self, offset: int) -> int:
        """Give the first offset at or after `offset` that no declared gap covers."""
        for start, end in self.gaps:
            if start <= offset < end:
                return end
        return offset


@dataclass(slots=True)
class Archive:
    """An archive on any fsspec filesystem; remembers what it read, so that looking again costs one listing.

    Args:
        uri: Path or fsspec URI of the directory.
    """

    uri: str
    _entries: dict[str, FileEntry] = field(default_factory=dict)
    _checked: dict[TopicPartition, PartitionIndex] = field(default_factory=dict)
    _seen: tuple[object, ...] = ()

    def partitions(self) -> dict[TopicPartition, PartitionIndex]:
        """List the archive, read what is new, and check all offsets.

        Raises:
            SourceGap: Offsets are missing without being declared, or come twice, or step back.
            HistoryLost: There is no such directory.
            UnknownFormat: The index file is of a newer release.
            ValueError: A file lacks a column of the archive.
        """
        filesystem, root = fsspec.core.url_to_fs(self.uri)
        if not filesystem.isdir(root):
            raise HistoryLost("there is no archive", where=self.uri, command="check the path given to archive(...)")
        found = filesystem.find(root, detail=True)
        paths = {_relative(name, root): info for name, info in found.items()}
        index_info = paths.get(INDEX_NAME)
        stamp = _stamp(index_info) if index_info else ()
        sizes = {path: int(info["size"]) for path, info in paths.items() if _is_data(path)}
        seen = (stamp, tuple(sorted(sizes.items())))
        if seen == self._seen:
            return self._checked
        stored = read_index_file(filesystem, root) if index_info else IndexFile(FORMAT)
        cached = {entry.path: entry for entry in stored.files} | self._entries
        entries = {}
        for path, size in sizes.items():
            entry = cached.get(path)
            if entry is None or entry.bytes != size:
                with filesystem.open(f"{root}/{path}", "rb") as handle, readable(f"{root}/{path}"):
                    entry = FileEntry(path, size, read_spans(handle, path))
            entries[path] = entry
        self._checked = check(entries.values(), stored.gaps)
        self._entries, self._seen = entries, seen
        return self._checked

    def write_index(self, gaps: Sequence[Gap] = ()) -> None:
        """Write the index file: caches the footers and declares `gaps`. The archive must be free of other gaps."""
        filesystem, root = fsspec.core.url_to_fs(self.uri)
        if filesystem.exists(f"{root}/{INDEX_NAME}"):
            filesystem.rm_file(f"{root}/{INDEX_NAME}")
        entries = []
        for name, info in sorted(filesystem.find(root, detail=True).items()):
            path = _relative(name, root)
            if _is_data(path):
                with filesystem.open(name, "rb") as handle:
                    entries.append(FileEntry(path, int(info["size"]), read_spans(handle, path)))
        check(entries, gaps)
        data = msgspec.json.format(msgspec.json.encode(IndexFile(FORMAT, entries, list(gaps))), indent=1)
        filesystem.pipe_file(f"{root}/{INDEX_NAME}.part", data)
        filesystem.mv(f"{root}/{INDEX_NAME}.part", f"{root}/{INDEX_NAME}")


def read_index_file(filesystem: Any, root: str) -> IndexFile:
    """Read the index file of an archive.

    Raises:
        UnknownFormat: A newer release wrote it, or it is none.
    """
    data = filesystem.cat_file(f"{root}/{INDEX_NAME}")
    where = f"{root}/{INDEX_NAME}"
    try:
        version = msgspec.json.decode(data, type=dict[str, Any]).get("format")
        if version == FORMAT:
            return msgspec.json.decode(data, type=IndexFile)
    except UNDECODABLE as error:
        raise UnknownFormat(
            "the index of the archive cannot be read",
            where=where,
            why=str(error),
            command="put the file back, or write the index again",
        ) from error
    raise UnknownFormat(
        "the index of the archive has an unknown format",
        where=where,
        why=f"format {version!r}, this release reads {FORMAT}",
        command="install the release that wrote it, or write the index again",
    )


@contextmanager
def readable(where: str) -> Iterator[None]:
    """Name a Parquet file that cannot be read in here.

    Raises:
        SourceDamaged: It is torn, or a page does not match its checksum.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException, LookupError) as error:
        raise SourceDamaged(
            "a file of the archive cannot be read",
            where=where,
            why=str(error),
            command="put the file back from where the archive was made",
        ) from error


def read_spans(handle: Any, path: str) -> list[Span]:
    """Read the spans of one file: from the footer's statistics if every row group holds one partition, else by column.

    Raises:
        ValueError: A column of the archive is missing.
        SourceGap: Offsets of a partition step back within the file.
    """
    parquet = pq.ParquetFile(handle)
    names = parquet.schema_arrow.names
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise ValueError(f"archive file {path}: lacks {', '.join(missing)}; needed are {', '.join(REQUIRED)}")
    spans: dict[TopicPartition, Span] = {}
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        if group.num_rows == 0:
            continue
        for span in _span_of_statistics(group) or _spans_of_rows(parquet.read_row_group(number, REQUIRED[:3]), path):
            known = spans.get((span.topic, span.partition))
            if known is not None:
                if span.first <= known.last:
                    raise _stepped_back(path, span.topic, span.partition, known.last, span.first)
                span = Span(span.topic, span.partition, known.first, span.last, known.count + span.count)  # noqa: PLW2901
            spans[span.topic, span.partition] = span
    return [spans[key] for key in sorted(spans)]


def _span_of_statistics(group: Any) -> list[Span] | None:
    found: dict[str, Any] = {}
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema in REQUIRED[:3]:
            found[column.path_in_schema] = column.statistics
    statistics = [found.get(name) for name in REQUIRED[:3]]
    if not all(one is not None and one.has_min_max and one.null_count == 0 for one in statistics):
        return None
    topic, partition, offset = statistics
    assert topic is not None and partition is not None and offset is not None
    if topic.min != topic.max or partition.min != partition.max:
        return None
    name = topic.min.decode() if isinstance(topic.min, bytes) else str(topic.min)
    return [Span(name, int(partition.min), int(offset.min), int(offset.max), group.num_rows)]


def _spans_of_rows(table: pa.Table, path: str) -> list[Span]:
    if any(table.column(name).null_count for name in REQUIRED[:3]):
        raise ValueError(f"archive file {path}: topic, partition and offset must not be null")
    measures = [("offset", "min"), ("offset", "max"), ("offset", "count")]
    grouped = table.group_by(["topic", "partition"]).aggregate(measures)
    return [
        Span(str(row["topic"]), row["partition"], row["offset_min"], row["offset_max"], row["offset_count"])
        for row in grouped.to_pylist()
    ]


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
                raise _stepped_back(f"{after.path} (after {before.path})", topic, partition, before.last, after.first)
            if covered(holes, before.last + 1, after.first) != after.first - before.last - 1:
                raise gap_error(after.path, topic, partition, before.last + 1, after.first)
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
    """Count the offsets of `[start, end)` that lie in disjoint gaps.

    >>> covered([(2, 4), (8, 20)], 3, 10)
    3
    """
    return sum(max(0, min(end, high) - max(start, low)) for low, high in gaps)


def gap_error(path: str, topic: str, partition: int, start: int, end: int) -> SourceGap:
    """Make the error for offsets `[start, end)` that should come before (or in) a file and do not."""
    return SourceGap(
        "offsets are missing in the archive",
        where=f"{path}, {topic}-{partition}",
        why=f"offsets {start} to {end - 1} are in no file and in no declared gap",
        command=f"put the missing file back, or declare the gap in {INDEX_NAME}",
    )


def _stepped_back(path: str, topic: str, partition: int, last: int, first: int) -> SourceGap:
    return SourceGap(
        "offsets step back in the archive",
        where=f"{path}, {topic}-{partition}",
        why=f"offset {first} comes after offset {last}",
        command="remove the file that holds the offsets a second time",
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
    values = offsets.to_numpy(zero_copy_only=False)
    if values[0] < expected:
        raise _stepped_back(path, topic, partition, expected - 1, int(values[0]))
    before = np.concatenate(([expected - 1], values[:-1]))
    for at in np.nonzero(values - before != 1)[0].tolist():
        low, high = int(before[at]) + 1, int(values[at])
        if high < low:
            raise _stepped_back(path, topic, partition, low - 1, high)
        if covered(gaps, low, high) != high - low:
            raise gap_error(path, topic, partition, low, high)
    return int(values[-1]) + 1


def _stamp(info: dict[str, Any]) -> tuple[object, ...]:
    """Give what changes when a file is replaced; filesystems name the time differently."""
    return info["size"], *(str(info.get(name)) for name in ("mtime", "LastModified", "ETag", "updated"))


def _relative(name: str, root: str) -> str:
    return name[len(root) :].lstrip("/")


def _is_data(path: str) -> bool:
    return path.endswith(".parquet") and not any(part.startswith(("_", ".")) for part in path.split("/"))
