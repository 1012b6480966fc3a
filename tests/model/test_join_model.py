"""The columnar join against nested loops: every kind of join, out of order, cut anywhere, thrown away and rebuilt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from backend.joins.spec import JoinSpec, join_spec
from backend.windows.definitions import Window, hopping, session, sliding, tumbling
from tests.model.join_driver import SCHEMA, JoinDriver
from tests.model.streams import PAUSES, cut, cut_points, share
from tests.oracle import joins as oracle
from tests.oracle.windows import Message, Source

KEYS = (1, 2, 3, None)
GROUPS = ("", "abcdefghijk", "a\0")
WIDER = pa.schema([*SCHEMA, pa.field("g", pa.string())])
"""With a second equal field, whose values are codes of any width."""
ON = (None, "k", ["k", "g"])
STEPS = (0, 0, 1, 1, 2, 3, 5, 8, 13, 30, -1, -2, -3, -5, -8, -20)
"""How far event time moves from the newest of both streams so far."""
RANGES = (None, (0, 0), (0, 4), (5, 0), (3, 3), (10, 2), (-2, 6), (40, 40))
RETENTIONS = (0, 1, 4, 10, 25)
SIZES = (None, None, 1, 3, 6)
FIRST = {(0, 0): 0, (1, 0): 10}
_ROW = len(STEPS) * len(KEYS) * 4 * 2 * 2


def windows_by_time() -> st.SearchStrategy[Window | None]:
    return st.sampled_from(
        [None, None, None, tumbling(6, origin=1), tumbling(10), hopping(9, 3), hopping(10, 4), sliding(5), session(4)]
    )


@st.composite
def specs_by_time(draw: st.DrawFn) -> JoinSpec:
    """Any join by event time."""
    on, within = draw(st.sampled_from([(on, r) for on in ON for r in RANGES if on or r]))
    options: dict[str, Any] = {}
    for side in ("left", "right"):
        options[f"{side}_retention_messages"] = size = draw(st.sampled_from(SIZES))
        kept = draw(st.sampled_from(RETENTIONS))
        window = draw(windows_by_time())
        if window is not None and window.kind == "session" and on is None:
            window = None
        options[f"{side}_window"] = window
        options[f"{side}_retention"] = None if size and window is None and kept < 5 else kept
    keyed = {"message_key": draw(st.sampled_from(["auto", "join_fields"]))} if on else {}
    return _spec(draw, on=on, within=within, **options, **keyed)


@st.composite
def specs_by_number(draw: st.DrawFn) -> JoinSpec:
    """Any join by number of messages."""
    on, within = draw(st.sampled_from([(on, r) for on in ON for r in RANGES if on or r]))
    sizes = [tumbling(messages=3), hopping(messages=4, every=2), sliding(messages=3), None]
    if on:
        sizes.append(session(messages=2))
    windows = draw(st.sampled_from([(a, b) for a in sizes for b in sizes if a or b]))
    options: dict[str, Any] = {}
    for side, window in zip(("left", "right"), windows, strict=True):
        options[f"{side}_window"] = window
        options[f"{side}_retention_messages"] = draw(st.sampled_from([1, 2, 5] if window is None else [None, 1, 5]))
    keyed = {"message_key": draw(st.sampled_from(["auto", "join_fields"]))} if on else {}
    return _spec(draw, on=on, within=within, **options, **keyed)


def _spec(draw: st.DrawFn, **options: Any) -> JoinSpec:
    windows = [options["left_window"], options["right_window"]]
    if isinstance(options["on"], list) and any(window is not None and window.kind == "session" for window in windows):
        options["session_key"] = draw(st.sampled_from([None, "k", "g"]))
    return join_spec(
        WIDER if isinstance(options["on"], list) else SCHEMA,
        WIDER if isinstance(options["on"], list) else SCHEMA,
        how=draw(st.sampled_from(["inner", "left", "right", "outer"])),
        idle_after=draw(st.sampled_from([None, 10_000])),
        on_time_update_period=draw(st.sampled_from([0, 0, 0, 5_000])),
        late_update_period=draw(st.sampled_from([0, 0, 0, 10_000])),
        max_ahead=None,
        first_offsets=FIRST,
        **options,
    )


def judged(spec: JoinSpec) -> oracle.JoinSpec:
    """Give a specification as the oracle reads it."""
    windows = [side.window for side in spec.sides]
    return oracle.JoinSpec(
        on=tuple(zip(spec.left.on, spec.right.on, strict=True)),
        before=spec.before,
        after=spec.after,
        how=spec.how,
        retention_ms=(spec.left.retention_ms, spec.right.retention_ms),
        retention_messages=(spec.left.retention_messages, spec.right.retention_messages),
        idle_after_ms=spec.idle_after_ms,
        max_ahead_ms=spec.max_ahead_ms,
        windows=tuple(None if w is None else (w.kind, w.size, w.step, w.origin) for w in windows),
        by_number=spec.by_number,
        on_time_ms=spec.on_time_ms,
        late_ms=spec.late_ms,
    )


@st.composite
def streams(draw: st.DrawFn, *, partitions: int = 1, max_size: int = 26) -> list[Message]:
    """Two streams as they are read: out of order, with gaps in offsets; either may be silent for long."""
    newest = draw(st.sampled_from((0, -50, 1_357_000_000_000)))
    lags = draw(st.sampled_from([(0, 0), (0, 4), (4, 0), (0, 12), (12, 0), (0, 60)]))  # a side that is behind
    offsets: dict[Source, int] = {}
    messages = []
    for number in draw(st.lists(st.integers(0, _ROW * partitions - 1), max_size=max_size)):
        rest, step = divmod(number, len(STEPS))
        rest, key = divmod(rest, len(KEYS))
        rest, gap = divmod(rest, 4)
        rest, group = divmod(rest, 2)
        partition, side = divmod(rest, 2)
        source = (side, partition)
        time = newest + STEPS[step]
        newest = max(newest, time)
        offsets[source] = offset = offsets.get(source, 10 * side - 1) + (1, 1, 1, 3)[gap]
        fields = {"k": KEYS[key], "g": GROUPS[group]}
        messages.append(Message(offset, time - lags[side], fields, partition, side))
    return messages


@st.composite
def batches(draw: st.DrawFn, messages: Sequence[Message]) -> tuple[list[tuple[Message, ...]], list[int]]:
    """Cut streams into micro-batches with their batch times; some messages are delivered twice."""
    parts = cut(messages, draw(cut_points(len(messages))))
    for number, back in draw(st.lists(st.tuples(st.integers(0, len(parts) - 1), st.integers(0, 30)), max_size=2)):
        seen = [m for part in parts[: number + 1] for m in part]
        if seen:
            parts[number] = (*parts[number], seen[-1 - back % len(seen)])
    pauses = draw(st.lists(st.sampled_from(PAUSES), min_size=len(parts), max_size=len(parts)))
    return parts, [sum(pauses[: n + 1]) for n in range(len(parts))]


def compare(
    spec: JoinSpec,
    parts: Sequence[Sequence[Message]],
    walls: Sequence[int],
    sources: Sequence[Source],
    *,
    shortest: int | None = 1,
) -> None:
    """Run both micro-batch by micro-batch, and rebuild the state from the source after each."""
    driver = JoinDriver(spec, sources, shortest=shortest)
    judge = oracle.JoinOracle(judged(spec), tuple(sources), first_offset=dict(FIRST))
    for number, (part, wall) in enumerate(zip(parts, walls, strict=True)):
        drain = number == len(parts) - 1
        refused = len(judge.errors)
        got = driver.batch(part, wall, drain=drain, twice=number == 1)
        assert got.rows == judge.batch(part, wall, drain=drain)
        assert sorted(got.errors) == sorted((e.place, e.reason) for e in judge.errors[refused:])
        driver.check_restore()


ONE = ((0, 0), (1, 0))


@share(0.16)
@given(st.data())
def test_joins_by_time_are_the_oracles(data: st.DataObject) -> None:
    parts, walls = data.draw(batches(data.draw(streams())))
    compare(data.draw(specs_by_time()), parts, walls, data.draw(st.sampled_from([ONE, ONE, (), ONE[:1]])))


@share(0.1)
@given(st.data())
def test_joins_by_number_are_the_oracles(data: st.DataObject) -> None:
    parts, walls = data.draw(batches(data.draw(streams())))
    compare(data.draw(specs_by_number()), parts, walls, ONE)


@share(0.04)
@given(st.data())
def test_joins_in_buckets_as_long_as_they_are_outside_of_tests_are_the_oracles(data: st.DataObject) -> None:
    parts, walls = data.draw(batches(data.draw(streams())))
    compare(data.draw(st.one_of(specs_by_time(), specs_by_number())), parts, walls, ONE, shortest=None)


@share(0.08)
@given(st.data())
def test_joins_over_several_partitions_are_the_oracles(data: st.DataObject) -> None:
    parts, walls = data.draw(batches(data.draw(streams(partitions=2))))
    sources = ((0, 0), (0, 1), (1, 0), (1, 1))
    compare(data.draw(specs_by_time()), parts, walls, sources)


@share(0.08)
@given(st.data())
def test_cuts_do_not_change_the_rows_of_one_partition(data: st.DataObject) -> None:
    spec = data.draw(specs_by_time())
    sides = [replace(side, retention_messages=None) for side in spec.sides if side.retention_ms is not None]
    if len(sides) == 2:
        spec = replace(spec, left=sides[0], right=sides[1], idle_after_ms=None)
        messages = data.draw(streams())
        rows = []
        for points in ([], data.draw(cut_points(len(messages)))):
            driver = JoinDriver(spec, ONE)
            parts = cut(messages, points)
            for number, part in enumerate(parts):
                rows += [
                    (len(points), row.left, row.right)
                    for row in driver.batch(part, number, drain=part is parts[-1]).rows
                ]
        whole = sorted((row[1:] for row in rows if row[0] == 0), key=str)
        assert sorted((row[1:] for row in rows if row[0] != 0), key=str) == (whole if points else [])
