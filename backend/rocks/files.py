"""Sorted rows as an SST file, beside any store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from rocksdict import SstFileWriter

from backend.rocks.errors import translated
from backend.rocks.options import RocksOptions, native_options
from backend.staging import seal
from backend.storage import storage
from backend.store import Staged, nothing


def write_sst(
    path: Path,
    keys: Sequence[bytes],
    values: Sequence[bytes | None],
    *,
    options: RocksOptions | None = None,
    midway: Callable[[], object] = nothing,
) -> Staged:
    """Write sorted rows to a new SST file, without a store: None is a point delete. File and directory are synced.

    `midway` is called when half of the rows are written.

    Raises:
        FileExistsError: There is a file already.
        KeyInvalid: The keys are not strictly increasing; the file is gone again.
    """
    if path.exists():
        raise FileExistsError(f"a staged file is never written over: {path}")
    writer = SstFileWriter(native_options(options or RocksOptions()))
    try:
        writer.open(str(path))
        half = len(keys) // 2
        _write(writer, keys[:half], values[:half])
        midway()
        _write(writer, keys[half:], values[half:])
        writer.finish()
    except Exception as error:
        path.unlink(missing_ok=True)
        raise translated(error, path) from error
    with storage(str(path)):
        return seal(path, len(keys))


def _write(writer: SstFileWriter, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
    if None not in values:
        deque(map(writer.__setitem__, keys, values), maxlen=0)  # a loop without bytecode: this is the hot path
        return
    for key, value in zip(keys, values, strict=True):
        if value is None:
            del writer[key]
        else:
            writer[key] = value
