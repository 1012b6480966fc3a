"""What a task tells of how it came by its state: written down there, told to the listeners in the driver.

Listeners live in the driver, and a shard that moves is fetched inside a task. So the task writes each try down, the
micro-batch's metrics carry it (`MOVES`, JSON), and the supervisor tells the listeners once the micro-batch is
published. Tries of an attempt that failed are in the text of its error instead.

A try: `{"shard", "commit", "why", "how"}`, and `{"failed"}` or `{"length", "seconds"}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from recovery.listener import Listeners, RestoreListener, Restoring

MOVES = "moves"
"""Name among a shard's metrics; absent when nothing was fetched."""
FETCHES = frozenset({"snapshot", "steps"})
"""How a task comes by its state: `Restoring.how`."""
MAX_TRIES = 64
"""A fallback order has no more steps worth telling."""


class Try(msgspec.Struct, frozen=True, omit_defaults=True):
    """One try to come by a shard's state.

    Attributes:
        shard: The shard.
        commit: Name of the commit wanted.
        why: What was found instead of usable state.
        how: As in `Restoring`.
        failed: Why it did not work; empty when it did.
        length: Bytes fetched.
        seconds: How long it took.
    """

    shard: int
    commit: str
    why: str
    how: str
    failed: str = ""
    length: int = 0
    seconds: float = 0.0


class Recorder:
    """Writes down every try that came to an end; one per attempt, not thread-safe."""

    def __init__(self) -> None:
        self.tries: list[Try] = []

    def add(self, one: Try) -> None:
        """Write a try down."""
        if len(self.tries) < MAX_TRIES:
            self.tries.append(one)

    @property
    def failures(self) -> str:
        """Say what failed, for an error's text; empty when nothing did."""
        return "; ".join(f"by {one.how}: {one.failed}" for one in self.tries if one.failed)

    def metrics(self) -> dict[str, str]:
        """Give the tries as a metric; empty when there were none."""
        return {MOVES: msgspec.json.encode(self.tries).decode()} if self.tries else {}


def moves(metrics: Mapping[str, Any]) -> list[Try]:
    """Give the tries among a shard's metrics, in order."""
    text = metrics.get(MOVES)
    return msgspec.json.decode(text, type=list[Try]) if text else []


def relay(tries: Iterable[Try], listeners: Iterable[RestoreListener]) -> None:
    """Tell listeners of tries that a task made: a start and how it ended, each."""
    watch = Listeners(listeners)
    for one in tries:
        restoring = Restoring(one.shard, one.commit, one.why, one.how)
        watch.start(restoring)
        if one.failed:
            watch.suspended(restoring, one.failed)
        else:
            watch.end(restoring, 0, one.length, one.seconds)
