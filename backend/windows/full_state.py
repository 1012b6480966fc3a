"""Full-state aggregates over messages that come in any order: folding goes by source, (stream, partition, offset)."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from backend.aggregates import FullPlan
from backend.aggregates.groups import taken
from backend.batch import OFFSET, PARTITION, STREAM
from backend.windows.columns.arrays import IntArray
from backend.windows.micro_batch import numbers


class FullState:
    """What full-state aggregates read of messages.

    Args:
        plan: The aggregates.
        messages: Their place in the source, and what the aggregates read; in any order.
        in_order: Rows will be asked for in the order of the source, as far as they are of one group.
    """

    def __init__(self, plan: FullPlan, messages: pa.Table, *, in_order: bool = False) -> None:
        self._plan = plan
        self._rank = _source_ranks(messages) if plan.ordered and not in_order else None
        self._messages = messages.select(plan.input_fields).combine_chunks()

    def result(self, rows: IntArray, groups: IntArray, count: int) -> pa.Table:
        """Compute the aggregates of groups of messages.

        Args:
            rows: Members, as rows of the messages; a message may be of several groups.
            groups: The group of each, in `[0, count)`.
            count: Number of groups.
        """
        if self._rank is not None:
            order = np.argsort(self._rank[rows], kind="stable")
            rows, groups = rows[order], groups[order]
        return self._plan.result(taken(self._messages, rows), groups, count)


def with_full(values: pa.Table, full: pa.Table) -> pa.Table:
    """Put full-state aggregates beside the incremental ones of the same windows."""
    return pa.table([*values.columns, *full.columns], schema=pa.schema([*values.schema, *full.schema]))


def _source_ranks(messages: pa.Table) -> IntArray:
    """Return the place of each message in the order of the source."""
    rank = np.empty(messages.num_rows, np.int64)
    rank[np.lexsort(tuple(numbers(messages, name) for name in (OFFSET, PARTITION, STREAM)))] = np.arange(len(rank))
    return rank
