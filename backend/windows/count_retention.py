"""Retention by number of messages: a closed window takes messages until N more of the source partition have come.

Exactly (but for sliding windows and sessions: up to a sixteenth of their size or gap longer): a window is out of
retention for a message if it was closed already (its end was at or before the partition's stream time) before the
message N places earlier in the same source partition, as far as this shard sees it. So what stays is every window that
was open when one of the newest N messages came. Refused messages count, too: then the rule depends on nothing but the
source's order, neither on cuts nor on what was refused before.

What has to be remembered is how far stream time was N messages ago: a staircase of (message number, last window
closed), with a step per window, not per message. It reaches back N messages and no further: under a greater N than
before no window is found closed before that. Nor does it tell apart what is gone by then, by whatever retention: the
stored bound refuses that for good, so the steps are as many as retention by time lets windows be. Without N nothing is
counted and nothing remembered. One row, `Region.OPERATOR` + `b"newest"`, MessagePack, format version first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise

import msgspec
import numpy as np

from backend.batch import BEFORE, NO_TIME, PARTITION, STREAM, SourcePartition
from backend.store.protocol import Region
from backend.windows.arrivals import started
from backend.windows.columns.arrays import IntArray
from backend.windows.ledger import decode_row
from backend.windows.micro_batch import Execution, numbers
from backend.windows.watermark import is_idle

FORMAT = 1
NONE_GONE = -(2**63)

_KEY = bytes([Region.OPERATOR]) + b"newest"


class Staircase(msgspec.Struct, array_like=True):
    """How stream time rose in one source partition.

    Attributes:
        counted: Messages so far.
        steps: Message numbers at which more windows were closed than before, ascending.
        closed: Last window closed from that message on.
    """

    counted: int
    steps: list[int]
    closed: list[int]


class _Row(msgspec.Struct, array_like=True):
    format: int
    gone: int
    stairs: list[tuple[int, int, Staircase]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Row)


class Newest:
    """Judges a micro-batch by number of messages.

    Args:
        keep: How many messages of a source partition; None is without limit.
        last_closed: Gives the last window that is closed at each clock.
    """

    def __init__(self, keep: int | None, last_closed: Callable[[IntArray], IntArray]) -> None:
        self._keep, self._last_closed = keep, last_closed

    def judge(self, execution: Execution, floor: int) -> tuple[IntArray | None, int]:
        """Count the micro-batch's messages; call it once per micro-batch.

        Args:
            execution: The messages.
            floor: The last window that is out of retention after the micro-batch by the stored bound and by time.

        Returns:
            Per message the last window that is out of retention for it (None without limit), and the last one that is
            for all messages after the micro-batch, at least `floor`.
        """
        data = execution.work.get(_KEY)
        if self._keep is None:
            if data is not None:
                execution.work.delete(_KEY)
            return None, floor
        row = _Row(FORMAT, NONE_GONE, [])
        if data is not None:
            row = decode_row(data, _decoder, FORMAT, "the staircase of stream time")
        stairs = {(s, p): stair for s, p, stair in row.stairs}
        before = row.gone
        source = numbers(execution.messages, STREAM) * 2**32 + numbers(execution.messages, PARTITION)
        closed = self._last_closed(np.maximum(numbers(execution.messages, BEFORE), started(NO_TIME)))
        gone = np.full(len(closed), NONE_GONE, np.int64)
        edges = np.flatnonzero(np.diff(source, prepend=source[:1] - 1, append=source[-1:] + 1)).tolist()
        for low, high in pairwise(edges):
            stair = stairs.setdefault((int(source[low] >> 32), int(source[low] % 2**32)), Staircase(0, [], []))
            gone[low:high] = self._climb(stair, self._keep, closed[low:high])
        gone = np.maximum(gone, before)  # an idle partition may have fallen behind what is gone for all
        row.gone = max(before, floor, self._gone_for_all(execution, stairs))
        for stair in stairs.values():
            first = min(bisect_right(stair.closed, row.gone), len(stair.closed) - 1)  # the next rise needs the last one
            del stair.steps[:first], stair.closed[:first]
        row.stairs = [(s, p, stair) for (s, p), stair in sorted(stairs.items())]
        if len(closed) or row.gone != before:
            execution.work.put(_KEY, _encoder.encode(row))
        return gone, row.gone

    def _gone_for_all(self, execution: Execution, stairs: dict[SourcePartition, Staircase]) -> int:
        """Give the last window that no later message of a source partition that is not idle can be in."""
        batch, idle_after = execution.batch, execution.idle_after_ms
        ends = {at: self._standing(stairs.get(at)) for at in batch.after}
        awake = [ends[at] for at, position in batch.after.items() if not is_idle(position, batch.time_ms, idle_after)]
        return min(awake) if awake else max(ends.values(), default=NONE_GONE)

    def _standing(self, stair: Staircase | None) -> int:
        """Give the last window that was closed before the message `keep` places before the next one."""
        assert self._keep is not None
        if stair is None:
            return NONE_GONE
        at = bisect_right(stair.steps, stair.counted - self._keep) - 1
        return stair.closed[at] if at >= 0 else NONE_GONE

    def _climb(self, stair: Staircase, keep: int, closed: IntArray) -> IntArray:
        """Add messages; gives for each the last window that was closed before the message `keep` places earlier."""
        rises = np.flatnonzero(np.diff(closed, prepend=stair.closed[-1] if stair.closed else closed[0] - 1) > 0)
        steps = np.concatenate([np.array(stair.steps, np.int64), rises + stair.counted])
        heights = np.concatenate([np.array(stair.closed, np.int64), closed[rises]])
        number = np.arange(len(closed)) + stair.counted
        at = np.searchsorted(steps, number - keep, "right") - 1
        stair.counted += len(closed)
        first = max(int(np.searchsorted(steps, stair.counted - keep, "right")) - 1, 0)
        stair.steps, stair.closed = steps[first:].tolist(), heights[first:].tolist()
        stair.steps[0] = max(stair.steps[0], stair.counted - keep)
        return np.where(at >= 0, heights[np.maximum(at, 0)], NONE_GONE)
