"""Staged files of several parts: SST files one behind the other in one file, with their lengths at the end.

RocksDB puts an ingested file at the lowest level where it overlaps with nothing. A micro-batch's messages under
`<timestamp>_<offset>` lie behind all that came before: alone, they go to the bottom at once and are never merged with
anything until they expire. In one SST with the metadata they overlap with everything, and are merged level by level.
So what a restore replays stands in a part of its own, where it is worth a file of the database.

It stays one file, so that a pointer, a snapshot and a check of its digest name one thing. Layout (format 1), integers
big-endian::

    +--------+--------+-----+----------------------+--------+--------+----------+
    | part 1 | part 2 | ... | length of each part  | parts  | format | magic    |
    | SST    | SST    |     | uint64 each          | uint16 | uint16 | RWPARTS. |
    +--------+--------+-----+----------------------+--------+--------+----------+

A file without the magic at its end is one SST: what the first release staged, and small micro-batches.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from backend.errors import StateCorrupted, unknown_format

MAGIC = b"RWPARTS."
FORMAT = 1
_TAIL = struct.Struct(">HH8s")
_CHUNK_BYTES = 4 * 1024 * 1024


def join(path: Path, others: Sequence[Path]) -> None:
    """Append files to the one at `path`, and how long each of them is; the others are gone then."""
    lengths = [file.stat().st_size for file in (path, *others)]
    with path.open("ab") as target:
        for other in others:
            _copy(other, 0, other.stat().st_size, target)
        target.write(struct.pack(f">{len(lengths)}Q", *lengths) + _TAIL.pack(len(lengths), FORMAT, MAGIC))
    for other in others:
        other.unlink()


def part_lengths(path: Path) -> list[int]:
    """Give the length of each part in bytes; nothing for a file that is one SST.

    Raises:
        UnknownFormat: A newer release wrote it.
        StateCorrupted: The lengths are not those of the file.
    """
    whole = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, whole - _TAIL.size))
        tail = file.read(_TAIL.size)
        if not tail.endswith(MAGIC):
            return []
        count, version, _ = _TAIL.unpack(tail.rjust(_TAIL.size, b"\0"))
        if version != FORMAT:
            raise unknown_format("a staged file has an unknown format", f"format {version}", FORMAT, str(path))
        table = struct.Struct(f">{count}Q")
        file.seek(max(0, whole - _TAIL.size - table.size))
        found = file.read(table.size)
    lengths = list(table.unpack(found)) if len(found) == table.size else []
    if not lengths or sum(lengths) + table.size + _TAIL.size != whole:
        why = f"parts of {lengths} bytes in a file of {whole}"
        raise StateCorrupted("a staged file's parts are not as long as it says", where=str(path), why=why)
    return lengths


def part(path: Path, start: int, length: int, target: Path) -> None:
    """Copy one part to a new file of its own; RocksDB syncs what it takes."""
    with target.open("xb") as file:
        _copy(path, start, length, file)


def _copy(path: Path, start: int, length: int, target: BinaryIO) -> None:
    with path.open("rb") as source:
        source.seek(start)
        while length > 0 and (chunk := source.read(min(length, _CHUNK_BYTES))):
            target.write(chunk)
            length -= len(chunk)
