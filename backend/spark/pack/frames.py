"""Frames: how messages travel from Spark's sources to the shards, many rows in one.

Spark's stateful Python operator groups rows one by one in Python, so it is given few, large rows: the *pack stage*, a
stateless `mapInArrow` (`backend.spark.pack.packing`), turns every Arrow batch into one frame per shard. The inverse,
`backend.spark.pack.assembling`, runs in the shard. Here is what both agree on.

A packed row (format 8)::

    shard   int      grouping value of the shard (see backend.spark.pack.routing)
    header  binary   MessagePack: format, batch time, slices, drain, adopt
    frame   binary   Arrow IPC stream of the messages, each with the record's own timestamp in the last column, or of
                     combined rows (backend.windows.combined_rows); integers, times and texts as narrow as they may be
                     (backend.spark.pack.narrow); null when the shard got none of this Arrow batch
    errors  binary   Arrow IPC stream of ERROR_SCHEMA, null when there are none

A *slice* says of one Arrow batch and one source partition what every shard must know even if it got no rows: first
offset, next offset, newest accepted event time. `BEFORE` in a frame counts from the start of its slice; `assemble` puts
slices together by first offset on top of the committed stream time. So lateness depends neither on the shard a row went
to, nor on where Arrow batches, tasks and micro-batches are cut.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from backend.batch import OWN_TIMESTAMP
from backend.errors import UNDECODABLE, FrameDamaged, UnknownFormat
from backend.windows.columns.arrays import IntArray

FORMAT = 8
SEAL_BYTES = 8
SMALL_BYTES = 64 * 1024
"""A table of less is written once and copied: to measure it first would take longer."""

PACKED_SCHEMA = "shard int, header binary, frame binary, errors binary"
PACKED_ARROW = pa.schema(
    [
        pa.field("shard", pa.int32()),
        pa.field("header", pa.binary()),
        pa.field("frame", pa.binary()),
        pa.field("errors", pa.binary()),
    ]
)

# Columns that the pack stage reads beside the operator's input fields.
SHARD_IN = "_shard"
TIMESTAMP_IN = "_timestamp"
"""int64: the record's own timestamp, milliseconds: the operator does not see it, the errors do."""
KEY_IN = "_key"
RAW_IN = "_raw"
MALFORMED_IN = "_malformed"
CODES_IN = "_codes"
"""int32: equal keys have equal numbers; where rows are routed by one text, and come from one batch of the source.
Windows that combine group by what routes, so they need not look at the texts again."""
VERDICT_IN = "_verdict"
"""Only where the input has steps (`backend.steps`)."""

TIMESTAMP_FIELD = pa.field(OWN_TIMESTAMP, pa.int64())
"""`TIMESTAMP_IN` in frames, where fields have the names that the job gave them."""


def column_name(name: str) -> str:
    """Give the name of a field's column on the way to the pack stage.

    Spark's Python functions read column names as expressions, so a dot or a backtick in one is a syntax of its own. No
    field has the name of a column above.

    >>> column_name("delay"), column_name("left.id"), column_name("_key")
    ('delay', '_x6c6566742e6964', '_x5f6b6579')
    """
    return name if re.fullmatch(r"(?!_)\w+", name) else f"_x{name.encode().hex()}"


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """What one Arrow batch brought of one source partition.

    Attributes:
        stream: Stream number.
        partition: Source partition.
        first: Offset of its first row.
        next: Offset after its last row.
        newest: Newest event time among its accepted rows, `NO_TIME` if none was accepted.
    """

    stream: int
    partition: int
    first: int
    next: int
    newest: int


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The header of a packed row.

    Attributes:
        format: Format version.
        time_ms: Batch time.
        slices: What the Arrow batch brought.
        drain: The driver asked to drain.
        adopt: Shard -> name of the commit that the driver asked it to adopt.
    """

    format: int
    time_ms: int
    slices: list[Slice]
    drain: bool = False
    adopt: dict[int, str] = {}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode_header(header: Header) -> bytes:
    """Serialise a header, with its checksum at the end."""
    return _sealed(_encoder.encode(header))


def decode_header(data: bytes, where: str = "") -> Header:
    """Read what `encode_header` wrote.

    Raises:
        FrameDamaged: It does not match its checksum.
        UnknownFormat: Another release wrote it.
    """
    content = _unsealed(data, where)
    what, command = "a frame has an unknown format", "run driver and executors with one release"
    try:
        header = _decoder.decode(content)
    except UNDECODABLE as error:
        raise UnknownFormat(what, where=where, why=str(error), command=command) from error
    if header.format != FORMAT:
        raise UnknownFormat(what, where=where, why=f"{header.format}, not {FORMAT}", command=command)
    return header


def rises(stream: IntArray, partition: IntArray, offset: IntArray, *, strictly: bool) -> bool:
    """Return whether rows are in order of stream, source partition and offset; strictly: no place comes twice."""
    rising = offset[1:] > offset[:-1] if strictly else offset[1:] >= offset[:-1]
    same = stream[1:] == stream[:-1]
    behind = (stream[1:] > stream[:-1]) | (same & (partition[1:] > partition[:-1]))
    return bool(np.all(behind | (same & (partition[1:] == partition[:-1]) & rising)))


def to_ipc(table: pa.Table) -> bytes:
    """Serialise a table as one Arrow IPC stream, with its checksum at the end (which readers of Arrow pass over)."""
    return bytes(to_ipc_buffer(table))


def to_ipc_buffer(table: pa.Table) -> pa.Buffer:
    """Give what `to_ipc` gives; copies the columns once, of a small table twice."""
    if table.get_total_buffer_size() < SMALL_BYTES:
        small = pa.BufferOutputStream()
        with pa.ipc.new_stream(small, table.schema) as writer:
            writer.write_table(table)
        return pa.py_buffer(_sealed(small.getvalue()))
    measured = pa.MockOutputStream()
    with pa.ipc.new_stream(measured, table.schema) as writer:
        writer.write_table(table)
    length = measured.size()
    data = pa.py_buffer(np.empty(length + SEAL_BYTES, np.uint8))
    sink = pa.FixedSizeBufferWriter(data)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    sink.write(xxhash.xxh3_64_digest(memoryview(data)[:length]))
    sink.close()
    return data


def from_ipc(data: bytes, where: str = "") -> pa.Table:
    """Read what `to_ipc` wrote; the table shares memory with `data`.

    Raises:
        FrameDamaged: It does not match its checksum.
    """
    with pa.ipc.open_stream(pa.py_buffer(_unsealed(data, where))) as reader:
        return reader.read_all()


def _sealed(data: bytes | pa.Buffer) -> bytes:
    return b"".join((data, xxhash.xxh3_64_digest(data)))


def _unsealed(data: bytes, where: str) -> memoryview:
    view = memoryview(data)
    content, checksum = view[:-SEAL_BYTES], bytes(view[-SEAL_BYTES:])
    if xxhash.xxh3_64_digest(content) != checksum:
        raise FrameDamaged(
            "packed messages do not match their checksum",
            where=where,
            why=f"{len(data)} bytes that are not what was written",
            command="start the query again; if it comes again, check disks and memory of the executors",
        )
    return content
