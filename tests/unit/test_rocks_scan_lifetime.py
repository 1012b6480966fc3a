"""A scan owns what RocksDB only points to: nothing that happens during one may end it early."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from backend.errors import StateCorrupted
from backend.rocks import RocksStore
from backend.rocks.options import _budget
from backend.store.protocol import Changes


def test_a_scan_with_an_end_is_whole_whatever_is_allocated_and_read_meanwhile(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path / "store")
    keys = [b"@%d" % number for number in range(1, 10)]
    store.write(Changes(keys, [b"v"] * len(keys)))
    for number in range(100):
        for reverse in (False, True):
            found = []
            for key, _ in store.scan(b"@", b"@" + bytes([255]), reverse=reverse):
                _noise = [bytes([number]) * length for length in range(1, 30)]
                store.get_many(keys[:2])
                found.append(key)
            assert found == (keys[::-1] if reverse else keys)
    store.close()


@pytest.mark.parametrize("read", ["scan", "reverse", "arrays", "get"])
def test_an_error_that_somebody_holds_on_to_keeps_no_lock(tmp_path: Path, read: str) -> None:
    path = tmp_path / "store"
    _budget.cache_clear()  # what was written here is not read from the block cache
    rng = random.Random(1)
    with RocksStore.open(path) as store:
        keys = [b"%04d" % number for number in range(2000)]
        store.confirm(store.stage(Changes(keys, [rng.randbytes(100) for _ in keys]), tmp_path / "staged.sst"))
    file = max(path.glob("*.sst"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    file.unlink()
    file.write_bytes(bytes(byte ^ 1 if at < len(data) // 2 else byte for at, byte in enumerate(data)))
    _budget.cache_clear()
    store = RocksStore.open(path)
    with pytest.raises(StateCorrupted) as held:
        if read in ("scan", "reverse"):
            list(store.scan(b"", None if read == "scan" else b"0900", reverse=read == "reverse"))
        elif read == "arrays":
            store.scan_arrays(b"", None)
        else:
            store.get(b"0001")
    store.close()
    assert held.value.__traceback__ is not None
    RocksStore.open(path, wait_s=0.0).close()
