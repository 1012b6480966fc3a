"""Runs: the messages of a group key until the key falls out of retention, for windows by number of messages.

A group key falls out, with all that is open of it, when one of these holds (and is given):

* by number   its newest message is not among the newest `retention_messages` of the shard, in order of arrival;
* by time     `newest + retention <= stream time`, where newest is the newest event time of the run's messages.

A session by number of messages is a run: it ends in full when its key falls out by number, as one whose newest message
is not among the newest `size` of its stream. Messages are numbered within their streams then.

A message that comes after that begins a new run, as if the key had never been there: windows are counted from 0 again,
so nothing has to stay of a key that went silent. A message that comes to a key that is not there and that is itself out
of retention, `t + retention <= stream time`, is refused: the window that it would open would be gone at once.

With one source partition stream time is the newest event time before the message, so runs are told message by message
and cuts change nothing. With several it is the watermark as committed, and keys fall out when a micro-batch ends.

Refused messages count as messages that came. Neither the number of a run's messages nor its newest event time would be
another if they did not, which is why a running maximum over all messages tells everything at once: a refused message
is out of retention, and all before it were.

=============== ============================ =========================================================================
region          key                          value
=============== ============================ =========================================================================
OPERATOR        `p`                          number of the next message that comes to the shard
OPERATOR        `p`, stream                  sessions: number of the next message of the stream
OPERATOR        `x`                          the tags of the indexes that there are
OPERATOR        `N`, number of the newest,   empty; in the order in which group keys fall out by number
                group key
OPERATOR        `T`, newest event time,      empty; in the order in which they fall out by time
                group key
=============== ============================ =========================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from backend.batch import BEFORE, NO_TIME, STREAM
from backend.keys import fixed_bytes, prefix_end
from backend.store.protocol import Region
from backend.store.workspace import Workspace
from backend.windows.arrivals import started
from backend.windows.by_number.rows import all_counters
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.merging.components import running_maximum
from backend.windows.merging.rows import timed_keys
from backend.windows.micro_batch import Execution, numbers

_POSITION, _INDEXES, _BY_NUMBER, _BY_TIME = (bytes([Region.OPERATOR]) + tag for tag in (b"p", b"x", b"N", b"T"))
_TIME = 8
STREAM_BITS = 47
"""A stream's number stands above them in its messages' numbers: two streams are further apart than any session is
long, and a stream's messages are 140 trillion at most.
"""
WHY = "no open window of its group key, and a window that it would open is out of retention"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Messages, for `judge` in order of (group key, arrival); all arrays as long as one another.

    Attributes:
        key: Number of the group key.
        number: Number of the message on the shard; of sessions within its stream, which stands above `STREAM_BITS`.
        time: Event time.
        clock: Stream time that it is judged by; ascending within a key.
    """

    key: IntArray
    number: IntArray
    time: IntArray
    clock: IntArray

    def where(self, rows: IntArray) -> Arrivals:
        """Give some of them."""
        return Arrivals(self.key[rows], self.number[rows], self.time[rows], self.clock[rows])


def judge(
    arrivals: Arrivals, known: Mask, last: IntArray, newest: IntArray, most: int | None, retention_ms: int
) -> tuple[Mask, Mask]:
    """Tell runs apart.

    Args:
        arrivals: The messages.
        known: Per group key, whether there is a run already.
        last: Per group key the number of its newest message, where there is a run.
        newest: Per group key the newest event time, where there is a run.
        most: How many messages may come since the newest one of a run; None is without limit.
        retention_ms: Retention by time; 0 is without.

    Returns:
        For each message whether it is taken, and whether it begins a run.
    """
    key, number, time, clock = arrivals.key, arrivals.number, arrivals.time, arrivals.clock
    first = np.ones(len(key), np.bool_)
    first[1:] = key[1:] != key[:-1]
    goes_on = first & known[key]
    opens = first & ~known[key]
    if most is not None:
        before = np.where(goes_on, last[key], np.concatenate([number[:1], number[:-1]]))
        opens |= (goes_on | ~first) & (number - before > most)
    if not retention_ms:
        return np.ones(len(key), np.bool_), opens
    reach = running_maximum(np.where(goes_on & ~opens, np.maximum(time, newest[key]), time), np.cumsum(first | opens))
    before = np.where(goes_on, newest[key], np.concatenate([reach[:1], reach[:-1]]))
    taken = reach + retention_ms > clock
    return taken, taken & (opens | (before + retention_ms <= clock))


def clocks(execution: Execution) -> IntArray:
    """Give the stream time that each message of a micro-batch is judged by."""
    if not execution.exact:
        return np.full(execution.messages.num_rows, started(execution.clock), np.int64)
    return np.maximum(numbers(execution.messages, BEFORE), started(execution.clock))


class FallingOut:
    """Finds group keys that fall out of retention without a message of theirs.

    Args:
        work: The state.
        most: Retention by number of messages, None for none; of sessions their size.
        retention_ms: Retention by time, 0 for none.
        stored: Gives all stored runs: group keys, number of their newest message, newest event time.
        per_stream: Messages are numbered within their streams.
    """

    def __init__(
        self,
        work: Workspace,
        most: int | None,
        retention_ms: int,
        stored: Callable[[Workspace], tuple[pa.Array, IntArray, IntArray]],
        *,
        per_stream: bool,
    ) -> None:
        self._work, self._most, self._retention_ms, self._stored = work, most, retention_ms, stored
        self._per_stream, self._streams = per_stream, [] if per_stream else [0]
        self._tags = [tag for tag, wanted in ((_BY_NUMBER, most is not None), (_BY_TIME, retention_ms > 0)) if wanted]
        self._settle()

    @property
    def limited(self) -> bool:
        """Whether there is a retention."""
        return bool(self._tags)

    def number(self, messages: pa.Table) -> IntArray:
        """Number messages that came; they are in order of stream."""
        streams = numbers(messages, STREAM) if self._per_stream else np.zeros(messages.num_rows, np.int64)
        found = np.arange(len(streams))
        if self._per_stream:
            self._streams = streams[np.flatnonzero(np.diff(streams, prepend=-1))].tolist()
        for stream in self._streams:  # a handful
            low, high = np.searchsorted(streams, (stream, stream + 1)).tolist()
            begin = self._end(stream)
            found[low:high] += begin - low
            if high > low:
                count = begin + high - low - (stream << STREAM_BITS)
                self._work.put(self._position(stream), count.to_bytes(8, "big"))
        return found

    def _position(self, stream: int) -> bytes:
        return _POSITION + (fixed_bytes(stream, "u2") if self._per_stream else b"")

    def _end(self, stream: int) -> int:
        """Give the number of the next message of a stream."""
        return (stream << STREAM_BITS) + int.from_bytes(self._work.get(self._position(stream)) or b"", "big")

    def judge(self, arrivals: Arrivals, known: Mask, last: IntArray, newest: IntArray) -> tuple[Mask, Mask]:
        """Tell runs apart, as `judge` does."""
        return judge(arrivals, known, last, newest, self._most, self._retention_ms)

    def find(self, clock: int) -> pa.Array:
        """Give the group keys that are out when messages were numbered and stream time is `clock`."""
        found: list[bytes] = []
        if self._most is not None:
            for stream in self._streams:
                begin = stream << STREAM_BITS
                found += self._scan(_BY_NUMBER, begin, max(self._end(stream) - self._most, begin))
        if self._retention_ms:
            found += self._scan(_BY_TIME, -(2**63), started(clock) - self._retention_ms + 1)
        return pa.array(found, pa.binary())

    def _scan(self, tag: bytes, begin: int, end: int) -> list[bytes]:
        keys, _ = self._work.scan_arrays(tag + fixed_bytes(begin), tag + fixed_bytes(end))
        return [key[2 + _TIME :] for key in keys]

    def out(self, last: IntArray, newest: IntArray, clock: int) -> Mask:
        """Tell which runs are out."""
        gone = np.zeros(len(last), np.bool_)
        if self._most is not None:
            for stream in self._streams:
                gone |= (last >> STREAM_BITS == stream) & (self._end(stream) - last > self._most)
        return gone | self.out_by_time(newest, np.full(len(last), clock))

    def out_by_time(self, newest: IntArray, clock: IntArray) -> Mask:
        """Tell which runs are out of retention by time at a stream time of each."""
        return (newest + self._retention_ms <= np.maximum(clock, started(NO_TIME))) & (self._retention_ms > 0)

    def in_full(self, last: IntArray, newest: IntArray, number: IntArray, clock: IntArray) -> Mask:
        """Tell which sessions ended by number, before retention by time would have taken them.

        Args:
            last: Number of the newest message of each run.
            newest: Newest event time of each.
            number: Numbers of all messages that came.
            clock: Stream time that each of those is judged by.
        """
        ended = np.zeros(len(last), np.bool_)
        if self._per_stream and len(number):
            assert self._most is not None
            at = np.minimum(np.searchsorted(number, last + self._most), len(number) - 1)
            ended = (number[at] == last + self._most) & ~self.out_by_time(newest, clock[at])
        return ended

    def delete(self, codes: pa.Array, last: IntArray, newest: IntArray) -> None:
        """Delete the index rows of group keys."""
        for tag in self._tags:
            self._work.delete_many(timed_keys(tag, last if tag == _BY_NUMBER else newest, codes))

    def put(self, codes: pa.Array, last: IntArray, newest: IntArray) -> None:
        """Write the index rows of group keys."""
        for tag in self._tags:
            keys = timed_keys(tag, last if tag == _BY_NUMBER else newest, codes)
            self._work.put_many(keys, [b""] * len(keys))

    def _settle(self) -> None:
        """Make the indexes that the options ask for, when the job before was asked for others."""
        wanted = b"".join(tag[1:] for tag in self._tags)
        there = self._work.get(_INDEXES) or b""
        if there == wanted:
            return
        for tag in (_BY_NUMBER, _BY_TIME):
            self._work.delete_many(self._work.scan_arrays(tag, prefix_end(tag))[0])
        self.put(*self._stored(self._work))
        self._work.put(_INDEXES, wanted)


def stored_runs(work: Workspace, *, timed: bool) -> tuple[pa.Array, IntArray, IntArray]:
    """Give all stored runs, and forget those of which nothing is open: with a retention by time alone they are kept.

    Args:
        work: The state.
        timed: Whether there is a retention by time.

    Returns:
        Group keys, number of their newest message, newest event time.
    """
    keys, rows = all_counters(work)
    if not timed:
        empty = rows["next"] == 0
        work.delete_many([keys[at] for at in np.flatnonzero(empty).tolist()])
        keys, rows = [keys[at] for at in np.flatnonzero(~empty).tolist()], rows[~empty]
    codes = pa.array([key[2:] for key in keys], pa.binary())
    return codes, rows["last"].astype(np.int64), rows["newest"].astype(np.int64)
