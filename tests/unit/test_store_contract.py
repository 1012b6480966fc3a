"""One contract over the dict twin and RocksDB."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.errors import KeyInvalid, StateCorrupted, StoreClosed, ValueInvalid
from backend.rocks import RocksStore
from backend.store.bounds import reclaim, stored_bounds
from backend.store.protocol import Changes
from tests.support.twin import MemoryTwin

Store = MemoryTwin | RocksStore
A, B, C, D = b"\x01a", b"\x01b", b"\x01c", b"\x01d"


@pytest.fixture(params=["memory", "rocks"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened: Store = MemoryTwin() if request.param == "memory" else RocksStore.open(tmp_path / "db")
    yield opened
    opened.close()


def test_get_tells_an_empty_value_from_none(store: Store) -> None:
    store.write(Changes([A, B], [b"", b"2"]))
    assert store.get(A) == b""
    assert store.get(C) is None
    assert store.get_many([B, C, A, B]) == [b"2", None, b"", b"2"]
    assert store.get_many([]) == []


def test_scans_are_half_open_in_both_directions(store: Store) -> None:
    store.write(Changes([A, B, C, D], [b"1", b"2", b"3", b"4"]))
    assert list(store.scan(A, C)) == [(A, b"1"), (B, b"2")]
    assert list(store.scan(A, C, reverse=True)) == [(B, b"2"), (A, b"1")]
    assert list(store.scan(B, None)) == [(B, b"2"), (C, b"3"), (D, b"4")]
    assert list(store.scan(B, None, reverse=True)) == [(D, b"4"), (C, b"3"), (B, b"2")]
    assert store.scan_arrays(B, D) == ([B, C], [b"2", b"3"])
    for start, end in [(C, C), (D, A), (b"\x02", b"\x03")]:
        assert list(store.scan(start, end)) == []
        assert list(store.scan(start, end, reverse=True)) == []
        assert store.scan_arrays(start, end) == ([], [])


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_is_a_snapshot(store: Store, reverse: bool) -> None:
    store.write(Changes([A, C], [b"1", b"3"]))
    scan = store.scan(A, None, reverse=reverse)
    store.write(Changes([A, B, C, D], [b"new", b"2", None, b"4"]))
    assert sorted(scan) == [(A, b"1"), (C, b"3")]


def test_write_applies_puts_deletes_and_bounds(store: Store) -> None:
    store.write(Changes([A, B], [b"1", b"2"]))
    store.write(Changes([A, C], [None, b"3"], {1: B}))
    assert store.scan_arrays(b"\x01", b"\x02") == ([B, C], [b"2", b"3"])
    assert stored_bounds(store) == {1: B}


def test_staged_changes_count_only_after_confirm(store: Store, tmp_path: Path) -> None:
    store.write(Changes([A, B], [b"1", b"2"]))
    staged = store.stage(Changes([A, C], [None, b"3"], {1: A}), tmp_path / "s")
    assert (staged.length, staged.rows) == ((tmp_path / "s").stat().st_size, 3)
    assert store.scan_arrays(b"\x01", b"\x02") == ([A, B], [b"1", b"2"])
    assert stored_bounds(store) == {}
    before = staged.path.read_bytes()
    store.confirm(staged)
    assert store.scan_arrays(b"\x01", b"\x02") == ([B, C], [b"2", b"3"])
    assert stored_bounds(store) == {1: A}
    assert staged.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.name != "db"] == ["s"]


def test_a_file_name_is_never_staged_twice(store: Store, tmp_path: Path) -> None:
    store.stage(Changes([A], [b"1"]), tmp_path / "s")
    before = (tmp_path / "s").read_bytes()
    with pytest.raises(FileExistsError):
        store.stage(Changes([B], [b"2"]), tmp_path / "s")
    assert (tmp_path / "s").read_bytes() == before


def test_changes_without_a_row_can_be_staged(store: Store, tmp_path: Path) -> None:
    rows = list(store.scan(b"", None))
    store.confirm(store.stage(Changes([], []), tmp_path / "s"))
    assert list(store.scan(b"", None)) == rows


def test_bounds_and_commit_rows_are_staged_in_order(store: Store, tmp_path: Path) -> None:
    rows = {b"\x00a": b"1", b"\x00bound\x01": b"\x01stale", b"\x00z": b"2", A: b"3"}
    store.confirm(
        store.stage(Changes(list(rows), list(rows.values()), {2: b"\x02", 0x40: b"\x40x", 1: A}), tmp_path / "s")
    )
    assert stored_bounds(store) == {1: A, 2: b"\x02", 0x40: b"\x40x"}
    assert store.get_many([b"\x00a", b"\x00z", A]) == [b"1", b"2", b"3"]


@pytest.mark.parametrize(
    ("damage", "what"),
    [("flip", "digest"), ("shorten", "wrong length"), ("lengthen", "wrong length"), ("remove", "missing")],
)
def test_a_damaged_staged_file_is_refused_and_nothing_is_applied(
    store: Store, tmp_path: Path, damage: str, what: str
) -> None:
    store.write(Changes([A], [b"1"]))
    staged = store.stage(Changes([A, B], [b"2", b"2"]), tmp_path / "s")
    data = bytearray(staged.path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "shorten":
        del data[-1]
    else:
        data.append(0)
    staged.path.write_bytes(data)
    if damage == "remove":
        staged.path.unlink()
    with pytest.raises(StateCorrupted, match=what):
        store.confirm(staged)
    assert list(store.scan(b"\x01", None)) == [(A, b"1")]


def test_delete_range_leaves_its_end_and_the_rest(store: Store) -> None:
    store.write(Changes([A, B, C, D], [b"1", b"2", b"3", b"4"]))
    for _ in range(2):
        store.delete_range(A, C)
        assert store.scan_arrays(b"\x01", None) == ([C, D], [b"3", b"4"])
    store.delete_range(D, C)
    assert store.scan_arrays(b"\x01", None) == ([C, D], [b"3", b"4"])


def test_the_janitor_reclaims_what_bounds_hide_once(store: Store) -> None:
    store.write(Changes([A, B, C], [b"1", b"2", b"3"], {1: C, 2: b"\x02x"}))
    assert reclaim(store, stored_bounds(store)) == [1]
    assert store.scan_arrays(b"\x01", None) == ([C], [b"3"])
    assert reclaim(store, stored_bounds(store)) == []


def test_a_checkpoint_is_a_store_of_its_own(store: Store, tmp_path: Path) -> None:
    store.write(Changes([A, B], [b"1", b"2"], {1: A}))
    store.checkpoint(tmp_path / "copy")
    store.write(Changes([A], [b"later"]))
    copy = type(store).open(tmp_path / "copy")  # type: ignore[attr-defined]
    assert copy.scan_arrays(b"\x01", None) == ([A, B], [b"1", b"2"])
    assert stored_bounds(copy) == {1: A}
    copy.write(Changes([B], [None]))
    copy.close()
    assert store.scan_arrays(b"\x01", None) == ([A, B], [b"later", b"2"])
    with pytest.raises(FileExistsError):
        store.checkpoint(tmp_path / "copy")


def test_a_closed_store_says_so(store: Store, tmp_path: Path) -> None:
    store.write(Changes([A, B], [b"1", b"2"]))
    staged = store.stage(Changes([C], [b"3"]), tmp_path / "s")
    scan = store.scan(A, None)
    next(scan)
    store.close()
    store.close()
    for use in (
        lambda: next(scan),
        lambda: store.get(A),
        lambda: store.get_many([A]),
        lambda: store.scan(A, None),
        lambda: store.scan_arrays(A, None),
        lambda: store.write(Changes([A], [b"1"])),
        lambda: store.stage(Changes([A], [b"1"]), tmp_path / "t"),
        lambda: store.confirm(staged),
        lambda: store.delete_range(A, B),
        lambda: store.checkpoint(tmp_path / "copy"),
    ):
        with pytest.raises(StoreClosed):
            use()
    assert not (tmp_path / "t").exists()
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("key", [None, 1, "a", bytearray(b"a")])
def test_a_key_that_is_not_bytes_is_refused(store: Store, key: object) -> None:
    with pytest.raises(KeyInvalid):
        store.get(key)  # type: ignore[arg-type]
    with pytest.raises(KeyInvalid):
        store.get_many([A, key])  # type: ignore[list-item]
    with pytest.raises(KeyInvalid):
        store.write(Changes([A, key], [b"1", b"2"]))  # type: ignore[list-item]
    assert store.get(A) is None


def test_a_value_that_is_not_bytes_is_refused_whole(store: Store) -> None:
    with pytest.raises(ValueInvalid):
        store.write(Changes([A, B], [b"1", "2"]))  # type: ignore[list-item]
    assert store.get(A) is None
