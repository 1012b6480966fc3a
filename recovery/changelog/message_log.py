"""The message log: messages that a shard keeps and nobody can read again, in segments beside the changelog.

A Kafka topic or an archive is replayed; what Spark gave of a DataFrame is not to be had a second time. So a task writes
the messages of its micro-batch down before its commit, once, and a restore takes them from here. Segments are never
part of a base: they are freed when the last of their messages has expired. ::

    <checkpoint>/rewind/messages/<shard>/<version, 20 digits>_<uuid>.messages

A segment (format 1), integers big-endian::

    +-------+--------+---------------+----------+--------------------------------------+-----------+
    | magic | format | header length | header   | body                                 | xxh3-128  |
    | RWML  | uint16 | uint32        | msgpack  | Arrow stream, zstd                   | 16 bytes  |
    +-------+--------+---------------+----------+--------------------------------------+-----------+

The header is `[shard, commit, rows]`. The body has `MESSAGE_FIELDS` without `BEFORE`, then the operator's fields. The
checksum covers everything before it. A segment holds the messages of the commit that names it, or, merged, of several
commits of a lineage up to it. Which ones a commit needs is in its record (`CommitRecord.segments`), so what an attempt
left that Spark did not commit is read by nobody.

So that files and record stay few, a new segment takes the newest `FAN_IN - 1` of its tier along, if they are small:
each message is written at most about once per tier, and a shard has a few dozen segments, and one more for each
`MERGED_BYTES` that it keeps.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from backend.batch import BEFORE, MESSAGE_FIELDS, NO_TIME, STREAM, SourcePartition
from backend.errors import UNDECODABLE, ChangelogDamaged, RewindError, unknown_format
from backend.spark.ranking import version_of
from recovery.commit.pointer import Commit, CommitRecord, Segment, is_old
from recovery.files import Files, open_files

MAGIC = b"RWML"
FORMAT = 1
DIRECTORY = "rewind/messages"
SUFFIX = ".messages"
FAN_IN = 16
MERGED_BYTES = 16 * 1024 * 1024
"""Segments of more bytes than this together are not merged."""

_HEAD = struct.Struct(">4sHI")
_DIGEST_BYTES = 16


class _Header(msgspec.Struct, frozen=True, array_like=True):
    shard: int
    commit: Commit
    rows: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


@dataclass(frozen=True, slots=True)
class MessageLog:
    """The logged messages of a query.

    Attributes:
        place: The directory, path or URI.
        streams: Streams whose messages are logged.
    """

    place: str
    streams: frozenset[int]

    @property
    def files(self) -> Files:
        """The directory."""
        return open_files(self.place)

    def of(self, messages: pa.Table) -> pa.Table:
        """Return the messages that are to be logged, without `BEFORE`, which a replay does not know."""
        mine = pc.is_in(messages.column(STREAM), pa.array(sorted(self.streams), pa.uint16()))
        return messages.filter(mine).drop_columns([BEFORE])

    def append(self, shard: int, commit: Commit, before: Sequence[Segment], messages: pa.Table) -> list[Segment]:
        """Log a commit's messages; durable on return. Return the segments of the commit.

        Args:
            shard: The shard.
            commit: This commit.
            before: Segments that are needed still, of the parent, oldest first.
            messages: Of the micro-batch; other streams' are left out.

        Raises:
            ChangelogDamaged: A segment that is to be merged is missing or damaged.
        """
        mine = self.of(messages)
        if not mine.num_rows:
            return list(before)
        remaining, taken, tier = _to_merge(before)
        tables = [self.read(shard, segment) for segment in taken]
        data = encode(shard, commit, pa.concat_tables([*(table.cast(mine.schema) for table in tables), mine]))
        length = self.files.write(_name(shard, commit), [data])
        return [*remaining, Segment(commit, tier, length)]

    def read(self, shard: int, segment: Segment) -> pa.Table:
        """Read a segment's messages, without `BEFORE`.

        Raises:
            ChangelogDamaged: It is missing, or not what was written.
        """
        name = _name(shard, segment.commit)
        where = f"{self.files.uri}/{name}"
        try:
            data = self.files.read(name)
        except FileNotFoundError as error:
            raise _damaged(where, "the commit names it, and it is not there") from error
        return decode(data, shard, segment.commit, where)

    def messages(self, record: CommitRecord, above: Commit | None = None) -> Iterator[pa.Table]:
        """Read the messages that a commit needs, as an operator's `replay_rows` takes them.

        Args:
            record: The commit's.
            above: Only those of later micro-batches than this ancestor's.
        """
        for segment in record.segments:
            if above is None or segment.commit.version > above.version:
                found = self.read(record.shard, segment)
                before = pa.array(np.full(found.num_rows, NO_TIME, np.int64))
                yield found.add_column(len(MESSAGE_FIELDS) - 1, MESSAGE_FIELDS[-1], before)

    def verify(self, record: CommitRecord) -> list[RewindError]:
        """Read every segment that a commit needs; return what is wrong."""
        wrong: list[RewindError] = []
        for segment in record.segments:
            try:
                self.read(record.shard, segment)
            except RewindError as error:
                wrong.append(error)
        return wrong

    def prune(self, oldest: CommitRecord) -> list[str]:
        """Delete the segments that no retained commit needs; only the driver calls it, after a commit.

        Args:
            oldest: The record of the oldest retained commit: whatever later ones need of its time, it needs too.
        """
        needed = {_name(oldest.shard, segment.commit) for segment in oldest.segments}
        folder = str(oldest.shard)
        there = [name for name in self.files.list(folder) if name.endswith(SUFFIX)]
        there += self.files.list(folder, temporary=True)
        old = [f"{folder}/{name}" for name in there if is_old(name, oldest.commit.version)]
        doomed = [name for name in old if name not in needed]
        self.files.delete(doomed)
        return doomed


def needed(
    segments: Sequence[Segment], replay_from: Mapping[SourcePartition, int], streams: Collection[int]
) -> list[Segment]:
    """Return the segments that have messages from the smallest retained offset on; the others are free.

    >>> old, new = (Segment(Commit(version, "0" * 32), 0, 9) for version in (3, 4))
    >>> needed([old, new], {(0, 0): 4 << 32}, {0}) == [new], needed([old, new], {}, {0})
    (True, [])
    """
    least = min((version_of(offset) for (stream, _), offset in replay_from.items() if stream in streams), default=None)
    return [] if least is None else [segment for segment in segments if segment.commit.version >= least]


def _to_merge(before: Sequence[Segment]) -> tuple[list[Segment], list[Segment], int]:
    """Return which segments stay, which a new one takes along, and its tier."""
    remaining, taken, tier, length = list(before), list[Segment](), 0, 0
    while len(remaining) >= FAN_IN - 1 and all(segment.tier == tier for segment in remaining[1 - FAN_IN :]):
        fits = list[Segment]()
        for segment in reversed(remaining[1 - FAN_IN :]):
            length += segment.length
            if length > MERGED_BYTES:
                break
            fits.insert(0, segment)
        if not fits:
            break
        remaining, taken, tier = remaining[: -len(fits)], [*fits, *taken], tier + 1
    return remaining, taken, tier


def encode(shard: int, commit: Commit, messages: pa.Table) -> bytes:
    """Encode a segment; see the module for the layout."""
    body = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(body, messages.schema, options=options) as writer:
        writer.write_table(messages)
    header = _encoder.encode(_Header(shard, commit, messages.num_rows))
    data: bytes = _HEAD.pack(MAGIC, FORMAT, len(header)) + header + body.getvalue().to_pybytes()
    data += xxhash.xxh3_128_digest(data)
    return data


def decode(data: bytes, shard: int, commit: Commit, where: str) -> pa.Table:
    """Decode a segment and check every byte of it.

    Raises:
        ChangelogDamaged: Torn, another commit's, or the checksum does not match.
        UnknownFormat: A newer release wrote it.
    """
    content, checksum = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if len(content) < _HEAD.size or xxhash.xxh3_128_digest(content) != checksum:
        raise _damaged(where, f"{len(data)} bytes that do not match their checksum")
    magic, version, length = _HEAD.unpack_from(content)
    if magic == MAGIC and version != FORMAT:
        raise unknown_format("a segment of the message log has an unknown format", f"format {version}", FORMAT, where)
    try:
        header = _decoder.decode(content[_HEAD.size : _HEAD.size + length])
        table = pa.ipc.open_stream(pa.py_buffer(memoryview(content)[_HEAD.size + length :])).read_all()
    except (*UNDECODABLE, OSError) as error:
        raise _damaged(where, str(error)) from error
    if magic != MAGIC or (header.shard, header.commit, header.rows) != (shard, commit, table.num_rows):
        raise _damaged(where, f"it holds {table.num_rows} messages of shard {header.shard}, {header.commit.name}")
    return table


def _name(shard: int, commit: Commit) -> str:
    return f"{shard}/{commit.name}{SUFFIX}"


def _damaged(where: str, why: str) -> ChangelogDamaged:
    return ChangelogDamaged(
        "a segment of the message log is missing or damaged",
        where=where,
        why=why,
        command="rewind verify <checkpoint>; rewind reset <checkpoint> accepts the loss and begins anew",
    )
