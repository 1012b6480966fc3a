"""The hunt between publishing and Spark's commit: the driver dies there, options change, the micro-batch runs again.

`python -m tests.model.planned_options --runs 10000 --seed 0`. Each run plays Spark around an operator: it plans a
micro-batch (`offsets/<version>`), runs it, and gives its rows to a sink that cannot take anything back; then the driver
may die, any number of times, and each start may change any of the free options, also between micro-batches. Which
operator a version runs under is the product's business (`settle`, `terms_of`); which one it should be is said here by
hand: that of the options that held when it was planned. What must hold:

* no start meets a micro-batch that makes other rows than are out (`OutputDiffers`),
* the rows that readers have seen are those of the last run, the one that Spark commits,
* rows and state are those of a run in which nobody died, each micro-batch under the options it was planned with,
* and, of aligned and sliding windows by time, rows and errors are the oracle's under these options.

The counts of what was changed between publishing and committing are printed, and the hunt fails if one is 0.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from backend import aggregates as agg
from backend.batch import Operator, SourcePartition
from backend.joins.operator import JoinOperator
from backend.joins.spec import join_spec
from backend.process import ProcessOperator, value_state
from backend.sinks.record import Contents, Digest, check_same, gathered
from backend.spark.job import Input, Job
from backend.spark.start import terms_of
from backend.windows import definitions as win
from backend.windows.operator import WindowOperator
from backend.windows.policies import Policies
from backend.windows.spec import window_spec
from recovery.commit.manifest import Manifest, record, settle
from recovery.files import open_files
from tests.model.test_window_oracle import compare
from tests.model.window_driver import SCHEMA, Driver, Shard
from tests.oracle.windows import Message, Spec, WindowOracle
from tests.support.twin import MemoryTwin

WINDOWS: Mapping[str, tuple[Any, ...]] = {
    "retention": (1, 7, 20, 60),
    "early": (None, 0, 6),
    "every": (None, 1, 3),
    "full": (False, True),
    "late": (None, 0, 4, 12),
    "idle_after": (None, 10, 40),
    "max_ahead": (None, 5, 30),
    "partitions": (1, 2, 3),
}
COUNTED = {**WINDOWS, "retention_messages": (None, 1, 3, 8)}
PROCESS: Mapping[str, tuple[Any, ...]] = {"ttl": (None, 1, 20), "max_ahead": (None, 5, 30), "partitions": (1, 2, 3)}
JOIN: Mapping[str, tuple[Any, ...]] = {
    "left_retention": (1, 7, 20, 60),
    "right_retention": (1, 7, 20, 60),
    "on_time_update_period": (0, 4, 12),
    "late_update_period": (0, 4, 12),
    "idle_after": (None, 10, 40),
    "max_ahead": (None, 5, 30),
    "partitions": (1, 2, 3),
}
KINDS: dict[str, Mapping[str, tuple[Any, ...]]] = {
    "tumbling": COUNTED,
    "hopping": COUNTED,
    "sliding": COUNTED,
    "session": COUNTED,
    "tumbling by number": COUNTED,
    "hopping by number": COUNTED,
    "sliding by number": COUNTED,
    "session by number": WINDOWS,
    "process": PROCESS,
    "join": JOIN,
}
SIDES = ("left", "right")
JUDGED = ("tumbling", "hopping", "sliding")
"""Kinds that the oracle is asked about: it knows one shard, and all source partitions from the start."""
STEPS = (0, 0, 1, 1, 2, 3, 5, 7, 10, 12, 25, -1, -3, -8, -15, -40)
PAUSES = (0, 1, 5, 12, 45)
MAX_DEATHS = 3

Options = dict[str, Any]


def operator_of(kind: str, options: Options) -> Operator:
    """Make the job of a kind under its options."""
    if kind == "process":
        schema = pa.schema([("key", pa.string()), ("n", pa.int64()), ("last", pa.int64())])
        return ProcessOperator(_last, schema, stores=[value_state("last", ttl=options["ttl"])], fields=["key", "value"])
    if kind == "join":
        more = {name: value for name, value in options.items() if name != "partitions"}
        return JoinOperator(join_spec(SCHEMA, SCHEMA, on="key", within=8, how="outer", **more))
    name, _, by_number = kind.partition(" ")
    sizes: dict[str, Any] = {"messages": 3} if by_number else {"size": 10}
    if name == "hopping":
        sizes |= {"every": 2} if by_number else {"step": 4}
    made = getattr(win, name)(**sizes) if by_number else getattr(win, name)(*sizes.values())
    aggregates = {"n": agg.count(), "total": agg.sum_("weight"), "all": agg.collect_list("value")}
    policies = Policies(options["early"], options["full"], options["late"], options["every"])
    more = {name: options[name] for name in ("retention", "retention_messages", "idle_after") if name in options}
    asked = window_spec(
        made, SCHEMA, aggregates, keys=["key"], policies=policies, max_ahead=options["max_ahead"], **more
    )
    return WindowOperator(asked)


def _last(messages: pa.Table, context: Any) -> pa.Table:
    """Count the messages, and say which value of their key came before, unless its TTL has passed."""
    rows = []
    for key, value in zip(messages["key"].to_pylist(), messages["value"].to_pylist(), strict=True):
        known = context["last"].get(key or "")
        context["last"].update(key or "", value)
        rows.append({"key": key, "n": messages.num_rows, "last": known})
    return pa.Table.from_pylist(rows, schema=pa.schema([("key", pa.string()), ("n", pa.int64()), ("last", pa.int64())]))


def spec_of(kind: str, options: Options) -> Spec:
    """Say the same job to the oracle."""
    return Spec(
        kind,
        size=10,
        step=4 if kind == "hopping" else 0,
        keys=("key",),
        aggregates=(("count", None), ("sum", "weight"), ("collect_list", "value")),
        retention_ms=options["retention"],
        retention_messages=options["retention_messages"],
        early_ms=options["early"],
        early_messages=options["every"],
        late_ms=options["late"],
        full=options["full"],
        idle_after_ms=options["idle_after"],
        max_ahead_ms=options["max_ahead"],
    )


class PlainDriver(Driver):
    """Gives rows as they are, whatever the operator."""

    def rows_of(self, results: pa.Table) -> list[Any]:
        return results.to_pylist()

    def copy(self) -> PlainDriver:
        """Give a driver over copies of the shards' stores."""
        other = PlainDriver(self.operator, self.keys, [], schema=self.schema)
        other.shards = [Shard(MemoryTwin(dict(one.store.scan(b"", None))), dict(one.bounds)) for one in self.shards]
        other.positions, other.version = dict(self.positions), self.version
        return other


class Topic:
    """What the job reads."""

    topics = ("t",)


class LastingSink:
    """What is out stays: the first rows of each version, compared as the product's sinks do."""

    def __init__(self) -> None:
        self.out: dict[int, tuple[list[Any], Contents]] = {}

    def publish(self, version: int, driver: Driver, rows: list[Any]) -> None:
        made = gathered(
            {
                number: {"results": _content(shard.outcome.results), "errors": _content(shard.outcome.errors)}
                for number, shard in enumerate(driver.shards)
                if shard.outcome is not None
            }
        )
        if version in self.out:
            check_same(self.out[version][1], made, version=version, where="the sink", command="")
        else:
            self.out[version] = rows, made


def _content(table: pa.Table) -> tuple[int, str]:
    return Digest().add(table).content


@dataclass
class Planned:
    """A micro-batch in Spark's offset log, and the options that held when it was planned."""

    messages: list[Message]
    time_ms: int
    drain: bool
    options: Options


class Played:
    """One run.

    Args:
        kind: One of `KINDS`.
        rng: Decides everything.
    """

    def __init__(self, kind: str, rng: random.Random) -> None:
        self.kind, self.rng = kind, rng
        self.checkpoint = f"memory://planned-{uuid.uuid4().hex}"
        self.options: Options = {name: rng.choice(values) for name, values in KINDS[kind].items()}
        self.partitions = 1 if kind in JUDGED else rng.choice((1, 2, 3))
        self.options["partitions"] = self.partitions if kind in JUDGED else rng.randint(1, self.partitions)
        self.shards = 1 if kind in (*JUDGED, "session by number", "join") else rng.choice((1, 2))
        self.oracle: WindowOracle | None = None
        self.streams = (0, 1) if kind == "join" else (0,)
        self.left = self._stream()
        self.wall = rng.choice((0, 5, 30))
        self.sink = LastingSink()
        self.changed: Counter[str] = Counter()
        self.alive, self.undisturbed = (self._driver() for _ in range(2))
        self._start()

    def run(self) -> None:
        """Play all micro-batches."""
        last = self.rng.randint(2, 6)
        for version in range(last + 1):
            if self.rng.random() < 0.4:
                self._change()
                self._start()
            self._micro_batch(version, self._plan(version, last=version == last))
        for shard, wanted in zip(self.alive.shards, self.undisturbed.shards, strict=True):
            found, expected = (dict(one.store.scan(b"", None)) for one in (shard, wanted))
            assert found == expected, "another state than without deaths"
            assert shard.bounds == wanted.bounds

    def _micro_batch(self, version: int, planned: Planned) -> None:
        before = self.options
        for death in range(self.rng.choice((0, 1, 2, MAX_DEATHS))):
            self._attempt(version, planned)  # published, and not committed
            changed = self._change()
            self._start()
            self.changed.update({f"{name} at death {death + 1}": 1 for name in changed})
        self.changed["committed under other options than planned"] += self.options != before
        done, rows = self._attempt(version, planned)
        assert self.sink.out[version][0] == rows, "readers have seen other rows than the state holds"
        self.alive = done
        self._judge(planned)
        open_files(self.checkpoint).write(f"commits/{version}", [b"v1"])
        operator, ahead = operator_of(self.kind, planned.options), planned.options["max_ahead"]
        wanted = _batch(self.undisturbed, planned, operator, ahead, self._known(planned.options))
        assert wanted == rows, "other rows than without deaths"

    def _judge(self, planned: Planned) -> None:
        """Compare what is committed with the oracle."""
        outcome = self.alive.shards[0].outcome
        if self.kind not in JUDGED or outcome is None:
            return
        spec = spec_of(self.kind, planned.options)
        oracle = self.oracle or WindowOracle(spec, self.partitions, batched=True)
        if spec != oracle.spec:
            oracle.change(spec)
        self.oracle = oracle
        sent, known = len(oracle.rows), len(oracle.errors)
        for message in sorted(planned.messages, key=lambda m: m.place):
            oracle.add_message(message, planned.time_ms)
        oracle.end_of_batch(planned.time_ms, planned.drain)
        compare(Driver.rows_of(self.alive, outcome.results), oracle.rows[sent:])
        places = [(e["stream"], e["partition"], e["offset"]) for e in outcome.errors.to_pylist()]
        assert sorted(places) == sorted(error.place for error in oracle.errors[known:])

    def _attempt(self, version: int, planned: Planned) -> tuple[PlainDriver, list[Any]]:
        """Run the micro-batch as the tasks of this start do, and publish; give what Spark may commit."""
        terms = self.terms.at(version)
        driver = self.alive.copy()
        rows = _batch(driver, planned, terms.operator, terms.max_ahead_ms, terms.sources[0])
        self.sink.publish(version, driver, rows)
        return driver, rows

    def _start(self) -> None:
        """Start the job with the options of now."""
        operator, max_ahead_ms = operator_of(self.kind, self.options), self.options["max_ahead"]
        grouping = tuple(range(self.shards))
        job = Job((Input(Topic(), None, ("key",)),), "key", grouping, operator, (), max_ahead_ms)  # type: ignore[arg-type]
        entries = {
            "operator": operator.describe(),
            "max_ahead_ms": max_ahead_ms,
            "partitions": [list(place) for place in self._known(self.options)],
        }
        wanted = Manifest(self.shards, grouping, entries)
        settled = record(self.checkpoint, settle(self.checkpoint, wanted, used=False))
        self.terms = terms_of(job, settled, self.checkpoint)

    def _change(self) -> list[str]:
        """Change some options, or none; a source partition that is known stays known."""
        others = [name for name in self.options if name != "partitions"]
        names = self.rng.sample(others, min(len(others), self.rng.choice((1, 1, 2, 3))))
        new = {name: self.rng.choice(KINDS[self.kind][name]) for name in names}
        if self.rng.random() < 0.3 and self.kind not in JUDGED:
            new["partitions"] = self.rng.randint(self.options["partitions"], self.partitions)
        changed = [name for name, value in new.items() if value != self.options[name]]
        self.options = {**self.options, **new}
        return changed

    def _plan(self, version: int, *, last: bool) -> Planned:
        take = len(self.left) if last else min(len(self.left), self.rng.choice((0, 1, 2, 3, 5, 8)))
        fresh, self.left = self.left[:take], self.left[take:]
        self.wall += self.rng.choice(PAUSES)
        open_files(self.checkpoint).write(f"offsets/{version}", [b"v1"])
        return Planned(fresh, self.wall, last or self.rng.random() < 0.1, self.options)

    def _known(self, options: Options) -> tuple[SourcePartition, ...]:
        return tuple((stream, partition) for stream in self.streams for partition in range(options["partitions"]))

    def _driver(self) -> PlainDriver:
        operator = operator_of(self.kind, self.options)
        sides = pa.schema([f.with_name(f"{side}.{f.name}") for side in SIDES for f in SCHEMA])
        schema, keys = (sides, ()) if self.kind == "join" else (SCHEMA, ("key",))
        return PlainDriver(operator, keys, [], shards=self.shards, schema=schema)

    def _stream(self) -> list[Message]:
        newest, messages, offsets = 0, list[Message](), Counter[SourcePartition]()
        for number in range(self.rng.randint(8, 30)):
            step, place = self.rng.choice(STEPS), (self.rng.choice(self.streams), self.rng.randrange(self.partitions))
            fields = {"key": self.rng.choice(("a", "b", None)), "value": number, "weight": self.rng.choice((None, 0.1))}
            if self.kind == "join":
                own = {f"{SIDES[place[0]]}.{name}": value for name, value in fields.items()}
                fields = {f"{side}.{name}": None for side in SIDES for name in fields} | own
            messages.append(Message(offsets[place], newest + step, fields, place[1], place[0]))
            newest = max(newest, newest + step)
            offsets[place] += 1
        return messages


def _batch(
    driver: Driver,
    planned: Planned,
    operator: Operator,
    max_ahead_ms: int | None,
    known: Sequence[SourcePartition],
) -> list[Any]:
    driver.operator, driver.max_ahead_ms = operator, max_ahead_ms
    driver.sources = sorted({*known, *(message.source for message in planned.messages)})
    return driver.batch(planned.messages, planned.time_ms, drain=planned.drain).rows


def hunt(kinds: Sequence[str], seeds: range) -> tuple[dict[str, Counter[str]], list[str]]:
    """Play a run per seed, the kinds in turn; gives what was changed at each death, and what failed."""
    changed: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    failed = []
    for seed in seeds:
        kind = kinds[seed % len(kinds)]
        try:
            played = Played(kind, random.Random(f"{kind} {seed}"))
            played.run()
            changed[kind] += played.changed
        except Exception as error:  # what a run ends with is what the hunt is for
            again = f"python -m tests.model.planned_options --kinds '{','.join(kinds)}' --runs 1 --seed {seed}"
            failed.append("\n  ".join([f"{kind}, seed {seed}", *traceback.format_exception(error)[-3:], again]))
    return changed, failed


def never_changed(changed: Mapping[str, Counter[str]]) -> list[str]:
    """Give what no run changed at its first death, and at a later one, whatever the kind."""
    whole = sum(changed.values(), Counter[str]())
    names = dict.fromkeys(name for kind in changed for name in KINDS[kind])
    return [f"{name} at death {death}" for name in names for death in (1, 2) if not whole[f"{name} at death {death}"]]


def main(arguments: Sequence[str]) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.model.planned_options", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    asked = parser.parse_args(arguments)
    changed, failed = hunt(asked.kinds.split(","), range(asked.seed, asked.seed + asked.runs))
    for said in failed[:10]:
        print(said)
    for kind, counts in changed.items():
        print(f"{kind}: {', '.join(f'{name} {count}' for name, count in sorted(counts.items()))}")
    missing = never_changed(changed) if asked.runs > 1 else []
    print(f"{asked.runs} runs, {len(failed)} failed; never changed: {missing or 'nothing'}")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
