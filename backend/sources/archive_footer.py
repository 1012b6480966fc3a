"""What one file of an archive says of itself: its columns' types, and per source partition the offsets that it holds.

Accepted types (`ACCEPTED` in words)::

    topic      text                               never null
    partition  integers, at least 0               never null
    offset     integers, at least 0               never null
    timestamp  timestamps of any unit (without a time zone: UTC), integers (milliseconds)
    key        bytes or text
    value      bytes or text; for format `typed` a struct

Text and bytes may be of the large kinds, of fixed size, or a dictionary; a key, a value or a timestamp that is null in
every row may be of Arrow's type null.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from backend.chunks import plain
from backend.errors import SourceDamaged, SourceGap, SourceInvalid
from backend.sources import TopicPartition
from backend.store.storage import answered

REQUIRED = ("topic", "partition", "offset", "timestamp", "key", "value")
BYTES, STRUCT = "bytes", "struct"
"""Kinds of the column `value`."""
_TAIL = 8
"""A Parquet file ends with the length of its footer, four bytes, and four of magic."""


class Span(msgspec.Struct, frozen=True):
    """Rows of one source partition in one file; `last` is inclusive."""

    topic: str
    partition: int
    first: int
    last: int
    count: int


class FileEntry(msgspec.Struct, frozen=True):
    """One file.

    Attributes:
        path: Relative to the archive.
        bytes: Its length.
        spans: What it holds.
        digest: xxh3-64 of its footer: another one with other bytes is another file. "" is not known.
        value: `BYTES` or `STRUCT`; "" is not known.
    """

    path: str
    bytes: int
    spans: list[Span]
    digest: str = ""
    value: str = ""


@contextmanager
def readable(where: str) -> Iterator[None]:
    """Name a Parquet file that cannot be read in here.

    Raises:
        SourceDamaged: It is gone, torn, not to be read by this user, or a page does not match its checksum.
        StorageFailed: Its filesystem does not answer.
    """
    try:
        with answered(where):
            yield
    except FileNotFoundError as error:
        raise SourceDamaged(
            "a file of the archive is gone",
            where=where,
            why=str(error),
            command="put the file back; a link must lead to a file",
        ) from error
    except PermissionError as error:
        raise SourceDamaged(
            "a file of the archive may not be read", where=where, why=str(error), command="give this user the right"
        ) from error
    except (OSError, pa.ArrowException, LookupError) as error:
        raise SourceDamaged(
            "a file of the archive cannot be read",
            where=where,
            why=str(error),
            command="put the file back from where the archive was made; a file that is still being written needs a name"
            " that begins with _ or . until it is whole",
        ) from error


def read_entry(handle: Any, path: str, size: int, topics: Collection[str] = ()) -> FileEntry:
    """Read what one file holds: from the footer's statistics if every row group holds one partition, else by column.

    Args:
        handle: The open file.
        path: Relative to the archive.
        size: Its length in bytes.
        topics: What is wrong with the offsets of others is passed over; empty is all.

    Raises:
        SourceInvalid: A column of the archive is missing, or of a type that is not accepted.
        SourceGap: Offsets of a partition step back within the file.
    """

    def is_read(topic: str) -> bool:
        return not topics or topic in topics

    parquet = pq.ParquetFile(handle)
    value = check_types(parquet.schema_arrow, path)
    spans: dict[TopicPartition, Span] = {}
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        if group.num_rows == 0:
            continue
        try:
            found = _span_of_statistics(group) or _spans_of_rows(parquet.read_row_group(number, REQUIRED[:3]), path)
        except (UnicodeDecodeError, pa.ArrowInvalid) as error:
            raise _invalid(
                path, "a topic is no text, or a number is none that a partition or offset has", str(error)
            ) from error
        for span in found:
            known = spans.get((span.topic, span.partition))
            if known is not None:
                if span.first <= known.last and is_read(span.topic):
                    raise stepped_back(path, span.topic, span.partition, known.last, span.first)
                span = Span(span.topic, span.partition, known.first, span.last, known.count + span.count)  # noqa: PLW2901
            spans[span.topic, span.partition] = span
    for span in filter(lambda span: is_read(span.topic), spans.values()):
        if span.first < 0 or span.partition < 0:
            raise _invalid(path, "partitions and offsets must be at least 0", f"{span.partition} and {span.first}")
        if span.last >= 2**63 - 1 or span.partition >= 2**31:
            raise _invalid(path, "partitions have 31 bits, offsets 63", f"{span.partition} and {span.last}")
    handle.seek(size - _TAIL)
    length = int.from_bytes(handle.read(4), "little")
    handle.seek(size - _TAIL - length)
    digest = xxhash.xxh3_64_hexdigest(handle.read(length))
    return FileEntry(path, size, [spans[key] for key in sorted(spans)], digest, value)


def check_types(schema: pa.Schema, path: str) -> str:
    """Check the columns of a file; return the kind of its values, `BYTES` or `STRUCT`.

    Raises:
        SourceInvalid: Names file, column, type, and what is accepted.
    """
    missing = [name for name in REQUIRED if name not in schema.names]
    if missing:
        raise _invalid(path, f"it lacks {', '.join(missing)}", f"needed are {', '.join(REQUIRED)}")
    for name in REQUIRED:
        fits, accepted = ACCEPTED[name]
        kind = schema.field(name).type
        if not fits(kind):
            raise _invalid(path, f"the column {name} is {kind}", f"accepted: {accepted}")
    return STRUCT if pa.types.is_struct(schema.field("value").type) else BYTES


def _invalid(path: str, what: str, why: str) -> SourceInvalid:
    return SourceInvalid(
        f"archive file {path}: {what}",
        where=path,
        why=why,
        command="write the file again, or move it out of the archive",
    )


def _is_text(kind: pa.DataType) -> bool:
    return plain(kind) in (pa.string(), pa.large_string())


def _is_bytes(kind: pa.DataType) -> bool:
    bare = plain(kind)
    return _is_text(bare) or pa.types.is_fixed_size_binary(bare) or bare in (pa.binary(), pa.large_binary(), pa.null())


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind))


ACCEPTED: dict[str, tuple[Callable[[pa.DataType], bool], str]] = {
    "topic": (_is_text, "text"),
    "partition": (pa.types.is_integer, "integers"),
    "offset": (pa.types.is_integer, "integers"),
    "timestamp": (_is_time, "timestamps, or integers (milliseconds)"),
    "key": (_is_bytes, "bytes or text"),
    "value": (lambda kind: _is_bytes(kind) or pa.types.is_struct(kind), "bytes or text; a struct for format='typed'"),
}
"""Per column: whether a type is accepted, and which are, in words."""


def _span_of_statistics(group: Any) -> list[Span] | None:
    columns = [group.column(number) for number in range(group.num_columns)]
    found = {one.path_in_schema: one.statistics for one in columns if one.path_in_schema in REQUIRED[:3]}
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
        raise _invalid(path, "topic, partition and offset must not be null", "null found")
    table = table.set_column(table.schema.get_field_index("topic"), "topic", table.column("topic").cast(pa.string()))
    measures = [("offset", "min"), ("offset", "max"), ("offset", "count")]
    grouped = table.group_by(["topic", "partition"]).aggregate(measures)
    return [
        Span(str(row["topic"]), row["partition"], row["offset_min"], row["offset_max"], row["offset_count"])
        for row in grouped.to_pylist()
    ]


def stepped_back(path: str, topic: str, partition: int, last: int, first: int) -> SourceGap:
    """Make the error for an offset that comes after a later one."""
    return SourceGap(
        "offsets step back in the archive",
        where=f"{path}, {topic}-{partition}",
        why=f"offset {first} comes after offset {last}",
        command="remove the file that holds the offsets a second time",
    )
