"""The contexts, message by message, against the oracle: policies by the wall clock, refusals, restarts in between."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.contexts.windows import AutomaticContext, StandaloneContext
from backend.contexts.windows import Message as Added
from backend.errors import SelectorDisabled
from backend.store.memory import MemoryStore
from tests.model.streams import feeds, share
from tests.model.test_window_oracle import close, compare, kinds, operator_of, specs
from tests.model.window_driver import Driver
from tests.oracle.windows import Message, Row, WindowOracle, full_rows, last_values

EVENTS = st.lists(st.sampled_from(("add", "add", "add", "add", "timeout", "refuse", "take", "replay")), max_size=60)
PAUSES = (0, 0, 500, 4_000, 5_000, 10_000)


def added(message: Message) -> Added:
    return Added(message.offset, message.time, message.fields, message.partition, message.stream)


@kinds("tumbling", "hopping", "sliding", "session")
@share(0.08)
@given(st.data())
def test_the_automatic_context_sends_what_the_oracle_sends(kind, data):
    spec = data.draw(specs(kind))
    feed = data.draw(feeds(duplicates=False))
    operator = operator_of(spec)
    oracle = WindowOracle(spec)
    translate = Driver(operator, spec.keys, []).rows_of
    sent: list[dict[str, object]] = []
    errors: list[tuple[tuple[int, int, int], str]] = []
    taking = True

    def downstream(result: dict[str, object]) -> bool:
        if taking:
            sent.append(result)
        return taking

    context = AutomaticContext(
        operator.spec,
        downstream,
        on_error=lambda e: errors.append(((e["stream"], e["partition"], e["offset"]), e["reason"])),
    )
    waiting, done = list(feed.messages), []
    wall = max(0, min((m.time for m in feed.messages), default=0))
    for event in data.draw(EVENTS):
        wall += data.draw(st.sampled_from(PAUSES))
        if event in ("refuse", "take"):
            taking = event == "take"
            oracle.refusing = not taking
        elif event == "timeout":
            context.timeout(wall)
            oracle.timeout(wall)
        elif (event == "replay" and done) or (event == "add" and waiting):
            message = data.draw(st.sampled_from(done)) if event == "replay" else waiting[0]
            if not context.selector_enabled:
                with pytest.raises(SelectorDisabled):
                    context.add_message(added(message), wall)
                with pytest.raises(RuntimeError):
                    oracle.add_message(message, wall)
                continue
            refused = len(oracle.errors)
            context.add_message(added(message), wall)
            oracle.add_message(message, wall)
            if len(oracle.errors) > refused:
                oracle.timeout(wall)  # a context looks at the policies after a refused message too; the seed returns
            if event == "add":
                done.append(waiting.pop(0))
        assert context.selector_enabled is not oracle.disabled
        if context.selector_enabled:
            compare(rows(translate, operator, sent), oracle.rows)
        assert errors == [(e.place, e.reason) for e in oracle.errors]


def rows(translate, operator, results) -> list[Row]:
    return translate(pa.Table.from_pylist(results, operator.result_schema))


@kinds("tumbling", "hopping", "sliding", "session")
@share(0.08)
@given(st.data())
def test_a_standalone_context_that_starts_again_loses_and_repeats_nothing(kind, data):
    spec = data.draw(specs(kind))
    feed = data.draw(feeds(duplicates=False))
    operator = operator_of(spec)
    translate = Driver(operator, spec.keys, []).rows_of
    store = MemoryStore()
    wall = max(0, max((m.time for m in feed.messages), default=0))
    context = StandaloneContext(operator.spec, store)
    kept: list[dict[str, object]] = []
    for message in feed.messages:
        context.add_message(added(message), wall)
        fate = data.draw(st.sampled_from(("go on", "go on", "flush", "crash")))
        if fate == "flush":
            kept += context.get_result()
            context.flush()
        elif fate == "crash":
            # what was not flushed is gone; the source delivers everything again, and what is in already is a NOOP
            context = StandaloneContext(operator.spec, store)
            for again in feed.messages:
                if again.offset <= message.offset:
                    context.add_message(added(again), wall)
    kept += context.get_result()
    oracle = WindowOracle(spec)
    for message in feed.messages:
        refused = len(oracle.errors)
        oracle.add_message(message, wall)
        if len(oracle.errors) > refused:
            oracle.timeout(wall)  # as above: a refused message counts for the retention by number, and moves it on
    ours = rows(translate, operator, kept)
    assert close(full_rows(ours), full_rows(oracle.rows))
    last, expected = last_values(ours), last_values(oracle.rows)
    assert last.keys() == expected.keys()
    assert all(close(last[window], expected[window]) for window in last)
