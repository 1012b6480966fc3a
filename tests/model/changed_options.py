"""The hunt with changed options: what may change between starts changes at random; attempts die, disks are lost.

`python -m tests.model.changed_options --runs 10000 --seed 0 [--kinds sliding,hopping] [--options retention_ms]`. Each
run plays a stream with late, disordered and repeated messages of one or several source partitions in micro-batches;
between them options change, one or two at a time. The oracle changes with them. In every micro-batch the rows and the
errors must be the oracle's, and a restore must give the messages that are stored, count and digest proven; in the end

* no (window, key, revision) was sent twice,
* every message is in a row or in the errors, unless a policy that would have sent it was off,
* the state is that of a run over the same micro-batches in which nothing failed (looked at in a quarter of the runs).

A run aims at one (option, direction, crash); further changes are random. The counts are printed, and the hunt fails if
one of them is 0.

A kind of job is a `Case`: `CASES` names them. What a case plays is a `Run`; `WindowRun` is that of all windows.

Mind when reading the oracle: an option that is off is None, and a retention never reopens what is gone.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tests.model.changed_joins import SIDES, JoinRun, join_of
from tests.model.streams import KEYS
from tests.model.test_window_oracle import AGGREGATES, compare, operator_of, set_of
from tests.model.window_driver import Driver
from tests.oracle.windows import Message, Row, Spec, WindowOracle

Options = Mapping[str, Any]
Aim = tuple[str, str, str]
"""(option, direction, crash)."""

CRASHES = ("none", "crash before the commit", "disk lost before", "disk lost after", "drain")
"""What befalls the first micro-batch under the changed options.

A disk that was lost before is restored by the new job from what the old one committed.
"""


class Run(Protocol):
    """One run of a job, side by side with its oracle; raises `AssertionError` where they differ."""

    @property
    def options(self) -> Options:
        """What may change, as it is now."""

    def change(self, options: Options) -> None:
        """Start the job again with other options."""

    def batch(self, crash: str, *, last: bool) -> None:
        """Play the next micro-batch, and what befalls it."""

    def finish(self) -> None:
        """Check what must hold in the end."""


@dataclass(frozen=True)
class Case:
    """A kind of job.

    Attributes:
        options: What may change: name -> its values, ascending; None (and for a switch False) is off, and stands first.
        usual: What those are that do not change in a hunt for some only.
        make: Makes a run from its source of randomness, the options it begins with, and the one that it aims at.
    """

    options: Mapping[str, tuple[Any, ...]]
    usual: Options
    make: Callable[[random.Random, Options, str], Run]

    def only(self, names: Sequence[str]) -> Case:
        """Return the case with some options that may change; all for none."""
        return replace(self, options={n: values for n, values in self.options.items() if not names or n in names})

    def aims(self) -> list[Aim]:
        """Give every (option, direction, crash) that there is."""
        found = []
        for name, values in self.options.items():
            turned = {direction(values, old, new) for old in values for new in values if old != new}
            found += [(name, way, crash) for way in sorted(turned) for crash in CRASHES]
        return found


def direction(values: Sequence[Any], old: Any, new: Any) -> str:
    """Say how a value of ascending ones changes: `on`, `off`, `more` or `less`."""
    if old is None or old is False:
        return "on"
    if new is None or new is False:
        return "off"
    return "more" if values.index(new) > values.index(old) else "less"


# -- windows -------------------------------------------------------------------------------------------------------

POLICIES: Mapping[str, tuple[Any, ...]] = {
    "early_ms": (None, 0, 6),
    "early_messages": (None, 1, 2, 5),
    "full": (False, True),
    "late_ms": (None, 0, 4, 12),
}
CLOCKS: Mapping[str, tuple[Any, ...]] = {"idle_after_ms": (None, 10, 40), "max_ahead_ms": (None, 5, 30)}
TIME_RETENTION: Mapping[str, tuple[Any, ...]] = {"retention_ms": (0, 7, 20, 60)}
COUNT_RETENTION: Mapping[str, tuple[Any, ...]] = {"retention_messages": (None, 1, 3, 8)}

USUAL: Options = {
    "retention_ms": 20,
    "retention_messages": None,
    "early_ms": None,
    "early_messages": None,
    "full": True,
    "late_ms": 12,
    "idle_after_ms": 40,
    "max_ahead_ms": None,
}

STEPS = (0, 0, 1, 1, 2, 3, 5, 7, 10, 12, 25, -1, -2, -3, -5, -8, -11, -15, -20, -40)
PAUSES = (0, 1, 5, 12, 45)
LIGHT, HEAVY = ("n", "total", "tail"), ("n", "list", "median")


def stream_of(rng: random.Random, partitions: int) -> list[Message]:
    """Make a disorderly stream; `value` is another in each message."""
    newest, messages = 0, []
    first = rng.choice((0, 7))
    offsets = [first + 1000 * partition for partition in range(partitions)]  # they name windows by number
    for number in range(rng.randint(8, 30)):
        step, partition = rng.choice(STEPS), rng.randrange(partitions)
        fields = {"key": rng.choice(KEYS), "value": number, "weight": rng.choice((None, 0.5, -1.25, 3.0))}
        messages.append(Message(offsets[partition], newest + step, fields, partition))
        newest = max(newest, newest + step)
        offsets[partition] += rng.choice((1, 1, 1, 3))
    return messages


def spec_of(rng: random.Random, kind: str, unit: str, options: Options) -> Spec:
    """Make a job: sizes of a few milliseconds or messages, so that all edges are near."""
    size = rng.choice((10, 6, 12, 1)) if unit == "time" else rng.choice((3, 4, 1))
    step = rng.choice([n for n in (5, 4, 3, 2, 1) if n <= size]) if kind == "hopping" else 0
    aligned = unit == "time" and kind in ("tumbling", "hopping")
    keyed = unit == "messages" and kind == "session"
    return Spec(
        kind,
        size,
        step,
        origin=rng.choice((0, 0, 3)) % (step or size) if aligned else 0,
        unit=unit,
        keys=("key",) if keyed else rng.choice((("key",), ("key",), ())),
        aggregates=tuple(AGGREGATES[name][1] for name in rng.choice((LIGHT, HEAVY, HEAVY))),
        **options,
    )


class WindowRun:
    """A run of windows over one stream.

    Args:
        rng: Decides everything.
        spec: The job as it begins.
        names: The options that may change.
    """

    def __init__(self, rng: random.Random, spec: Spec, names: Sequence[str]) -> None:
        self.rng, self.spec, self.names = rng, spec, names
        partitions = rng.choice((1, 1, 2, 3))
        self.left = stream_of(rng, partitions)
        self.given: list[Message] = []
        self.wall = rng.choice((0, 5, 30))
        self.oracle = WindowOracle(spec, partitions, batched=True)
        sources = [(0, partition) for partition in range(partitions)]
        # a shard counts the messages that it sees, the oracle all of them
        shards = 1 if spec.unit == "messages" or "retention_messages" in names else rng.choice((1, 1, 2))
        self.drivers = [self._driver(sources, shards) for _ in range(2 if rng.random() < 0.25 else 1)]
        """The one that things befall; perhaps one beside it that they do not."""
        self.rows: list[Row] = []
        self.complete = True

    @property
    def options(self) -> Options:
        return {name: getattr(self.spec, name) for name in self.names}

    def _driver(self, sources: Sequence[tuple[int, int]], shards: int) -> Driver:
        by_number = self.spec.unit == "messages"
        ahead = self.spec.max_ahead_ms
        operator = operator_of(self.spec)
        return Driver(operator, self.spec.keys, sources, shards=shards, by_number=by_number, max_ahead_ms=ahead)

    def change(self, options: Options) -> None:
        self.spec = replace(self.spec, **options)
        self.oracle.change(self.spec)
        for driver in self.drivers:
            driver.operator, driver.max_ahead_ms = operator_of(self.spec), self.spec.max_ahead_ms

    def batch(self, crash: str, *, last: bool) -> None:
        ours = self.drivers[0]
        drain = last or crash == "drain"
        if crash == "disk lost before":
            ours.lose_disk()
        messages = self._next(last)
        self.wall += self.rng.choice(PAUSES)
        self.complete &= self.spec.late_ms is not None and (
            self.spec.full or self.spec.early_ms is not None or self.spec.early_messages is not None
        )
        sent, known = len(self.oracle.rows), len(self.oracle.errors)
        for message in sorted(set_of(messages), key=lambda m: m.place):
            self.oracle.add_message(message, self.wall)
        self.oracle.end_of_batch(self.wall, drain)
        output = ours.batch(messages, self.wall, drain=drain, twice=crash == "crash before the commit")
        for plain in self.drivers[1:]:
            plain.batch(messages, self.wall, drain=drain)
        compare(output.rows, self.oracle.rows[sent:])
        assert sorted(output.errors) == sorted((e.place, e.reason) for e in self.oracle.errors[known:])
        ours.check_restore()
        if crash == "disk lost after":
            ours.lose_disk()
        self.rows += output.rows

    def _next(self, last: bool) -> list[Message]:
        """Take the next messages, and perhaps some of those again that came before."""
        take = len(self.left) if last else min(len(self.left), self.rng.choice((0, 1, 2, 3, 5, 8)))
        fresh, self.left = self.left[:take], self.left[take:]
        again = self.rng.sample(self.given, min(len(self.given), self.rng.choice((0, 0, 0, 2))))
        self.given += fresh
        return [*fresh, *again, *(fresh[:1] if self.rng.random() < 0.2 else ())]

    def finish(self) -> None:
        # sessions begin alike before and after they have grown
        several = self.spec.kind == "session" and self.spec.unit == "messages"
        sent = Counter(
            (r.window, r.last if several else None, r.key, r.revision) for r in self.rows if r.reason != "retracted"
        )
        assert [name for name, count in sent.items() if count > 1] == [], "sent twice"
        if self.complete and ("collect_list", "value") in self.spec.aggregates:
            at = self.spec.aggregates.index(("collect_list", "value"))
            shown = {value for row in self.rows for value in row.values[at]}
            refused = {error.place for error in self.oracle.errors}
            lost = [m for m in self.given if m.fields["value"] not in shown and m.place not in refused]
            assert lost == [], "accepted, and in no output"
        for plain in self.drivers[1:]:
            for one, two in zip(self.drivers[0].shards, plain.shards, strict=True):
                assert one.visible() == two.visible(), "another state than without failures"


def windows(kind: str, unit: str, *options: Mapping[str, tuple[Any, ...]]) -> Case:
    """Make the case of a kind of windows."""
    free = {name: values for part in options for name, values in part.items()}

    def make(rng: random.Random, begin: Options, aim: str) -> Run:
        counted = aim == "retention_messages" or rng.random() < 0.3
        if "retention_messages" in free and not counted:
            begin = {**begin, "retention_messages": None}
        names = [name for name in free if counted or name != "retention_messages"]
        return WindowRun(rng, spec_of(rng, kind, unit, begin), names)

    return Case(free, {name: USUAL[name] for name in free}, make)


def joins(kept: Mapping[str, tuple[Any, ...]], *, by_number: bool = False) -> Case:
    """Make the case of joins."""
    free = {**kept, "on_time_ms": (0, 6), "late_ms": (0, 12), **CLOCKS}
    usual = {name: values[2 if name.endswith("_ms") else 0] for name, values in kept.items()}

    def make(rng: random.Random, begin: Options, aim: str) -> Run:
        return JoinRun(rng, join_of(rng, begin, by_number=by_number), list(free))

    return Case(free, {"on_time_ms": 0, "late_ms": 0, "idle_after_ms": 40, "max_ahead_ms": None, **usual}, make)


EARLY = {name: POLICIES[name] for name in ("early_ms", "early_messages", "full")}
"""Nothing comes late to windows by number."""

CASES: dict[str, Case] = {
    **{
        kind: windows(kind, "time", TIME_RETENTION, COUNT_RETENTION, POLICIES, CLOCKS)
        for kind in ("tumbling", "hopping", "sliding")
    },
    "session": windows("session", "time", TIME_RETENTION, COUNT_RETENTION, POLICIES, CLOCKS),
    **{
        f"{kind} by number": windows(kind, "messages", TIME_RETENTION, COUNT_RETENTION, EARLY, CLOCKS)
        for kind in ("tumbling", "hopping", "sliding")
    },
    "session by number": windows("session", "messages", TIME_RETENTION, EARLY, CLOCKS),
    "join": joins(
        {
            **{f"{side}_retention_ms": (0, 1, 4, 10, 25, 100) for side in SIDES},
            **{f"{side}_retention_messages": (None, 1, 3, 6) for side in SIDES},
        }
    ),
    "join by number": joins({f"{side}_retention_messages": (1, 2, 5, 20) for side in SIDES}, by_number=True),
}


# -- the hunt ------------------------------------------------------------------------------------------------------


def play(case: Case, aim: Aim, rng: random.Random, trace: list[str]) -> Counter[Aim]:
    """Play one run; gives what was changed in which way with which crash."""
    name, way, crash = aim
    values = case.options[name]
    pairs = [(old, new) for old in values for new in values if old != new and direction(values, old, new) == way]
    old, new = rng.choice(pairs)
    begin = {n: case.usual[n] if rng.random() < 0.4 else rng.choice(v) for n, v in case.options.items()}
    begin[name] = old
    run = case.make(rng, {**case.usual, **begin}, name)
    trace.append(f"begins with {begin}")
    seen: Counter[Aim] = Counter()
    batches = rng.randint(3, 7)
    at = rng.randint(1, batches - 2)
    for number in range(batches):
        changed: dict[str, Any] = {}
        befalls = rng.choice(CRASHES)
        if number == at:
            changed, befalls = {name: new}, crash
        if number and rng.random() < (0.3 if number == at else 0.4):
            others = [n for n in case.options if n in run.options and (n != name or number > at)]
            changed |= {n: rng.choice(case.options[n]) for n in rng.sample(others, min(len(others), 1))}
        elif number < at:
            befalls = "none"
        changed = {n: value for n, value in changed.items() if value != run.options[n]}
        for n, value in changed.items():
            seen[n, direction(case.options[n], run.options[n], value), befalls] += 1
        if changed:
            run.change(changed)
        trace.append(f"micro-batch {number}: {changed or 'nothing'} changed, {befalls}")
        run.batch(befalls, last=number == batches - 1)
    run.finish()
    return seen


def hunt(kinds: Sequence[str], seeds: range, options: Sequence[str] = ()) -> tuple[dict[str, Counter[Aim]], list[str]]:
    """Play a run per seed, the aims in turn, and for an aim the kinds in turn.

    Returns:
        What was tried of each kind, and what failed.
    """
    cases = {kind: CASES[kind].only(options) for kind in kinds}
    tried: dict[str, Counter[Aim]] = {kind: Counter() for kind in kinds}
    aims = sorted({aim for case in cases.values() for aim in case.aims()})
    failed = []
    for seed in seeds:
        number, at = divmod(seed, len(aims))
        aim = aims[at]
        fitting = [kind for kind, case in cases.items() if aim in case.aims()]
        kind = fitting[(number + at) % len(fitting)]
        trace: list[str] = []
        try:
            tried[kind] += play(cases[kind], aim, random.Random(f"{kind} {seed}"), trace)
        except Exception as error:  # what a run ends with is what the hunt is for
            again = f"python -m tests.model.changed_options --kinds {','.join(kinds)} --runs 1 --seed {seed}"
            again += f" --options {','.join(options)}" if options else ""
            lines = traceback.format_exception(error)[-2:]
            failed.append("\n  ".join([f"{kind}, seed {seed}: {aim}", *trace, *lines, f"again: {again}"]))
    return tried, failed


def untried(tried: Mapping[str, Counter[Aim]], options: Sequence[str] = ()) -> list[Aim]:
    """Give what no run tried, whatever the kind."""
    whole = sum(tried.values(), Counter[Aim]())
    return sorted({aim for kind in tried for aim in CASES[kind].only(options).aims() if not whole[aim]})


def main(arguments: Sequence[str]) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.model.changed_options", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(CASES))
    parser.add_argument("--options", default="", help="only these change")
    asked = parser.parse_args(arguments)
    options = asked.options.split(",") if asked.options else []
    tried, failed = hunt(asked.kinds.split(","), range(asked.seed, asked.seed + asked.runs), options)
    for said in failed[:10]:
        print(said)
    whole = sum(tried.values(), Counter[Aim]())
    for option, way in dict.fromkeys((aim[0], aim[1]) for aim in sorted(whole)):
        counts = ", ".join(f"{crash} {whole[option, way, crash]}" for crash in CRASHES)
        print(f"{option} {way}: {counts}")
    missing = untried(tried, options) if asked.runs > 1 else []
    print(f"{asked.runs} runs, {len(failed)} failed; never tried: {missing or 'nothing'}")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
