"""Each aggregate against values worked out by hand: nulls, NaN, overflow, empty groups, order of folding."""

from __future__ import annotations

import datetime as dt
import math
import struct
from decimal import Decimal
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from backend import aggregates as agg
from backend.aggregates import groups
from backend.aggregates.groups import Rows
from backend.batch import MESSAGE_FIELDS
from backend.contexts.windows import Message, StandaloneContext
from backend.errors import StateCorrupted, UserCodeFailed, ValueInvalid
from backend.windows.definitions import session, tumbling
from backend.windows.spec import window_spec

NAN, INF = math.nan, math.inf
INT_MAX, INT_MIN = 2**63 - 1, -(2**63)
PLAIN = {field.name: field.type for field in MESSAGE_FIELDS}


def messages(partitions: list[int] | None = None, **columns: Any) -> pa.Table:
    size = len(next(iter(columns.values())))
    where = partitions or [0] * size
    own = {
        "_stream": [0] * size,
        "_partition": where,
        "_offset": range(size),
        "_time": [0] * size,
        "_before": [0] * size,
    }
    arrays = [pa.array(list(own[name]), kind) for name, kind in PLAIN.items()]
    return pa.table([*arrays, *(pa.array(v) for v in columns.values())], names=[*PLAIN, *columns])


def split(table: pa.Table, groups: list[int], aggregate: agg.Aggregate, n: int) -> list[list[Any]]:
    """Give the results of one fold, and of every cut of the rows in two, merged in both sequences."""
    plan = agg.compile_incremental({"r": aggregate}, table.schema)
    assert plan.accumulator_schema.names == [f"r.{name.removeprefix('r.')}" for name in plan.accumulator_schema.names]
    where = np.array(groups, np.int64)
    out = [plan.result(plan.fold(table, where, n))["r"].to_pylist()]
    for cut in range(len(groups) + 1):
        parts = [plan.fold(table[:cut], where[:cut], n), plan.fold(table[cut:], where[cut:], n)]
        for sequence in (parts, parts[::-1]):
            both = pa.concat_tables(sequence)
            merged = plan.merge(both, np.concatenate([np.arange(n), np.arange(n)]), n)
            assert merged.schema.equals(plan.accumulator_schema)
            out.append(plan.result(merged)["r"].to_pylist())
    return out


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        (a is None and b is None)
        or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))
        or (type(a) is type(b) and a == b)
        for a, b in zip(left, right, strict=True)
    )


# groups 0 and 1 have values, 2 only a null, 3 nothing
GROUPS = [0, 1, 0, 1, 0, 2]
INTS = [3, -4, None, 10, 5, None]
FLOATS = [3.5, NAN, -1.0, 2.0, None, None]
TEXTS = ["b", "", "a", "\u00e9", "ab", None]
DAYS = [dt.date(2013, 1, day) if day else None for day in (3, 1, 2, 9, 0, 0)]
INSTANTS = [None if day is None else dt.datetime(day.year, day.month, day.day, tzinfo=dt.UTC) for day in DAYS]
BOOLS = [True, False, False, None, True, None]
MONEY = [None if i is None else Decimal(i).scaleb(-2) for i in INTS]


@pytest.mark.parametrize(
    ("values", "aggregate", "expected"),
    [
        (INTS, agg.count(), [3, 2, 1, 0]),
        (INTS, agg.count("x"), [2, 2, 0, 0]),
        (FLOATS, agg.count("x"), [2, 2, 0, 0]),  # NaN is a value
        (INTS, agg.sum_("x"), [8, 6, None, None]),
        (FLOATS, agg.sum_("x"), [2.5, NAN, None, None]),
        (MONEY, agg.sum_("x"), [Decimal("0.08"), Decimal("0.06"), None, None]),
        (INTS, agg.mean("x"), [4.0, 3.0, None, None]),
        (FLOATS, agg.mean("x"), [1.25, NAN, None, None]),
        (MONEY, agg.mean("x"), [Decimal("0.040000"), Decimal("0.030000"), None, None]),
        (INTS, agg.variance("x"), [2.0, 98.0, None, None]),
        (INTS, agg.stddev("x"), [math.sqrt(2), math.sqrt(98), None, None]),
        (FLOATS, agg.variance("x"), [10.125, NAN, None, None]),
        (INTS, agg.min_("x"), [3, -4, None, None]),
        (INTS, agg.max_("x"), [5, 10, None, None]),
        (FLOATS, agg.min_("x"), [-1.0, 2.0, None, None]),
        (FLOATS, agg.max_("x"), [3.5, NAN, None, None]),
        (TEXTS, agg.min_("x"), ["a", "", None, None]),
        (TEXTS, agg.max_("x"), ["b", "\u00e9", None, None]),
        (DAYS, agg.max_("x"), [DAYS[0], DAYS[3], None, None]),
        (INSTANTS, agg.min_("x"), [INSTANTS[2], INSTANTS[1], None, None]),
        (BOOLS, agg.max_("x"), [True, False, None, None]),
        (MONEY, agg.min_("x"), [Decimal("0.03"), Decimal("-0.04"), None, None]),
        ([b"\x00", b"", b"\xff", None, None, None], agg.max_("x"), [b"\xff", b"", None, None]),
        (INTS, agg.first("x"), [3, -4, None, None]),
        (INTS, agg.last("x"), [5, 10, None, None]),
        (FLOATS, agg.last("x"), [None, 2.0, None, None]),
        (FLOATS, agg.last("x", ignore_nulls=True), [-1.0, 2.0, None, None]),
        ([None, "z", "y", None, "x", None], agg.first("x", ignore_nulls=True), ["y", "z", None, None]),
        (TEXTS, agg.first("x"), ["b", "", None, None]),
        (INSTANTS, agg.last("x"), [None, INSTANTS[3], None, None]),
        (INTS, agg.approx_distinct("x"), [2, 2, 0, 0]),
        (TEXTS, agg.approx_distinct("x"), [3, 2, 0, 0]),  # the empty text counts
        ([0.0, NAN, -0.0, NAN, 1.0, None], agg.approx_distinct("x"), [2, 1, 0, 0]),
        (BOOLS, agg.approx_distinct("x"), [2, 1, 0, 0]),
        (DAYS, agg.approx_distinct("x"), [2, 2, 0, 0]),
        (MONEY, agg.approx_distinct("x"), [2, 2, 0, 0]),
    ],
)
def test_incremental_by_hand(values: list[Any], aggregate: agg.Aggregate, expected: list[Any]) -> None:
    for result in split(messages(x=values), GROUPS, aggregate, 4):
        assert same(result, expected), result


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([INT_MAX, 1], None),
        ([INT_MIN, -1], None),
        ([INT_MAX, 1, -1], INT_MAX),  # the state is exact: it comes back into range
        ([INT_MAX, INT_MIN], -1),
        ([INT_MIN], INT_MIN),
        ([INT_MAX] * 5 + [INT_MIN] * 5, -5),
    ],
)
def test_integer_sums_never_wrap(values: list[int], expected: int | None) -> None:
    groups = [0] * len(values)
    for result in split(messages(x=values), groups, agg.sum_("x"), 1):
        assert result == [expected]


def test_mean_of_integers_whose_sum_is_out_of_range() -> None:
    for result in split(messages(x=[INT_MAX] * 4), [0] * 4, agg.mean("x"), 1):
        assert result == [float(INT_MAX)]


@pytest.mark.parametrize("kind", [pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint32(), pa.uint64()])
def test_sums_of_narrow_and_unsigned_integers_are_int64(kind: pa.DataType) -> None:
    table = messages(x=pa.array([100, 27, None], kind))
    for result in split(table, [0, 0, 0], agg.sum_("x"), 1):
        assert result == [127]
    for result in split(table, [0, 0, 0], agg.max_("x"), 1):
        assert result == [100]


def test_unsigned_sum_beyond_int64_is_null() -> None:
    for result in split(messages(x=pa.array([2**63], pa.uint64())), [0], agg.sum_("x"), 1):
        assert result == [None]


def test_decimal_sum_beyond_38_digits_is_null() -> None:
    most = Decimal("9" * 38)
    table = messages(x=pa.array([most, Decimal(1), Decimal(-1)], pa.decimal128(38, 0)))
    assert split(table, [0, 0, 0], agg.sum_("x"), 1)[0] == [most]
    assert split(table[:2], [0, 0], agg.sum_("x"), 1)[0] == [None]


def test_decimal_mean_rounds_half_up() -> None:
    values = pa.array([Decimal("0.01"), Decimal("0.00"), Decimal("0.01")], pa.decimal128(5, 2))
    assert split(messages(x=values), [0] * 3, agg.mean("x"), 1)[0] == [Decimal("0.006667")]
    values = pa.array([Decimal("-0.01"), *[Decimal("0.00")] * 31], pa.decimal128(5, 2))  # -0.0003125
    plan = agg.compile_incremental({"r": agg.mean("x")}, messages(x=values).schema)
    result = plan.result(plan.fold(messages(x=values), np.zeros(32, np.int64), 1))["r"].to_pylist()
    assert result == [Decimal("-0.000313")]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1e16, 1.0, -1e16], 1.0),
        ([1e100, 1.0, -1e100, 1.0], 2.0),
        ([0.1] * 10, 1.0),
        ([INF, 1.0], INF),
        ([-INF, 1.0], -INF),
        ([INF, -INF], NAN),
        ([INF, NAN], NAN),
        ([5e-324, 5e-324], 1e-323),
        ([1.7e308, 1.7e308], INF),
        ([-0.0], 0.0),
    ],
)
def test_float_sums_are_compensated(values: list[float], expected: float) -> None:
    for result in split(messages(x=values), [0] * len(values), agg.sum_("x"), 1):
        assert same(result, [expected]), result


def test_a_finite_sum_that_overflows_on_the_way_is_right_within_one_fold() -> None:
    table = messages(x=[1.7e308, 1.7e308, -1.7e308])
    assert split(table, [0, 0, 0], agg.sum_("x"), 1)[0] == [1.7e308]


def test_variance_keeps_its_digits_at_a_large_mean() -> None:
    values = [1e9 + v for v in (4.0, 7.0, 13.0, 16.0)]  # the textbook's loss of all digits: exactly 30
    for result in split(messages(x=values), [0] * 4, agg.variance("x"), 1):
        assert result == [30.0]
    shifted = [1e15 + v for v in (0.0, 1.0, 2.0)]
    for result in split(messages(x=shifted), [0] * 3, agg.stddev("x"), 1):
        assert result == [1.0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        *(([7.0], None), ([7.0, 7.0], 0.0), ([0.1, 0.1, 0.1], 0.0), ([1e200, -1e200], INF), ([INF, 1.0], NAN)),
        *(([1.7e308, 1.7e308], INF), ([-1.7e308, -1.7e308, 1.0], INF), ([1.7e308, 1.7e308, NAN], NAN)),
    ],
)
def test_variance_at_its_edges(values: list[float], expected: float | None) -> None:
    for result in split(messages(x=values), [0] * len(values), agg.variance("x"), 1):
        assert same(result, [expected])


def test_first_and_last_follow_partition_then_offset_in_any_sequence_of_merges() -> None:
    table = messages(partitions=[0, 0, 1, 1], x=["a", "b", "c", "d"])
    for result in split(table, [0, 0, 0, 0], agg.first("x"), 1):
        assert result == ["a"]
    for result in split(table, [0, 0, 0, 0], agg.last("x"), 1):
        assert result == ["d"]


def test_minimum_has_one_zero() -> None:
    for result in split(messages(x=[0.0, -0.0]), [0, 0], agg.min_("x"), 1):
        assert math.copysign(1.0, result[0]) == 1.0


def test_infinities_and_extremes() -> None:
    table = messages(x=[-INF, INF])
    assert split(table, [0, 0], agg.max_("x"), 1)[0] == [INF]
    assert split(messages(x=[-INF]), [0], agg.max_("x"), 1)[0] == [-INF]
    assert split(messages(x=[NAN]), [0], agg.min_("x"), 1)[0][0] != 0.0
    assert split(messages(x=[INT_MIN]), [0], agg.max_("x"), 1)[0] == [INT_MIN]


def test_distinct_counts_are_close_bounded_and_the_same_however_they_are_made() -> None:
    table = messages(x=[f"user-{number}" for number in range(20_000)])
    plan = agg.compile_incremental({"users": agg.approx_distinct("x", precision=10)}, table.schema)
    zeros = np.zeros(20_000, np.int64)
    whole = plan.fold(table, zeros, 1)
    thirds = [plan.fold(table.take(list(range(part, 20_000, 3))), zeros[part::3], 1) for part in (2, 0, 1)]
    merged = plan.merge(pa.concat_tables(thirds), np.zeros(3, np.int64), 1)
    assert merged.equals(whole)
    assert len(whole["users.theta"][0].as_py()) <= 8 * 1024 + 24
    assert abs(plan.result(whole)["users"][0].as_py() - 20_000) < 3 * 20_000 / 32


def test_a_sketch_that_cannot_be_read_is_corruption() -> None:
    plan = agg.compile_incremental({"r": agg.approx_distinct("x")}, messages(x=[1]).schema)
    with pytest.raises(StateCorrupted):
        plan.result(pa.table({"r.theta": [b"\x03\x03"]}))


class Range(msgspec.Struct):
    low: int
    high: int


def widen(state: Range | None, value: int | None) -> Range | None:
    if value is None:
        return state
    return Range(value, value) if state is None else Range(min(state.low, value), max(state.high, value))


def unite(left: Range | None, right: Range | None) -> Range | None:
    if left is None or right is None:
        return left or right
    return Range(min(left.low, right.low), max(left.high, right.high))


def spread(state: Range | None) -> int | None:
    return None if state is None else state.high - state.low


def nothing() -> None:
    return None


def spread_of(name: str) -> agg.Aggregate:
    return agg.reducer(name, init=nothing, add=widen, merge=unite, result=spread, output=pa.int64(), state=Range | None)


def test_reducer_by_hand() -> None:
    for result in split(messages(x=INTS), GROUPS, spread_of("x"), 4):
        assert result == [2, 14, None, None]


def test_reducer_without_fields_and_result() -> None:
    twice = agg.reducer(init=int, add=lambda state: state + 2, merge=lambda a, b: a + b, output=pa.int64())
    for result in split(messages(x=INTS), GROUPS, twice, 4):
        assert result == [6, 4, 2, 0]


def test_reducer_state_must_be_encodable_and_decodable() -> None:
    bad = agg.reducer(init=object, add=lambda s: s, merge=lambda a, b: a, output=pa.int64())
    plan = agg.compile_incremental({"r": bad}, messages(x=[1]).schema)
    with pytest.raises(ValueInvalid, match="state of the reducer cannot be encoded"):
        plan.fold(messages(x=[1]), np.zeros(1, np.int64), 1)
    plan = agg.compile_incremental({"r": spread_of("x")}, messages(x=[1]).schema)
    with pytest.raises(StateCorrupted, match="decoded"):
        plan.result(pa.table({"r.state": [b"\xc1"]}))
    other = agg.reducer("x", init=int, add=lambda s, x: s + x, merge=lambda a, b: a + b, output=pa.float64(), state=int)
    plan = agg.compile_incremental({"r": other}, messages(x=[1.5]).schema)
    with pytest.raises((ValueInvalid, UserCodeFailed), match="not of the type that state= declares"):
        plan.result(plan.fold(messages(x=[1.5]), np.zeros(1, np.int64), 1))  # no disk is wrong, and nothing to restore
    huge = agg.reducer(init=str, add=lambda s: "x" * 2_000_000, merge=lambda a, b: a, output=pa.string())
    plan = agg.compile_incremental({"r": huge}, messages(x=[1]).schema)
    with pytest.raises(ValueInvalid, match="too large"):
        plan.fold(messages(x=[1]), np.zeros(1, np.int64), 1)
    wrong = agg.reducer(init=int, add=lambda s: s, merge=lambda a, b: a, result=lambda s: "text", output=pa.int64())
    plan = agg.compile_incremental({"r": wrong}, messages(x=[1]).schema)
    with pytest.raises(ValueInvalid, match="output type"):
        plan.result(plan.fold(messages(x=[1]), np.zeros(1, np.int64), 1))


def total_of_products(table: pa.Table) -> int:
    return sum(a * b for a, b in zip(table["x"].to_pylist(), table["y"].to_pylist(), strict=True))


@pytest.mark.parametrize(
    ("values", "aggregate", "expected"),
    [
        (INTS, agg.median("x"), [4.0, 3.0, None, None]),
        (INTS, agg.quantile("x", 0), [3.0, -4.0, None, None]),
        (INTS, agg.quantile("x", 1), [5.0, 10.0, None, None]),
        (INTS, agg.quantile("x", 0.25), [3.5, -0.5, None, None]),
        (FLOATS, agg.quantile("x", 1.0), [3.5, NAN, None, None]),
        (FLOATS, agg.quantile("x", 0.0), [-1.0, 2.0, None, None]),
        ([INF, INF, INF, -INF, 1.0, None], agg.quantile("x", 0.75), [INF, NAN, None, None]),
        (MONEY, agg.quantile("x", 1.0), [0.05, 0.1, None, None]),
        (INTS, agg.collect_list("x"), [[3, 5], [-4, 10], [], []]),
        (TEXTS, agg.collect_list("x"), [["b", "a", "ab"], ["", "\u00e9"], [], []]),
        ([5, 1, 5, 1, 2, None], agg.collect_set("x"), [[2, 5], [1], [], []]),
        (["b", "z", "a", "z", "b", None], agg.collect_set("x"), [["a", "b"], ["z"], [], []]),
        ([-0.0, 1.0, 0.0, 1.0, 0.0, None], agg.collect_set("x"), [[0.0], [1.0], [], []]),
        ([5, 1, 5, 3, 2, None], agg.top_k("x", 2), [[5, 5], [3, 1], [], []]),
        (["b", "z", "a", "y", "c", None], agg.top_k("x", 2), [["c", "b"], ["z", "y"], [], []]),
    ],
)
def test_full_by_hand(values: list[Any], aggregate: agg.Aggregate, expected: list[Any]) -> None:
    table = messages(x=values)
    plan = agg.compile_full({"r": aggregate}, table.schema)
    result = plan.result(table, np.array(GROUPS), 4)
    assert same(result["r"].to_pylist(), expected), result["r"].to_pylist()
    assert result.schema.equals(pa.schema(plan.result_fields))


@pytest.mark.parametrize("longest", [1, 7, 300, 20_000])
def test_quantiles_of_groups_of_many_sizes_are_those_of_sorted_lists(longest: int) -> None:
    random = np.random.default_rng(longest)
    sizes = random.integers(0, longest + 1, max(4, 30_000 // longest))
    values = random.choice([0.0, -0.0, math.inf, -math.inf, math.nan, 1e300, 0.1, *random.normal(size=50)], sizes.sum())
    missing = random.random(sizes.sum()) < 0.1
    group_of = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    table = pa.table({"x": pa.array(values, mask=missing), "y": pa.array(np.arange(len(values)), pa.int32())})
    found = {
        (name, fraction): agg.quantile(name, fraction).bind("q", table.schema).result(Rows(table, group_of, len(sizes)))
        for name in "xy"
        for fraction in (0.0, 0.5, 0.9, 1.0)
    }
    columns = {"x": [None if gone else value for value, gone in zip(values.tolist(), missing, strict=True)],
               "y": list(range(len(values)))}  # fmt: skip
    for (name, fraction), result in found.items():
        lists: list[list[float]] = [[] for _ in sizes]
        for group, value in zip(group_of.tolist(), columns[name], strict=True):
            if value is not None:
                lists[group].append(value)
        for own, got in zip(lists, result.to_pylist(), strict=True):
            own.sort(key=lambda value: (math.isnan(value), value))
            if not own:
                assert got is None
                continue
            place = fraction * (len(own) - 1)
            low, high = own[math.floor(place)], own[math.ceil(place)]
            share = place - math.floor(place)
            wanted = low if share == 0 or low == high else (1 - share) * low + share * high
            assert got == wanted or (math.isnan(got) and math.isnan(wanted))


def test_two_quantiles_of_a_column_sort_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_ = list[int]()
    monkeypatch.setattr(groups, "sort_runs", lambda values, sizes: sorted_.append(len(values)))
    rows = Rows(pa.table({"x": [1.0, 2.0], "y": [1.0, None]}), np.array([0, 0]), 1)
    for aggregate in (agg.median("x"), agg.quantile("x", 0.9), agg.median("y")):
        aggregate.bind("q", rows.table.schema).result(rows)
    assert sorted_ == [2, 1]


def test_top_k_takes_nan_as_greatest() -> None:
    table = messages(x=[1.0, NAN, 3.0])
    plan = agg.compile_full({"r": agg.top_k("x", 2)}, table.schema)
    top = plan.result(table, np.zeros(3, np.int64), 1)["r"].to_pylist()[0]
    assert math.isnan(top[0])
    assert top[1] == 3.0


def test_nan_is_one_value_of_a_set() -> None:
    table = messages(x=[NAN, 1.0, -NAN, struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0001))[0]])
    plan = agg.compile_full({"r": agg.collect_set("x")}, table.schema)
    found = plan.result(table, np.zeros(4, np.int64), 1)["r"].to_pylist()[0]
    assert len(found) == 2
    assert found[0] == 1.0
    assert math.isnan(found[1])


def test_over_all_sees_its_fields_in_fold_order_and_no_empty_group() -> None:
    table = messages(x=[1, 2, 3, 4], y=[10, 20, 30, 40])
    plan = agg.compile_full(
        {
            "dot": agg.over_all("x", "y", function=total_of_products, output=pa.int64()),
            "seen": agg.over_all("y", function=lambda t: t["y"].to_pylist(), output=pa.list_(pa.int64())),
        },
        table.schema,
    )
    assert plan.input_fields == ["x", "y"]
    result = plan.result(table, np.array([2, 0, 2, 0]), 3)
    assert result["dot"].to_pylist() == [200, None, 100]
    assert result["seen"].to_pylist() == [[20, 40], None, [10, 30]]


def test_several_aggregates_under_names() -> None:
    table = messages(x=INTS, y=TEXTS)
    plan = agg.compile_incremental({"a": agg.count(), "b": agg.sum_("x"), "c": agg.max_("y")}, table.schema)
    assert plan.input_fields == ["x", "y"]
    assert plan.result(plan.fold(table, np.zeros(6, np.int64), 1)).to_pylist() == [{"a": 6, "b": 14, "c": "\u00e9"}]
    assert [field.name for field in plan.result_fields] == ["a", "b", "c"]


def test_no_aggregate_at_all_still_counts_messages() -> None:
    table = messages(x=INTS)
    plan = agg.compile_incremental({}, table.schema)
    accumulators = plan.fold(table, np.array(GROUPS), 4)
    assert accumulators.to_pydict() == {"_messages": [3, 2, 1, 0]}
    assert plan.merge(accumulators, np.array([0, 0, 1, 1]), 2).to_pydict() == {"_messages": [5, 1]}
    assert plan.result(accumulators).num_rows == 4
    assert plan.result_fields == []
    full = agg.compile_full({}, table.schema)
    assert full.result(table, np.array(GROUPS), 4).num_rows == 4


def test_sliced_and_chunked_columns() -> None:
    table = pa.concat_tables([messages(x=MONEY[:2]).cast(messages(x=MONEY).schema), messages(x=MONEY)[2:]])
    plan = agg.compile_incremental({"r": agg.sum_("x")}, table.schema)
    assert plan.result(plan.fold(table[1:], np.zeros(5, np.int64), 1))["r"].to_pylist() == [
        Decimal("0.14") - Decimal("0.03")
    ]


@pytest.mark.parametrize(
    ("aggregates", "says"),
    [
        ({"r": agg.sum_("nope")}, r"aggregates\['r'\].*unknown field 'nope'.*allowed are b, l, t"),
        ({"r": agg.sum_("t")}, r"aggregates\['r'\].*sum of field 't' of type string.*allowed: integers"),
        ({"r": agg.mean("b")}, r"mean of field 'b' of type bool"),
        ({"r": agg.variance("t")}, r"variance of field 't'"),
        ({"r": agg.stddev("t")}, r"stddev of field 't'"),
        ({"r": agg.min_("l")}, r"min of field 'l' of type list"),
        ({"r": agg.first("l")}, r"first of field 'l'"),
        ({"r": agg.approx_distinct("l")}, r"approx_distinct of field 'l'"),
        ({"r": agg.median("t")}, r"median of field 't'"),
        ({"r": agg.top_k("l", 1)}, r"top_k of field 'l'"),
        ({"r": agg.collect_set("l")}, r"collect_set of field 'l'"),
        ({"": agg.count()}, r"name '' is not allowed"),
        ({"reason": agg.count()}, r"name 'reason' is not allowed"),
        ({"r": "count"}, r"'count' is no aggregate"),
    ],
)
def test_bad_aggregates_fail_when_compiled(aggregates: dict[str, Any], says: str) -> None:
    schema = pa.schema({"t": pa.string(), "b": pa.bool_(), "l": pa.list_(pa.int64())})
    with pytest.raises(ValueError, match=says):
        agg.compile_full(aggregates, schema)


@pytest.mark.parametrize("kind", [agg.sum_, agg.mean])
@pytest.mark.parametrize("part", ["sum", "squares"])
def test_two_aggregates_that_would_keep_one_partial_result_are_refused(kind: Any, part: str) -> None:
    schema = pa.schema({"x": pa.float64()})
    with pytest.raises(ValueError, match=rf"'a' and 'a\.{part}' both keep a partial result 'a\.{part}"):
        agg.compile_incremental({"a": agg.variance("x"), f"a.{part}": kind("x")}, schema)


def test_a_full_state_aggregate_is_refused_as_incremental() -> None:
    with pytest.raises(ValueError, match="median needs all messages"):
        agg.compile_incremental({"r": agg.median("x")}, pa.schema({"x": pa.int64()}))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: agg.quantile("x", 1.5), "fraction=1.5"),
        (lambda: agg.quantile("x", NAN), "fraction=nan"),
        (lambda: agg.top_k("x", 0), "k=0"),
        (lambda: agg.approx_distinct("x", precision=40), "precision=40"),
        (lambda: agg.reducer("x", init=0, add=max, merge=max, output=pa.int64()), "init=0"),  # type: ignore[arg-type]
        (lambda: agg.reducer("x", init=int, add=max, merge=max, output="int"), "output='int'"),
        (lambda: agg.reducer("x", init=int, add=max, merge=max, output=pa.int64(), state=42), "state=42"),
        (
            lambda: agg.reducer("x", init=int, add=max, merge=max, output=pa.month_day_nano_interval()),
            "reducer: output: month_day_nano_interval cannot be written",
        ),
        (lambda: agg.first("x", ignore_nulls="no"), "ignore_nulls='no'"),  # type: ignore[arg-type]
        (
            lambda: agg.over_all("x", function=len, output=pa.decimal128(5, -2)),
            r"over_all: output: decimal128\(5, -2\) cannot be written",
        ),
        (lambda: agg.over_all(function=len, output=pa.int64()), "at least one field"),
        (lambda: agg.over_all("x", function=3, output=pa.int64()), "function=3"),  # type: ignore[arg-type]
    ],
)
def test_bad_options_fail_at_once(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_the_manifest_names_what_decides_a_result() -> None:
    assert agg.quantile("x", 0.9).describe() == {"kind": "quantile", "fields": ["x"], "fraction": 0.9}
    assert agg.first("x").describe() == {"kind": "first", "fields": ["x"], "ignore_nulls": False}
    described = spread_of("x").describe()
    assert described["add"] == f"{__name__}:widen"
    assert described["init"] == f"{__name__}:nothing"
    assert described["output"] == "int64"
    msgspec.json.encode(described)


KINDS = [
    *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2)),
    *(pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.date32(), pa.date64()),
    *(pa.decimal32(5, 2), pa.decimal64(9, 2), pa.decimal128(10, 2), pa.decimal256(50, 2), pa.duration("us"), pa.null()),
    *(pa.time32("s"), pa.time64("us"), pa.timestamp("us"), pa.timestamp("ns", "UTC"), pa.month_day_nano_interval()),
    *(
        pa.list_(pa.int64()),
        pa.list_(pa.string_view()),
        pa.struct([("x", pa.decimal32(5, 2))]),
        pa.list_view(pa.int8()),
    ),
    pa.dictionary(pa.int32(), pa.string()),
]
OF_A_FIELD = [
    *(agg.count, agg.sum_, agg.mean, agg.variance, agg.min_, agg.max_, agg.first, agg.last, agg.approx_distinct),
    *(agg.median, agg.collect_list, agg.collect_set),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_type_is_refused_by_the_specification_or_taken_from_message_to_result(kind: pa.DataType) -> None:
    """Also as a key, and where sessions merge: never by the first message."""
    fields = pa.schema([pa.field("v", kind)])
    value = EXAMPLES.get(str(kind), 1)
    for window, make in product((tumbling(10), session(10)), (*OF_A_FIELD, None)):
        aggregates, keys = ({"r": make("v")}, []) if make is not None else ({"r": agg.count()}, ["v"])
        try:
            spec = window_spec(window, fields, aggregates, keys=keys, retention=100, max_ahead=None)
        except ValueError:
            continue
        context = StandaloneContext(spec)
        for offset, one in enumerate([None, value, value, None]):
            context.add_message(Message(offset, 3 * offset, {"v": one}), 0)
        context.add_message(Message(4, 500, {"v": None}), 0)
        assert context.get_errors() == []
        assert context.get_result()


WORD = "dictionary<values=string, indices=int32, ordered=0>"
EXAMPLES: dict[str, Any] = {
    **dict.fromkeys(("string", "large_string", "string_view", WORD), "a"),
    **dict.fromkeys(("binary", "large_binary", "binary_view", "fixed_size_binary[2]"), b"ab"),
    **dict.fromkeys(("decimal32(5, 2)", "decimal64(9, 2)", "decimal128(10, 2)", "decimal256(50, 2)"), Decimal("1.25")),
    **{"bool": True, "date32[day]": dt.date(2020, 1, 1), "date64[ms]": dt.date(2020, 1, 1), "null": None},
    **{"list<item: string_view>": ["a"], "struct<x: decimal32(5, 2)>": {"x": Decimal(1)}, "list<item: int64>": [1]},
    **{"month_day_nano_interval": (1, 2, 3), "float16": np.float16(1.5), "list_view<item: int8>": [1]},
    **{"time32[s]": dt.time(1), "time64[us]": dt.time(1), "timestamp[ns, tz=UTC]": 1_000},
}
