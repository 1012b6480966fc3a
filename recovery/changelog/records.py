"""The bytes of a changelog record: written by `encode`, read by `decode`, the same for a file and for a topic.

A record is either a *delta* (what one commit changed: the last value per key, deletes included) or a *base* (every
row as of one commit). Layout, integers big-endian (format 1)::

    +-------+--------+------+------+---------------+----------+---------------+-------------+--------+-----------+
    | magic | format | kind | zero | header length | header   | body          | body length | rows   | xxh3-128  |
    | RWCL  | uint16 | D, B | 0x00 | uint32        | msgpack  | Arrow stream  | uint64      | uint64 | 16 bytes  |
    +-------+--------+------+------+---------------+----------+---------------+-------------+--------+-----------+
    |<------------- 12 bytes -------------------->|                           |<------------ 32 bytes ----------->|

The header is the commit record (`pointer.encode_record`). The body is an Arrow IPC stream of two columns,
`key: large_binary` and `value: large_binary`, compressed with zstd, in key order; a null value is a delete. The
checksum covers everything before it. Lengths and checksum stand at the end, so that a base can be written without
holding it in memory; a torn record is shorter than its lengths say, or does not match its checksum.

Rows of `backend.store.protocol.UNLOGGED` never get in: messages are replayed from the source, and the commit row is
the header. Rows have no headers of their own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from io import BytesIO
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from backend.chunks import one_chunk
from backend.errors import UNDECODABLE, ChangelogDamaged, StateCorrupted, unknown_format
from backend.store.layers import increasing
from backend.store.protocol import UNLOGGED, Changes, region_range, region_slice
from recovery.commit.pointer import Commit, CommitRecord, decode_record, encode_record

MAGIC = b"RWCL"
FORMAT = 1

SCHEMA = pa.schema([pa.field("key", pa.large_binary(), nullable=False), pa.field("value", pa.large_binary())])
"""Columns of a record's body."""

_HEAD = struct.Struct(">4sHcxI")
_TAIL = struct.Struct(">QQ16s")
_BASE_CHUNK_ROWS = 8192

HEAD_BYTES = 16 * 1024
"""Enough of a record's start to hold most headers: what `decode_header` is given first."""


class Kind(Enum):
    """What a record holds."""

    DELTA = b"D"
    BASE = b"B"

    @property
    def suffix(self) -> str:
        """Ending of a file's name."""
        return ".delta" if self is Kind.DELTA else ".base"


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A decoded record.

    Attributes:
        kind: Delta or base.
        record: The commit that it makes (delta) or that it is complete for (base).
        rows: `SCHEMA`, in key order, each key once.
    """

    kind: Kind
    record: CommitRecord
    rows: pa.Table


def encode_delta(record: CommitRecord, changes: Changes) -> bytes:
    """Encode what a commit changed; rows of unlogged regions are left out."""
    threads = len(changes.keys) >= _BASE_CHUNK_ROWS  # a short one is done before a thread of Arrow's pool wakes
    return b"".join(encode(Kind.DELTA, record, _logged(changes.keys, changes.values), threads=threads))


def encode_base(record: CommitRecord, rows: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """Encode every row as of a commit, chunk by chunk, in bounded memory.

    Args:
        record: The commit that the rows are complete for.
        rows: All rows of the store in key order; those of unlogged regions are left out.

    Raises:
        ValueError: Keys are not strictly increasing.
    """
    return encode(Kind.BASE, record, _batches(rows))


def encode(
    kind: Kind, record: CommitRecord, batches: Iterable[pa.RecordBatch], *, threads: bool = True
) -> Iterator[bytes]:
    """Encode a record as a stream of byte chunks; with or without threads they are the same. The layout: see above."""
    digest = xxhash.xxh3_128()
    header = encode_record(record)
    head = _HEAD.pack(MAGIC, FORMAT, kind.value, len(header)) + header
    digest.update(head)
    yield head
    sink = BytesIO()
    length = rows = 0

    def collected() -> bytes:
        nonlocal length
        body = sink.getvalue()
        sink.seek(0)
        sink.truncate()
        digest.update(body)
        length += len(body)
        return body

    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=threads)
    with pa.ipc.new_stream(sink, SCHEMA, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
            rows += batch.num_rows
            yield collected()
    yield collected()
    lengths = struct.pack(">QQ", length, rows)
    digest.update(lengths)
    yield lengths + digest.digest()


def decode(data: bytes, where: str) -> LogRecord:
    """Decode a record and check every byte of it.

    Args:
        data: A whole record.
        where: Its file or topic position, for errors.

    Raises:
        ChangelogDamaged: Torn, or the checksum does not match.
        UnknownFormat: A newer release wrote it.
    """
    record, kind, start = _head(data, where)
    if len(data) < start + _TAIL.size:
        raise damaged(where, f"it ends after {len(data)} bytes, inside the record")
    length, rows, checksum = _TAIL.unpack_from(data, len(data) - _TAIL.size)
    if start + length + _TAIL.size != len(data):
        raise damaged(where, f"{len(data)} bytes found, {start + length + _TAIL.size} announced at its end")
    found = xxhash.xxh3_128(memoryview(data)[:-16]).digest()
    if found != checksum:
        raise damaged(where, f"checksum {found.hex()} found, {checksum.hex()} expected")
    try:
        table = pa.ipc.open_stream(pa.py_buffer(memoryview(data)[start : start + length])).read_all()
        table.validate(full=True)  # offsets are believed by everything that reads them
    except (*UNDECODABLE, OSError) as error:
        raise damaged(where, str(error)) from error
    if table.num_rows != rows or table.schema != SCHEMA:
        raise damaged(where, f"{table.num_rows} rows of {table.schema.names} found, {rows} announced")
    return LogRecord(kind, record, table)


def decode_header(read: Callable[[int], bytes], where: str) -> CommitRecord:
    """Decode only the commit record, for walking a lineage; the checksum is not looked at.

    Args:
        read: Gives at most so many bytes from the record's start.
        where: Its file or topic position, for errors.

    Raises:
        ChangelogDamaged: Torn before the header's end.
        UnknownFormat: A newer release wrote it.
    """
    data = read(HEAD_BYTES)
    if len(data) == HEAD_BYTES:
        data = read(max(HEAD_BYTES, _HEAD.size + _header_length(data, where)))
    return _head(data, where)[0]


def merge(chain: Sequence[LogRecord]) -> pa.Table:
    """Put a chain of records together: the rows as of its newest commit.

    Args:
        chain: Newest first; the last is a base or the first commit's delta.

    Returns:
        `SCHEMA` without nulls, in key order, each key once, nothing below the newest commit's bounds.
    """
    whole = pa.concat_tables([link.rows for link in chain]).combine_chunks()
    if len(chain) > 1 and whole.num_rows:
        ordered = whole.take(pc.sort_indices(whole["key"]))  # stable: of a key's values the newest comes first
        keys = one_chunk(ordered["key"])
        first = pa.concat_arrays([pa.array([True]), pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1))])
        whole = ordered.filter(first)
    if whole["value"].null_count:
        whole = whole.filter(whole["value"].is_valid())
    return _above_bounds(whole, chain[0].record.bounds)


def _above_bounds(rows: pa.Table, bounds: dict[int, bytes]) -> pa.Table:
    for region, bound in bounds.items():
        start = pa.scalar(region_range(region)[0], pa.large_binary())
        below = pa.scalar(bound, pa.large_binary())
        expired = pc.and_(pc.greater_equal(rows["key"], start), pc.less(rows["key"], below))
        rows = rows.filter(pc.invert(expired))
    return rows


def _head(data: bytes, where: str) -> tuple[CommitRecord, Kind, int]:
    """Give the commit record, the kind, and where the body starts."""
    length = _header_length(data, where)
    kind = data[6:7]
    if kind not in {Kind.DELTA.value, Kind.BASE.value}:
        raise damaged(where, f"kind {kind!r} is neither delta nor base")
    end = _HEAD.size + length
    if len(data) < end:
        raise damaged(where, f"it ends after {len(data)} bytes, inside the header")
    try:
        record = decode_record(bytes(data[_HEAD.size : end]), where=where)
    except StateCorrupted as error:
        raise damaged(where, error.why) from error
    return record, Kind(kind), end


def _header_length(data: bytes, where: str) -> int:
    if len(data) < _HEAD.size:
        raise damaged(where, f"it ends after {len(data)} bytes, inside the first {_HEAD.size}")
    magic, version, _, length = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise damaged(where, f"it starts with {magic!r}, not {MAGIC!r}")
    if version != FORMAT:
        raise unknown_format("a changelog record has an unknown format", f"format {version}", FORMAT, where)
    return int(length)


def check_commit(record: CommitRecord, shard: int, commit: Commit, where: str) -> None:
    """Check that a record is the one that its name promises.

    Raises:
        ChangelogDamaged: It is another shard's or another commit's.
    """
    if record.shard != shard or record.commit != commit:
        raise damaged(where, f"it holds commit {record.commit.name} of shard {record.shard}")


def damaged(where: str, why: str) -> ChangelogDamaged:
    """Name a record that is not what was written."""
    return ChangelogDamaged("a changelog record is damaged", where=where, why=why)


def missing(where: str) -> ChangelogDamaged:
    """Name a record that a lineage needs, and that is not there."""
    why = "a commit of the lineage names it, and no base stands in for it"
    return ChangelogDamaged("a changelog record is missing", where=where, why=why)


def _batch(keys: Sequence[bytes], values: Sequence[bytes | None]) -> pa.RecordBatch:
    columns = [pa.array(keys, pa.large_binary()), pa.array(values, pa.large_binary())]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _logged(keys: Sequence[bytes], values: Sequence[bytes | None]) -> Iterator[pa.RecordBatch]:
    """Give sorted rows without those of unlogged regions."""
    at = 0
    for region in sorted(UNLOGGED):
        start, end = region_slice(keys, region)
        if at < start:
            yield _batch(keys[at:start], values[at:start])
        at = max(at, end)
    if at < len(keys):
        yield _batch(keys[at:], values[at:])


def _batches(rows: Iterable[tuple[bytes, bytes]]) -> Iterator[pa.RecordBatch]:
    source = iter(rows)
    last = b""
    while chunk := list(islice(source, _BASE_CHUNK_ROWS)):
        keys, values = [key for key, _ in chunk], [value for _, value in chunk]
        if keys[0] <= last or not increasing(keys):
            raise ValueError("rows of a base must be in strictly increasing key order")
        last = keys[-1]
        yield from _logged(keys, values)
