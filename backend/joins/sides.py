"""The two sides of a join, and how long their messages can be joined.

Joins by time go by event time, joins by number by the number of a message in its source partition, from the partition's
first offset on; so the streams are aligned by their first offsets. Either is called the *place in time* `at` here. The
clock of a message is the newest event time of its source partition before it, or its own number. A message can be
joined by a message of the other side while `expiry(at) > clock` of that one; and the same the other way round, so it
does not matter which comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from backend.batch import NO_TIME
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.definitions import Grid, Window

FOREVER = 2**63 - 1
LEFT, RIGHT = 0, 1
SIDES = ("left", "right")


@dataclass(frozen=True)
class Side:
    """One side of a join.

    Attributes:
        number: `LEFT` or `RIGHT`.
        schema: The messages' own fields.
        on: The equal fields, in the order of the other side's.
        out: Fields that come out, in the order of the schema.
        window: Its windows; None is one unbounded window.
        retention_ms: See `join_spec`; None for none.
        retention_messages: See `join_spec`; None for none.
        outer: Rows without a partner come out, too.
        by_number: Windows and retention of both sides are measured by number of messages; by event time otherwise.
    """

    number: int
    schema: pa.Schema
    on: tuple[str, ...]
    out: tuple[str, ...]
    window: Window | None
    retention_ms: int | None
    retention_messages: int | None
    outer: bool
    by_number: bool

    @property
    def name(self) -> str:
        """`left` or `right`."""
        return SIDES[self.number]

    @property
    def fields(self) -> list[pa.Field]:
        """The fields that travel: those that come out and the equal ones; all nullable."""
        return [pa.field(f.name, f.type) for f in self.schema if f.name in self.out or f.name in self.on]

    @property
    def columns(self) -> list[pa.Field]:
        """The columns that the operator's messages have for this side; nullable."""
        return [f.with_name(f"{self.name}.{f.name}") for f in self.fields]

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry."""
        return {
            "on": list(self.on),
            "out": list(self.out),
            "fields": [[f.name, str(f.type)] for f in self.fields],
            "window": None if self.window is None else self.window.describe(),
        }

    @property
    def keep(self) -> int | None:
        """How far behind its window's end a message can be joined; None for ever."""
        return self.retention_messages if self.by_number else self.retention_ms

    @property
    def newest(self) -> int | None:
        """How many of the newest messages can be joined, beside retention by time; None for all."""
        return None if self.by_number else self.retention_messages

    @property
    def grid(self) -> Grid | None:
        """Numbers the windows, where they are of a fixed length."""
        return Grid.of(self.window) if self.window is not None and self.window.step else None

    @property
    def _lag(self) -> int:
        """How far behind each message its window ends, where windows are on no grid.

        A sliding window closes when the clock passes it, a session when the clock passes the gap behind it.
        """
        if self.window is None:
            return 0
        return 1 + (self.window.size if self.window.kind == "session" else 0)

    def ends(self, at: IntArray) -> IntArray:
        """Give the first clock at which the first window of each message is over; without a window, `at` itself."""
        grid = self.grid
        return at + self._lag if grid is None else grid.ends(grid.last_ended(at) + 1)

    def expiry(self, at: IntArray) -> IntArray:
        """Give the first clock of the other side at which each message cannot be joined any more."""
        return np.full(len(at), FOREVER, np.int64) if self.keep is None else self.ends(at) + self.keep

    def first_alive(self, clock: int) -> int:
        """Give the smallest `at` that a clock of the other side leaves alive; `NO_TIME` when all are."""
        if self.keep is None or clock == NO_TIME:
            return NO_TIME
        passed, grid = clock - self.keep, self.grid
        return passed + 1 - self._lag if grid is None else grid.start(grid.last_ended_at(passed)) + grid.size

    def late(self, at: IntArray, clock: IntArray) -> Mask:
        """Tell which messages came after the end of their window; without a window none does."""
        return np.zeros(len(at), np.bool_) if self.window is None else self.ends(at) <= clock
