"""How long a message of a join's side can be joined, and how far each side has come.

Joins by time go by event time, joins by number by the number of a message in its source partition, from the partition's
first offset on; so the streams are aligned by their first offsets. Either is called the *place in time* `at` here. The
clock of a message is the newest event time of its source partition before it, or its own number. A message can be
joined by a message of the other side while `expiry(at) > clock` of that one; and the same the other way round, so it
does not matter which comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from backend.batch import NO_TIME, MicroBatch, Position, SourcePartition
from backend.joins.sides import LEFT, RIGHT, Side
from backend.joins.spec import JoinSpec
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.definitions import Grid, Window
from backend.windows.watermark import is_idle

FOREVER = 2**63 - 1
MIN_BUCKET_MS, MIN_BUCKET_MESSAGES = 1_000, 256
"""Shortest buckets: a side that leads has one for each so much that it leads by, all read in each micro-batch."""


@dataclass(frozen=True, slots=True)
class Life:
    """When messages of one side expire.

    Attributes:
        window: The side's windows, None for one without end.
        keep: How far behind its window's end a message is kept; None for ever.
    """

    window: Window | None
    keep: int | None

    @classmethod
    def of(cls, spec: JoinSpec, side: Side) -> Life:
        """Give the life of a side's messages."""
        return cls(side.window, side.retention_messages if spec.by_number else side.retention_ms)

    def ends(self, at: IntArray) -> IntArray:
        """Give the first clock at which the first window of each message is over; without a window, `at` itself."""
        window = self.window
        if window is None:
            return at
        if window.kind in ("tumbling", "hopping"):
            grid = Grid.of(window)
            return grid.first_window(grid.pane_of(at)) * grid.step + grid.origin + grid.size
        # a sliding window closes when the clock passes it, a session when the clock passes the gap behind it
        return at + 1 + (window.size if window.kind == "session" else 0)

    def expiry(self, at: IntArray) -> IntArray:
        """Give the first clock of the other side at which each message cannot be joined any more."""
        return np.full(len(at), FOREVER, np.int64) if self.keep is None else self.ends(at) + self.keep

    def first_alive(self, clock: int) -> int:
        """Give the smallest `at` that a clock of the other side leaves alive; `NO_TIME` when all are."""
        if self.keep is None or clock == NO_TIME:
            return NO_TIME
        passed, window = clock - self.keep, self.window
        if window is None:
            return passed + 1
        if window.kind in ("tumbling", "hopping"):
            grid = Grid.of(window)
            return grid.last_ended_at(passed) * grid.step + grid.origin + grid.size
        return passed - (window.size if window.kind == "session" else 0)

    def late(self, at: IntArray, clock: IntArray) -> Mask:
        """Tell which messages came after the end of their window; without a window none does."""
        return np.zeros(len(at), np.bool_) if self.window is None else self.ends(at) <= clock


def bucket_width(spec: JoinSpec) -> int:
    """Give the length of the pieces in which messages are counted and expire: a 64th of what is kept, or the shortest.

    So a message is stored for at most that much longer than it can be met. The length is chosen when a shard starts
    and kept with its state.
    """
    longest = 0
    for side in spec.sides:
        life = Life.of(spec, side)
        longest = max(longest, (life.keep or 0) + (life.window.size if life.window else 0))
    if not longest:
        longest = 1 if spec.by_number else max((spec.before or 0) + (spec.after or 0), 60_000)
    return max(longest // 64, MIN_BUCKET_MESSAGES if spec.by_number else MIN_BUCKET_MS)


def side_clocks(
    committed: tuple[int, int],
    reached: Mapping[SourcePartition, int],
    batch: MicroBatch,
    started_ms: int,
    spec: JoinSpec,
) -> tuple[tuple[int, int], int | None]:
    """Give how far each side has come at the end of a micro-batch, and when that may change without input.

    A side's clock is the smallest clock of its source partitions that are not idle. When all are, they hold nothing
    back and the other side's clock counts; when all of both are, the newest there is. A side that was never seen is a
    source partition that is silent since the first micro-batch. Clocks never go back.

    Args:
        committed: The clocks of both sides as committed.
        reached: Clock per source partition.
        batch: Says which source partitions are idle.
        started_ms: Batch time of the first micro-batch.
        spec: The join.

    Returns:
        The clocks; the batch time at which one may move on because a source partition is idle, None if none will.
    """
    awake: tuple[list[int], list[int]] = ([], [])
    waits: list[int] = []
    known = [(side_of(source[0], spec), position, reached[source]) for source, position in batch.after.items()]
    silent = Position(0, NO_TIME, started_ms)
    known += [(side, silent, NO_TIME) for side in (LEFT, RIGHT) if side not in {side for side, _, _ in known}]
    for side, position, clock in known:
        if not is_idle(position, batch.time_ms, spec.idle_after_ms):
            awake[side].append(clock)
            if spec.idle_after_ms is not None:
                waits.append(position.active_ms + spec.idle_after_ms)
    newest = max(reached.values(), default=NO_TIME)
    clocks = (
        max(committed[LEFT], min(awake[LEFT] or awake[RIGHT], default=newest)),
        max(committed[RIGHT], min(awake[RIGHT] or awake[LEFT], default=newest)),
    )
    return clocks, min(waits, default=None) if newest > min(clocks) else None


def side_of(stream: int, spec: JoinSpec) -> int:
    """Give the side of a stream."""
    return LEFT if stream < spec.left_streams else RIGHT
