"""How far each side of a join has come, and the pieces in which its messages expire."""

from __future__ import annotations

from collections.abc import Mapping

from backend.batch import NO_TIME, MicroBatch, Position, SourcePartition
from backend.joins.sides import LEFT, RIGHT
from backend.joins.spec import JoinSpec
from backend.joins.state import JoinLedger
from backend.windows.watermark import is_idle

MIN_BUCKET_MS, MIN_BUCKET_MESSAGES = 1_000, 256
"""Shortest buckets: a side that leads has one for each so much that it leads by, all read in each micro-batch."""


def bucket_width(spec: JoinSpec) -> int:
    """Give the length of the pieces in which messages are counted and expire: a 64th of what is kept, or the shortest.

    So a message is stored for at most that much longer than it can be met. The length is chosen when a shard starts
    and kept with its state.
    """
    longest = max((side.keep or 0) + (side.window.size if side.window else 0) for side in spec.sides)
    if not longest:
        longest = 1 if spec.by_number else max((spec.before or 0) + (spec.after or 0), 60_000)
    return max(longest // 64, MIN_BUCKET_MESSAGES if spec.by_number else MIN_BUCKET_MS)


def side_clocks(
    spec: JoinSpec, ledger: JoinLedger, reached: Mapping[SourcePartition, int], batch: MicroBatch
) -> tuple[tuple[int, int], int | None]:
    """Give how far each side has come at the end of a micro-batch, and when that may change without input.

    A side's clock is the smallest clock of its source partitions that are not idle. When all are, they hold nothing
    back and the other side's clock counts; when all of both are, the newest there is. A side that was never seen is a
    source partition that is silent since the first micro-batch. Clocks never go back.

    Args:
        spec: The join.
        ledger: As committed.
        reached: Clock per source partition.
        batch: Says which source partitions are idle.

    Returns:
        The clocks; the batch time at which one may move on because a source partition is idle, None if none will.
    """
    awake: tuple[list[int], list[int]] = ([], [])
    waits: list[int] = []
    known = [(spec.side_of(source[0]), position, reached[source]) for source, position in batch.after.items()]
    silent = Position(0, NO_TIME, ledger.started_ms)
    known += [(side, silent, NO_TIME) for side in (LEFT, RIGHT) if side not in {side for side, _, _ in known}]
    for side, position, clock in known:
        if not is_idle(position, batch.time_ms, spec.idle_after_ms):
            awake[side].append(clock)
            if spec.idle_after_ms is not None:
                waits.append(position.active_ms + spec.idle_after_ms)
    newest = max(reached.values(), default=NO_TIME)
    clocks = (
        max(ledger.clocks[LEFT], min(awake[LEFT] or awake[RIGHT], default=newest)),
        max(ledger.clocks[RIGHT], min(awake[RIGHT] or awake[LEFT], default=newest)),
    )
    return clocks, min(waits, default=None) if newest > min(clocks) else None
