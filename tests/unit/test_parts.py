"""Staged files of several parts: messages by themselves, so that RocksDB never merges them with anything."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from backend.errors import StateCorrupted, UnknownFormat
from backend.rocks import RocksStore, write_staged
from backend.rocks.files import PART_BYTES
from backend.rocks.parts import part_lengths
from backend.store.protocol import Changes, Staged
from backend.store.staging import seal
from tests.support.waiting import until

COMMIT, WINDOW = b"\x00commit", b"\x03window"
VALUE = bytes(1024)
ROWS = 2 * PART_BYTES // len(VALUE)


def messages(first: int, count: int = ROWS) -> list[bytes]:
    return [b"\x01" + number.to_bytes(8, "big") for number in range(first, first + count)]


def values(version: int) -> list[bytes]:
    """Nothing that could be compressed: in a small database everything is one level."""
    return [random.Random(version * ROWS + number).randbytes(len(VALUE)) for number in range(ROWS)]


def micro_batch(version: int) -> Changes:
    """So many messages behind all others, the commit row before and metadata behind them."""
    keys = messages(version * ROWS)
    return Changes([COMMIT, *keys, WINDOW], [b"%d" % version, *values(version), b"%d" % version])


def settled(store: RocksStore) -> list[str]:
    """Give the database's files of messages alone once no compaction runs or waits."""
    names = ("num-running-compactions", "compaction-pending")
    until(lambda: all(store.property(f"rocksdb.{name}") == "0" for name in names), what="the compactions' end")
    files = store._open.live_files()
    return [file["name"] for file in files if file["start_key"][:1] == file["end_key"][:1] == b"\x01"]


@pytest.mark.slow
def test_messages_are_never_merged_until_they_expire(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path / "db")
    made: list[set[str]] = []
    for version in range(30):
        before = set(settled(store))
        store.confirm(store.stage(micro_batch(version), tmp_path / f"{version}.sst"))
        made.append(set(settled(store)) - before)
        assert len(made[-1]) == 1
    assert set(settled(store)) == set().union(*made), "each file of messages is as it was ingested"
    store.delete_range(b"\x01", messages(10 * ROWS)[0])
    store.delete_range(b"\x03", WINDOW)
    for version in range(30, 45):
        store.confirm(store.stage(micro_batch(version), tmp_path / f"{version}.sst"))
    assert set(settled(store)) >= set().union(*made[10:]), "what has not expired is as it was"
    assert store.scan_arrays(b"\x01", b"\x02") == (
        messages(10 * ROWS, 35 * ROWS),
        [value for version in range(10, 45) for value in values(version)],
    )
    assert store.get(COMMIT) == store.get(WINDOW) == b"44"
    store.close()


def test_settling_waits_for_what_is_being_merged(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path / "db")
    keys = [b"\x03" + number.to_bytes(8, "big") for number in range(3000)]
    for version in range(8):
        rows = [random.Random(version * 3000 + number).randbytes(1000) for number in range(3000)]
        store.confirm(store.stage(Changes(keys, rows), tmp_path / f"{version}.sst"))
    store.settle(60.0)
    store.close()
    with RocksStore.open(tmp_path / "db", read_only=True) as again:
        assert int(again.property("rocksdb.num-files-at-level0")) < 8


def test_deletes_of_two_regions_span_nothing_between_them(tmp_path: Path) -> None:
    with RocksStore.open(tmp_path / "db") as store:
        store.write(Changes([b"\x01a", b"\x01z", b"\x03a", b"\x03z"], [b"1"] * 4))
        store.delete_range(b"\x01", b"\x01m")
        store.delete_range(b"\x03", b"\x03m")
        newest = max(store._open.live_files(), key=lambda file: file["name"])
        assert newest["start_key"] >= b"\x03"
        assert store.scan_arrays(b"\x01", None) == ([b"\x01z", b"\x03z"], [b"1", b"1"])


def test_few_messages_are_no_file_of_their_own(tmp_path: Path) -> None:
    keys = messages(0, PART_BYTES // len(VALUE) // 2)
    staged = write_staged(tmp_path / "one", [COMMIT, *keys, WINDOW], [VALUE] * (len(keys) + 2))
    assert part_lengths(staged.path) == []
    alone = write_staged(tmp_path / "alone", messages(0), [VALUE] * ROWS)
    assert part_lengths(alone.path) == [], "nothing is with them"
    assert part_lengths(write_staged(tmp_path / "both", *_rows(micro_batch(0))).path) != []


def _rows(changes: Changes) -> tuple[list[bytes], list[bytes | None]]:
    return list(changes.keys), list(changes.values)


def test_index_and_messages_are_parts_of_their_own(tmp_path: Path) -> None:
    index = [b"\x02" + key for key in messages(0, PART_BYTES // 10)]
    keys = [COMMIT, *messages(0), *index, WINDOW]
    values = [b"c", *[VALUE] * ROWS, *[b""] * len(index), None]
    store = RocksStore.open(tmp_path / "db")
    store.write(Changes([WINDOW], [b"goes"]))
    staged = store.stage(Changes(keys, values), tmp_path / "x.sst")
    assert len(part_lengths(staged.path)) == 3
    assert staged.rows == len(keys)
    store.confirm(staged)
    found = store.scan_arrays(COMMIT, b"\x00d")[0] + store.scan_arrays(b"\x01", None)[0]
    assert found == keys[:-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["db", "x.sst"]
    store.close()


def by_hand(path: Path, parts: list[bytes], lengths: list[int] | None = None, version: int = 1) -> Staged:
    lengths = [len(part) for part in parts] if lengths is None else lengths
    tail = struct.pack(f">{len(lengths)}QHH", *lengths, len(lengths), version) + b"RWPARTS."
    path.write_bytes(b"".join(parts) + tail)
    return seal(path, 0)


@pytest.fixture
def ssts(tmp_path: Path) -> list[bytes]:
    one = write_staged(tmp_path / "1", [b"\x01a", b"\x01b"], [b"1", b"2"]).path
    two = write_staged(tmp_path / "2", [COMMIT, WINDOW], [b"c", b"w"]).path
    return [one.read_bytes(), two.read_bytes()]


def test_the_layout_is_as_written_down(tmp_path: Path, ssts: list[bytes]) -> None:
    with RocksStore.open(tmp_path / "db") as store:
        store.confirm(by_hand(tmp_path / "x.sst", ssts))
        assert store.get_many([b"\x01a", b"\x01b", COMMIT, WINDOW]) == [b"1", b"2", b"c", b"w"]


def test_a_newer_layout_is_refused(tmp_path: Path, ssts: list[bytes]) -> None:
    with RocksStore.open(tmp_path / "db") as store, pytest.raises(UnknownFormat, match="format 2"):
        store.confirm(by_hand(tmp_path / "x.sst", ssts, version=2))


def test_all_parts_or_none(tmp_path: Path, ssts: list[bytes]) -> None:
    lengths = [len(ssts[0]), len(ssts[1])]
    with RocksStore.open(tmp_path / "db") as store:
        for number, (parts, said) in enumerate(
            [
                ([ssts[0], ssts[1][:-100]], None),
                ([ssts[0], b"no SST"], None),
                (ssts, [lengths[0] - 1, lengths[1] + 1]),
                (ssts, lengths[:1]),
                (ssts, []),
                (ssts, [2**63, 0]),
            ]
        ):
            staged = by_hand(tmp_path / f"{number}.sst", parts, said)
            with pytest.raises(StateCorrupted):
                store.confirm(staged)
            assert store.scan_arrays(b"\x00commit", b"\x00d") == store.scan_arrays(b"\x01", None) == ([], [])
    assert not list(tmp_path.glob(".*"))


def test_a_failing_part_leaves_no_file(tmp_path: Path) -> None:
    keys, values = _rows(micro_batch(0))
    keys[-2:] = [WINDOW, WINDOW]
    with pytest.raises(Exception, match="sorted"):
        write_staged(tmp_path / "x.sst", keys, values)
    assert not list(tmp_path.iterdir())


def test_a_file_cut_inside_its_lengths_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(struct.pack(">HH", 9, 1) + b"RWPARTS.")
    with pytest.raises(StateCorrupted, match="not as long"):
        part_lengths(tmp_path / "x")
    (tmp_path / "y").write_bytes(b"RWPARTS.")
    with pytest.raises((StateCorrupted, UnknownFormat)):
        part_lengths(tmp_path / "y")
