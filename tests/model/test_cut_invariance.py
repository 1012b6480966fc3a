"""Where micro-batches are cut changes nothing: full results, errors and state are the same; retention by number too."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.aggregates import collect_list, count, first, max_, median, reducer, sum_
from backend.contexts.windows import Message as Added
from backend.contexts.windows import StandaloneContext
from backend.store.protocol import Region
from backend.store.workspace import Workspace
from backend.windows import ledger
from backend.windows.definitions import Window, hopping, session, sliding, tumbling
from backend.windows.operator import WindowOperator
from backend.windows.policies import policies
from backend.windows.spec import WindowSpec, window_spec
from tests.model.streams import cut, cut_points, feeds, share
from tests.model.window_driver import SCHEMA, Driver
from tests.oracle.windows import Message, last_values

WINDOWS = [tumbling(10), hopping(10, 4, origin=1), sliding(10), session(10)]
LIGHT = {"n": count(), "s": sum_("value"), "m": max_("weight"), "f": first("value")}
HEAVY = {"n": count(), "m": median("weight"), "l": collect_list("value")}

AT_THE_END = policies(early="1 day", full=False)

COUNTED = [tumbling(messages=4), hopping(messages=5, every=2), sliding(messages=3), session(messages=3)]

windows = pytest.mark.parametrize("window", WINDOWS, ids=lambda w: w.kind)
some = share(0.12)


def spec_of(window: Window, **options) -> WindowSpec:
    options = {"aggregates": LIGHT, "keys": ["key"], "retention": 12, "max_ahead": None, **options}
    return window_spec(window, SCHEMA, **options)


def by_number(window: Window, *sizes: int) -> st.SearchStrategy[int | None]:
    """Give retentions by number of messages; sessions by event time have none."""
    return st.sampled_from((None, *(sizes if window.kind != "session" else ())))


def run(
    spec: WindowSpec, batches: Sequence[Sequence[Message]], partitions: int = 1, shards: int = 1, drain: bool = False
):
    """Feed micro-batches at one wall clock; gives the driver, rows and errors."""
    sources = [(0, p) for p in range(partitions)]
    driver = Driver(WindowOperator(spec), spec.keys, sources, shards=shards, by_number=not spec.window.by_time)
    rows, errors = [], []
    for number, batch in enumerate(batches):
        output = driver.batch(batch, 1000, drain=drain and number == len(batches) - 1)
        rows += output.rows
        errors += output.errors
    driver.check_restore()
    return driver, rows, sorted(errors)


def full(rows):
    """Give what was sent at windows' ends: the full results, without them the last early ones."""
    return sorted(((r.window, r.key, r.values) for r in rows if r.reason in ("full", "early")), key=repr)


def state(driver: Driver, shard: int = 0) -> dict[bytes, bytes]:
    """Give what a reader sees: everything that no bound hides; of the ledger not when it next looks at what waits."""
    store = driver.shards[shard]
    rows = {k: v for k, v in Workspace(store.store, store.bounds).scan(b"\x00", None) if k[0] != Region.COMMIT}
    known = ledger.read(Workspace(store.store))
    known.due_ms = None
    return {**rows, ledger.KEY: ledger.encode(known)}


@windows
@some
@given(st.data())
def test_one_partition_same_full_results_errors_and_state(window, data):
    spec = spec_of(
        window,
        aggregates=data.draw(st.sampled_from((LIGHT, HEAVY))),
        retention_messages=data.draw(by_number(window, 3, 8)),
        policies=data.draw(st.sampled_from((None, AT_THE_END))) if window.kind != "session" else None,
    )
    feed = data.draw(feeds(duplicates=False))
    whole, rows, errors = run(spec, [feed.messages])
    pieces, cut_rows, cut_errors = run(spec, cut(feed.messages, data.draw(cut_points(len(feed.messages)))))
    assert full(rows) == full(cut_rows)
    assert errors == cut_errors
    assert state(whole) == state(pieces)
    sharded_spec = spec_of(window, aggregates=spec.aggregates, policies=spec.policies)
    _, sharded, sharded_errors = run(sharded_spec, [feed.messages], shards=3)
    if spec.retention_messages is None:
        assert full(sharded) == full(rows)
        assert sharded_errors == errors


@windows
@some
@given(st.data())
def test_several_partitions_same_last_values_and_errors(window, data):
    spec = spec_of(
        window,
        aggregates=data.draw(st.sampled_from((LIGHT, HEAVY))),
        retention=data.draw(st.sampled_from((12, 0, 30))),
        retention_messages=data.draw(by_number(window, 3)),
    )
    partitions = data.draw(st.sampled_from((2, 3)))
    feed = data.draw(feeds(partitions=partitions, duplicates=False))
    _, rows, errors = run(spec, [feed.messages], partitions=partitions, drain=True)
    points = data.draw(cut_points(len(feed.messages)))
    _, cut_rows, cut_errors = run(spec, cut(feed.messages, points), partitions=partitions, drain=True)
    assert last_values(rows) == last_values(cut_rows)
    assert errors == cut_errors


@pytest.mark.parametrize("window", COUNTED, ids=lambda w: w.kind)
@share(0.08)
@given(st.data())
def test_windows_by_number_same_full_results_errors_and_state(window, data):
    spec = spec_of(
        window,
        aggregates=data.draw(st.sampled_from((LIGHT, HEAVY))),
        keys=data.draw(st.sampled_from((["key"], ["key", "value"], [])[: 2 if window.kind == "session" else 3])),
        retention=data.draw(st.sampled_from((None, 1, 10, 30))),
        retention_messages=data.draw(by_number(window, 1, 3, 6)),
    )
    feed = data.draw(feeds(duplicates=False))
    whole, rows, errors = run(spec, [feed.messages])
    pieces, cut_rows, cut_errors = run(spec, cut(feed.messages, data.draw(cut_points(len(feed.messages)))))
    assert [r for r in rows if r.reason == "full"] == [r for r in cut_rows if r.reason == "full"]
    assert errors == cut_errors
    assert state(whole) == state(pieces)


@windows
@share(0.06)
@given(st.data())
def test_running_a_prefix_again_changes_nothing(window, data):
    messages = data.draw(feeds(duplicates=False, max_size=12)).messages
    context = StandaloneContext(spec_of(window, aggregates=HEAVY))
    added = [Added(m.offset, m.time, m.fields) for m in messages]
    context.add_messages(added, 1000)
    results, errors = context.get_result(), context.get_errors()
    kept = context.get_messages(-(2**60), 2**60)
    for message in added[: data.draw(st.integers(0, len(added)))]:
        context.add_message(message, 1000)
    assert context.get_result() == results
    assert context.get_errors() == errors
    assert context.get_messages(-(2**60), 2**60).equals(kept)


@pytest.mark.parametrize(("size", "step"), [(10, 10), (10, 4)])
@some
@given(feeds(duplicates=False), st.integers(1, 6), st.sampled_from((0, 5, 1000)))
def test_retention_by_number_refuses_what_was_closed_so_many_messages_ago(size, step, feed, keep, retention):
    spec = spec_of(hopping(size, step), retention=retention, retention_messages=keep)
    _, _, errors = run(spec, feed.batches)
    clocks: list[int] = []
    clock = -(2**62)
    refused = []
    for number, message in enumerate(feed.messages):
        clocks.append(clock)
        ends = [e for e in range(message.time + 1, message.time + size + 1) if (e - size) % step == 0]
        long_ago = clocks[number - keep] if number >= keep else -(2**62)
        if all(end + retention <= clock or end <= long_ago for end in ends):
            refused.append((message.place, "out_of_retention"))
        clock = max(clock, message.time)
    assert errors == refused


def test_an_overlap_of_sixty_stores_no_more_than_twice_the_panes():
    messages = [Message(n, n * 997, {"key": f"k{n % 7}", "value": n, "weight": 1.0}) for n in range(2000)]
    sizes = {}
    for name, window in {"panes": tumbling("1 minute"), "overlap": hopping("1 hour", "1 minute")}.items():
        driver, _, _ = run(spec_of(window, retention="1 hour"), cut(messages, [500, 1000, 1500]))
        sizes[name] = sum(len(k) + len(v) for k, v in state(driver).items())
    assert sizes["overlap"] <= 2 * sizes["panes"]


def added_up(earlier: float, later: float) -> float:
    return earlier + later


@pytest.mark.parametrize("window", [sliding(messages=7), hopping(messages=6, every=1)], ids=lambda w: w.kind)
def test_which_messages_of_windows_by_number_are_added_first_does_not_follow_from_the_cuts(window: Window) -> None:
    """Sums of floats tell: 1e20 takes with it what is added to it before the -1e20."""
    plain = reducer("weight", init=lambda: 0.0, add=added_up, merge=added_up, output=pa.float64())
    spec = spec_of(window, retention=None, aggregates={"s": sum_("weight"), "r": plain})
    weights = (1e20, 0.1, 0.7, -1e20, -0.3)
    stream = [
        Message(at, at, {"key": "ab"[at % 7 % 2], "value": 0, "weight": weights[at * at % 5]}) for at in range(60)
    ]
    played = []
    for size in (60, 7, 1):
        driver = Driver(WindowOperator(spec), spec.keys, [(0, 0)], by_number=True)
        rows = [row for low in range(0, 60, size) for row in driver.batch(stream[low : low + size], 1_000).rows]
        played.append(sorted(map(repr, rows)))
    assert played[0] == played[1] == played[2]
    assert len(played[0]) > 40
