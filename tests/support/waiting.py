"""How tests wait: for a condition, with one patience, ended early by the death of what they wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

PATIENCE_S = 300.0
"""For every wait: far more than anything takes, less than a test's limit."""
LOOK_S = 0.02

T = TypeVar("T")


class WaitedTooLong(TimeoutError):
    """What was waited for did not come; the runner of the tests knows it as a failure by time."""


class Died(Exception):
    """What was waited for has ended before it did what was waited for: a wrong answer."""


def until(
    condition: Callable[[], T], *, what: str, alive: Callable[[], object] | None = None, patience_s: float = PATIENCE_S
) -> T:
    """Wait until a condition is true, and return its value.

    Args:
        condition: Asked every 20 ms.
        what: Is waited for; for messages.
        alive: Whether it can still come; asked before the condition, which therefore has the last word.
        patience_s: How long.

    Raises:
        WaitedTooLong: It did not become true; the value seen last is in the message.
        Died: `alive` said no, and the condition was still not true.
    """
    end = time.monotonic() + patience_s
    while True:
        lives = alive is None or alive()
        seen = condition()
        if seen:
            return seen
        if not lives:
            raise Died(f"{what}: it has ended before; seen last: {seen!r}")
        if time.monotonic() > end:
            raise WaitedTooLong(f"{what}: not within {patience_s:g} s; seen last: {seen!r}")
        time.sleep(LOOK_S)


def ended(query: Any, patience_s: float = PATIENCE_S) -> None:
    """Wait until a query has ended by itself; its error is raised.

    Raises:
        WaitedTooLong: It still runs.
    """
    if not query.await_termination(patience_s):
        raise WaitedTooLong(f"{query}: not ended within {patience_s:g} s")
