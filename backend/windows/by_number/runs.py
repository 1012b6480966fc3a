"""The runs of a micro-batch (backend.windows.by_number.falling), and the numbers of its messages within them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backend.aggregates.groups import stable_order
from backend.batch import NO_TIME, OFFSET, PARTITION, STREAM, TIME
from backend.rows import fixed_values
from backend.windows.arrivals import started
from backend.windows.by_number.falling import WHY, Arrivals, FallingOut, clocks
from backend.windows.by_number.rows import COUNTERS, read_counters
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.columns.grouping import KeySpace
from backend.windows.columns.keyed import WindowKeys, keyed
from backend.windows.micro_batch import Execution, numbers


class Runs:
    """The runs of one micro-batch: of each group key the stored one, if there is one, then those that messages begin.

    Messages that are refused are taken out of the micro-batch. Arrays are as long as there are runs, but for those of
    messages.

    Args:
        execution: The micro-batch.
        keys: Encodes the group key.
        falling: Finds what falls out.
        more: Further group keys to look at, all of which have a stored run.
        keeps: Messages are stored.

    Attributes:
        keys: Group key of each run, ascending; of one group key in order of time.
        key: Run of each message.
        order: The messages in order of run; those of a run as they came.
        at: Where in `order` each run's messages begin.
        number: Number of each message within its run.
        counted: New messages.
        stored: The run was stored.
        next0: Number of the run's next message before.
        next1: The same after.
        live: Live messages in the message store; who changes them keeps this up to date, and the next ones.
        digest: Their digest.
        source: Source partition of the first live message.
        mixed0: The live messages came from several source partitions before: their numbers are not in order.
        mixed: The same after.
        newest: Newest event time, this micro-batch's messages included.
        last: Number of the newest message on the shard, likewise.
        out: The run falls out of retention.
        ended: It ends in full: a session, by number of messages.
    """

    def __init__(
        self, execution: Execution, keys: WindowKeys, falling: FallingOut, more: Sequence[pa.Array], *, keeps: bool
    ) -> None:
        self._work, self._falling = execution.work, falling
        messages = execution.messages
        came, clock = falling.number(messages), clocks(execution)
        number = came
        found, codes = keys.encode(messages)
        space = KeySpace([codes, *more, falling.find(execution.clock_after)])
        key = space.numbers[0][found] if len(found) else found
        rows = self._work.get_many(keyed(COUNTERS, space.keys))
        known = np.array([row is not None for row in rows], np.bool_)
        counters = read_counters([row for row in rows if row is not None])
        time, begun = numbers(messages, TIME), (~known).astype(np.int64)
        first = np.arange(len(space))
        self.key: IntArray = key
        if falling.limited:
            taken, opens, since = self._judge(Arrivals(key, number, time, clock), known, counters)
            execution.refuse(~taken, "out_of_retention", WHY)
            begun = np.bincount(key[opens], minlength=len(space))
            first = np.cumsum(known + begun) - (known + begun)
            self.key = (first + known - 1 - (np.cumsum(begun) - begun))[key[taken]] + since[taken]
            time, number = time[taken], number[taken]
        count = known + begun
        code = np.repeat(np.arange(len(space)), count)
        self.keys: pa.Array = space.keys.take(pa.array(code))
        self._space, self._first = space, first
        self.stored: Mask = np.zeros(len(code), np.bool_)
        self.stored[first[known]] = True
        self.next0, self.live, self.digest = (self._spread(counters[name]) for name in ("next", "live", "digest"))
        self._was = self._spread(counters["last"]), self._spread(counters["newest"])
        self.last, self.newest = self._was[0].copy(), np.where(self.stored, self._was[1], started(NO_TIME))
        np.maximum.at(self.newest, self.key, time)
        np.maximum.at(self.last, self.key, number)
        newest_run = np.ones(len(code), np.bool_)
        newest_run[:-1] = code[1:] != code[:-1]
        self.out: Mask = ~newest_run | falling.out(self.last, self.newest, execution.clock_after)
        self.ended: Mask = falling.in_full(self.last, self.newest, came, clock)
        self._number()
        self._find_sources(execution, counters, keeps=keeps)

    def __len__(self) -> int:
        return len(self.keys)

    def _judge(
        self, arrivals: Arrivals, known: Mask, counters: npt.NDArray[np.void]
    ) -> tuple[Mask, Mask, npt.NDArray[np.int64]]:
        """Tell for each message whether it is taken, whether it begins a run, and how many began in order of keys."""
        last, newest = np.zeros(len(known), np.int64), np.zeros(len(known), np.int64)
        last[known], newest[known] = counters["last"], counters["newest"]
        order = stable_order(arrivals.key, len(known))
        taken, opens = np.empty(len(order), np.bool_), np.empty(len(order), np.bool_)
        taken[order], opens[order] = self._falling.judge(arrivals.where(order), known, last, newest)
        since = np.empty(len(order), np.int64)
        since[order] = np.cumsum(opens[order])
        return taken, opens, since

    def _number(self) -> None:
        """Number the messages within their runs."""
        self.counted: IntArray = np.bincount(self.key, minlength=len(self))
        self.next1: IntArray = self.next0 + self.counted
        self.order, self.at = stable_order(self.key, len(self)), np.cumsum(self.counted) - self.counted
        self.number: IntArray = np.empty(len(self.key), np.int64)
        own = self.key[self.order]
        self.number[self.order] = np.arange(len(own)) - self.at[own] + self.next0[own]

    def _find_sources(self, execution: Execution, counters: npt.NDArray[np.void], *, keeps: bool) -> None:
        """Tell which runs have live messages of several source partitions."""
        stream, partition = (numbers(execution.messages, name) for name in (STREAM, PARTITION))
        own = stream * 2**32 + partition
        self.source: IntArray = np.zeros(len(self), np.int64)
        self.source[self.key[::-1]] = own[::-1]
        self.source[self.stored] = counters["stream"].astype(np.int64) * 2**32 + counters["partition"]
        self.mixed0: Mask = self._spread(counters["mixed"]) > 0
        self.mixed: Mask = self.mixed0.copy()
        if keeps:
            self.mixed[self.key[(own != self.source[self.key]) | _passed(execution, own)]] = True

    def _spread(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Give a column of counters for all runs."""
        out = np.zeros(len(self.stored), np.uint64 if column.dtype.kind == "u" else np.int64)
        out[self.stored] = column
        return out

    def find(self, codes: pa.Array) -> IntArray:
        """Give the stored runs of group keys."""
        found: IntArray = self._first[self._space.find(codes)]
        return found

    def store(self, counters: npt.NDArray[np.void], keep: Mask, touched: Mask) -> None:
        """Write the counters of runs that are kept; `touched` ones that are not are forgotten."""
        old = np.flatnonzero(touched & self.stored)
        self._work.delete_many(keyed(COUNTERS, self.keys.take(pa.array(old))))
        self._falling.delete(self.keys.take(pa.array(old)), self._was[0][old], self._was[1][old])
        picked = np.flatnonzero(keep)
        codes = self.keys.take(pa.array(picked))
        self._work.put_many(keyed(COUNTERS, codes), fixed_values(counters[picked]))
        self._falling.put(codes, counters["last"][picked].astype(np.int64), counters["newest"][picked].astype(np.int64))


def _passed(execution: Execution, own: IntArray) -> Mask:
    """Tell which messages' offsets were passed before: contexts with `offsets="unordered"` take them."""
    offset, passed = numbers(execution.messages, OFFSET), np.zeros(len(own), np.bool_)
    before = {s * 2**32 + p: at.next_offset for (s, p), at in execution.batch.before.items()}
    edges = np.flatnonzero(np.diff(own, prepend=-1, append=-1)).tolist()  # in order of their sources
    for low, high in pairwise(edges):
        newest = np.maximum.accumulate(offset[low:high])
        passed[low:high] = offset[low:high] < np.maximum(newest, before.get(int(own[low]), 0))
    return passed
