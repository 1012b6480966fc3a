"""Refused messages that a replay must leave out: those that lie where a session is, or may come to be.

A replay brings every message from the first one that is held, and `Sessions.settle` leaves those that a session covers.
A refused message at t of group key K could be taken for one of them only if

* a session of K that is kept has `first <= t <= last + gap`: it covers t, or may grow over it; or
* t is taken by the bound: a source partition that is behind the one that t came from may still open a session there.

Once neither holds, neither ever does again: a session comes to cover t only through messages that are taken, and the
bound, which never goes back, takes none before t then. So the list is as short as such messages are rare, and is
independent of cuts with one source partition.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pyarrow as pa

from backend.batch import TIME
from backend.chunks import taken_rows
from backend.keys import fixed_bytes, prefix_end
from backend.messages.keys import OFFSET_BYTES, TIME_BYTES, message_keys, places_of
from backend.messages.layout import TIME_FIRST
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.columns.grouping import GroupKeys
from backend.windows.merging import rows
from backend.windows.merging.found import touched
from backend.windows.merging.one_by_one import Terms
from backend.windows.merging.rows import SessionRows
from backend.windows.micro_batch import Execution, numbers


class Refused:
    """Keeps the list in OPERATOR: `R`, place -> event time, group key.

    Args:
        execution: Its sessions are written already, its `replay_from` is known.
        terms: What sessions go by.
        session_rows: Reads sessions.
    """

    def __init__(self, execution: Execution, terms: Terms, session_rows: SessionRows) -> None:
        self._execution, self._work, self._terms, self._rows = execution, execution.work, terms, session_rows

    def add(self, messages: pa.Table, keys: GroupKeys) -> None:
        """List those of the micro-batch's refused messages that matter."""
        if not messages.num_rows:
            return
        key, codes = keys.encode(messages)
        matters = np.flatnonzero(self._matters(numbers(messages, TIME), key, codes))
        picked = taken_rows(messages, matters)
        names, times = codes.take(pa.array(key[matters])).to_pylist(), numbers(picked, TIME).tolist()
        places = [rows.REFUSED + place[-OFFSET_BYTES:] for place in message_keys(TIME_FIRST, picked)]
        self._work.put_many(places, [fixed_bytes(time) + name for time, name in zip(times, names, strict=True)])

    def listed(self, gone: Collection[bytes]) -> list[tuple[int, int, int]]:
        """Forget what no longer matters; gives (stream, partition, offset) of the others.

        Args:
            gone: Group keys of which a session went.
        """
        places, values = self._work.scan_arrays(rows.REFUSED, prefix_end(rows.REFUSED))
        if not places:
            return []
        times = rows.firsts_of([value[:TIME_BYTES] for value in values])
        open_before = times >= self._terms.first_taken
        doubtful = np.array([value[TIME_BYTES:] in gone for value in values], np.bool_) | open_before
        rows_ = np.flatnonzero(doubtful)
        coded = pa.array([values[at][TIME_BYTES:] for at in rows_.tolist()], pa.binary()).dictionary_encode()
        stays = np.ones(len(places), np.bool_)
        stays[rows_] = self._matters(times[rows_], coded.indices.to_numpy().astype(np.int64), coded.dictionary)
        found = list(zip(*(part.tolist() for part in places_of(places)), strict=True))
        start = self._execution.replay_from
        stays &= np.array([offset >= start.get((stream, partition), 2**63) for stream, partition, offset in found])
        self._work.delete_many([places[at] for at in np.flatnonzero(~stays).tolist()])
        return [found[at] for at in np.flatnonzero(stays).tolist()]

    def _matters(self, times: IntArray, key: IntArray, codes: pa.Array) -> Mask:
        """Tell which event times a session covers or may come to cover; `key` numbers `codes`."""
        sessions = self._rows.read(self._work, sorted(set(touched(self._work, self._terms, times, key, codes))))
        at = sessions.before(codes.take(pa.array(key)), times)
        matters: Mask = times >= self._terms.first_taken_after
        known = at >= 0
        matters[known] |= times[known] <= sessions.last[at[known]] + self._terms.gap
        return matters
