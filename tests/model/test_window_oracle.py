"""The columnar window operator against the oracle: each micro-batch's rows and errors, and what a restore gives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend import aggregates as agg
from backend.windows import definitions as win
from backend.windows.operator import WindowOperator
from backend.windows.policies import Policies
from backend.windows.spec import window_spec
from tests.model.streams import Feed, feeds, share
from tests.model.window_driver import SCHEMA, Driver
from tests.oracle.windows import Message, Row, Spec, WindowOracle

AGGREGATES: dict[str, tuple[agg.Aggregate, tuple[Any, ...]]] = {
    "n": (agg.count(), ("count", None)),
    "n_value": (agg.count("value"), ("count", "value")),
    "total": (agg.sum_("value"), ("sum", "value")),
    "weight": (agg.sum_("weight"), ("sum", "weight")),
    "least": (agg.min_("value"), ("min", "value")),
    "most": (agg.max_("weight"), ("max", "weight")),
    "mean": (agg.mean("weight"), ("mean", "weight")),
    "var": (agg.variance("weight"), ("variance", "weight")),
    "dev": (agg.stddev("weight"), ("stddev", "weight")),
    "head": (agg.first("value"), ("first", "value")),
    "tail": (agg.last("weight"), ("last", "weight")),
    "median": (agg.median("weight"), ("median", "weight")),
    "q90": (agg.quantile("weight", 0.9), ("quantile", "weight", 0.9)),
    "list": (agg.collect_list("value"), ("collect_list", "value")),
    "set": (agg.collect_set("value"), ("collect_set", "value")),
    "top": (agg.top_k("weight", 2), ("top_k", "weight", 2)),
}
LIGHT = ("n", "total", "mean", "head", "var", "most", "least", "tail")
HEAVY = ("list", "median", "n", "set", "q90", "top", "weight", "n_value")


@st.composite
def specs(draw: st.DrawFn, kind: str, unit: str = "time") -> Spec:
    """Give a job: sizes of a few milliseconds or messages, so that all edges are near."""
    size = draw(st.sampled_from((10, 6, 12, 1)))
    steps = [n for n in (5, 4, 3, 2, 1, 7) if n <= size]
    step = draw(st.sampled_from(steps)) if kind == "hopping" else 0
    aligned = unit == "time" and kind in ("tumbling", "hopping")
    keyed = unit == "messages" and kind == "session"  # it ends by messages without its key
    counted = draw(st.sampled_from((None, None, 1, 3, 8)))
    if keyed:
        counted = None
    names = draw(st.sampled_from((LIGHT[:3], HEAVY[:3], LIGHT, HEAVY, (*LIGHT, *HEAVY))))
    return Spec(
        kind,
        size,
        step,
        origin=draw(st.sampled_from((0, 0, 3, -1))) % (step or size) if aligned else 0,
        unit=unit,
        keys=draw(st.sampled_from((("key",), ("key", "value")) if keyed else (("key",), (), ("key", "value")))),
        aggregates=tuple(AGGREGATES[name][1] for name in dict.fromkeys(names)),
        retention_ms=draw(st.sampled_from((10, 0, 1, 7, 35, 10_000))),
        retention_messages=counted,
        early_ms=draw(st.sampled_from((None, None, 0, 5_000))),
        early_messages=draw(st.sampled_from((None, None, 1, 2, 5))),
        late_ms=draw(st.sampled_from((10_000, 0, 4_000))),
        idle_after_ms=draw(st.sampled_from((None, 60_000))),
        max_ahead_ms=draw(st.sampled_from((None, None, 15))),
    )


def windows_of(spec: Spec) -> win.Window:
    """Say the same windows to the product."""
    if spec.unit == "messages":
        return {
            "tumbling": lambda: win.tumbling(messages=spec.size),
            "hopping": lambda: win.hopping(messages=spec.size, every=spec.step),
            "sliding": lambda: win.sliding(messages=spec.size),
            "session": lambda: win.session(messages=spec.size),
        }[spec.kind]()
    return {
        "tumbling": lambda: win.tumbling(spec.size, origin=spec.origin),
        "hopping": lambda: win.hopping(spec.size, spec.step, origin=spec.origin),
        "sliding": lambda: win.sliding(spec.size),
        "session": lambda: win.session(spec.size),
    }[spec.kind]()


def operator_of(spec: Spec, made: win.Window | None = None) -> WindowOperator:
    """Say the same job to the product; `made` are the windows, where the oracle knows them by their edges."""
    made = made or windows_of(spec)
    chosen = {n: ours for n, (ours, theirs) in AGGREGATES.items() if theirs in spec.aggregates}
    ordered = {n: chosen[n] for theirs in spec.aggregates for n in chosen if AGGREGATES[n][1] == theirs}
    asked = window_spec(
        made,
        SCHEMA,
        ordered,
        keys=spec.keys,
        retention=spec.retention_ms if spec.unit == "time" else spec.retention_ms or None,
        retention_messages=spec.retention_messages,
        policies=Policies(spec.early_ms, spec.full, spec.late_ms, spec.early_messages),
        idle_after=spec.idle_after_ms,
        max_ahead=spec.max_ahead_ms,
    )
    return WindowOperator(asked)


def close(one: Any, two: Any) -> bool:
    """Compare results: exactly, floats to their last digits."""
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=1e-12, abs_tol=1e-12) or (math.isnan(one) and math.isnan(two))
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(close, one, two))
    return bool(one == two)


def ordered(rows: Iterable[Row]) -> list[tuple[Any, ...]]:
    """Sort rows by what names them: the order within a micro-batch is looked at elsewhere."""
    named = [(r.window, r.key, r.revision, r.reason, r.first, r.last, r.values) for r in rows]
    return sorted(named, key=lambda r: repr(r[:6]))


def compare(ours: Iterable[Row], theirs: Iterable[Row]) -> None:
    """Compare the rows of a micro-batch with the oracle's."""
    ours, theirs = ordered(ours), ordered(theirs)
    found, expected = ([row[:6] for row in rows] for rows in (ours, theirs))
    assert found == expected, (
        f"too many: {[row for row in found if row not in expected]}, "
        f"missing: {[row for row in expected if row not in found]}"
    )
    for one, two in zip(ours, theirs, strict=True):
        assert close(one[6], two[6]), (one, two)


PHASES = ("retracted", "full", "late", "early", "drain")


def judge(spec: Spec, feed: Feed, shards: int, made: win.Window | None = None) -> None:
    """Run the operator and the oracle side by side."""
    operator = operator_of(spec, made)
    if spec.retention_messages is not None:
        shards = 1  # a shard counts the messages that it sees, the oracle all of them
    oracle = WindowOracle(spec, feed.partitions, batched=True)
    sources = [(0, partition) for partition in range(feed.partitions)]
    driver = Driver(
        operator,
        spec.keys,
        sources,
        shards=shards,
        by_number=spec.unit == "messages",
        max_ahead_ms=spec.max_ahead_ms,
    )
    for number, (batch, wall) in enumerate(zip(feed.batches, feed.walls, strict=True)):
        drain = number in (len(feed.batches) - 1, len(feed.batches) // 2 if len(feed.messages) % 3 == 0 else -1)
        known = len(oracle.errors)
        sent = len(oracle.rows)
        for message in sorted(set_of(batch), key=lambda m: m.place):
            oracle.add_message(message, wall)
        oracle.end_of_batch(wall, drain)
        output = driver.batch(batch, wall, drain=drain, twice=number % 2 == 0)
        compare(output.rows, oracle.rows[sent:])
        assert sorted(output.errors) == sorted((e.place, e.reason) for e in oracle.errors[known:])
        if shards == 1:
            phases = [PHASES.index(row.reason) for row in output.rows]
            assert spec.kind == "session" or phases == sorted(phases)
        driver.check_restore()


def set_of(batch: Iterable[Message]) -> list[Message]:
    """Give each place once."""
    return list({message.place: message for message in batch}.values())


def kinds(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", names)


@kinds("tumbling", "hopping", "sliding", "session")
@share(0.15)
@given(st.data())
def test_time_windows_of_one_partition_equal_the_oracle_in_every_micro_batch(kind, data):
    judge(data.draw(specs(kind)), data.draw(feeds()), shards=data.draw(st.sampled_from((1, 1, 3))))


@kinds("tumbling", "hopping", "sliding", "session")
@share(0.15)
@given(st.data())
def test_time_windows_of_several_partitions_equal_the_oracle_in_every_micro_batch(kind, data):
    feed = data.draw(feeds(partitions=data.draw(st.sampled_from((2, 3)))))
    judge(data.draw(specs(kind)), feed, shards=data.draw(st.sampled_from((1, 1, 3))))


@kinds("tumbling", "hopping", "sliding", "session")
@share(0.15)
@given(st.data())
def test_windows_by_number_of_messages_equal_the_oracle_in_every_micro_batch(kind, data):
    feed = data.draw(feeds(partitions=data.draw(st.sampled_from((1, 1, 3)))))
    spec = data.draw(specs(kind, "messages"))
    # without a key, and for sessions, the whole stream has to be in one shard
    judge(spec, feed, shards=data.draw(st.sampled_from((1, 3))) if spec.keys and kind != "session" else 1)


MIDNIGHTS = tuple(
    int(datetime.fromisoformat(text).timestamp() * 1000)
    for text in (
        *(f"2026-03-{day}T00:00:00+01:00" for day in range(10, 30)),
        *(f"2026-03-{day}T00:00:00+02:00" for day in (30, 31)),
        *(f"2026-04-{day:02}T00:00:00+02:00" for day in range(1, 31)),
    )
)
"""Days in Berlin around the night in which an hour is skipped; by the law of 2026, not by a library."""


@pytest.mark.parametrize("partitions", [1, 3])
@share(0.15)
@given(st.data())
def test_calendar_windows_equal_the_oracle_in_every_micro_batch(partitions, data):
    """A millisecond of a feed is an hour here."""
    hour, feed = 3_600_000, data.draw(feeds(partitions=partitions))
    low = min((m.time for m in feed.messages), default=0)
    begin = MIDNIGHTS[18] + data.draw(st.sampled_from((0, -hour, 5 * hour)))
    moved = {m.place: replace(m, time=begin + min(m.time - low, 500) * hour) for m in feed.messages}
    batches = tuple(tuple(moved[m.place] for m in batch) for batch in feed.batches)
    feed = replace(feed, messages=tuple(moved.values()), batches=batches)
    drawn = data.draw(specs("tumbling"))
    spec = replace(drawn, origin=0, max_ahead_ms=None, edges=MIDNIGHTS, retention_ms=min(drawn.retention_ms, 35) * hour)
    judge(spec, feed, data.draw(st.sampled_from((1, 1, 3))), win.tumbling("1 day", timezone="Europe/Berlin"))


@kinds("tumbling", "hopping", "sliding")
def test_a_partition_that_wakes_up_finds_gone_what_is_gone_by_number_of_messages(kind):
    # partition 1 alone counts while partition 0 is idle; then partition 0 comes with a message of a gone window
    fields = {"key": "a", "value": 1, "weight": 1.0}
    batches = (
        (),
        (Message(1, 5, fields, 1), Message(2, 15, fields, 1), Message(3, 15, fields, 1)),
        (Message(1, 4, fields, 0),),
    )
    spec = Spec(
        kind,
        10,
        step=5 if kind == "hopping" else 0,
        keys=("key",),
        aggregates=(AGGREGATES["n"][1], AGGREGATES["list"][1]),
        retention_ms=10,
        retention_messages=1,
        idle_after_ms=60_000,
    )
    feed = Feed(tuple(m for batch in batches for m in batch), batches, (5, 60_005, 60_005), 2)
    judge(spec, feed, shards=1)


def test_a_restore_tells_live_messages_by_number_from_those_of_another_source_partition():
    # the first window of "b" is full and forgotten; its next message is of another partition than what is replayed
    def message(partition: int, offset: int, key: str) -> Message:
        return Message(offset, 0, {"key": key, "value": 1, "weight": 1.0}, partition)

    batches = (
        (message(1, 7, "b"), message(1, 12, "a")),
        (message(0, 8, "b"), message(1, 16, "b")),
        (message(0, 17, "b"),),
    )
    spec = Spec("tumbling", 3, unit="messages", keys=("key",), aggregates=(AGGREGATES["list"][1],))
    judge(spec, Feed(tuple(m for batch in batches for m in batch), batches, (0, 1, 2), 2), shards=1)
