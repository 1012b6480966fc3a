"""The oracle has the properties that it asks of the operator: cuts change nothing that matters, replays nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.streams import cut, cut_points, feeds, share
from tests.oracle.windows import Message, Spec, WindowOracle, error_set, full_rows, last_values, run

BASE = Spec("tumbling", 10, keys=("key",), aggregates=(("count", None), ("sum", "value"), ("collect_list", "value")))
KINDS = {
    "tumbling": replace(BASE, origin=3, retention_ms=7),
    "hopping": replace(BASE, kind="hopping", step=4, retention_ms=7),
    "sliding": replace(BASE, kind="sliding", size=6, retention_ms=5),
    "session": replace(BASE, kind="session", size=4, retention_ms=9),
    "tumbling messages": replace(BASE, size=3, unit="messages"),
    "hopping messages": replace(BASE, kind="hopping", size=5, step=2, unit="messages"),
    "sliding messages": replace(BASE, kind="sliding", size=3, unit="messages"),
    "session messages": replace(BASE, kind="session", size=3, unit="messages"),
    "tumbling messages kept": replace(BASE, size=3, unit="messages", retention_ms=9, retention_messages=4),
    "sliding messages kept": replace(BASE, kind="sliding", size=3, unit="messages", retention_ms=9),
    "session messages kept": replace(BASE, kind="session", size=3, unit="messages", retention_ms=9),
}


def in_order(batch: tuple[Message, ...]) -> list[Message]:
    return sorted(batch, key=lambda m: m.place)


@pytest.mark.parametrize("kind", KINDS)
@share(0.3)
@given(st.data())
def test_cuts_and_replays_change_nothing_with_one_partition(kind, data):
    spec = KINDS[kind]
    feed = data.draw(feeds(duplicates=False))
    whole = run(spec, [feed.messages], walls=[feed.walls[-1]])
    parts = run(spec, feed.batches, walls=feed.walls)
    again = run(spec, [*feed.batches, feed.messages], walls=[*feed.walls, feed.walls[-1]])
    for other in (parts, again):
        assert full_rows(whole.rows) == full_rows(other.rows)
        assert error_set(whole.errors) == error_set(other.errors)
        assert last_values(whole.rows) == last_values(other.rows)


# Not sessions: whether a very late message finds a retained session to join depends on what the other source partitions
# have brought by then.
@pytest.mark.parametrize("kind", ["tumbling", "hopping", "sliding"])
@share(0.3)
@given(st.data())
def test_cuts_change_neither_errors_nor_last_values_with_several_partitions(kind, data):
    spec = KINDS[kind]
    feed = data.draw(feeds(partitions=3, duplicates=False))
    by_partition = [[m for m in feed.messages if m.partition == p] for p in range(3)]
    results = []
    for _ in range(2):
        # each partition is cut on its own: a micro-batch takes what has arrived of each
        pieces = [cut(part, data.draw(cut_points(len(part)))) for part in by_partition]
        longest = max(len(piece) for piece in pieces)
        batches = [in_order(sum((p[n] if n < len(p) else () for p in pieces), ())) for n in range(longest)]
        results.append(run(spec, batches, partitions=3))
    one, two = results
    assert error_set(one.errors) == error_set(two.errors)
    assert last_values(one.rows) == last_values(two.rows)


def test_message_by_message_and_by_micro_batch_agree():
    spec = replace(BASE, retention_ms=100, late_ms=0)
    messages = [Message(n, t, {"key": "a", "value": n}) for n, t in enumerate([1, 5, 12, 3, 30, 29, 14])]
    single = WindowOracle(spec)
    for message in messages:
        single.add_message(message, 0)
    single.drain()
    batched = run(spec, [messages], walls=[0])
    assert full_rows(single.rows) == full_rows(batched.rows)
    assert last_values(single.rows) == last_values(batched.rows)
