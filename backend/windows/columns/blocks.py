"""Runs of accumulators that overlap, merged by blocks of doubling length."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from backend.aggregates import IncrementalPlan
from backend.windows.columns.arrays import IntArray


def combine(plan: IncrementalPlan, table: pa.Table, first: IntArray, length: IntArray) -> pa.Table:
    """Merge runs of accumulators: `length[i]` rows from `first[i]` on, into row i.

    Runs overlap, so blocks of 2, 4, 8, ... neighbours are merged once for all of them, and a run takes one block per
    bit of its length: n log(length) merges instead of n * length. Which rows are merged with which follows from a run's
    length alone, so sums of floats are the same wherever it begins.

    Args:
        plan: Merges the accumulators.
        table: Accumulator columns.
        first: First row of each run.
        length: Rows of each run, at least 1.
    """
    if not len(first):
        return table.slice(0, 0)
    blocks, width, at = table.combine_chunks(), 1, first.copy()
    parts, owners = [], []
    longest = int(length.max())
    while width <= longest:
        mine = np.flatnonzero(length & width)
        parts.append(blocks.take(pa.array(at[mine])))
        owners.append(mine)
        at[mine] += width
        if 2 * width <= longest:
            rest = blocks.slice(width)
            group = np.concatenate([np.arange(blocks.num_rows), np.arange(rest.num_rows)])
            blocks = plan.merge(pa.concat_tables([blocks, rest]), group, blocks.num_rows)
        width *= 2
    return plan.merge(pa.concat_tables(parts), np.concatenate(owners), len(first))
