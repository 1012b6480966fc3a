"""What waits to be sent, and with which revision: SAMZA-552's pending updates and pending flush lists, as arrays.

`Waiting` is made from the stored revisions that a micro-batch concerns and from its updates; results then take their
revisions from it, and what is left goes back to the store. The three policies meet here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from backend.store.protocol import Region, region_range
from backend.store.workspace import Workspace
from backend.windows import revisions
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.columns.grouping import KeySpace, start_bytes
from backend.windows.columns.pane_rows import Pairs
from backend.windows.micro_batch import Execution
from backend.windows.policies import Policies
from backend.windows.revisions import UNKNOWN, Revisions


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the windows stand, by number: each is the last window that...

    Attributes:
        closed_before: ... was closed before the micro-batch.
        closed_after: ... is closed after it.
        gone_after: ... is out of retention after it.
        now_ms: Batch time.
        drain: The input ends with this micro-batch.
        full_off: As in `Execution`.
    """

    closed_before: int
    closed_after: int
    gone_after: int
    now_ms: int
    drain: bool
    full_off: bool

    @property
    def shows_open(self) -> bool:
        """True when every open window is sent."""
        return self.drain or self.full_off


class StoredRevisions:
    """The revisions that a micro-batch concerns: of windows that go or close, as ranges; what waits; others one by one.

    Args:
        execution: The micro-batch.
        progress: Where the windows stand.
        gone_before: The last window that was out of retention before it.
        start: Gives the start that a window's number stands for in the keys.
    """

    def __init__(self, execution: Execution, progress: Progress, gone_before: int, start: Callable[[int], int]) -> None:
        self._work, ledger = execution.work, execution.ledger
        self.all = progress.shows_open or (ledger.due_ms is not None and ledger.due_ms <= progress.now_ms)
        """Everything that waits is looked at: found by a pass over all rows."""
        self._ranges: list[tuple[int, int]] = []
        self._start = start
        if progress.gone_after > gone_before:
            self._ranges.append((gone_before + 1, progress.gone_after))
        if ledger.sent_open and progress.closed_after > progress.closed_before:
            self._ranges.append((max(progress.closed_before, progress.gone_after) + 1, progress.closed_after))
        self._open = [self._key(progress.closed_after + 1)] if progress.shows_open else []

    def due(self) -> Revisions:
        """Read the rows of windows that go, close, or are sent while open, and what waits when something is due."""
        edges = [(self._key(low), self._key(high + 1)) for low, high in self._ranges]
        if self.all:
            end = region_range(Region.REVISIONS)[1]
            return revisions.pending(self._work, [*edges, *((low, end) for low in self._open)])
        parts = [revisions.scan(self._work, low, high) for low, high in edges]
        return Revisions.concat(parts) if parts else revisions.empty()

    def _key(self, window: int) -> bytes:
        return start_bytes(Region.REVISIONS, max(self._start(window), -(2**63)))

    def others(self, windows: IntArray, keys: IntArray, encoded: pa.Array) -> Revisions:
        """Read the rows of updated windows that are in no range; `encoded` are the group keys by number.

        What waits may be among them: `due` gives it, too.
        """
        if not len(windows):
            return revisions.empty()
        read = np.zeros(len(windows), np.bool_)
        for low, high in self._ranges:
            read |= (windows >= low) & (windows <= high)
        wanted = Pairs(windows[~read], keys[~read], len(encoded))
        starts = np.array([self._start(window) for window in wanted.windows.tolist()], np.int64)
        at = np.searchsorted(wanted.windows, wanted.window)
        return revisions.get(self._work, starts[at], encoded.take(pa.array(wanted.key)))


class Waiting:
    """(window, group key) pairs that are in the stored revisions or were updated in this micro-batch.

    Args:
        rows: Stored revisions, and `windows`, `keys`: window number and key number of each. Some may be there twice.
        late: Updates to windows that were closed when the message came: window and key numbers.
        early: Updates to windows that are open after the micro-batch, and how many messages each is.
        ending: Updates to windows that close in the micro-batch, from messages that came before their end. Read only
            where what waits of them is sent as early, because full results are off.
        space: Number of group keys.
        progress: Where the windows stand.
        policies: When results are sent.
    """

    def __init__(
        self,
        rows: Revisions,
        windows: IntArray,
        keys: IntArray,
        late: tuple[IntArray, IntArray],
        early: tuple[IntArray, IntArray, IntArray],
        ending: tuple[IntArray, IntArray],
        space: int,
        progress: Progress,
        policies: Policies,
    ) -> None:
        self._progress, self._policies = progress, policies
        self.pairs = Pairs(
            np.concatenate([windows, late[0], early[0], ending[0]]),
            np.concatenate([keys, late[1], early[1], ending[1]]),
            space,
        )
        count = len(self.pairs)
        self._rows = rows
        self._stored, self._next = np.full(count, -1, np.int64), np.full(count, UNKNOWN, np.int64)
        self._since, self._unsent = np.full(count, progress.now_ms, np.int64), np.zeros(count, np.int64)
        self._waits, self._ends = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        self._extra: list[Revisions] = []
        self.goes: Mask = self._waits
        """Pairs that are to be sent now."""
        if not count:
            return
        at = self.pairs.find(windows, keys)
        self._stored[at] = np.arange(len(rows))
        self._next[at] = rows.next
        # what waited of a window that closes now goes with its end: in the full result, or as the last early one
        closes = (windows > progress.closed_before) & (windows <= progress.closed_after)
        still = rows.pending & ~closes
        self._ends[at[rows.pending & closes]] = True
        self._ends[self.pairs.find(*ending)] = True
        self._since[at[still]] = rows.since[still]
        self._waits[at[still]] = True
        self._unsent[at[still]] = rows.unsent[still]
        if policies.early_messages is not None:
            np.add.at(self._unsent, self.pairs.find(*early[:2]), early[2])
        for updated in (late, early[:2]):
            self._waits[self.pairs.find(*updated)] = True
        self.goes = self._waits & self._due()

    def _due(self) -> Mask:
        past: Mask = self.pairs.window <= self._progress.closed_after
        if self._progress.drain:
            return past  # every open window is sent as drained, which stands for an early row that is due
        due: Mask = self.pairs.window <= self._progress.gone_after
        late_ms, now_ms = self._policies.late_ms, self._progress.now_ms
        # what waits for a policy that is off waited for it when it was on
        due |= past if late_ms is None else past & (self._since + late_ms <= now_ms)
        due |= (
            ~past if not self._policies.early else ~past & self._policies.early_due(self._since, self._unsent, now_ms)
        )
        return due & past if self._progress.full_off else due

    def renumber(self, numbers: IntArray, space: int) -> None:
        """Change to other key numbers in the same order."""
        self.pairs = Pairs(self.pairs.window, numbers[self.pairs.key], space)

    def going(self, space: int) -> Pairs:
        """Give the pairs that are to be sent now."""
        return Pairs(self.pairs.window[self.goes], self.pairs.key[self.goes], space)

    def take(self, windows: IntArray, keys: IntArray, usual: IntArray) -> IntArray:
        """Give the revisions of results that are sent now; they wait no more.

        Args:
            windows: Window of each result.
            keys: Key number of each.
            usual: Revision of those that no row says otherwise of.
        """
        at = self.pairs.find(windows, keys)
        known = at >= 0
        at = at[known]
        taken = usual.copy()
        explicit = self._next[at] != UNKNOWN
        taken[np.flatnonzero(known)[explicit]] = self._next[at[explicit]]
        self._next[at] = taken[known] + 1
        self._waits[at], self._unsent[at] = False, 0
        return taken

    def ending(self, windows: IntArray, keys: IntArray) -> Mask:
        """Return of which windows that close now something waits: without full results that is sent, as early."""
        if self._progress.full_off:
            return np.ones(len(windows), np.bool_)
        at = self.pairs.find(windows, keys)
        waited: Mask = (at >= 0) & np.append(self._ends, False)[at]
        return waited

    def full(self, windows: IntArray, keys: IntArray) -> IntArray:
        """Give the revisions of results at windows' ends; later updates of the same windows go on waiting."""
        waits = self._waits.copy()
        taken = self.take(windows, keys, np.zeros(len(windows), np.int64))
        self._waits = waits
        if self._policies.full:
            at = self.pairs.find(windows, keys)
            self._next[at[(at >= 0) & (taken == 0)]] = UNKNOWN  # sent once, as usual
        return taken

    def open(self, windows: IntArray, keys: IntArray) -> IntArray:
        """Return the revisions of results of open windows that are sent whether they wait or not."""
        return self.take(windows, keys, np.zeros(len(windows), np.int64))

    def anew(self, windows: IntArray, keys: IntArray) -> None:
        """Count the revisions of windows of which a result was just sent from it on."""
        self._next[self.pairs.find(windows, keys)] = 1

    def remember(
        self, space: KeySpace, starts: IntArray, windows: IntArray, keys: IntArray, following: IntArray
    ) -> None:
        """Keep the next revision of windows that were sent while open, or at their end but not in full, unasked."""
        new = self.pairs.find(windows, keys) < 0
        none = np.zeros(int(new.sum()), np.int64)
        encoded = space.keys.take(pa.array(keys[new]))
        self._extra.append(Revisions(starts[new], encoded, following[new], none > 0, none, none))

    def store(self, work: Workspace, space: KeySpace, starts: Callable[[IntArray], IntArray]) -> None:
        """Write what changed and differs from the usual, of windows still in retention; `starts` gives their starts."""
        if not len(self.pairs) and not self._extra:
            return
        alive = self.pairs.window > self._progress.gone_after
        usual = (self._next == UNKNOWN) & ~self._waits
        changed = self._rows.changed(self._stored, self._next, self._waits, self._since, self._unsent)
        remaining, dropped = alive & ~usual & changed, alive & usual & (self._stored >= 0)
        now, over = (self._of(rows, space.keys, starts(self.pairs.window[rows])) for rows in (remaining, dropped))
        revisions.put(work, Revisions.concat([now, *self._extra]))
        if len(over):
            revisions.delete(work, over)

    def changes(
        self, keys: pa.Array, starts: Callable[[IntArray, IntArray], IntArray], moved: Mask
    ) -> tuple[Revisions, Revisions]:
        """Give the stored rows that change or go, of windows that are gone too, and those that take their place.

        Args:
            keys: Encoded group keys by number.
            starts: Gives the starts in the keys of rows, of windows and key numbers.
            moved: Per key number, whether its stored rows have other starts.
        """
        window, key = self.pairs.window, self.pairs.key
        stays = (window > self._progress.gone_after) & ((self._next != UNKNOWN) | self._waits)
        self._next = np.maximum(self._next, 0)  # what waits and was never sent
        changed = self._rows.changed(self._stored, self._next, self._waits, self._since, self._unsent)
        changed |= moved[key] | ~stays
        old = np.zeros(len(self._rows), np.bool_)
        old[self._stored[changed & (self._stored >= 0)]] = True
        fresh = changed & stays
        return self._rows.where(old), self._of(fresh, keys, starts(window[fresh], key[fresh]))

    def _of(self, pairs: Mask, keys: pa.Array, starts: IntArray) -> Revisions:
        return Revisions(
            starts,
            keys.take(pa.array(self.pairs.key[pairs])),
            self._next[pairs],
            self._waits[pairs],
            self._since[pairs],
            self._unsent[pairs],
        )

    def due_ms(self) -> int | None:
        """Give the batch time at which the first of what still waits is to be sent."""
        if not self._waits.any():
            return None
        waits = self._waits & (self.pairs.window > self._progress.gone_after)
        past = self.pairs.window <= self._progress.closed_after
        times: list[int] = []
        for here, period in ((past, self._policies.late_ms), (~past, self._policies.early_ms)):
            rows = waits & here
            if period is not None and rows.any():
                times.append(int(self._since[rows].min()) + period)
        return min(times, default=None)
