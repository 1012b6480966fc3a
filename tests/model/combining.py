"""Combined rows against messages one by one: random streams, slices cut anywhere, combined always, never, or by chance.

    python -m tests.model.combining --runs 1000 --seed 0

Results, errors and every stored byte must be those of the operator that gets each message. What a run met is counted:
combined rows that were refused whole, and rows of a key and pane that a window's end, or its retention, parted.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pyarrow as pa

from backend.aggregates import count, first, last, max_, mean, min_, sum_
from backend.batch import BEFORE, MESSAGE_FIELDS, NO_TIME
from backend.windows.aligned import combining
from backend.windows.combined_rows import COUNT, is_combined
from backend.windows.definitions import Window, hopping, tumbling
from backend.windows.operator import WindowOperator
from backend.windows.policies import every, policies
from backend.windows.spec import WindowSpec, window_spec
from tests.model.window_driver import SCHEMA, Driver
from tests.oracle.windows import Message

WINDOWS = (tumbling(10), hopping(10, 4, origin=1), hopping(12, 3), tumbling("1 day", timezone="Europe/Berlin"))
AGGREGATES = {"n": count(), "s": sum_("value"), "a": mean("value"), "f": first("value"), "l": last("value")}
POLICIES = (
    policies(),
    policies(late="each"),
    policies(early="5 ms", late="5 ms"),
    policies(early="5 ms", full=False),
    policies(late=None),
    policies(early=every(2), late="each"),
    policies(early=every(7, or_after="9 ms"), full=False),
)
STEPS = (0, 0, 0, 0, 1, 1, 1, 2, 3, 7, 12, -1, -2, -4, -9, -30, 40)


class Combined(Driver):
    """A driver whose shards get what the pack stage makes: slices, combined, their clocks raised to what came before.

    Args:
        spec: The windows.
        chance: Cuts slices, and says which of them are combined.
        share: How many slices are.
        met: Counts.
        partitions: Source partitions.
    """

    def __init__(
        self, spec: WindowSpec, chance: random.Random, share: float, met: Counter[str], partitions: int
    ) -> None:
        super().__init__(WindowOperator(spec), spec.keys, [(0, p) for p in range(partitions)])
        self.always, self.never = combining.Combining(spec, fewer=0), combining.Combining(spec, fewer=10**9)
        self.chance, self.share, self.met = chance, share, met

    def table(self, messages: Sequence[tuple[Message, int]]) -> pa.Table:
        """Cut, combine and raise."""
        whole, parts, at = super().table(messages), [], 0
        while at < len(messages):
            size, source = self.chance.randint(1, 25), messages[at][0].source
            end = at + 1
            while end < min(at + size, len(messages)) and messages[end][0].source == source:
                end += 1
            own = whole.slice(at, end - at)
            times = np.array([NO_TIME, *(m.time for m, _ in messages[at : end - 1])], np.int64)
            own = own.set_column(
                own.column_names.index(BEFORE), MESSAGE_FIELDS[-1], pa.array(np.maximum.accumulate(times))
            )
            mine = self.always if self.chance.random() < self.share else self.never
            no_stamps = pa.nulls(len(own), pa.int64())
            found = mine.combined(own, no_stamps, np.zeros(len(own), np.int64))
            rows = mine.each(own, no_stamps) if found is None else found[0]
            self._count(rows)
            raised = np.maximum(np.asarray(rows[BEFORE]), messages[at][1])
            parts.append(rows.set_column(rows.column_names.index(BEFORE), MESSAGE_FIELDS[-1], pa.array(raised)))
            at = end
        return pa.concat_tables(parts) if parts else whole

    def _count(self, rows: pa.Table) -> None:
        assert is_combined(rows)
        several = [row for row in rows.to_pylist() if row[COUNT] > 1]
        self.met["combined rows"] += len(several)
        pane = self.always._grid.pane_of(np.asarray(rows["_time"], np.int64)).tolist()
        places = Counter(zip(rows["key"].to_pylist(), pane, strict=True))
        self.met["parted by an end"] += sum(n > 1 for n in places.values())


def stream(chance: random.Random, partitions: int) -> list[Message]:
    """Give messages in disorder, many of few keys."""
    newest, found = chance.choice((0, 1_700_000_000_000)), []
    offsets = [0] * partitions
    back = 0
    for number in range(chance.randint(1, 120)):
        if number % 10 == 0:  # now and then a run of old messages, all alike
            back = chance.choice((0, 0, 15, 40, 100))
        step = chance.choice((0, 0, 1)) - back if back else chance.choice(STEPS)
        time, source = newest + step, chance.randrange(partitions) if chance.random() < 0.2 else 0
        newest = max(newest, time)
        value = None if chance.random() < 0.1 else chance.randint(-9, 9)
        fields = {"key": chance.choice(("a", "b", None)), "value": value, "weight": 0.5}
        found.append(Message(offsets[source], time, fields, source))
        offsets[source] += chance.choice((1, 1, 1, 3))
    return found


def a_spec(chance: random.Random, window: Window) -> WindowSpec:
    """Give a specification that combines."""
    return window_spec(
        window,
        SCHEMA,
        {**AGGREGATES, "m": max_("value"), "b": min_("value")},
        keys=["key"],
        retention=chance.choice((0, 3, 12, 86_400_000)),
        policies=chance.choice(POLICIES),
        idle_after=chance.choice((None, 3)),
        max_ahead=None,
    )


def one(seed: int, share: float, met: Counter[str]) -> None:
    """Compare one stream."""
    chance = random.Random(f"combining {seed}")
    partitions = chance.choice((1, 1, 2))
    spec = a_spec(chance, chance.choice(WINDOWS))
    assert combining.combines(spec)
    messages = stream(chance, partitions)
    plain = Driver(WindowOperator(spec), spec.keys, [(0, p) for p in range(partitions)])
    packed = Combined(spec, chance, share, met, partitions)
    wall, at = chance.choice((0, messages[0].time)), 0
    while at < len(messages):
        end, wall = at + chance.randint(1, 50), wall + chance.choice((0, 2, 9))
        drain = end >= len(messages)
        refused = met["combined rows"]
        wanted = plain.batch(messages[at:end], wall, drain=drain)
        found = packed.batch(messages[at:end], wall, drain=drain)
        assert found.rows == wanted.rows, seed
        assert sorted(found.errors) == sorted(wanted.errors), seed
        assert packed.shards[0].visible() == plain.shards[0].visible(), seed
        met["refused"] += len(wanted.errors)
        met["micro-batches"] += met["combined rows"] > refused
        at = end


def main() -> None:
    """Hunt."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--runs", type=int, default=1000)
    asked.add_argument("--seed", type=int, default=0)
    given = asked.parse_args()
    met: Counter[str] = Counter()
    with counting_refused(met):
        for seed in range(given.seed, given.seed + given.runs):
            one(seed, (0.0, 0.5, 1.0)[seed % 3], met)
    print(f"{given.runs} runs, 0 failed; {', '.join(f'{name}: {n:,}' for name, n in sorted(met.items()))}")


def counting_refused(met: Counter[str]) -> mock._patch[object]:
    """Count the rows of several messages that are refused whole."""
    from backend.windows import micro_batch

    real = micro_batch.error_rows

    def counted(rows: pa.Table, reason: str, detail: str) -> pa.Table:
        if COUNT in rows.column_names:
            met["refused whole"] += sum(n > 1 for n in rows[COUNT].to_pylist())
        return real(rows, reason, detail)

    return mock.patch.object(micro_batch, "error_rows", counted)


if __name__ == "__main__":
    main()
