"""Messages of windows by number of messages, for full-state aggregates: laid out by number, stored, dropped."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa

from backend.aggregates import FullPlan
from backend.batch import PARTITION, STREAM
from backend.chunks import taken_rows
from backend.keys import prefix_end
from backend.messages.key_first import PLACE_BYTES, MessagesByKey, StoredMessages
from backend.messages.keys import source_bytes
from backend.messages.rows import Digests
from backend.windows.by_number.rows import MESSAGES, PLACES, pack_counts, split_places, unpack_counts
from backend.windows.by_number.runs import Runs
from backend.windows.columns.arrays import IntArray, Mask, compress, parts, spread
from backend.windows.columns.keyed import keyed
from backend.windows.columns.pane_rows import MAX_MEMBERS
from backend.windows.full_state import FullState
from backend.windows.micro_batch import Execution, numbers


class TupleContents:
    """The messages of one micro-batch and, where windows need them, the stored ones.

    Args:
        message_store: The message store.
        plan: The aggregates that read messages.
        execution: The micro-batch.
        runs: The runs and their messages; what is live of them is kept up to date here.
        whole: Windows are whole runs: sessions, of which no message's number matters.
    """

    def __init__(
        self, message_store: MessagesByKey, plan: FullPlan, execution: Execution, runs: Runs, *, whole: bool
    ) -> None:
        self._message_store, self._plan, self._execution, self._runs = message_store, plan, execution, runs
        self._whole = whole

    def read(self, moves: Mask) -> None:
        """Lay out the messages of group keys in order of (key, number): of those in `moves`, and new ones."""
        listed = self._runs.mixed0 & (not self._whole)
        needed = np.flatnonzero(
            (moves | (self._runs.mixed & (self._runs.counted > 0) & (not self._whole))) & (self._runs.live > 0)
        )
        starts = keyed(MESSAGES, self._runs.keys.take(pa.array(needed)))
        stops, sizes = (prefix_end(key) or b"\xff" for key in starts), self._runs.live[needed]
        stored = self._message_store.read_counted(self._execution.work, starts, stops, sizes, "group key")
        self._stored = StoredMessages(stored.keys, stored.values, needed[stored.owner])
        begins = np.cumsum(sizes) - sizes
        rank = np.arange(len(stored.owner)) - begins[stored.owner]
        for at in np.flatnonzero(listed[needed]).tolist():  # rare: their order was written down
            rows = slice(int(begins[at]), int(begins[at] + sizes[at]))
            places = self._execution.work.get(PLACES + self._runs.keys[int(needed[at])].as_py()) or b""
            number_of = {place: at for at, place in enumerate(split_places(places))}
            rank[rows] = [number_of.get(key[-PLACE_BYTES:], -1) for key in stored.keys[rows]]
        self._stored_number = rank + self._runs.next0[self._stored.owner] - self._runs.live[self._stored.owner]
        key = np.concatenate([self._stored.owner, self._runs.key])
        number = np.concatenate([self._stored_number, self._runs.number])
        order = np.lexsort((number, key))
        self._all_key, self._all_number = key[order], number[order]
        both = pa.concat_tables(
            [self._message_store.table(stored), self._message_store.select(self._execution.messages)]
        )
        self._all_messages = taken_rows(both, order)
        # numbers follow arrival, folding follows the source
        self._full = FullState(self._plan, self._all_messages, in_order=not self._runs.mixed.any())
        self._all_first = np.searchsorted(self._all_key, np.arange(len(self._runs)))

    def values(self, low: IntArray, high: IntArray, key: IntArray) -> pa.Table:
        """Compute full-state aggregates of number ranges, some windows at a time."""
        begin = self._all_first[key]
        begin = begin + low - self._all_number[begin]
        tables = []
        for part in parts(high - low, MAX_MEMBERS):
            rows, owner = spread(begin[part], (high - low)[part])
            tables.append(self._full.result(rows, owner, part.stop - part.start))
        return pa.concat_tables(tables)

    def store(self, keep: IntArray) -> None:
        """Drop what no open window needs; new messages that filled windows within the micro-batch never get there."""
        gone = np.flatnonzero(self._stored_number < keep[self._stored.owner])
        self._account(self._message_store.drop(self._execution, self._stored.where(gone)), self._stored.owner[gone], -1)
        stay = np.flatnonzero(self._runs.number >= keep[self._runs.key])
        picked = taken_rows(self._execution.messages, stay)
        names, values = self._message_store.rows(picked, self._runs.keys.take(pa.array(self._runs.key[stay])))
        self._account(self._message_store.put(self._execution, names, values), self._runs.key[stay], 1)
        if self._whole:
            self._store_counts(picked, self._runs.key[stay])
        else:
            self._store_places(keep)

    def _store_places(self, keep: IntArray) -> None:
        """Write down the order of live messages of group keys that have several source partitions."""
        touched = self._runs.mixed & ((self._runs.counted > 0) | self._runs.out)
        if not touched.any():
            return
        names = self._message_store.rows(self._all_messages, self._runs.keys.take(pa.array(self._all_key)))[0]
        ends = np.append(self._all_first, len(self._all_key))
        for key in np.flatnonzero(touched).tolist():
            name = PLACES + self._runs.keys[key].as_py()
            first, end = ends[key : key + 2].tolist()
            first += int(np.searchsorted(self._all_number[first:end], keep[key]))
            if first < end:
                self._execution.work.put(name, b"".join(names[at][-PLACE_BYTES:] for at in range(first, end)))
            else:
                self._execution.work.delete(name)
                self._runs.mixed[key] = False

    def _store_counts(self, messages: pa.Table, key: IntArray) -> None:
        """Write down how many live messages each source partition has, of sessions that have several."""
        work, codes = self._execution.work, self._runs.keys
        work.delete_many(
            [PLACES + codes[at].as_py() for at in np.flatnonzero(self._runs.mixed0 & self._runs.out).tolist()]
        )
        rows = np.flatnonzero(self._runs.mixed[key])
        source, sources = compress(numbers(messages, STREAM)[rows] * 2**32 + numbers(messages, PARTITION)[rows])
        pair, pairs = compress(key[rows] * max(len(sources), 1) + source)
        counts, owner = np.bincount(pair).tolist(), pairs // max(len(sources), 1)
        bytes_of = [source_bytes(*divmod(one, 2**32)) for one in sources.tolist()]
        edges = np.flatnonzero(np.diff(owner, prepend=-1, append=-1)).tolist()
        touched = owner[edges[:-1]].tolist()
        names = [PLACES + code for code in codes.take(pa.array(touched, pa.int64())).to_pylist()]
        for at, name, written, (low, high) in zip(touched, names, work.get_many(names), pairwise(edges), strict=True):
            first = {
                source_bytes(*divmod(int(self._runs.source[at]), 2**32)): int(self._runs.live[at])
                - sum(counts[low:high])
            }
            found = Counter(first if written is None else unpack_counts(written))
            for one, count in zip((pairs[low:high] % len(sources)).tolist(), counts[low:high], strict=True):
                found[bytes_of[one]] += count
            work.put(name, pack_counts(found))

    def _account(self, found: Digests, key: IntArray, sign: int) -> None:
        self._runs.live += sign * np.bincount(key, minlength=len(self._runs.live))
        np.add.at(self._runs.digest, key, found if sign > 0 else np.uint64(0) - found)
