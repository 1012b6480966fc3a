"""A scan owns what RocksDB only points to: nothing that happens during one may end it early."""

from __future__ import annotations

from pathlib import Path

from backend.rocks import RocksStore
from backend.store import Changes


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
