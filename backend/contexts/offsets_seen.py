"""Offsets that a context was given, per source partition: what tells a replay from a message that is out of order.

Kept as runs `[first, last]`, so a partition without gaps has one, whatever its length. Gaps are not declared to a
context: an offset that was passed may be no message at all (a transaction's marker, a compacted record), or one that
comes later.

One row per run in `Region.OPERATOR`, written with the state of the same flush::

    "o" stream (2), partition (4), first (8)  ->  format (1), last (8)         all as order-preserving keys are

An older release kept no runs: what it passed counts as given.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from copy import copy

from backend.batch import Positions, SourcePartition
from backend.errors import OffsetsScattered, UnknownFormat
from backend.keys import fixed_bytes, prefix_end
from backend.messages.keys import clock_bytes, places_of
from backend.store.protocol import Readable, Region
from backend.store.workspace import Workspace

FORMAT = 1
MAX_RUNS = 10_000
"""Runs of a source partition. More are forgotten from the oldest on where offsets are in order, refused where not."""
ORDERED, UNORDERED = "ordered", "unordered"

_RUNS = bytes([Region.OPERATOR]) + b"o"
_LOWEST = -(2**63)


class Seen:
    """The offsets of one source partition that were given.

    Args:
        runs: First offset of each run, ascending -> the last one.
        fresh: They are not stored yet.
    """

    def __init__(self, runs: Mapping[int, int], *, fresh: bool = False) -> None:
        self._firsts, self._lasts = list(runs), list(runs.values())
        self._changed = set(runs) if fresh else set[int]()
        """First offsets of runs that may be stored otherwise: one set of all copies."""

    def __len__(self) -> int:
        return len(self._firsts)

    def __contains__(self, offset: int) -> bool:
        at = bisect_right(self._firsts, offset) - 1
        return at >= 0 and offset <= self._lasts[at]

    def copy(self) -> Seen:
        """Return the same offsets; those that are added to one are not in the other."""
        other = copy(self)
        other._firsts, other._lasts = self._firsts.copy(), self._lasts.copy()
        return other

    def add(self, offset: int) -> None:
        """Add an offset that is not there."""
        at = bisect_right(self._firsts, offset)
        last = offset
        if at < len(self) and self._firsts[at] == offset + 1:
            self._changed.add(self._firsts.pop(at))
            last = self._lasts.pop(at)
        if at and self._lasts[at - 1] == offset - 1:
            at -= 1
            self._lasts[at] = last
        else:
            self._firsts.insert(at, offset)
            self._lasts.insert(at, last)
        self._changed.add(self._firsts[at])

    def forget(self) -> None:
        """Forget the oldest runs over the limit."""
        over = max(len(self) - MAX_RUNS, 0)
        self._changed.update(self._firsts[:over])
        del self._firsts[:over], self._lasts[:over]

    def save(self, work: Workspace, source: SourcePartition) -> None:
        """Write what changed since the last time."""
        for first in sorted(self._changed):
            key, at = _RUNS + clock_bytes((*source, first)), bisect_right(self._firsts, first) - 1
            if at >= 0 and self._firsts[at] == first:
                work.put(key, bytes([FORMAT]) + fixed_bytes(self._lasts[at]))
            else:
                work.delete(key)
        self._changed.clear()


def read(state: Readable, positions: Positions) -> dict[SourcePartition, Seen]:
    """Read the runs of all source partitions.

    Args:
        state: Where they are.
        positions: As stored; what an older release passed counts as given.

    Raises:
        UnknownFormat: Another release wrote a run.
    """
    runs: dict[SourcePartition, dict[int, int]] = {}
    keys, values = state.scan_arrays(_RUNS, prefix_end(_RUNS))
    for stream, partition, first, value in zip(*(part.tolist() for part in places_of(keys)), values, strict=True):
        if value[:1] != bytes([FORMAT]):
            raise UnknownFormat(
                "a run of offsets has an unknown format", why=f"it is format {value[0]}, known is {FORMAT}"
            )
        runs.setdefault((stream, partition), {})[first] = int.from_bytes(value[1:], "big") - 2**63
    passed = {source: Seen({_LOWEST: position.next_offset - 1}, fresh=True) for source, position in positions.items()}
    return passed | {source: Seen(found) for source, found in runs.items()}


def scattered(source: SourcePartition) -> OffsetsScattered:
    """Return the error of a source partition whose offsets leave too many gaps to be remembered."""
    stream, partition = source
    return OffsetsScattered(
        "the offsets of a source partition leave too many gaps to be told apart from replays",
        where=f"stream {stream}, partition {partition}",
        why=f"at most {MAX_RUNS} runs of offsets without a gap are remembered",
        command="add the messages that are missing between them first, or open the context with offsets='ordered'",
    )
