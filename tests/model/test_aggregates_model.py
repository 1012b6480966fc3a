"""Folding in any split and merging is one fold; checked against fractions, `statistics` and plain loops."""

from __future__ import annotations

import itertools
import math
import statistics
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from backend import aggregates as agg
from tests.model.streams import share

INTS = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.integers(-9, 9))
# within 2**-200 .. 2**200 the sums of squares neither overflow nor lose digits to subnormals
MODERATE = st.one_of(
    st.floats(-1e6, 1e6, allow_subnormal=False).filter(lambda v: v == 0 or abs(v) > 1e-30),
    st.integers(-1000, 1000).map(float),
)
ANY_FINITE = st.floats(-1e300, 1e300, allow_nan=False)
AGGREGATES = {
    "n": agg.count(),
    "k": agg.count("i"),
    "sum_i": agg.sum_("i"),
    "sum_f": agg.sum_("f"),
    "mean_i": agg.mean("i"),
    "mean_m": agg.mean("m"),
    "var": agg.variance("m"),
    "min_i": agg.min_("i"),
    "max_i": agg.max_("i"),
    "min_f": agg.min_("f"),
    "max_t": agg.max_("t"),
    "first": agg.first("t"),
    "last": agg.last("i"),
    "last_seen": agg.last("i", ignore_nulls=True),
    "distinct": agg.approx_distinct("i"),
    "joined": agg.reducer("t", init=str, add=lambda s, t: s + t, merge=lambda a, b: a + b, output=pa.string()),
}
EXACT = [name for name in AGGREGATES if name not in ("sum_f", "mean_m", "var", "mean_i")]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[int]]:
    row = st.fixed_dictionaries(
        {"g": st.integers(0, 3), "i": INTS, "f": ANY_FINITE, "m": MODERATE, "t": st.text("ab\u00e9", max_size=3)}
    )
    rows = draw(st.lists(row, max_size=24))
    cuts = draw(st.lists(st.integers(0, len(rows)), max_size=4).map(sorted))
    return rows, cuts


SCHEMA = pa.schema(
    [
        ("_stream", pa.uint16()),
        ("_partition", pa.int32()),
        ("_offset", pa.int64()),
        ("i", pa.int64()),
        ("f", pa.float64()),
        ("m", pa.float64()),
        ("t", pa.string()),
    ]
)


def table(rows: list[dict[str, Any]], start: int) -> pa.Table:
    own = [{"_stream": 1, "_partition": 2, "_offset": start + place, **row} for place, row in enumerate(rows)]
    return pa.Table.from_pylist(own, schema=SCHEMA)


def numbers(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([row["g"] for row in rows], np.int64)


def close(found: float, exact: Fraction, scale: Fraction) -> bool:
    """Within two units of the last digit of the result, or of twice double precision at the scale of the inputs."""
    if not math.isfinite(found):
        return False
    return abs(Fraction(found) - exact) <= 2 * Fraction(math.ulp(float(exact))) + scale / 2**98


@share(0.5)
@given(batches())
def test_any_split_merged_is_one_fold_is_the_plain_loop(drawn: tuple[list[dict[str, Any]], list[int]]) -> None:
    rows, cuts = drawn
    plan = agg.compile_incremental(AGGREGATES, SCHEMA)
    whole = plan.result(plan.fold(table(rows, 0), numbers(rows), 4)).to_pylist()
    edges = [0, *cuts, len(rows)]
    parts = [plan.fold(table(rows[a:b], a), numbers(rows[a:b]), 4) for a, b in itertools.pairwise(edges)]
    merged = plan.merge(pa.concat_tables(parts), np.tile(np.arange(4), len(parts)), 4)
    for group, (once, pieces) in enumerate(zip(whole, plan.result(merged).to_pylist(), strict=True)):
        mine = [row for row in rows if row["g"] == group]
        for found in (once, pieces):
            check(found, mine)
        assert {name: once[name] for name in EXACT} == {name: pieces[name] for name in EXACT}


def check(found: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    ints = [row["i"] for row in rows if row["i"] is not None]
    texts = [row["t"] for row in rows]
    assert found["n"] == len(rows)
    assert found["k"] == len(ints)
    total = sum(ints)
    assert found["sum_i"] == (total if ints and -(2**63) <= total < 2**63 else None)
    assert found["min_i"] == min(ints, default=None)
    assert found["max_i"] == max(ints, default=None)
    assert found["max_t"] == max(texts, key=lambda t: t.encode(), default=None)
    assert found["first"] == (texts[0] if rows else None)
    assert found["last"] == (rows[-1]["i"] if rows else None)
    assert found["last_seen"] == (ints[-1] if ints else None)
    assert found["distinct"] == len(set(ints))
    assert found["joined"] == "".join(texts)
    if ints:
        assert close(found["mean_i"], Fraction(total, len(ints)), Fraction(abs(total), len(ints)))
    if not rows:
        assert found["sum_f"] is found["mean_m"] is found["var"] is found["min_f"] is None
        return
    floats = [Fraction(row["f"]) for row in rows]
    assert close(found["sum_f"], sum(floats, Fraction(0)), sum(map(abs, floats), Fraction(0)))
    assert found["min_f"] == min(row["f"] for row in rows)
    moderate = [Fraction(row["m"]) for row in rows]
    assert close(found["mean_m"], Fraction(statistics.mean(moderate)), sum(map(abs, moderate), Fraction(0)))
    if len(rows) > 1:
        exact = Fraction(statistics.variance(moderate))
        assert close(found["var"], exact, sum((v * v for v in moderate), Fraction(0)))
    else:
        assert found["var"] is None


@share(0.5)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.one_of(st.none(), st.integers(-50, 50))), max_size=30),
    st.floats(0, 1),
    st.integers(1, 4),
)
def test_full_state_is_the_plain_loop(pairs: list[tuple[int, int | None]], fraction: float, k: int) -> None:
    messages = pa.table({"x": pa.array([value for _, value in pairs], pa.int64())})
    plan = agg.compile_full(
        {
            "median": agg.median("x"),
            "q": agg.quantile("x", fraction),
            "all": agg.collect_list("x"),
            "set": agg.collect_set("x"),
            "top": agg.top_k("x", k),
        },
        messages.schema,
    )
    found = plan.result(messages, np.array([group for group, _ in pairs], np.int64), 3).to_pylist()
    for group, row in enumerate(found):
        values = [value for where, value in pairs if where == group and value is not None]
        assert row["all"] == values
        assert row["set"] == sorted(set(values))
        assert row["top"] == sorted(values, reverse=True)[:k]
        if not values:
            assert row["median"] is row["q"] is None
            continue
        assert row["median"] == float(statistics.median(values))
        place = fraction * (len(values) - 1)
        low, high = sorted(values)[math.floor(place)], sorted(values)[math.ceil(place)]
        assert math.isclose(row["q"], low + (high - low) * (place - math.floor(place)), rel_tol=1e-12, abs_tol=1e-12)
