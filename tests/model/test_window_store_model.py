"""Window stores against a plain list: restarts, crashes, changed retentions and snapshots as rules."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.store.memory import MemoryStore
from backend.stores.memory_window_store import InMemoryWindowStore
from backend.stores.standalone import StoreSet
from backend.stores.window_store import Windowed, WindowOptions, WindowStore

SIZE = 5
KEYS = st.sampled_from(["", "user_1", "user_12", "user_2", "a\0", "a\0b", "\U0010ffff"])
STARTS = st.integers(-60, 120)
VALUES = st.one_of(st.none(), st.integers(-3, 3), st.sampled_from(["", False, "x"]))
ENDS = st.one_of(st.none(), STARTS)


class Model:
    """All rows that were ever put, in order; what is visible is found by looking at each."""

    def __init__(self, retention: int, grace: int, duplicates: bool) -> None:
        self.retention, self.grace, self.duplicates = retention, grace, duplicates
        self.rows: list[tuple[int, str, Any]] = []
        self.newest: int | None = None
        self.gone: int | None = None  # starts up to here have been invisible once
        self.dropped = 0

    def put(self, key: str, value: Any, start: int) -> bool:
        newest = start if self.newest is None else max(self.newest, start)
        late = start <= newest - self.grace or (self.gone is not None and start <= self.gone)
        if late and start != newest:
            self.dropped += 1
            return False
        self.newest = newest
        if not self.duplicates:
            self.rows = [row for row in self.rows if row[:2] != (start, key)]
        if value is not None:
            self.rows.append((start, key, value))
        self.forget()
        return True

    def forget(self) -> None:
        if self.newest is not None:
            gone = self.newest - self.retention
            self.gone = gone if self.gone is None else max(self.gone, gone)
            self.rows = [row for row in self.rows if row[0] > self.gone]

    def visible(self) -> list[tuple[int, str, Any]]:
        return sorted(self.rows, key=lambda row: row[:2])  # stable: duplicates stay in the order of their puts


def _within(value: Any, low: Any, high: Any) -> bool:
    return (low is None or value >= low) and (high is None or value < high)


def _rows(found: Iterator[tuple[Windowed, Any]]) -> list[tuple[int, str, Any]]:
    return [(row.start, row.key, value) for row, value in found]


class WindowStoreMachine(RuleBasedStateMachine):
    """The rules that every window store follows."""

    store: Any
    model: Model

    def start(self, options: WindowOptions) -> None:
        self.store = InMemoryWindowStore(options)

    @initialize(
        retention=st.sampled_from([0, 5, 20, 1_000]), grace=st.sampled_from([0, 1, 5, 20]), duplicates=st.booleans()
    )
    def begin(self, retention: int, grace: int, duplicates: bool) -> None:
        grace = min(grace, retention)
        self.snapshots: list[tuple[Any, list[Any]]] = []
        self.model = Model(retention, grace, duplicates)
        self.start(WindowOptions("w", retention, min(SIZE, retention), grace, duplicates))

    @rule(key=KEYS, value=VALUES, start=STARTS)
    def put(self, key: str, value: Any, start: int) -> None:
        assert self.store.put(key, value, start) is self.model.put(key, value, start)

    @rule(key=KEYS, start=STARTS)
    def fetch_one(self, key: str, start: int) -> None:
        values = [value for at, of, value in self.model.visible() if (at, of) == (start, key)]
        assert self.store.fetch_one(key, start) == (values[-1] if values else None)

    @rule(key=KEYS, low=ENDS, high=ENDS, backward=st.booleans())
    def fetch(self, key: str, low: int | None, high: int | None, backward: bool) -> None:
        rows = [(at, value) for at, of, value in self.model.visible() if of == key and _within(at, low, high)]
        assert list(self.store.fetch(key, low, high, backward=backward)) == (rows[::-1] if backward else rows)

    @rule(first=st.none() | KEYS, last=st.none() | KEYS, low=ENDS, high=ENDS, backward=st.booleans())
    def fetch_range(
        self, first: str | None, last: str | None, low: int | None, high: int | None, backward: bool
    ) -> None:
        rows = [row for row in self.model.visible() if _within(row[1], first, last) and _within(row[0], low, high)]
        found = self.store.fetch_range(first, last, low, high, backward=backward)
        assert _rows(found) == (rows[::-1] if backward else rows)

    @rule(low=ENDS, high=ENDS, read=st.integers(0, 2))
    def take_snapshot(self, low: int | None, high: int | None, read: int) -> None:
        rows = self.store.fetch_all(low, high)
        expected = [row for row in self.model.visible() if _within(row[0], low, high)]
        for _ in range(min(read, len(expected))):
            row, value = next(rows)
            assert (row.start, row.key, value) == expected.pop(0)
        self.snapshots.append((rows, expected))

    @precondition(lambda self: self.snapshots)
    @rule()
    def read_snapshot(self) -> None:
        rows, expected = self.snapshots.pop(0)
        assert _rows(rows) == expected

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "model"):
            return
        rows = self.model.visible()
        assert _rows(self.store.all()) == rows
        assert _rows(self.store.all(backward=True)) == rows[::-1]
        assert self.store.dropped == self.model.dropped
        assert self.model.newest is None or self.store.stream_time == self.model.newest


class PersistentMachine(WindowStoreMachine):
    """Restarts beside the rules of all; over the dict twin, so that many examples fit."""

    stores: StoreSet

    def start(self, options: WindowOptions) -> None:
        self.options = options
        self.make()
        self.committed = copy.deepcopy(self.model)

    def make(self) -> None:
        self.base = MemoryStore()
        self.open()

    def open(self) -> None:
        self.stores = StoreSet(self.base, [self.options])
        self.store = self.stores["w"]

    @rule()
    def flush(self) -> None:
        self.store.flush()
        self.committed = copy.deepcopy(self.model)

    @rule(retention=st.sampled_from([0, 5, 20, 1_000]), flush=st.booleans())
    def start_again(self, retention: int, flush: bool) -> None:
        if flush:
            self.flush()
        self.end_process()
        self.snapshots.clear()
        self.model = copy.deepcopy(self.committed)
        model = self.model
        model.retention, model.grace = retention, min(model.grace, retention)
        model.forget()
        self.options = WindowOptions("w", retention, min(SIZE, retention), model.grace, model.duplicates)
        self.open()

    def end_process(self) -> None:
        """Crash: what was not flushed is in no one's hands any more."""


class RocksMachine(PersistentMachine):
    """The same on disk."""

    def make(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="window-store-"))
        self.open()

    def open(self) -> None:
        self.store = WindowStore.open(
            self.path / "store",
            name="w",
            retention=self.options.retention_ms,
            window_size=self.options.window_size_ms,
            grace=self.options.grace_ms,
            retain_duplicates=self.options.retain_duplicates,
        )

    def end_process(self) -> None:
        self.store.close(flush=False)

    def teardown(self) -> None:
        if hasattr(self, "path"):
            self.store.close(flush=False)
            shutil.rmtree(self.path)


TestInMemory = WindowStoreMachine.TestCase
TestInMemory.settings = settings(max_examples=25, stateful_step_count=30)
TestPersistent = PersistentMachine.TestCase
TestPersistent.settings = settings(max_examples=40, stateful_step_count=30)
TestOnDisk = RocksMachine.TestCase
TestOnDisk.settings = settings(max_examples=8, stateful_step_count=25)
