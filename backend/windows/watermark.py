"""Stream clocks: how far event time has come, and so which windows are closed.

Stream time is per source partition and comes with the micro-batch (`Position.stream_time`). The *watermark* of a
shard is the smallest stream time of its source partitions that are not idle; when all are idle nobody can hold the
others back, and it is the largest. It is committed with the state and never goes back.
"""

from __future__ import annotations

from backend.batch import NO_TIME, Position, Positions


def is_idle(position: Position, time_ms: int, idle_after_ms: int | None) -> bool:
    """Tell whether nothing was accepted of a source partition for `idle_after_ms` of wall clock."""
    return idle_after_ms is not None and time_ms - position.active_ms >= idle_after_ms


def watermark_after(committed: int, after: Positions, time_ms: int, idle_after_ms: int | None) -> int:
    """Give the watermark at the end of a micro-batch.

    Args:
        committed: Watermark as committed, `NO_TIME` at first.
        after: Positions when the micro-batch is done.
        time_ms: Batch time.
        idle_after_ms: Wall clock after which a silent source partition no longer holds windows open; None is never.
    """
    if not after:
        return committed
    awake = [p.stream_time for p in after.values() if not is_idle(p, time_ms, idle_after_ms)]
    reached = min(awake) if awake else max(p.stream_time for p in after.values())
    return max(committed, reached)


def next_idle_ms(committed: int, after: Positions, time_ms: int, idle_after_ms: int | None) -> int | None:
    """Give the batch time at which the watermark moves on without input, None if it will not."""
    if idle_after_ms is None or len(after) < 2:
        return None
    newest = max(p.stream_time for p in after.values())
    if newest <= committed or newest == NO_TIME:
        return None
    awake = [p.active_ms + idle_after_ms for p in after.values() if not is_idle(p, time_ms, idle_after_ms)]
    return min(awake, default=None)


def exact(before: Positions, after: Positions) -> bool:
    """Tell whether the shard has one source partition, so that closing is decided message by message."""
    return len(before.keys() | after.keys()) <= 1


def came(before: Positions, after: Positions) -> bool:
    """Tell whether a micro-batch brought a message of any source partition, to whichever shard."""
    known = {source: position.next_offset for source, position in before.items()}
    # one that has become known, and has brought nothing, is at 0
    return any(known.get(source, 0) != position.next_offset for source, position in after.items())
