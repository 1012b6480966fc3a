"""Session stores against a plain dict, and the session processor against clustering all records at once."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.store.memory import MemoryStore
from backend.store.workspace import Workspace
from backend.stores.session_store import SessionKey, SessionOptions, SessionStore
from backend.stores.session_windows import SessionWindows, aggregate
from backend.stores.standalone import StoreSet

KEYS = st.sampled_from(["", "user_1", "user_12", "user_2", "a\0"])
TIMES = st.integers(-60, 150)
SPANS = st.tuples(TIMES, TIMES).map(sorted)
VALUES = st.one_of(st.none(), st.integers(-3, 3), st.sampled_from(["", False]))
RETENTIONS = st.sampled_from([0, 7, 30, 1_000])
Session = tuple[str, int, int]


class Model:
    """Every session that is kept; what is visible is found by looking at each."""

    def __init__(self, retention: int) -> None:
        self.retention = retention
        self.sessions: dict[Session, Any] = {}
        self.newest: int | None = None
        self.oldest: int | None = None  # ends before this have been invisible once
        self.dropped = 0

    def see(self, end: int) -> None:
        self.newest = end if self.newest is None else max(self.newest, end)
        self.forget()

    def forget(self) -> None:
        if self.newest is not None:
            oldest = self.newest - self.retention
            self.oldest = oldest if self.oldest is None else max(self.oldest, oldest)
            self.sessions = {key: value for key, value in self.sessions.items() if key[2] >= self.oldest}

    def put(self, session: Session, value: Any) -> bool:
        if self.oldest is not None and session[2] < self.oldest:
            self.dropped += 1
            return False
        self.sessions.pop(session, None)
        if value is not None:
            self.sessions[session] = value
        self.see(session[2])
        return True

    def rows(self) -> list[tuple[Session, Any]]:
        return sorted(self.sessions.items(), key=lambda row: (row[0][2], row[0][0], row[0][1]))


def _rows(found: Iterator[tuple[SessionKey, Any]]) -> list[tuple[Session, Any]]:
    return [((key.key, key.start, key.end), value) for key, value in found]


class SessionStoreMachine(RuleBasedStateMachine):
    """Over the dict twin."""

    @initialize(retention=RETENTIONS, segments=st.integers(2, 6), shortest=st.sampled_from([1, 10, 60_000]))
    def begin(self, retention: int, segments: int, shortest: int) -> None:
        self.shape = (segments, shortest)
        self.options = SessionOptions("s", retention, *self.shape)
        self.snapshots: list[tuple[Any, list[Any]]] = []
        self.model = Model(retention)
        self.committed = copy.deepcopy(self.model)
        self.make()

    def make(self) -> None:
        self.base = MemoryStore()
        self.open()

    def open(self) -> None:
        self.stores = StoreSet(self.base, [self.options])
        self.store: Any = self.stores["s"]

    def end_process(self) -> None:
        """Crash: what was not flushed is in no one's hands any more."""

    @rule(key=KEYS, span=SPANS, value=VALUES)
    def put(self, key: str, span: list[int], value: Any) -> None:
        assert self.store.put(SessionKey(key, *span), value) is self.model.put((key, *span), value)  # type: ignore[arg-type]

    @rule(key=KEYS, span=SPANS)
    def remove(self, key: str, span: list[int]) -> None:
        self.store.remove(SessionKey(key, *span))
        self.model.sessions.pop((key, *span), None)  # type: ignore[arg-type]
        self.model.see(span[1])

    @precondition(lambda self: self.model.sessions)
    @rule(number=st.integers(0, 99), again=st.booleans())
    def remove_known(self, number: int, again: bool) -> None:
        session, value = self.model.rows()[number % len(self.model.sessions)]
        self.store.remove(SessionKey(*session))
        del self.model.sessions[session]
        if again:
            assert self.store.put(SessionKey(*session), value) is self.model.put(session, value)

    @rule(key=KEYS, earliest=TIMES, latest=TIMES, backward=st.booleans())
    def find(self, key: str, earliest: int, latest: int, backward: bool) -> None:
        rows = [row for row in self.model.rows() if row[0][0] == key and row[0][2] >= earliest and row[0][1] <= latest]
        assert _rows(self.store.find(key, earliest, latest, backward=backward)) == (rows[::-1] if backward else rows)

    @rule(first=st.none() | KEYS, last=st.none() | KEYS, earliest=TIMES, latest=TIMES, backward=st.booleans())
    def find_range(self, first: str | None, last: str | None, earliest: int, latest: int, backward: bool) -> None:
        rows = [
            row
            for row in self.model.rows()
            if (first is None or row[0][0] >= first)
            and (last is None or row[0][0] < last)
            and row[0][2] >= earliest
            and row[0][1] <= latest
        ]
        found = self.store.find_range(first, last, earliest, latest, backward=backward)
        assert _rows(found) == (rows[::-1] if backward else rows)

    @rule(low=st.none() | TIMES, high=st.none() | TIMES, backward=st.booleans(), read=st.integers(0, 2))
    def by_end(self, low: int | None, high: int | None, backward: bool, read: int) -> None:
        expected = [
            row for row in self.model.rows() if (low is None or row[0][2] >= low) and (high is None or row[0][2] < high)
        ]
        expected = expected[::-1] if backward else expected
        found = self.store.fetch_by_end(low, high, backward=backward)
        for _ in range(min(read, len(expected))):
            assert _rows(iter([next(found)])) == [expected.pop(0)]
        self.snapshots.append((found, expected))

    @precondition(lambda self: self.snapshots)
    @rule()
    def read_snapshot(self) -> None:
        found, expected = self.snapshots.pop(0)
        assert _rows(found) == expected

    @rule(key=KEYS, span=SPANS)
    def fetch_session(self, key: str, span: list[int]) -> None:
        assert self.store.fetch_session(key, *span) == self.model.sessions.get((key, *span))  # type: ignore[call-overload]

    @rule()
    def flush(self) -> None:
        self.store.flush()
        self.committed = copy.deepcopy(self.model)

    @rule(retention=RETENTIONS, flush=st.booleans())
    def start_again(self, retention: int, flush: bool) -> None:
        if flush:
            self.flush()
        self.end_process()
        self.snapshots.clear()
        self.model = copy.deepcopy(self.committed)
        self.model.retention = retention
        self.model.forget()
        self.options = SessionOptions("s", retention, *self.shape)
        self.open()

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "store"):
            return
        rows = self.model.rows()
        assert _rows(self.store.all()) == rows
        for key in {session[0] for session, _ in rows}:
            assert _rows(self.store.fetch(key)) == [row for row in rows if row[0][0] == key]
        assert self.store.dropped == self.model.dropped
        assert self.model.newest is None or self.store.stream_time == self.model.newest


class RocksMachine(SessionStoreMachine):
    """The same on disk."""

    def make(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="session-store-"))
        self.open()

    def open(self) -> None:
        self.store = SessionStore.open(
            self.path / "store",
            name="s",
            retention=self.options.retention_ms,
            num_segments=self.shape[0],
            min_segment_interval=self.shape[1],
        )

    def end_process(self) -> None:
        self.store.close(flush=False)

    def teardown(self) -> None:
        if hasattr(self, "path"):
            self.store.close(flush=False)
            shutil.rmtree(self.path)


TestPersistent = SessionStoreMachine.TestCase
TestPersistent.settings = settings(max_examples=40, stateful_step_count=30)
TestOnDisk = RocksMachine.TestCase
TestOnDisk.settings = settings(max_examples=6, stateful_step_count=25)


@settings(max_examples=60)
@given(
    records=st.lists(st.tuples(st.sampled_from(["a", "ab"]), st.integers(-40, 40)), max_size=20),
    gap=st.integers(1, 8),
    cuts=st.sets(st.integers(0, 20)),
)
def test_sessions_are_the_clusters_of_all_records_whatever_their_order(
    records: list[tuple[str, int]], gap: int, cuts: set[int]
) -> None:
    base = MemoryStore()
    windows = SessionWindows.inactivity_gap(gap).until(1_000)
    sessions = aggregate(
        list, lambda _k, value, so_far: [*so_far, value], lambda _k, one, two: one + two, windows, "sessions"
    )
    stores = StoreSet(base, [sessions.store])
    table: dict[SessionKey, Any] = {}
    for number, (key, time) in enumerate(records):
        if number in cuts:  # a restart between two records
            stores.flush()
            stores = StoreSet(base, [sessions.store])
        retracting = True
        for update in sessions.processor(stores["sessions"]).process(key, number, time):  # type: ignore[arg-type]
            if update.value is None:
                assert retracting, "a session was retracted after the new one was emitted"
                del table[update.session]
            else:
                retracting = False
                table[update.session] = sorted(update.value)
    assert table == _clusters(records, gap)
    found = {key: sorted(value) for key, value in stores["sessions"].all()}  # type: ignore[attr-defined]
    assert found == table


def _clusters(records: list[tuple[str, int]], gap: int) -> dict[Session, list[int]]:
    clusters: dict[Session, list[int]] = {}
    for key in {key for key, _ in records}:
        mine = sorted((time, number) for number, (of, time) in enumerate(records) if of == key)
        group: list[tuple[int, int]] = []
        for time, number in [*mine, (10**6, -1)]:
            if group and time - group[-1][0] > gap:
                clusters[(key, group[0][0], group[-1][0])] = sorted(number for _, number in group)
                group = []
            group.append((time, number))
    return clusters


def test_the_oracle_clusters_by_hand() -> None:
    assert _clusters([("a", 10), ("a", 15), ("b", 12), ("a", 21)], 5) == {
        ("a", 10, 15): [0, 1],
        ("a", 21, 21): [3],
        ("b", 12, 12): [2],
    }


def test_workspaces_are_where_it_all_goes() -> None:
    work = Workspace(MemoryStore())
    SessionOptions("s", 10).bind(work, 0x41, 0).put(SessionKey("a", 1, 2), 1)
    assert {key[0] for key in work.changes().keys} == {0x41}
