"""The tree of merged partials against adding up the rows of each range."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from backend.aggregates import collect_list, compile_incremental, count, max_, sum_
from backend.windows.sliding.block_tree import BlockTree


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 33, 100])
@pytest.mark.parametrize("longest", [1, 5, 1000])
def test_ranges_with_rows_that_are_not_seen(rows, longest):
    random = np.random.default_rng(rows * 1000 + longest)
    schema = pa.schema([pa.field("v", pa.int64())])
    plan = compile_incremental({"n": count(), "s": sum_("v"), "m": max_("v")}, schema)
    values = random.integers(-50, 50, rows)
    accumulators = plan.fold(pa.table({"v": values}), np.arange(rows), rows)
    clock, seen_from = random.integers(0, 10, rows), random.integers(0, 10, rows)
    tree = BlockTree(plan, accumulators, clock, seen_from, longest)
    first, counts, windows, clocks, expected = [], [], [], [], []
    for _ in range(200):
        low = int(random.integers(0, rows))
        size = int(random.integers(1, min(rows - low, longest) + 1))
        window, last_clock = (int(random.integers(0, 14)) for _ in range(2))
        seen = [int(values[at]) for at in range(low, low + size) if clock[at] <= last_clock and seen_from[at] <= window]
        if seen:
            first.append(low)
            counts.append(size)
            windows.append(window)
            clocks.append(last_clock)
            expected.append({"n": len(seen), "s": sum(seen), "m": max(seen)})
    if expected:
        found = tree.results(*(np.array(column) for column in (first, counts, windows, clocks)))
        assert found.to_pylist() == expected


def test_it_takes_mergeable_aggregates_only():
    with pytest.raises(ValueError, match="compile_full"):
        compile_incremental({"l": collect_list("v")}, pa.schema([pa.field("v", pa.int64())]))
