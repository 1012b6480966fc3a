"""Nodes: sets of stored sessions and new messages, and what their aggregates come to.

Nodes are numbered: first the stored sessions, then sets of messages, and joins of other nodes; a join is part of at
most one other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backend.aggregates import FullPlan, IncrementalPlan
from backend.chunks import taken_rows
from backend.windows.columns.arrays import IntArray, parts, spread
from backend.windows.columns.pane_rows import MAX_MEMBERS
from backend.windows.full_state import FullState
from backend.windows.merging.rows import Stored

Number = TypeVar("Number", np.int64, np.uint64)


@dataclass(frozen=True, slots=True)
class _Step:
    """Joins that are made of their parts, or extended by one part before what they have.

    Attributes:
        joins: Nodes.
        parts: Nodes that are there already.
        owner: Position in `joins` of each part.
        extends: The joins keep what they have.
    """

    joins: IntArray
    parts: IntArray
    owner: IntArray
    extends: bool


class Nodes:
    """The nodes of one micro-batch: made one by one or many at once, then read.

    Args:
        stored: Number of stored sessions: the first nodes.
        messages: Number of messages.
    """

    def __init__(self, stored: int, messages: int) -> None:
        self.stored = self.total = stored
        self.message_node = np.full(messages, -1, np.int64)
        """Per message the node that it directly belongs to, -1 as long as none is known."""
        self._joins: list[IntArray] = [np.empty((2, 0), np.int64)]

    def leaf(self, messages: IntArray | list[int], group: IntArray | int = 0, count: int = 1) -> int:
        """Make nodes of messages, by the group of each in `[0, count)`; returns the first of them."""
        self.message_node[messages] = self.total + group
        self.total += count
        return self.total - count

    def join(self, parts: IntArray | list[int], group: IntArray | int = 0, count: int = 1) -> int:
        """Make nodes of nodes, by the group of each in `[0, count)`; returns the first of them."""
        self._joins.append(np.stack(np.broadcast_arrays(self.total + group, parts)))
        self.total += count
        return self.total - count

    def close(self) -> None:
        """Sort the joins by node; call once, when all are there."""
        joins = np.concatenate(self._joins, axis=1)
        self._joined, self._parts = joins[:, np.argsort(joins[0], kind="stable")]
        self._begin = np.searchsorted(self._joined, np.arange(self.total + 1))
        self._is_join = np.diff(self._begin) > 0
        self._steps = self._merges()

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

    def accumulators(self, plan: IncrementalPlan, stored: Stored, messages: pa.Table) -> pa.Table:
        """Compute the accumulators of all nodes: row n is node n."""
        direct = np.flatnonzero(self.message_node >= 0)
        folded, group = np.unique(self.message_node[direct], return_inverse=True)
        picked = messages if len(direct) == messages.num_rows else taken_rows(messages, direct)
        table = pa.concat_tables(
            [stored.accumulators.cast(plan.accumulator_schema), plan.fold(picked, group, len(folded))]
        )
        row = np.zeros(self.total, np.int64)
        row[: self.stored] = np.arange(self.stored)
        row[folded] = self.stored + np.arange(len(folded))
        for step in self._steps:
            made = table.num_rows + np.arange(len(step.joins))
            rows, group = row[step.parts], step.owner
            if step.extends:
                rows, group = np.concatenate([row[step.parts], row[step.joins]]), np.concatenate([group, group])
            table = pa.concat_tables([table, plan.merge(table, group, len(step.joins), at=rows)])
            table, row[step.joins] = table.combine_chunks(), made
        return table.take(pa.array(row))

    def sums(self, stored: npt.NDArray[Number], messages: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Add up a number per stored session and per message for all nodes; unsigned ones wrap."""
        out = np.zeros(self.total, stored.dtype)
        out[: self.stored] = stored
        direct = self.message_node >= 0
        np.add.at(out, self.message_node[direct], messages[direct])
        for step in self._steps:
            added = out[step.parts]
            if not step.extends:
                out[step.joins] = 0
            np.add.at(out, step.joins[step.owner], added)
        return out

    def _merges(self) -> list[_Step]:
        """Give the merges that make all joins, in order.

        A session that closes and grows again and again is a long chain of joins. Along the longest part of each join
        (its `main`) distances are doubled, and only side branches wait for one another, so that a chain of n joins
        takes log(n) steps, and any tree log(n)**2.
        """
        depth, main = self._depths()
        joins = np.flatnonzero(self._is_join)
        steps = []
        for level in range(int(depth[joins].max(initial=-1)) + 1):
            here = joins[depth[joins] == level]
            at, owner = spread(self._begin[here], np.diff(self._begin)[here])
            parts = self._parts[at]
            chained = (main[here] >= 0) & (depth[main[here]] == level)
            back = np.where(chained, main[here], -1)
            others = parts != back[owner]
            steps.append(_Step(here, parts[others], owner[others], False))
            steps += _doubled(here, back, self.total)
        return steps

    def _depths(self) -> tuple[IntArray, IntArray]:
        """Give for each join how many side branches lie within one another, and the part that is largest, if a join."""
        depth, main = np.full(self.total, -1, np.int64), np.full(self.total, -1, np.int64)
        depth[self._is_join] = 0
        size = np.ones(self.total, np.int64)
        deep = np.zeros(self.total, np.bool_)
        deep[self._joined[self._is_join[self._parts]]] = True
        for node in np.flatnonzero(deep).tolist():  # only components taken message by message make joins of joins
            inner = [
                part for part in self._parts[self._begin[node] : self._begin[node + 1]].tolist() if self._is_join[part]
            ]
            size[node] += sum(int(size[part]) for part in inner)
            main[node] = max(inner, key=size.__getitem__)
            depth[node] = max(int(depth[part]) + (part != main[node]) for part in inner)
        return depth, main


def _doubled(joins: IntArray, back: IntArray, total: int) -> list[_Step]:
    """Extend chains of joins by their predecessors `back` (-1 for none), then by those of these, and so on."""
    steps = []
    place = np.full(total + 1, -1, np.int64)
    place[joins] = np.arange(len(joins))
    while (here := np.flatnonzero(back >= 0)).size:
        steps.append(_Step(joins[here], back[here], np.arange(len(here)), True))
        back = np.where(back >= 0, back[place[back]], -1)
    return steps


def full_values(plan: FullPlan, owner: IntArray, row: IntArray, count: int, messages: pa.Table) -> pa.Table:
    """Compute full-state aggregates of sets of messages.

    Args:
        plan: The aggregates.
        owner: Of each member the set, in `[0, count)`.
        row: Of each member the row of `messages`.
        count: Number of sets.
        messages: All messages, in any order.
    """
    state, order = FullState(plan, messages), np.argsort(owner, kind="stable")
    owner, row = owner[order], row[order]
    sizes = np.bincount(owner, minlength=count)
    ends, made = np.cumsum(sizes), []
    for part in parts(sizes, MAX_MEMBERS):
        rows = slice(int(ends[part.start] - sizes[part.start]), int(ends[part.stop - 1]))
        made.append(state.result(row[rows], owner[rows] - part.start, part.stop - part.start))
    return pa.concat_tables(made) if made else state.result(row[:0], owner[:0], 0)
