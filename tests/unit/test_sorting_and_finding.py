"""Tables, and sorts of several numbers in one, give what searches and sorts of whole numbers give."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from backend.aggregates import compile_full, median, quantile
from backend.aggregates.groups import Rows, add_integers, from_limbs, stable_order
from backend.chunks import is_repeated, repeated
from backend.errors import KeyInvalid, ValueInvalid
from backend.store.limits import check_key, check_keys, check_value, check_values
from backend.store.protocol import MAX_VALUE_BYTES
from backend.windows import arrivals
from backend.windows.arrivals import _near
from backend.windows.columns.arrays import firsts, places
from backend.windows.columns.pane_rows import Pairs, PaneRows
from backend.windows.definitions import assigner, hopping, tumbling


@pytest.mark.parametrize(
    "count", [1, 7, 1 << 12, (1 << 12) + 1, 1 << 16, 1 << 20, (1 << 32) - 1, 1 << 52, 1 << 54, 1 << 61]
)
def test_rows_are_sorted_by_group_and_stay_in_order(count: int) -> None:
    random = np.random.default_rng(count)
    few = random.integers(0, count, 5)
    groups = np.concatenate([few[random.integers(0, 5, 300)], random.integers(0, count, 300), [count - 1]])
    expected = sorted(range(len(groups)), key=lambda row: (int(groups[row]), row))
    assert stable_order(groups, count).tolist() == expected
    assert stable_order(groups.astype(np.uint64), count).tolist() == expected


@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32(), pa.uint64()], ids=str
)
@pytest.mark.parametrize(("rows", "count"), [(0, 1), (1, 3), (200, 7), (200, 5_000)])
def test_integers_ascend_in_their_groups_however_far_apart(kind: pa.DataType, rows: int, count: int) -> None:
    """Beside plain loops: few small ones, all in one place far from zero, and the ends of the type."""
    random = np.random.default_rng(rows + count)
    bits = kind.bit_width
    low, high = (0, 2**bits - 1) if pa.types.is_unsigned_integer(kind) else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for some in ([0, 1, 2, None], [high, high - 1, high - 2], [low, low + 1, None], [low, 0, 1, high, None], [None]):
        values = [some[place] for place in random.integers(0, len(some), rows)]
        groups = random.integers(0, count, rows)
        found, sizes = Rows(pa.table({"x": pa.array(values, kind)}), groups, count).ascending("x")
        wanted = [
            sorted(
                float(value) for value, own in zip(values, groups, strict=True) if own == group and value is not None
            )
            for group in range(count)
        ]
        assert sizes.tolist() == [len(own) for own in wanted]
        assert found.tolist() == [value for own in wanted for value in own]
        table = pa.table({"x": pa.array(values, kind)})
        assert Rows(table, groups.astype(np.int32), count).ascending("x")[0].tolist() == found.tolist()


@pytest.mark.parametrize("most", [2, 2**31, 2**32 + 1, 2**53, (2**62 // 100) - 1, 2**62 // 100, 2**63 - 1])
def test_sums_of_integers_are_those_of_python_however_large(most: int) -> None:
    random = np.random.default_rng(most)
    values = [*random.integers(-most - 1, most, 97, endpoint=True).tolist(), most, most, -most - 1]
    groups = [*random.integers(0, 3, 97).tolist(), 2, 2, 0]  # the last of four groups has none
    expected = [sum(value for value, own in zip(values, groups, strict=True) if own == group) for group in range(4)]
    assert from_limbs(add_integers(pa.array(values, pa.int64()), np.array(groups), 4)) == expected


def test_texts_are_all_one_or_not() -> None:
    rows = repeated("a\u00e9", 5)
    rows.validate(full=True)
    assert rows.to_pylist() == ["a\u00e9"] * 5
    assert is_repeated(rows)
    assert is_repeated(rows.slice(2, 2))
    assert is_repeated(pa.array(["x", "a", "a"]).slice(1))
    for others in (["a", "b"], ["a", "aa"], ["aa", "a", "a"], ["a", None], [None], [], ["", "a"], ["ab", "ba"]):
        assert not is_repeated(pa.array(others, pa.string()))
    assert not is_repeated(pa.array([1, 1]))
    with pytest.raises(ValueError, match="too many for one array"):
        repeated("a" * 1024, 2**21)


@pytest.mark.parametrize("wide", [100, 10**6, 2**62])
def test_places_are_found_near_and_far(wide: int) -> None:
    random = np.random.default_rng(wide)
    known = np.unique(random.integers(-wide, wide, 60))
    values = np.concatenate([random.choice(known, 80), random.integers(-wide, wide, 80), [-(2**63), 2**63 - 1]])
    where = {int(value): place for place, value in enumerate(known)}
    assert places(known, values).tolist() == [where.get(int(value), -1) for value in values]
    inner = np.array([int(known[0]), int(known[-1])])
    assert places(known, inner).tolist() == [0, len(known) - 1]
    nothing = np.empty(0, np.int64)
    assert places(nothing, values).tolist() == [-1] * len(values)
    assert places(known, nothing).tolist() == []


def test_pairs_are_found_and_a_key_below_zero_is_none() -> None:
    """A key of -1 is one that a window does not know: not the last key of the window before."""
    pairs = Pairs(np.array([5, 9, 9]), np.array([3, 0, 2]), 4)
    windows, keys = np.array([5, 9, 9, 9, 5, 7, 9, 10**15]), np.array([3, 0, 2, -1, 0, 3, 3, 0])
    assert pairs.find(windows, keys).tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
    assert pairs.contain(windows, keys).tolist() == [True] * 3 + [False] * 5


def test_quantiles_of_many_groups_by_hand() -> None:
    """More groups than 16 bits number; NaN is the greatest value; both zeros are one, whatever comes first."""
    many = 70_000
    plan = compile_full({"m": median("x"), "q": quantile("x", 0.25)}, pa.schema([("x", pa.float64())]))
    groups = np.concatenate([np.arange(many), np.arange(many), [0, 0, 1, 69_999]])
    values = np.concatenate([np.arange(many) + 2.0, np.arange(many) * 1.0, [7.0, float("nan"), float("nan"), -9.0]])
    found = plan.result(pa.table({"x": values}), groups, many)
    # group 0: 0, 2, 7, NaN; group 1: 1, 3, NaN; group 5: 5, 7; the last: -9, 69999, 70001
    assert [found["m"][group].as_py() for group in (0, 1, 5, 69_999)] == [4.5, 3.0, 6.0, 69_999.0]
    assert [found["q"][group].as_py() for group in (0, 5, 69_999)] == [1.5, 5.5, 34_995.0]
    zeros = plan.result(pa.table({"x": [-0.0, 0.0, 0.0, -0.0, -0.0]}), np.array([0, 0, 1, 1, 2]), 3)
    assert [str(one) for one in zeros["m"].to_pylist()] == ["0.0"] * 3


@pytest.mark.parametrize("count", [1, 3, 500, 20_000])
@pytest.mark.parametrize("late", [False, True])
def test_the_first_row_of_each_group(count: int, late: bool) -> None:
    """Also of one that comes only at the end, behind those that are looked at first."""
    random = np.random.default_rng(count)
    most = count - 1 if late and count > 1 else count
    numbers = np.concatenate([random.integers(0, most, 60_000), random.permutation(count)])
    seen: dict[int, int] = {}
    for row, number in enumerate(numbers.tolist()):
        seen.setdefault(number, row)
    assert firsts(numbers, count).tolist() == [seen[number] for number in range(count)]


@pytest.mark.parametrize("window", [tumbling(10), hopping(30, 10), tumbling("1 month", timezone="Europe/Berlin")])
@pytest.mark.parametrize("piece", [1, 7, 1_024])
def test_whoever_may_be_out_of_retention_is_looked_at(
    window: object, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "PIECE", piece)
    grid = assigner(window)
    random = np.random.default_rng(piece)
    scale = 1 if grid.ends(np.array([1]))[0] < 1_000 else 10**8
    for spread in (5, 40, 200):
        own = np.maximum.accumulate(np.sort(random.integers(0, 2_000, 300)) * scale)
        pane = grid.pane_of(own - random.integers(0, spread, 300) * scale)
        out = grid.last_ended(own - 20 * scale) >= grid.first_window(pane)
        near = _near(grid, pane, own, 20 * scale)
        assert set(np.flatnonzero(out).tolist()) <= set(near.tolist())
        if piece == 1:
            assert near.tolist() == np.flatnonzero(out).tolist()
    assert len(_near(grid, pane[:0], own[:0], 20)) == 0


@pytest.mark.parametrize(("interval", "skip"), [(0, 0), (3, 0), (0, 2), (3, 2)])
def test_windows_see_what_came_before_their_end_and_was_in_retention(interval: int, skip: int) -> None:
    random = np.random.default_rng(interval + skip)
    grid = assigner(hopping(30, 10))
    shape = 200
    rows = PaneRows.sorted(
        random.integers(0, 9, shape),
        random.integers(0, skip + 1, shape),
        random.integers(-1, interval + 1, shape),
        np.zeros(shape, np.int64),
    )
    windows, intervals = np.arange(-2, 9), random.integers(0, interval + 1, 11)
    expected = [
        (at, number)
        for number, window in enumerate(windows.tolist())
        for at in range(shape)
        if window <= rows.pane[at] < window + 3
        and rows.interval[at] <= intervals[number]
        and rows.skip[at] <= window - (rows.pane[at] - 2)
    ]
    found = [pair for part in rows.seen_by(grid, windows, intervals) for pair in zip(*map(list, part), strict=True)]
    assert found == expected


@pytest.mark.parametrize("bad", ["text", None, 7, bytearray(b"x"), bytes(MAX_VALUE_BYTES + 1)])
def test_one_bad_key_or_value_among_many_is_found(bad: object) -> None:
    good: list[object] = [b"x", b"yy"]
    with pytest.raises(KeyInvalid):
        check_keys([*good, bad, *good])  # type: ignore[list-item]
    with pytest.raises(ValueInvalid):
        check_values([*good, bad, *good])  # type: ignore[list-item]
    with pytest.raises(KeyInvalid):
        check_keys([b"x", b""])
    check_values([b"x", b""])


class _Tagged(bytes):
    """Bytes that would lose what a class of their own says."""


def test_a_class_of_ones_own_is_named_not_its_size() -> None:
    for check in (check_key, lambda bad: check_keys([b"x", bad])):
        with pytest.raises(KeyInvalid, match="a key must be bytes") as refused:
            check(_Tagged(b"x"))
        assert refused.value.why == "_Tagged was given"
    for check in (check_value, lambda bad: check_values([b"x", bad])):
        with pytest.raises(ValueInvalid, match="a value must be bytes") as value_refused:
            check(_Tagged(b"x"))
        assert value_refused.value.why == "_Tagged was given"
