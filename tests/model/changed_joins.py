"""What the hunt with changed options plays of joins: two disorderly streams, side by side with the oracle."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from backend.joins.operator import JoinOperator
from backend.joins.spec import JoinSpec, join_spec
from backend.windows.definitions import hopping, session, sliding, tumbling
from tests.model.join_driver import SCHEMA, JoinDriver
from tests.model.test_join_model import FIRST, RANGES, judged
from tests.oracle.joins import JoinOracle, Pair
from tests.oracle.windows import Message, Source

STEPS = (0, 0, 1, 1, 2, 3, 5, 8, 13, 30, -1, -2, -3, -5, -8, -20)
LAGS = ((0, 0), (0, 0), (0, 4), (4, 0), (0, 12), (12, 0), (0, 60), (60, 0))
"""How far the streams are behind."""
PAUSES = (0, 1, 5, 12, 45)
BY_TIME = (None, None, None, tumbling(6, origin=1), tumbling(10), hopping(9, 3), hopping(10, 4), sliding(5), session(4))
BY_NUMBER = (tumbling(messages=3), hopping(messages=4, every=2), sliding(messages=3), session(messages=2), None)
SIDES = ("left", "right")


def changed(spec: JoinSpec, options: Mapping[str, Any]) -> JoinSpec:
    """Give a join with other options; those of a side are named `left_retention_ms` and so on."""
    rest = {name: value for name, value in options.items() if not name.startswith(SIDES)}
    for side in SIDES:
        own = {name.removeprefix(f"{side}_"): value for name, value in options.items() if name.startswith(side)}
        rest[side] = replace(getattr(spec, side), **own)
    return replace(spec, **rest)


def join_of(rng: random.Random, options: Mapping[str, Any], *, by_number: bool) -> JoinSpec:
    """Make a job."""
    on, within = rng.choice([(on, r) for on in (None, "k") for r in RANGES if on or r])
    kinds = BY_NUMBER if by_number else BY_TIME
    allowed = [window for window in kinds if on or window is None or window.kind != "session"]
    pairs = [(left, right) for left in allowed for right in allowed if left or right or not by_number]
    kept = (
        {f"{side}_retention_messages": 1 for side in SIDES}
        if by_number
        else {"left_retention": 1, "right_retention": 1}
    )
    left, right = rng.choice(pairs)
    spec = join_spec(
        SCHEMA,
        SCHEMA,
        on=on,
        within=within,
        how=rng.choice(("inner", "left", "right", "outer", "outer")),
        left_window=left,
        right_window=right,
        message_key=rng.choice(("auto", "join_fields")) if on else "auto",
        first_offsets=FIRST,
        **kept,
    )
    return changed(spec, options)


def streams_of(rng: random.Random, partitions: int) -> list[Message]:
    """Make two streams as they are read."""
    newest, lags, messages = 0, rng.choice(LAGS), []
    offsets: dict[Source, int] = {}
    for _ in range(rng.randint(8, 36)):
        side, partition = rng.randrange(2), rng.randrange(partitions)
        time = newest + rng.choice(STEPS)
        newest = max(newest, time)
        offset = offsets.get((side, partition), 10 * side - 1) + rng.choice((1, 1, 1, 3))
        offsets[side, partition] = offset
        messages.append(Message(offset, time - lags[side], {"k": rng.choice((1, 2, 3, None))}, partition, side))
    return messages


class JoinRun:
    """A run of a join.

    Args:
        rng: Decides everything.
        spec: The job as it begins.
        names: The options that may change.
    """

    def __init__(self, rng: random.Random, spec: JoinSpec, names: Sequence[str]) -> None:
        self.rng, self.spec, self.names = rng, spec, names
        partitions = 1 if spec.by_number else rng.choice((1, 1, 2))
        self.left, self.given = streams_of(rng, partitions), list[Message]()
        sources = [(side, partition) for side in range(2) for partition in range(partitions)]
        self.wall = rng.choice((0, 5, 30))
        self.judge = JoinOracle(judged(spec), tuple(sources), first_offset=dict(FIRST))
        self.drivers = [JoinDriver(spec, sources) for _ in range(2 if rng.random() < 0.25 else 1)]
        """The one that things befall; perhaps one beside it that they do not."""
        self._tell()
        self.rows: list[Pair] = []
        self.idle = False

    @property
    def options(self) -> Mapping[str, Any]:
        """What may change, as it is now."""
        found = {}
        for name in self.names:
            side, _, own = name.partition("_")
            found[name] = getattr(getattr(self.spec, side), own) if side in SIDES else getattr(self.spec, name)
        return found

    def _tell(self) -> None:
        for driver in self.drivers:
            driver.spec, driver.operator = self.spec, JoinOperator(self.spec)
            driver.max_ahead_ms = self.spec.max_ahead_ms

    def change(self, options: Mapping[str, Any]) -> None:
        """Start the job again with other options."""
        self.spec = changed(self.spec, options)
        self.judge.change(judged(self.spec))
        self._tell()

    def batch(self, crash: str, *, last: bool) -> None:
        """Play the next micro-batch, and what befalls it."""
        ours = self.drivers[0]
        drain = last or crash == "drain"
        if crash == "disk lost before":
            ours.lose_disk()
        take = len(self.left) if last else min(len(self.left), self.rng.choice((0, 1, 2, 3, 5, 8)))
        fresh, self.left = self.left[:take], self.left[take:]
        again = self.rng.sample(self.given, min(len(self.given), self.rng.choice((0, 0, 0, 2))))
        self.given += fresh
        self.wall += self.rng.choice(PAUSES)
        self.idle |= self.spec.idle_after_ms is not None
        known = len(self.judge.errors)
        expected = self.judge.batch([*fresh, *again], self.wall, drain)
        output = ours.batch([*fresh, *again], self.wall, drain=drain, twice=crash == "crash before the commit")
        for plain in self.drivers[1:]:
            plain.batch([*fresh, *again], self.wall, drain=drain)
        assert self.judge.doubt or output.rows == expected
        assert sorted(output.errors) == sorted((e.place, e.reason) for e in self.judge.errors[known:])
        ours.check_restore()
        if crash == "disk lost after":
            ours.lose_disk()
        self.rows += output.rows

    def finish(self) -> None:
        """Check what must hold in the end."""
        assert [row for row, count in Counter((r.left, r.right) for r in self.rows).items() if count > 1] == []
        lonely = {r.left or r.right for r in self.rows if r.reason == "full" and None in (r.left, r.right)}
        met = {place for r in self.rows if None not in (r.left, r.right) for place in (r.left, r.right)}
        if not self.idle:  # a source partition that was idle may still bring a partner
            assert lonely & met == set(), "shown without a partner, and with one"
        for plain in self.drivers[1:]:
            one, two = (driver.shards[0].visible() for driver in (self.drivers[0], plain))
            assert one == two, "another state than without failures"
