"""A changelog record as Kafka messages: cut in bounded pieces by the writer, put together again by the reader.

A record (`recovery.changelog.records`) may be larger than a message may be. Each message carries one piece as its value
and says in its key what it is a piece of. Layout of the key, 88 bytes, integers big-endian (format 2)::

    +-------+--------+------+------+--------+-----------+---------+----------+--------+-------------+------------+
    | magic | format | kind | last | index  | append id | version | uuid     | deltas | delta bytes | base bytes |
    | RWKL  | uint16 | D, B | 0, 1 | uint32 | 8 bytes   | int64   | 16 bytes | uint32 | uint64      | uint64     |
    +-------+--------+------+------+--------+-----------+---------+----------+--------+-------------+------------+
    | begins: int64 | owner: 16 bytes |
    +---------------+-----------------+

Format 1 was the same without the last two, and is read: nobody owns its messages.

The append id is random, once per append: pieces of two appends never mix, whether their writer died, was fenced, or
wrote the same commit twice. A record is complete when all pieces from 0 to the last one follow each other; anything
else is what a writer that died left behind. Deltas and bytes count what has been appended since the last base, so that
one message at the end of the log tells whether a base is wanted; `begins` is the offset of that base, or of the first
commit's delta: a log that is cut above it cannot give the record's commit back. The owner is the query (its uuid in the
manifest). A topic is cut from its beginning, so every message names it, and before the first one a *claim* does::

    key: | RWKO | format 1: uint16 | owner: 16 bytes |       value: empty
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from backend.errors import unknown_format
from recovery.changelog.protocol import Growth
from recovery.changelog.records import Kind
from recovery.commit.pointer import Commit

MAGIC = b"RWKL"
FORMAT = 2
UNOWNED_FORMAT = 1
CLAIM_MAGIC = b"RWKO"
CLAIM_FORMAT = 1
CHUNK_BYTES = 768 * 1024
"""Most bytes of a piece: with its key it stays below what brokers accept by default (1 MiB)."""
MAX_OPEN = 64
"""Records whose end has not been seen, kept at most: older ones were left behind by writers that died."""

_UNOWNED = struct.Struct(">4sHc?I8sq16sIQQ")
_KEY = struct.Struct(_UNOWNED.format + "q16s")
_CLAIM = struct.Struct(">4sH16s")
_NOBODY = bytes(16)


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """The key of one message; see the module for the layout.

    Attributes:
        owner: The query, hex; "" for nobody.
    """

    kind: Kind
    commit: Commit
    append_id: bytes
    index: int
    last: bool
    growth: Growth
    owner: str = ""

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
            *self.growth,
            bytes.fromhex(self.owner) or _NOBODY,
        )


def is_ours(key: bytes) -> bool:
    """Tell whether a message with this key is of a changelog, whatever its format."""
    return key[:4] in (MAGIC, CLAIM_MAGIC)


def decode_key(data: bytes | None, where: str) -> ChunkKey | None:
    """Decode a message's key; None when the message is not ours.

    Raises:
        UnknownFormat: A newer release wrote it.
    """
    if data is None or len(data) < 6 or data[:4] != MAGIC:
        return None
    version = int.from_bytes(data[4:6], "big")
    if version not in (FORMAT, UNOWNED_FORMAT):
        what = "a changelog message has an unknown format"
        raise unknown_format(what, f"format {version}", f"{UNOWNED_FORMAT} and {FORMAT}", where)
    layout = _KEY if version == FORMAT else _UNOWNED
    if len(data) != layout.size or data[6:7] not in {kind.value for kind in Kind}:
        return None
    _, _, kind, last, index, append_id, number, uuid, *grown = layout.unpack(data)
    owner = grown.pop().hex() if version == FORMAT and grown[-1] != _NOBODY else ""
    return ChunkKey(Kind(kind), Commit(number, uuid.hex()), append_id, index, last, Growth(*grown[:4]), owner)


def claim_key(owner: str) -> bytes:
    """Return the key of the message by which a query claims an empty topic."""
    return _CLAIM.pack(CLAIM_MAGIC, CLAIM_FORMAT, bytes.fromhex(owner))


def is_claim(data: bytes | None) -> bool:
    """Tell whether a message's key is a claim."""
    return data is not None and data.startswith(CLAIM_MAGIC)


def owner_in(data: bytes | None, where: str) -> str:
    """Return the query that a message's key names, "" for none.

    Raises:
        UnknownFormat: A newer release wrote it.

    >>> owner_in(claim_key("ab" * 16), "t-0@0") == "ab" * 16
    True
    """
    if data is None or not is_claim(data):
        key = decode_key(data, where)
        return key.owner if key is not None else ""
    if data[4:6] != CLAIM_FORMAT.to_bytes(2, "big") or len(data) != _CLAIM.size:
        found = f"format {int.from_bytes(data[4:6], 'big')}"
        raise unknown_format("a claim to a changelog topic has an unknown format", found, CLAIM_FORMAT, where)
    return data[6:].hex()


def cut(stream: Iterable[bytes], size: int = CHUNK_BYTES) -> Iterator[tuple[bytes, bool]]:
    """Cut a stream of bytes in pieces of at most `size`, each with whether it is the last; nothing is one empty piece.

    >>> list(cut([b"ab", b"cde"], 2))
    [(b'ab', False), (b'cd', False), (b'e', True)]
    >>> list(cut([b"abcd"], 2))
    [(b'ab', False), (b'cd', True)]
    """
    buffer = bytearray()
    for data in stream:
        buffer += data
        while len(buffer) > size:  # never the last piece: something is left for it
            yield bytes(buffer[:size]), False
            del buffer[:size]
    yield bytes(buffer), True


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
        return min((unfinished.first for unfinished in self._open.values() if unfinished.version > above), default=None)

    def begins(self, append_id: bytes, offset: int) -> bool:
        """Return whether a record of this append, whose end has not been seen, begins at an offset."""
        return append_id in self._open and self._open[append_id].first == offset

    def add(self, key: ChunkKey, value: bytes, offset: int) -> tuple[Stored, bytes] | None:
        """Take a piece; give the record and its bytes when it was the last one.

        A piece that does not follow the one before it drops what there is of its record.
        """
        if key.index == 0:
            self._open[key.append_id] = _Open(offset, key.commit.version, [])
            while len(self._open) > MAX_OPEN:
                del self._open[next(iter(self._open))]
        unfinished = self._open.get(key.append_id)
        if unfinished is None or key.index != len(unfinished.pieces):
            self._open.pop(key.append_id, None)
            return None
        unfinished.pieces.append(value)
        if not key.last:
            return None
        del self._open[key.append_id]
        data = b"".join(unfinished.pieces)
        return Stored(key.kind, key.commit, key.append_id, unfinished.first, offset, len(data), key.growth), data
