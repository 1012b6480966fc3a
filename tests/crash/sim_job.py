"""What a simulated query does: its windows, its source and Spark's offset log, all from the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from backend import aggregates as agg
from backend.batch import MAX_EVENT_TIME
from backend.errors import HistoryLost
from backend.windows import definitions as win
from backend.windows.operator import WindowOperator
from backend.windows.policies import Policies
from backend.windows.spec import window_spec
from tests.model.window_driver import SCHEMA
from tests.oracle.windows import Message, Spec

START_MS = 1_000
KINDS = tuple((kind, unit) for kind in ("tumbling", "hopping", "sliding", "session") for unit in ("time", "messages"))

CHANGING = {(kind, "time") for kind in ("tumbling", "hopping", "sliding")}
"""Windows whose options change in the middle."""

FREE: dict[str, tuple[Any, ...]] = {
    "retention_ms": (0, 7, 30, 100),
    "early_ms": (None, 0, 5_000),
    "full": (False, True),
    "late_ms": (None, 0, 10_000),
    "idle_after_ms": (None, 4_000, 60_000),
    "max_ahead_ms": (None, 30),
}
"""What may change between starts, and to what."""

EARLY_MESSAGES = {(None, 0): 3, (5_000, 10_000): 2}
"""(early_ms, late_ms) -> the early policy's number of messages, where it counts them."""


@dataclass
class Planned:
    """A micro-batch in Spark's offset log, and the options that it was planned with."""

    ends: dict[int, int]
    time_ms: int
    drain: bool
    spec: Spec
    operator: WindowOperator


@dataclass
class Source:
    """A topic in memory; offsets below `earliest` are gone."""

    messages: list[list[Message]]
    bad: set[tuple[int, int]]
    earliest: list[int]

    def read(self, starts: dict[int, int], ends: dict[int, int]) -> list[Message]:
        """Give the messages of half-open ranges of offsets."""
        found = []
        for partition, messages in enumerate(self.messages):
            low, high = starts.get(partition, 0), ends.get(partition, 0)
            if low < high and low < self.earliest[partition]:
                raise HistoryLost(f"partition {partition} begins at {self.earliest[partition]}, {low} is asked for")
            found += [m for m in messages if low <= m.offset < high]
        return found


def pieces_of(rng: random.Random, messages: list[Message]) -> list[list[Message]]:
    """Cut the messages into Arrow batches: any number, but each partition's in runs of offsets."""
    pieces: list[list[Message]] = []
    for partition in sorted({m.partition for m in messages}):
        mine = [m for m in messages if m.partition == partition]
        edges = sorted(rng.sample(range(1, len(mine)), min(rng.randint(0, 2), len(mine) - 1))) if len(mine) > 1 else []
        pieces += [mine[low:high] for low, high in zip([0, *edges], [*edges, len(mine)], strict=True)]
    if len(pieces) > 1 and rng.random() < 0.3:  # one Arrow batch may hold slices of several partitions
        first, second = pieces[0], pieces[-1]
        if first[0].partition != second[0].partition:
            pieces = [[*first, *second], *pieces[1:-1]]
    return pieces


def written_ms(message: Message) -> int | None:
    """Give a message's own timestamp, milliseconds: some have none, or an unknown one, a few one that refuses them."""
    kind = (message.offset * 7 + message.partition) % 12
    if kind < 6:
        return -1 if kind == 5 else None
    return message.time - (0 if kind < 9 else 25 if kind < 11 else 45)


def spec_of(rng: random.Random) -> Spec:
    kind, unit = rng.choice(KINDS)
    full = rng.random() < 0.7
    spec = Spec(
        kind,
        size=10 if unit == "time" else 3,
        step=(rng.choice((5, 4)) if unit == "time" else 2) if kind == "hopping" else 0,
        unit=unit,
        keys=("key",),
        aggregates=(("count", None), ("sum", "value"), ("median", "weight") if full else ("max", "weight")),
        retention_ms=rng.choice((0, 7, 30)),
        early_ms=rng.choice((None, 5_000)),
        late_ms=rng.choice((0, 10_000)),
        idle_after_ms=rng.choice((None, 60_000)),
        max_ahead_ms=rng.choice((None, None, 30)),
    )
    return replace(spec, early_messages=EARLY_MESSAGES.get((spec.early_ms, spec.late_ms)))


def changed_spec(rng: random.Random, spec: Spec) -> Spec:
    """Return the job as it is, or now and then with one or two other options."""
    if (spec.kind, spec.unit) not in CHANGING or rng.random() > 0.3:
        return spec
    names = rng.sample(sorted(FREE), rng.choice((1, 2)))
    spec = replace(spec, **{name: rng.choice(FREE[name]) for name in names})
    return replace(spec, early_messages=EARLY_MESSAGES.get((spec.early_ms, spec.late_ms)))


def operator_of(spec: Spec) -> WindowOperator:
    make = {"tumbling": win.tumbling, "hopping": win.hopping, "sliding": win.sliding, "session": win.session}[spec.kind]
    if spec.unit == "messages":
        made = make(messages=spec.size, every=spec.step) if spec.kind == "hopping" else make(messages=spec.size)
    else:
        made = make(spec.size, spec.step) if spec.kind == "hopping" else make(spec.size)
    third = agg.median("weight") if ("median", "weight") in spec.aggregates else agg.max_("weight")
    return WindowOperator(
        window_spec(
            made,
            SCHEMA,
            {"n": agg.count(), "total": agg.sum_("value"), "third": third},
            keys=spec.keys,
            retention=spec.retention_ms if spec.unit == "time" else spec.retention_ms or None,
            policies=Policies(spec.early_ms, spec.full, spec.late_ms, spec.early_messages),
            idle_after=spec.idle_after_ms,
            max_ahead=spec.max_ahead_ms,
        )
    )


def source_of(rng: random.Random, partitions: int) -> Source:
    newest, messages, bad = START_MS, [[] for _ in range(partitions)], set()
    offsets = [rng.choice((0, 7))] * partitions
    for number in range(rng.randint(10, 45)):
        partition = number % partitions if number < partitions else rng.randrange(partitions)
        time = newest + rng.choice((0, 1, 1, 2, 3, 5, 10, 12, 25, -1, -3, -8, -20, -40))
        if rng.random() < 0.03:
            time = MAX_EVENT_TIME + 1
        else:
            newest = max(newest, time)
        fields = {
            "key": rng.choice(("a", "b", "ab", None)),
            "value": rng.choice((None, 1, 2, -3)),
            "weight": rng.choice((None, 0.5, -1.25, 3.0)),
        }
        messages[partition].append(Message(offsets[partition], time, fields, partition))
        if number >= partitions and rng.random() < 0.04:
            bad.add((partition, offsets[partition]))
        offsets[partition] += rng.choice((1, 1, 1, 3))
    return Source(messages, bad, [0] * partitions)
