"""A check of a database's files finds every flipped bit, also in what no read shows."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from backend.errors import StateCorrupted
from backend.rocks import RocksOptions, RocksStore
from backend.rocks.blocks import check_blocks
from backend.store.protocol import Changes

ROWS = 1_500


def key(number: int) -> bytes:
    return b"\x10" + number.to_bytes(8, "big")


def with_hidden_rows(path: Path, options: RocksOptions | None = None) -> list[Path]:
    """Make a database of ingested, flushed and merged files, with rows under a range delete; return its files."""
    random = Random(5)
    with RocksStore.open(path, options=options) as store:
        for version in range(12):
            numbers = range(version * ROWS, (version + 1) * ROWS)
            keys = [b"\x05", *map(key, numbers), b"\xf0"]
            values = [random.randbytes(40) + b"same" * 10 for _ in keys]
            store.confirm(store.stage(Changes(keys, values), path.with_name(f"{version}.sst")))
            store.settle()
        store.delete_range(key(0), key(9 * ROWS))
        assert len(list(store.scan(key(0), None))) == 3 * ROWS + 1
        return [path / str(file["name"]).lstrip("/") for file in store._open.live_files()]


@pytest.mark.parametrize("compression", ["lz4", "none", "snappy", "zstd"])
def test_every_file_is_sound_and_a_flipped_bit_anywhere_is_found(tmp_path: Path, compression: str) -> None:
    files = with_hidden_rows(tmp_path / "db", RocksOptions(compression=compression))
    assert len(files) > 3
    assert all(check_blocks(path) >= 4 for path in files)
    flipped = tmp_path / "flipped.sst"
    for path in (min(files, key=_size), max(files, key=_size)):
        data = bytearray(path.read_bytes())
        tail = range(max(0, len(data) - 1_200), len(data))  # properties, both indexes, footer
        for at in sorted({*range(0, len(data), max(1, len(data) // 50)), *tail}):
            data[at] ^= 1 << at % 8
            flipped.write_bytes(data)
            with pytest.raises(StateCorrupted, match=str(flipped)):
                check_blocks(flipped)
            data[at] ^= 1 << at % 8


def _size(path: Path) -> int:
    return path.stat().st_size


@pytest.mark.parametrize("length", [0, 1, 52, 53, 60, -1, -60])
def test_a_file_cut_short_is_found(tmp_path: Path, length: int) -> None:
    data = with_hidden_rows(tmp_path / "db")[0].read_bytes()
    (tmp_path / "cut.sst").write_bytes(data[:length])
    with pytest.raises(StateCorrupted, match=r"cut\.sst"):
        check_blocks(tmp_path / "cut.sst")


def test_rows_that_no_read_shows_are_checked(tmp_path: Path) -> None:
    """A compaction reads them, and fails again and again."""
    damaged = max(with_hidden_rows(tmp_path / "db"), key=_size)
    data = bytearray(damaged.read_bytes())
    data[200] ^= 1
    damaged.unlink()
    damaged.write_bytes(data)
    with RocksStore.open(tmp_path / "db", read_only=True) as store:
        assert len(list(store.scan(key(0), None))) == 3 * ROWS + 1, "reading all of it finds nothing"
        with pytest.raises(StateCorrupted, match=damaged.name):
            store.check_files()


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    files = with_hidden_rows(tmp_path / "db")
    with RocksStore.open(tmp_path / "db", read_only=True) as store:
        store.check_files()
        files[0].unlink()
        with pytest.raises(StateCorrupted, match=rf"missing.*{files[0].name}"):
            store.check_files()
