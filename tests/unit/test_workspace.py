from __future__ import annotations

import pytest

from backend.errors import BoundViolated, KeyInvalid, ValueInvalid
from backend.store.memory import MemoryStore
from backend.store.protocol import MAX_KEY_BYTES, Changes
from backend.store.workspace import RUN_ROWS, Workspace


def key(number: int, region: int = 1) -> bytes:
    return bytes([region]) + number.to_bytes(4, "big")


def workspace(*numbers: int, bounds: dict[int, bytes] | None = None) -> Workspace:
    store = MemoryStore()
    store.write(Changes([key(n) for n in numbers], [b"base" for _ in numbers]))
    return Workspace(store, bounds)


def everything(work: Workspace) -> dict[int, bytes]:
    """Read region 1 on all four paths, and check that they agree."""
    keys, values = work.scan_arrays(b"\x01", b"\x02")
    rows = list(zip(keys, values, strict=True))
    assert list(work.scan(b"\x01", b"\x02")) == rows
    assert list(work.scan(b"\x01", b"\x02", reverse=True)) == rows[::-1]
    assert work.get_many(keys) == values
    assert [work.get(k) for k in keys] == values
    return {int.from_bytes(k[1:], "big"): v for k, v in rows}


def test_own_writes_are_read_and_the_base_is_not_touched() -> None:
    work = workspace(1, 2, 3)
    work.put(key(2), b"new")
    work.put(key(4), b"")
    work.delete(key(1))
    work.delete(key(9))
    assert everything(work) == {2: b"new", 3: b"base", 4: b""}
    assert work.get_many([key(1), key(9), key(4), key(3)]) == [None, None, b"", b"base"]
    assert work.changes() == Changes([key(1), key(2), key(4), key(9)], [None, b"new", b"", None], {})


@pytest.mark.parametrize("reads", [1, 3, 19 * RUN_ROWS])
def test_few_and_many_keys_are_found_alike(reads: int) -> None:
    work = workspace(*range(0, 40 * RUN_ROWS, 3))
    work.put_many([key(n) for n in range(20 * RUN_ROWS)], [b"run"] * (20 * RUN_ROWS))
    work.delete(key(5))
    wanted = [5, 20 * RUN_ROWS, 20 * RUN_ROWS + 1, *range(7, 7 + reads)]
    expected = [None] + [b"base" if n % 3 == 0 else None for n in wanted[1:3]] + [b"run"] * reads
    assert work.get_many([key(n) for n in wanted]) == expected[: len(wanted)]


@pytest.mark.parametrize("count", [RUN_ROWS - 1, RUN_ROWS, 3 * RUN_ROWS])
def test_the_last_write_of_a_key_wins_over_dict_and_runs(count: int) -> None:
    work = workspace(5)
    work.put(key(5), b"first")
    assert everything(work) == {5: b"first"}
    numbers = range(count)
    work.put_many([key(n) for n in numbers], [b"second"] * count)
    assert work.get(key(5)) == b"second"
    work.put_many([key(n) for n in reversed(numbers)], [b"third"] * count)  # not sorted
    work.put(key(6), b"fourth")
    work.delete_many([key(n) for n in range(10, count)])
    expected = dict.fromkeys(range(10), b"third") | {6: b"fourth"}
    assert everything(work) == expected
    changes = work.changes()
    assert changes.keys == sorted(changes.keys)
    assert len(changes) == count
    assert everything(work) == expected


def test_of_equal_keys_in_one_call_the_last_counts() -> None:
    work = workspace()
    work.put_many([key(1), key(1), key(0)], [b"a", b"b", b"c"])
    assert everything(work) == {0: b"c", 1: b"b"}


def test_a_scan_shows_the_workspace_as_it_was_when_it_began() -> None:
    work = workspace(1, 3)
    work.put(key(2), b"own")
    scan = work.scan(b"\x01", None)
    work.put(key(2), b"later")
    work.delete(key(3))
    work.put_many([key(n) for n in range(4, 4 + RUN_ROWS)], [b"later"] * RUN_ROWS)
    assert list(scan) == [(key(1), b"base"), (key(2), b"own"), (key(3), b"base")]


def test_bounds_hide_on_every_read_path() -> None:
    work = workspace(1, 2, 3, 4)
    work.put(key(2), b"own")
    work.put(key(4), b"own")
    work.raise_bound(1, key(3))
    assert everything(work) == {3: b"base", 4: b"own"}
    assert work.get(key(1)) is None
    assert work.get_many([key(n) for n in (1, 2, 3, 4)]) == [None, None, b"base", b"own"]
    assert work.changes() == Changes([key(4)], [b"own"], {1: key(3)})


def test_bounds_of_several_regions_cut_one_scan() -> None:
    store = MemoryStore()
    rows = [key(n, region) for region in (1, 2, 3) for n in (1, 2, 3)]
    store.write(Changes(rows, [b"x"] * 9))
    work = Workspace(store, {3: key(9, 3), 1: key(2, 1)})  # in no order
    expected = [key(2, 1), key(3, 1), key(1, 2), key(2, 2), key(3, 2)]
    assert work.scan_arrays(b"\x01", None)[0] == expected
    assert [k for k, _ in work.scan(b"\x01", None, reverse=True)] == expected[::-1]
    assert work.scan_arrays(key(1, 1), key(2, 1)) == ([], [])
    assert work.scan_arrays(key(3, 1), key(2, 2))[0] == [key(3, 1), key(1, 2)]
    assert work.scan_arrays(key(2, 3), key(3, 3)) == ([], [])
    assert work.scan_arrays(key(3, 2), key(3, 3))[0] == [key(3, 2)]


def test_a_write_below_a_bound_is_refused_whole() -> None:
    work = workspace(5, bounds={1: key(3)})
    for write in (
        lambda: work.put(key(2), b"x"),
        lambda: work.put_many([key(4), key(2)], [b"x", b"x"]),
        lambda: work.put_many([key(n) for n in range(2, 2000)], [b"x"] * 1998),
    ):
        with pytest.raises(BoundViolated):
            write()
    assert len(work.changes()) == 0
    work.put(key(3), b"at the bound")
    work.delete(key(1))
    work.delete_many([key(1), key(5)])
    assert everything(work) == {3: b"at the bound"}
    assert work.changes().keys == [key(3), key(5)]


def test_bounds_never_go_back() -> None:
    work = workspace(1, bounds={1: key(3)})
    work.raise_bound(1, key(2))
    assert work.bounds == {1: key(3)}
    work.raise_bound(1, b"\x02")
    assert work.bounds == {1: b"\x02"}
    with pytest.raises(TypeError):
        work.bounds[1] = b""  # type: ignore[index]


@pytest.mark.parametrize(("region", "bound"), [(0, b"\x00a"), (255, b"\xff"), (1, b"\x02a"), (2, b"\x01a"), (1, None)])
def test_a_bound_outside_its_region_is_refused(region: int, bound: bytes) -> None:
    with pytest.raises(KeyInvalid):
        workspace().raise_bound(region, bound)


@pytest.mark.parametrize("bad", [None, 1, "a", b"", bytearray(b"x"), bytes(MAX_KEY_BYTES + 1)])
def test_bad_keys_are_refused_and_nothing_is_written(bad: bytes) -> None:
    work = workspace()
    for use in (
        lambda: work.get(bad),
        lambda: work.get_many([b"a", bad]),
        lambda: work.put(bad, b""),
        lambda: work.put_many([b"a", bad], [b"", b""]),
        lambda: work.delete(bad),
        lambda: work.delete_many([b"a", bad]),
    ):
        with pytest.raises(KeyInvalid):
            use()
    assert len(work.changes()) == 0


@pytest.mark.parametrize("bad", [None, 1, "a", bytearray(b"x")])
def test_bad_values_are_refused_and_nothing_is_written(bad: bytes) -> None:
    work = workspace()
    with pytest.raises(ValueInvalid):
        work.put(b"a", bad)
    with pytest.raises(ValueInvalid):
        work.put_many([b"a", b"b"], [b"", bad])
    with pytest.raises(ValueInvalid):
        work.put_many([b"a", b"b"], [b""])
    assert len(work.changes()) == 0


def test_a_value_over_the_size_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.store.limits.MAX_VALUE_BYTES", 10)
    work = workspace()
    work.put(b"a", bytes(10))
    with pytest.raises(ValueInvalid, match="11 bytes"):
        work.put(b"a", bytes(11))
    with pytest.raises(ValueInvalid, match="11 bytes"):
        work.put_many([b"a"], [bytes(11)])
