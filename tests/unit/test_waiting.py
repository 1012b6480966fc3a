from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import waiting
from tests.support.waiting import Died, WaitedTooLong, ended, until


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that only `sleep` moves."""
    now = [0.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(waiting.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    yield now


def test_the_first_true_value_is_returned(clock: list[float]) -> None:
    values = iter([0, [], "", 7, 8])
    assert until(lambda: next(values), what="a value") == 7
    assert clock[0] == pytest.approx(3 * waiting.LOOK_S)


def test_a_wait_ends_after_its_patience_and_says_what_it_saw(clock: list[float]) -> None:
    with pytest.raises(WaitedTooLong, match=r"rows: not within 2 s; seen last: \[\]"):
        until(list, what="rows", patience_s=2)
    assert 2 < clock[0] < 2.2


def test_a_wait_for_what_has_ended_ends_at_once(clock: list[float]) -> None:
    with pytest.raises(Died, match="rows: it has ended before; seen last: 0"):
        until(lambda: 0, what="rows", alive=lambda: False)
    assert clock[0] == 0
    assert not issubclass(Died, TimeoutError | AssertionError)


def test_what_was_done_just_before_the_end_counts() -> None:
    done: list[int] = []

    def alive() -> bool:
        done.append(1)  # between this question and the next
        return False

    assert until(lambda: done, what="rows", alive=alive) == [1]


class Query:
    def __init__(self, ends: bool) -> None:
        self.ends = ends

    def await_termination(self, timeout_s: float) -> bool:
        assert timeout_s == waiting.PATIENCE_S
        return self.ends


def test_a_query_that_does_not_end_was_waited_for_too_long() -> None:
    ended(Query(True))
    with pytest.raises(WaitedTooLong, match="not ended within 300 s"):
        ended(Query(False))
