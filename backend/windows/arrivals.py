"""Arrivals: a micro-batch's messages placed in panes, judged, and folded to accumulators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from backend.aggregates import IncrementalPlan
from backend.batch import BEFORE, NO_TIME, TIME
from backend.windows import combined_rows
from backend.windows.accumulators import with_clock
from backend.windows.columns.arrays import IntArray, compress, dense, firsts, union
from backend.windows.columns.grouping import GroupKeys
from backend.windows.columns.rows import Rows
from backend.windows.definitions import Assigner
from backend.windows.micro_batch import Execution, numbers

LOWEST = -(2**62) - 2**61
"""Stands for a clock that has not started: below every event time, and no window's end is at or before it."""
PIECE = 1_024
"""Messages that are looked at together to tell whether any of them may be out of retention."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Accepted messages in panes; all arrays as long as the micro-batch's messages.

    Attributes:
        pane: Pane numbers.
        skip: Windows over the pane that are out of retention for the message.
        interval: See backend.windows.columns.pane_rows.
        clock: Watermark before the message.
        key: Number of the group key.
        keys: The distinct encoded group keys, by number.
        ends: Window ends that separate the intervals, ascending.
    """

    pane: IntArray
    skip: IntArray
    interval: IntArray
    clock: IntArray
    key: IntArray
    keys: pa.Array
    ends: IntArray


@dataclass(frozen=True, slots=True)
class Arrived(Rows):
    """Messages folded to accumulators, in order of (pane, skip, interval, key); all arrays as long as `table`.

    Attributes:
        pane: Pane numbers.
        skip: Skips.
        interval: Epochs.
        key: Numbers of group keys.
        clock: Watermark before the first message of each.
        count: Messages of each; empty where nobody asked for them.
        table: Accumulator columns and `FIRST_CLOCK`.
    """

    pane: IntArray
    skip: IntArray
    interval: IntArray
    key: IntArray
    clock: IntArray
    count: IntArray
    table: pa.Table


def started(clock: int) -> int:
    """Give a clock that can be calculated with."""
    return max(clock, LOWEST)


def place(
    execution: Execution, grid: Assigner, retention_ms: int, gone: IntArray | None, group_keys: GroupKeys
) -> Placed:
    """Place the micro-batch's messages; those that no window can take go to the errors.

    Args:
        execution: The messages.
        grid: The windows.
        retention_ms: Retention by time.
        gone: Per message the last window that is out of retention by number of messages; None without limit.
        group_keys: Encodes the group key.
    """
    pane, skip, own = _judge(execution, grid, retention_ms, gone)
    if execution.exact:
        clock, ends = own, _ends_passed(grid, pane, execution.clock, own)
        # the clock of one source partition never goes back: count the rows between the ends instead of comparing each
        edges = np.searchsorted(clock, ends, "left")
        interval = np.repeat(np.arange(len(ends) + 1), np.diff(np.concatenate([[0], edges, [len(clock)]])))
    else:
        clock, ends = np.full(len(pane), execution.clock, np.int64), np.empty(0, np.int64)
        interval = np.zeros(len(pane), np.int64)
    key, keys = group_keys.encode(execution.messages)
    return Placed(pane, skip, interval, clock, key, keys, ends)


def _judge(
    execution: Execution, grid: Assigner, retention_ms: int, gone: IntArray | None
) -> tuple[IntArray, IntArray, IntArray]:
    """Refuse what is out of retention; gives pane, skip and own clock of the rest."""
    own = np.maximum(numbers(execution.messages, BEFORE), execution.clock)
    pane = grid.pane_of(numbers(execution.messages, TIME))
    skip = np.zeros(len(pane), np.int64)
    rows = np.arange(len(pane)) if gone is not None else _near(grid, pane, own, retention_ms)
    if not len(rows):
        return pane, skip, own
    first, last = grid.first_window(pane[rows]), grid.last_window(pane[rows])
    dead = grid.last_ended(np.maximum(own[rows], LOWEST) - retention_ms)
    if gone is not None:
        dead = np.maximum(dead, gone)
    skip[rows] = np.maximum(dead - first + 1, 0)
    refused = np.zeros(len(pane), np.bool_)
    refused[rows] = skip[rows] > last - first
    also = "" if gone is None else ", or more than the retained messages ago, or left a shorter retention before"
    execution.refuse(
        refused, "out_of_retention", f"every window of it ended {retention_ms} ms or more before stream time{also}"
    )
    return (pane[~refused], skip[~refused], own[~refused]) if refused.any() else (pane, skip, own)


def _near(grid: Assigner, pane: IntArray, own: IntArray, retention_ms: int) -> IntArray:
    """Return the rows in pieces of which the newest clock has a window of the oldest pane out of retention: few."""
    if not len(pane):
        return np.empty(0, np.int64)
    edges = np.arange(0, len(pane), PIECE)
    newest, oldest = np.maximum.reduceat(own, edges), np.minimum.reduceat(pane, edges)
    near = grid.last_ended(np.maximum(newest, LOWEST) - retention_ms) >= grid.first_window(oldest)
    return np.flatnonzero(np.repeat(near, PIECE)[: len(pane)])


def _ends_passed(grid: Assigner, pane: IntArray, clock: int, own: IntArray) -> IntArray:
    """Give the ends of windows over the panes that the clock passes before some message."""
    if not len(pane) or own[-1] == NO_TIME:
        return np.empty(0, np.int64)
    touched = compress(pane)[1]
    closed, passed = grid.last_ended_at(started(clock)), grid.last_ended_at(int(own[-1]))
    windows = union(np.maximum(grid.first_window(touched), closed + 1), np.minimum(grid.last_window(touched), passed))
    return grid.ends(windows)


def fold(placed: Placed, messages: pa.Table, plan: IncrementalPlan, *, counted: bool) -> Arrived:
    """Fold placed messages; `counted` asks how many each accumulator is made of."""
    space = max(len(placed.keys), 1)
    spot, spots = _spots(placed)
    group, codes = dense(spot * space + placed.key, max(len(spots[0]) * space, 1))
    first = firsts(group, len(codes))
    at = codes // space
    clock = placed.clock[first]
    table = with_clock(combined_rows.fold(messages, plan, group, len(codes)), clock)
    count = np.zeros(len(codes) if counted else 0, np.int64)
    if counted:
        np.add.at(count, group, combined_rows.counts(messages))
    return Arrived(spots[0][at], spots[1][at], spots[2][at], codes % space, clock, count, table)


def _spots(placed: Placed) -> tuple[IntArray, tuple[IntArray, IntArray, IntArray]]:
    """Number the distinct (pane, skip, interval) in their order."""
    pane, panes = compress(placed.pane)
    skips = int(placed.skip.max(initial=0)) + 1
    intervals = len(placed.ends) + 1
    if skips == 1 and intervals == 1:
        return pane, (panes, np.zeros(len(panes), np.int64), np.zeros(len(panes), np.int64))
    # below 2**62: panes and intervals are at most as many as there are rows, skips at most MAX_OVERLAP
    spot, spots = dense((pane * skips + placed.skip) * intervals + placed.interval, len(panes) * skips * intervals)
    return spot, (panes[spots // (skips * intervals)], spots // intervals % skips, spots % intervals)
