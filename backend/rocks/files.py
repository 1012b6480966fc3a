"""Sorted rows as a staged file, beside any store: an SST, or several in one (`backend.rocks.parts`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import setitem
from pathlib import Path

from rocksdict import SstFileWriter

from backend.rocks import parts
from backend.rocks.errors import Named
from backend.rocks.options import RocksOptions, native_options
from backend.store.protocol import REPLAYED, Seen, Staged, nothing, region_slice, unseen
from backend.store.rows import StoreRows
from backend.store.staging import seal
from backend.store.storage import storage

PART_BYTES = 256 * 1024
"""Rows of a replayed region are a part of their own from so many bytes on: a file of the database, and never merged
with others to fewer, should not be a small one."""
_SAMPLE = 1024
_BLOCK_ROWS = 4096

_Keys = Sequence[bytes]
_Values = Sequence[bytes | None]
_Rows = tuple[_Keys, _Values]


def write_staged(
    path: Path,
    keys: _Keys,
    values: _Values,
    *,
    options: RocksOptions | None = None,
    midway: Callable[[], object] = nothing,
) -> Staged:
    """Write sorted rows to a new staged file, without a store: None is a point delete. File and directory are synced.

    `midway` is called when half of the rows of the first part are written.

    Raises:
        FileExistsError: There is a file already.
        KeyInvalid: The keys are not strictly increasing; the file is gone again.
    """
    with Named(path):  # keys that are no bytes
        first, *others = _parts(keys, values)
    files = [path.with_name(f".{path.name}.{number}") for number in range(1, len(others) + 1)]
    _write_sst(path, _halves(first, midway), options)
    try:
        for file, rows in zip(files, others, strict=True):
            _write_sst(file, [rows], options)
        with storage(str(path)):
            if files:
                parts.join(path, files)
            return seal(path, len(keys))
    except Exception:
        for file in (path, *files):
            file.unlink(missing_ok=True)
        raise


def write_columns(path: Path, rows: StoreRows, *, options: RocksOptions | None = None, seen: Seen = unseen) -> Staged:
    """Write rows that are columns as `write_staged` does, to one SST.

    A block of them at a time becomes objects, which fit in the processor's cache until they are written. `seen` is
    called with the keys and values of each block that was written.

    Raises:
        FileExistsError: There is a file already.
        KeyInvalid: The keys are not strictly increasing, or there are none; the file is gone again.
    """

    def blocks() -> Iterator[_Rows]:
        for start in range(0, len(rows), _BLOCK_ROWS):
            keys, values = rows.part(start, min(start + _BLOCK_ROWS, len(rows))).lists()
            yield keys, values
            seen(keys, values)

    _write_sst(path, blocks(), options)
    with storage(str(path)):
        return seal(path, len(rows))


def _parts(keys: _Keys, values: _Values) -> list[_Rows]:
    """Divide rows: each large replayed region, then, in the last part, what overlaps with them."""
    found: list[_Rows] = []
    rest_keys: list[bytes] = []
    rest_values: list[bytes | None] = []
    at = 0
    for region in sorted(REPLAYED):
        start, end = region_slice(keys, region)
        part = keys[start:end], values[start:end]
        if _bytes(*part) >= PART_BYTES:
            found.append(part)
            rest_keys += keys[at:start]
            rest_values += values[at:start]
            at = end
    if not found:
        return [(keys, values)]
    rest_keys += keys[at:]
    rest_values += values[at:]
    return [*found, (rest_keys, rest_values)] if rest_keys else found


def _bytes(keys: _Keys, values: _Values) -> int:
    """Estimate the bytes of rows from a sample of them."""
    step = len(keys) // _SAMPLE + 1
    return step * (sum(map(len, keys[::step])) + sum(len(value) for value in values[::step] if value is not None))


def _halves(rows: _Rows, midway: Callable[[], object]) -> Iterator[_Rows]:
    keys, values = rows
    half = len(keys) // 2
    yield keys[:half], values[:half]
    midway()
    yield keys[half:], values[half:]


def _write_sst(path: Path, blocks: Iterable[_Rows], options: RocksOptions | None) -> None:
    """Write blocks of rows to a new SST, each before the next one is asked for; after an error there is no file."""
    if path.exists():
        raise FileExistsError(f"a staged file is never written over: {path}")
    writer = SstFileWriter(native_options(options or RocksOptions()))
    try:
        with Named(path):
            writer.open(str(path))
            for keys, values in blocks:
                _write(writer, keys, values)
            writer.finish()
    except Exception:
        path.unlink(missing_ok=True)
        raise


def _write(writer: SstFileWriter, keys: _Keys, values: _Values) -> None:
    if None not in values:
        # the hot path: a loop without bytecode
        deque(map(setitem, repeat(writer), keys, values), maxlen=0)  # type: ignore[arg-type]
        return
    for key, value in zip(keys, values, strict=True):
        if value is None:
            del writer[key]
        else:
            writer[key] = value
