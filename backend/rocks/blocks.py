"""Every block of an SST file against its checksum, also of rows that no read shows.

A read passes over what a range delete covers, or what is newer; the next compaction reads it, and fails on a damaged
block again and again. RocksDB can check whole files (`VerifyChecksum`), rocksdict does not have it. So the blocks are
found here, by the file's own index. Format (block-based table, version 5, which `native_options` sets)::

    data blocks | meta blocks (filter, properties, ...) | index of these | index of the data blocks | footer, 53 bytes

Behind each block are a byte that names its compression and its checksum, 4 bytes: the lower half of the XXH3 (64
bits) of the block, with the compression's byte times a prime upon it. The footer: a byte for the kind of checksum, the
places of the two indexes as varints, zeros, version and magic number. Entries of an index: bytes of the key shared
with the one before, bytes of its own and, where the index is not that of the data, bytes of the value; all varints;
then the key and the value, which begins with the block's place and size. An index ends with the places of its entries,
4 bytes each, and their number.

Source: RocksDB's `table/format.cc`, `table/block_based/block_builder.cc`, `util/hash.cc`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import xxhash

from backend.errors import StateCorrupted
from backend.store.storage import storage

_FOOTER = struct.Struct("<B40sIQ")
_MAGIC, _VERSION, _XXH3 = 0x88E241B785F4CFF7, 5, 4
_TRAILER = struct.Struct("<BI")
_PRIME = 0x6B9083D9
_CODECS = {1: "snappy", 4: "lz4_raw", 7: "zstd"}
"""By the byte behind a block; the size of what comes out stands in front, but for Snappy, which has it itself."""


class _Place(NamedTuple):
    start: int
    size: int


def check_blocks(path: Path) -> int:
    """Check every block of an SST file, reading it from the disk.

    Returns:
        How many there are.

    Raises:
        StateCorrupted: A block does not match its checksum, or this is not such a file.
        StorageFailed: The disk does not give it.
        FileNotFoundError: It is not there.
    """
    with storage(str(path)), path.open("rb", buffering=0) as file:
        return _check(file.fileno(), path)


def _check(descriptor: int, path: Path) -> int:
    length = os.fstat(descriptor).st_size
    end = length - _FOOTER.size
    footer = os.pread(descriptor, _FOOTER.size, max(end, 0))
    if end < 0 or len(footer) != _FOOTER.size:
        raise _damaged(path, f"{length} bytes are no SST file")
    kind, places, version, magic = _FOOTER.unpack(footer)
    if (kind, version, magic) != (_XXH3, _VERSION, _MAGIC):
        raise _damaged(path, f"its footer is of format {version}, checksum {kind}, magic {magic:x}")
    try:
        meta, at = _place(places, 0)
        index, at = _place(places, at)
        if any(places[at:]):
            raise _damaged(path, "bytes of its footer are not zero")
        count = 2
        for own, values in ((meta, True), (index, False)):
            for place in _indexed(_block(descriptor, path, own, end), values=values):
                _block(descriptor, path, place, end)
                count += 1
    except (IndexError, struct.error, pa.ArrowException, OverflowError) as error:
        raise _damaged(path, f"an index cannot be read: {error}") from error
    return count


def _block(descriptor: int, path: Path, place: _Place, end: int) -> tuple[int, bytes]:
    """Read a block and compare it with its checksum; return its compression and its bytes."""
    if place.start + place.size + _TRAILER.size > end:
        raise _damaged(path, f"a block of {place.size} bytes at {place.start} would end in the footer or behind it")
    data = os.pread(descriptor, place.size + _TRAILER.size, place.start)
    compression, checksum = _TRAILER.unpack_from(data, place.size)
    content = data[: place.size]
    found = (xxhash.xxh3_64_intdigest(content) ^ compression * _PRIME) & 0xFFFFFFFF
    if found != checksum:
        why = f"the block of {place.size} bytes at {place.start} has checksum {found:08x}, {checksum:08x} was written"
        raise _damaged(path, why)
    return compression, content


def _indexed(block: tuple[int, bytes], *, values: bool) -> Iterator[_Place]:
    """Give the places that an index names."""
    data = _plain(*block)
    (restarts,) = struct.unpack_from("<I", data, len(data) - 4)
    end, at = len(data) - 4 * (restarts + 1), 0
    while at < end:
        _, at = _varint(data, at)
        own, at = _varint(data, at)
        length, at = _varint(data, at) if values else (0, at)
        place, after = _place(data, at + own)
        yield place
        at = at + own + length if values else after


def _plain(compression: int, data: bytes) -> bytes:
    if compression == 0:
        return data
    if compression not in _CODECS:
        raise IndexError(f"compression {compression} is unknown")
    name = _CODECS[compression]
    size, at = _varint(data, 0)
    plain: bytes = pa.decompress(data[0 if name == "snappy" else at :], size, codec=name, asbytes=True)
    return plain


def _place(data: bytes, at: int) -> tuple[_Place, int]:
    start, at = _varint(data, at)
    size, at = _varint(data, at)
    return _Place(start, size), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            if byte == 0 and shift > 7:
                raise IndexError("a number is longer than it need be")
            return value, at


def _damaged(path: Path, why: str) -> StateCorrupted:
    return StateCorrupted("a file of the database is damaged", where=str(path), why=why)
