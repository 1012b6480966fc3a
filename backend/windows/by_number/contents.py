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
        space: Runs of group keys; arrays of keys are as long.
        whole: Windows are whole runs: sessions, of which no message's number matters.
        key: Group key of each message.
        number: Number of each message within its key.
        counted: New messages of each key.
        next0: Next number of each key before.
        live: Live messages of each key; kept up to date here.
        digest: Their digest; kept up to date here.
        source: Source partition of the first live message of each key.
        mixed0: Keys whose live messages came from several source partitions before.
        mixed: The same after; kept up to date here.
        out: Keys that fall out of retention.
    """

    def __init__(
        self,
        message_store: MessagesByKey,
        plan: FullPlan,
        execution: Execution,
        space: Runs,
        *,
        whole: bool,
        key: IntArray,
        number: IntArray,
        counted: IntArray,
        next0: IntArray,
        live: IntArray,
        digest: Digests,
        source: IntArray,
        mixed0: Mask,
        mixed: Mask,
        out: Mask,
    ) -> None:
        self._message_store, self._plan, self._execution, self._space = message_store, plan, execution, space
        self._whole = whole
        self._key, self._number, self._counted, self._next0 = key, number, counted, next0
        self._live, self._digest, self._source = live, digest, source
        self._mixed0, self._mixed, self._out = mixed0, mixed, out

    def read(self, moves: Mask) -> None:
        """Lay out the messages of group keys in order of (key, number): of those in `moves`, and new ones."""
        listed = self._mixed0 & (not self._whole)
        needed = np.flatnonzero((moves | (self._mixed & (self._counted > 0) & (not self._whole))) & (self._live > 0))
        starts = keyed(MESSAGES, self._space.keys.take(pa.array(needed)))
        stops, sizes = (prefix_end(key) or b"\xff" for key in starts), self._live[needed]
        stored = self._message_store.read_counted(self._execution.work, starts, stops, sizes, "group key")
        self._stored = StoredMessages(stored.keys, stored.values, needed[stored.owner])
        begins = np.cumsum(sizes) - sizes
        rank = np.arange(len(stored.owner)) - begins[stored.owner]
        for at in np.flatnonzero(listed[needed]).tolist():  # rare: their order was written down
            rows = slice(int(begins[at]), int(begins[at] + sizes[at]))
            places = self._execution.work.get(PLACES + self._space.keys[int(needed[at])].as_py()) or b""
            number_of = {place: at for at, place in enumerate(split_places(places))}
            rank[rows] = [number_of.get(key[-PLACE_BYTES:], -1) for key in stored.keys[rows]]
        self._stored_number = rank + self._next0[self._stored.owner] - self._live[self._stored.owner]
        key = np.concatenate([self._stored.owner, self._key])
        number = np.concatenate([self._stored_number, self._number])
        order = np.lexsort((number, key))
        self._all_key, self._all_number = key[order], number[order]
        both = pa.concat_tables(
            [self._message_store.table(stored), self._message_store.select(self._execution.messages)]
        )
        self._all_messages = taken_rows(both, order)
        # numbers follow arrival, folding follows the source
        self._full = FullState(self._plan, self._all_messages, in_order=not self._mixed.any())
        self._all_first = np.searchsorted(self._all_key, np.arange(len(self._space)))

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
        stay = np.flatnonzero(self._number >= keep[self._key])
        picked = taken_rows(self._execution.messages, stay)
        names, values = self._message_store.rows(picked, self._space.keys.take(pa.array(self._key[stay])))
        self._account(self._message_store.put(self._execution, names, values), self._key[stay], 1)
        if self._whole:
            self._store_counts(picked, self._key[stay])
        else:
            self._store_places(keep)

    def _store_places(self, keep: IntArray) -> None:
        """Write down the order of live messages of group keys that have several source partitions."""
        touched = self._mixed & ((self._counted > 0) | self._out)
        if not touched.any():
            return
        names = self._message_store.rows(self._all_messages, self._space.keys.take(pa.array(self._all_key)))[0]
        ends = np.append(self._all_first, len(self._all_key))
        for key in np.flatnonzero(touched).tolist():
            name = PLACES + self._space.keys[key].as_py()
            first, end = ends[key : key + 2].tolist()
            first += int(np.searchsorted(self._all_number[first:end], keep[key]))
            if first < end:
                self._execution.work.put(name, b"".join(names[at][-PLACE_BYTES:] for at in range(first, end)))
            else:
                self._execution.work.delete(name)
                self._mixed[key] = False

    def _store_counts(self, messages: pa.Table, key: IntArray) -> None:
        """Write down how many live messages each source partition has, of sessions that have several."""
        work, codes = self._execution.work, self._space.keys
        work.delete_many([PLACES + codes[at].as_py() for at in np.flatnonzero(self._mixed0 & self._out).tolist()])
        rows = np.flatnonzero(self._mixed[key])
        source, sources = compress(numbers(messages, STREAM)[rows] * 2**32 + numbers(messages, PARTITION)[rows])
        pair, pairs = compress(key[rows] * max(len(sources), 1) + source)
        counts, owner = np.bincount(pair).tolist(), pairs // max(len(sources), 1)
        bytes_of = [source_bytes(*divmod(one, 2**32)) for one in sources.tolist()]
        edges = np.flatnonzero(np.diff(owner, prepend=-1, append=-1)).tolist()
        touched = owner[edges[:-1]].tolist()
        names = [PLACES + code for code in codes.take(pa.array(touched, pa.int64())).to_pylist()]
        for at, name, written, (low, high) in zip(touched, names, work.get_many(names), pairwise(edges), strict=True):
            first = {source_bytes(*divmod(int(self._source[at]), 2**32)): int(self._live[at]) - sum(counts[low:high])}
            found = Counter(first if written is None else unpack_counts(written))
            for one, count in zip((pairs[low:high] % len(sources)).tolist(), counts[low:high], strict=True):
                found[bytes_of[one]] += count
            work.put(name, pack_counts(found))

    def _account(self, found: Digests, key: IntArray, sign: int) -> None:
        self._live += sign * np.bincount(key, minlength=len(self._live))
        np.add.at(self._digest, key, found if sign > 0 else np.uint64(0) - found)
