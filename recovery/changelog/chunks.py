"""A changelog record as Kafka messages: cut in bounded pieces by the writer, put together again by the reader.

A record (`recovery.changelog.records`) may be larger than a message may be. Each message carries one piece as its value
and says in its key what it is a piece of. Layout of the key, 64 bytes, integers big-endian (format 1)::

    +-------+--------+------+------+--------+-----------+---------+----------+--------+-------------+------------+
    | magic | format | kind | last | index  | append id | version | uuid     | deltas | delta bytes | base bytes |
    | RWKL  | uint16 | D, B | 0, 1 | uint32 | 8 bytes   | int64   | 16 bytes | uint32 | uint64      | uint64     |
    +-------+--------+------+------+--------+-----------+---------+----------+--------+-------------+------------+

The append id is random, once per append: pieces of two appends never mix, whether their writer died, was fenced, or
wrote the same commit twice. A record is complete when all pieces from 0 to the last one follow each other; anything
else is what a writer that died left behind. The last three fields count what has been appended since the last base, so
that one message at the end of the log tells whether a base is wanted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from backend.errors import UnknownFormat
from recovery.changelog.records import Kind
from recovery.pointer import Commit

MAGIC = b"RWKL"
FORMAT = 1
CHUNK_BYTES = 768 * 1024
"""Most bytes of a piece: with its key it stays below what brokers accept by default (1 MiB)."""
MAX_OPEN = 64
"""Records whose end has not been seen, kept at most: older ones were left behind by writers that died."""

_KEY = struct.Struct(">4sHc?I8sq16sIQQ")
KEY_BYTES = _KEY.size


@dataclass(frozen=True, slots=True)
class Growth:
    """What has been appended to a lineage since its last base, this record included.

    Attributes:
        deltas: How many.
        delta_bytes: Their bytes.
        base_bytes: Bytes of that base, 0 without one.
    """

    deltas: int = 0
    delta_bytes: int = 0
    base_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """The key of one message; see the module for the layout."""

    kind: Kind
    commit: Commit
    append_id: bytes
    index: int
    last: bool
    growth: Growth

    def encode(self) -> bytes:
        """Give the key's bytes."""
        return _KEY.pack(
            MAGIC,
            FORMAT,
            self.kind.value,
            self.last,
            self.index,
            self.append_id,
            self.commit.version,
            bytes.fromhex(self.commit.uuid),
            self.growth.deltas,
            self.growth.delta_bytes,
            self.growth.base_bytes,
        )


def decode_key(data: bytes | None, where: str) -> ChunkKey | None:
    """Decode a message's key; None when the message is not ours.

    Raises:
        UnknownFormat: A newer release wrote it.
    """
    if data is None or len(data) < 6 or data[:4] != MAGIC:
        return None
    version = int.from_bytes(data[4:6], "big")
    if version != FORMAT:
        raise UnknownFormat(
            "a changelog message has an unknown format",
            where=where,
            why=f"format {version}, this release reads {FORMAT}",
            command="install the release that wrote it",
        )
    if len(data) != KEY_BYTES or data[6:7] not in {kind.value for kind in Kind}:
        return None
    _, _, kind, last, index, append_id, number, uuid, deltas, delta_bytes, base_bytes = _KEY.unpack(data)
    growth = Growth(deltas, delta_bytes, base_bytes)
    return ChunkKey(Kind(kind), Commit(number, uuid.hex()), append_id, index, last, growth)


def cut(stream: Iterable[bytes], size: int = CHUNK_BYTES) -> Iterator[tuple[bytes, bool]]:
    """Cut a stream of bytes in pieces of at most `size`, each with whether it is the last; nothing is one empty piece.

    >>> list(cut([b"ab", b"cde"], 2))
    [(b'ab', False), (b'cd', False), (b'e', True)]
    >>> list(cut([b"abcd"], 2))
    [(b'ab', False), (b'cd', True)]
    """
    held = bytearray()
    for data in stream:
        held += data
        while len(held) > size:  # never the last piece: something is left for it
            yield bytes(held[:size]), False
            del held[:size]
    yield bytes(held), True


@dataclass(frozen=True, slots=True)
class Stored:
    """A complete record in the log.

    Attributes:
        kind: Delta or base.
        commit: Its commit.
        append_id: Of its pieces.
        first: Offset of the first piece.
        last: Offset of the last piece.
        length: Bytes.
        growth: As of this record.
    """

    kind: Kind
    commit: Commit
    append_id: bytes
    first: int
    last: int
    length: int
    growth: Growth


@dataclass(slots=True)
class _Open:
    first: int
    version: int
    pieces: list[bytes]


class Assembler:
    """Put pieces together as they are read, in offset order."""

    def __init__(self) -> None:
        self._open: dict[bytes, _Open] = {}

    def open_from(self, above: int) -> int | None:
        """Give the smallest offset of a record whose end has not been seen, None when there is none.

        Args:
            above: Records of this version and older ones do not count: their writers died, or nobody needs them.
        """
        return min((partial.first for partial in self._open.values() if partial.version > above), default=None)

    def add(self, key: ChunkKey, value: bytes, offset: int) -> tuple[Stored, bytes] | None:
        """Take a piece; give the record and its bytes when it was the last one.

        A piece that does not follow the one before it drops what there is of its record.
        """
        if key.index == 0:
            self._open[key.append_id] = _Open(offset, key.commit.version, [])
            while len(self._open) > MAX_OPEN:
                del self._open[next(iter(self._open))]
        partial = self._open.get(key.append_id)
        if partial is None or key.index != len(partial.pieces):
            self._open.pop(key.append_id, None)
            return None
        partial.pieces.append(value)
        if not key.last:
            return None
        del self._open[key.append_id]
        data = b"".join(partial.pieces)
        return Stored(key.kind, key.commit, key.append_id, partial.first, offset, len(data), key.growth), data
