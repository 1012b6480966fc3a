"""Nodes: sets of stored sessions and new messages, and what their aggregates come to.

Nodes are numbered: first the stored sessions, then sets of messages, and joins of other nodes. All joins of one depth
are merged at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backend.aggregates import FullPlan, IncrementalPlan
from backend.operators.arrays import IntArray, spread
from backend.operators.facts import MAX_MEMBERS
from backend.operators.held import fold_order
from backend.operators.session_rows import Stored

Number = TypeVar("Number", np.int64, np.uint64)


@dataclass
class Nodes:
    """The nodes of one micro-batch.

    Attributes:
        stored: Number of stored sessions: the first nodes.
        message_node: Per message the node that it directly belongs to, -1 for refused ones.
        parts: Of joins: (node, parts) as two arrays, one row per part.
        total: Number of nodes.
    """

    stored: int
    message_node: IntArray
    joined: list[IntArray] = field(default_factory=list)
    parts: list[IntArray] = field(default_factory=list)
    total: int = 0

    def close(self) -> None:
        """Sort the joins by node; call once, when all are there."""
        none = [np.empty(0, np.int64)]
        joined, parts = np.concatenate([*self.joined, *none]), np.concatenate([*self.parts, *none])
        order = np.argsort(joined, kind="stable")
        self._joined, self._parts = joined[order], parts[order]
        self._begin = np.searchsorted(self._joined, np.arange(self.total + 1))
        self._is_join = np.diff(self._begin) > 0

    def leaves(self, nodes: IntArray) -> tuple[IntArray, IntArray]:
        """Give what nodes are made of: the position in `nodes`, and a node that is no join."""
        owner, node = np.arange(len(nodes)), nodes
        done_owner, done_node = [], []
        while len(node):  # as often as joins are deep
            join = self._is_join[node]
            done_owner.append(owner[~join])
            done_node.append(node[~join])
            at, mine = spread(self._begin[node[join]], np.diff(self._begin)[node[join]])
            owner, node = owner[join][mine], self._parts[at]
        none = [np.empty(0, np.int64)]
        return np.concatenate([*done_owner, *none]), np.concatenate([*done_node, *none])

    def partials(self, plan: IncrementalPlan, stored: Stored, messages: pa.Table) -> pa.Table:
        """Compute the partial aggregates of all nodes: row n is node n."""
        direct = np.flatnonzero(self.message_node >= 0)
        folded, group = np.unique(self.message_node[direct], return_inverse=True)
        picked = messages if len(direct) == messages.num_rows else messages.take(pa.array(direct))
        tables = [stored.partials.cast(plan.partial_schema), plan.fold(picked, group, len(folded))]
        row = np.full(self.total, -1, np.int64)
        row[: self.stored] = np.arange(self.stored)
        row[folded] = self.stored + np.arange(len(folded))
        made = self.stored + len(folded)
        for level in self._levels():
            rows, group = spread(self._begin[level], np.diff(self._begin)[level])
            known = pa.concat_tables(tables)
            tables = [known, plan.merge(known.take(pa.array(row[self._parts[rows]])), group, len(level))]
            row[level] = made + np.arange(len(level))
            made += len(level)
        return pa.concat_tables(tables).take(pa.array(np.maximum(row, 0)))

    def sums(self, stored: npt.NDArray[Number], messages: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Add up a number per stored session and per message for all nodes; unsigned ones wrap."""
        out = np.zeros(self.total, stored.dtype)
        out[: self.stored] = stored
        direct = self.message_node >= 0
        np.add.at(out, self.message_node[direct], messages[direct])
        for level in self._levels():
            rows, owner = spread(self._begin[level], np.diff(self._begin)[level])
            np.add.at(out, level[owner], out[self._parts[rows]])
        return out

    def _levels(self) -> list[IntArray]:
        """Give the joins by depth: those of a level have parts of earlier levels only."""
        depth = np.zeros(self.total, np.int64)
        joins = np.flatnonzero(self._is_join)
        if not len(joins):
            return []
        while True:  # as often as joins are deep
            rows, owner = spread(self._begin[joins], np.diff(self._begin)[joins])
            deeper = depth.copy()
            np.maximum.at(deeper, joins[owner], depth[self._parts[rows]] + 1)
            if (deeper == depth).all():
                break
            depth = deeper
        return [joins[depth[joins] == level] for level in range(1, int(depth.max()) + 1)]


def full_values(plan: FullPlan, owner: IntArray, row: IntArray, count: int, messages: pa.Table) -> pa.Table:
    """Compute full-state aggregates of sets of messages.

    Args:
        plan: The aggregates.
        owner: Of each member the set, in `[0, count)`.
        row: Of each member the row of `messages`.
        count: Number of sets.
        messages: All messages, in any order.
    """
    rank = np.empty(messages.num_rows, np.int64)
    rank[fold_order(messages)] = np.arange(messages.num_rows)
    order = np.lexsort((rank[row], owner))
    owner, row = owner[order], row[order]
    ends = np.searchsorted(owner, np.arange(1, count + 1))
    parts, at = [], 0
    while at < count:
        done = int(ends[at - 1]) if at else 0
        end = max(at + 1, int(np.searchsorted(ends, done + MAX_MEMBERS, "right")))
        rows = slice(done, int(ends[end - 1]))
        parts.append(plan.result(messages.take(pa.array(row[rows])), owner[rows] - at, end - at))
        at = end
    return pa.concat_tables(parts) if parts else plan.result(messages.slice(0, 0), np.empty(0, np.int64), 0)
