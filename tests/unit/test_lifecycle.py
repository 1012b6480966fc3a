"""Every hand on a running query at every moment of its life, alone and in pairs: nothing runs on or waits for ever.

A query of two starts (the first fails for state, which is restored) with a thread of Spark's that publishes, and a
`stop` that waits for it, as Spark's does. At a *moment* the life stands still until a hand has begun its work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest

from backend.errors import CheckpointTaken, QueryStopped, StateUnavailable
from recovery.commit.lease import Lease
from recovery.listener import Listeners, Restoring
from recovery.snapshots.publisher import Snapshots
from recovery.supervise import patience, supervisor
from recovery.supervise.housekeeping import Housekeeping
from recovery.supervise.supervisor import QueryPlan, RewindQuery

PATIENCE_S = 20
MOMENTS = ("running 1", "publishing 0", "restoring", "listening", "launching", "running 2", "publishing 1", "stopping")
INSIDE = ("publishing 0", "listening", "publishing 1")
"""Moments at which the user's own code runs, called by us."""


class MessagesByKey:
    """A lease that counts."""

    def __init__(self) -> None:
        self.lost: CheckpointTaken | None = None
        self.released = 0

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def release(self) -> None:
        self.released += 1


class SparkQuery:
    """One of Spark's queries: publishes one micro-batch in a thread of its own; then fails, or runs until stopped."""

    lastProgress = None  # noqa: N815 - Spark's name

    def __init__(self, life: Life, number: int, publish: Callable[[Any, int], None]) -> None:
        self._life, self._number, self._publish = life, number, publish
        self._stopped = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._stream, daemon=True)
        self._thread.start()

    @property
    def isActive(self) -> bool:
        self._life.moment(f"running {self._number}")
        return self.runs

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def exception(self) -> Exception | None:
        return self._failure

    def stop(self) -> None:
        self._life.moment("stopping")
        self._stopped.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "Spark waits for its thread, which waits for the caller"

    def _stream(self) -> None:
        self._life.ready.wait(PATIENCE_S)
        try:
            self._publish(None, self._number - 1)
        except Exception as error:
            self._failure = error
            return
        if self._number == 1:
            self._failure = StateUnavailable("no local state", where="shard 0")
        else:
            self._stopped.wait(PATIENCE_S)


class Life:
    """The query's life, and the hands that touch it: (moment, what, whether by the thread that is there then)."""

    def __init__(self, hands: list[tuple[str, str, bool]], *, bounded: bool = False) -> None:
        self.hands, self.queries, self.drains = hands, list[SparkQuery](), 0
        self.ready, self.lease = threading.Event(), MessagesByKey()
        self.at: dict[str, threading.Event] = {moment: threading.Event() for moment in MOMENTS}
        self.done: list[str] = []
        self.threads: list[threading.Thread] = []
        self.started_after_stop = False
        self.stopped = self.ran_on = False
        plan = QueryPlan(
            checkpoint="checkpoint",
            start_query=self._launch,  # type: ignore[arg-type]
            publish=self._publish,
            restore=self._restore,
            drain=self._drain,
            drain_of=lambda version: self.drains,
            housekeeping=Housekeeping(None, Snapshots("memory://lifecycle"), 100),  # type: ignore[arg-type]
            shards=1,
            targets=({("t", 0): 9},) if bounded else None,
            lease=self.lease,  # type: ignore[arg-type]
        )
        self.handle = RewindQuery(plan)
        self.ready.set()

    def moment(self, name: str) -> None:
        if name not in self.at or self.at[name].is_set():
            return
        self.at[name].set()
        self.ready.wait(PATIENCE_S)
        for number, (moment, what, inside) in enumerate(self.hands):
            if moment == name:
                if inside:
                    self._touch(number, what)
                else:
                    thread = threading.Thread(target=self._touch, args=(number, what), daemon=True)
                    self.threads.append(thread)
                    thread.start()
                    if what == "stop":
                        assert self.handle._stopping.wait(PATIENCE_S)
                    elif what != "await":
                        thread.join(0.05)

    def _touch(self, number: int, what: str) -> None:
        handle = self.handle
        if what == "stop":
            handle.stop()
            if not self.hands[number][2]:
                self.stopped = True
                self.ran_on |= any(query.runs for query in self.queries)
        elif what == "drain":
            try:
                handle.drain()
            except QueryStopped:
                assert handle._stopping.is_set()
        elif what == "await":
            handle.await_termination(PATIENCE_S)
        elif what == "await a moment":
            handle.await_termination(0.001)
        elif what == "Spark's stop":
            handle.query.stop()
        elif what == "taken":
            self.lease.lost = CheckpointTaken("taken over")
        self.done.append(what)

    def _launch(self, publish: Callable[[Any, int], None]) -> SparkQuery:
        if self.queries:
            self.moment("launching")
        self.started_after_stop |= self.stopped
        self.queries.append(SparkQuery(self, len(self.queries) + 1, publish))
        return self.queries[-1]

    def _publish(self, frames: Any, version: int) -> list[dict[str, Any]]:
        self.moment(f"publishing {version}")
        return []

    def _restore(self, why: str) -> int:
        self.moment("restoring")
        told = threading.Thread(target=Listeners([Hearing(self)]).start, args=(Restoring(0, "c", why, "replay"),))
        told.start()  # as the thread that follows a replay's progress does
        told.join(PATIENCE_S)
        assert not told.is_alive()
        return 1

    def _drain(self) -> int:
        self.drains += 1
        return self.drains


class Hearing:
    """A listener of the user's."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def start(self, restoring: Restoring) -> None:
        self._life.moment("listening")

    batch = suspended = end = start


@contextmanager
def lived(hands: list[tuple[str, str, bool]], *, bounded: bool = False) -> Iterator[Life]:
    """Live until something ends the query, by `stop` at last; then see that nothing of it is left."""
    life = Life(hands, bounded=bounded)
    if not any(what in ("stop", "taken", "Spark's stop") and moment != "stopping" for moment, what, _ in hands):
        assert life.at["publishing 1"].wait(PATIENCE_S)
        assert life.at["running 2"].wait(PATIENCE_S)
    else:
        life.handle._done.wait(0.2)
    stopper = threading.Thread(target=life.handle.stop, daemon=True)
    stopper.start()
    stopper.join(PATIENCE_S)
    assert not stopper.is_alive(), "stop() waits for ever"
    for thread in life.threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a hand is held for ever"
    assert not life.handle.is_active
    assert [query.runs for query in life.queries] == [False] * len(life.queries), "Spark's query runs on"
    assert not life.ran_on, "stop() returned while Spark's query ran"
    assert not life.started_after_stop
    assert life.lease.released == 1
    yield life


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "POLL_S", 0.001)
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.0)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("what", ["stop", "drain", "await", "await a moment", "Spark's stop", "taken"])
def test_one_hand_at_each_moment(moment: str, what: str) -> None:
    with lived([(moment, what, False)]) as life:
        assert what in life.done
        if what == "taken" and moment != "stopping":
            assert isinstance(life.handle.exception, CheckpointTaken)
        elif what != "taken":
            assert life.handle.exception is None


@pytest.mark.parametrize("moment", INSIDE)
def test_a_listener_or_a_sink_may_stop_the_query_it_is_called_by(moment: str) -> None:
    with lived([(moment, "stop", True), (moment, "drain", True)]) as life:
        assert life.done == ["stop", "drain"], "and what is asked after it is refused"
        assert life.drains == 0


@pytest.mark.parametrize("moment", INSIDE)
def test_who_is_waited_for_cannot_wait(moment: str) -> None:
    caught: list[BaseException] = []

    class Impatient(Life):
        def _touch(self, number: int, what: str) -> None:
            try:
                super()._touch(number, what)
            except RuntimeError as error:
                caught.append(error)

    life = Impatient([(moment, "await", True)])
    assert life.at[moment].wait(PATIENCE_S)
    assert life.at["running 2"].wait(PATIENCE_S) or moment != "publishing 1"
    life.handle.stop()
    assert ["await_termination" in str(error) for error in caught] == [True]


@pytest.mark.slow
def test_every_pair_of_hands_at_every_pair_of_moments() -> None:
    hands = [(moment, what, False) for moment, what in product(MOMENTS, ("stop", "drain", "await a moment"))]
    hands += [(moment, "stop", True) for moment in INSIDE]
    pairs = 0
    for one, other in product(hands, hands):
        if "stop" in (one[1], other[1]):
            with lived([one, other]) as life:
                assert life.handle.exception is None
            pairs += 1
    assert pairs == 11 * 27 + 16 * 11


def test_a_bounded_run_that_somebody_else_stopped_did_not_reach_its_end() -> None:
    with lived([("running 2", "Spark's stop", False)], bounded=True) as life:
        assert isinstance(life.handle.exception, QueryStopped)
        with pytest.raises(QueryStopped, match="before the end of its input"):
            life.handle.await_termination(1)


def test_sparks_query_does_not_outlive_a_supervisor_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of our own between two micro-batches ends Spark's query too, and the lease."""

    def fail(query: Any) -> int:
        raise OSError("the disk is gone")

    monkeypatch.setattr(supervisor, "_committed", fail)
    life = Life([])
    with pytest.raises(OSError, match="the disk is gone"):
        life.handle.await_termination(PATIENCE_S)
    assert not any(query.runs for query in life.queries)
    assert life.lease.released == 1


def test_the_fake_lease_has_what_the_supervisor_calls() -> None:
    assert all(callable(getattr(Lease, name)) for name in ("check", "release"))
