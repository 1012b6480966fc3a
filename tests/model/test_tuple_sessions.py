"""Sessions by number of messages against a plain loop; cuts change neither results nor state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.aggregates import collect_list, count, sum_
from backend.windows.definitions import session
from backend.windows.operator import WindowOperator
from backend.windows.policies import policies
from backend.windows.spec import window_spec
from tests.model.streams import share
from tests.model.tuple_checks import check_messages, check_replay, cut
from tests.unit.one_shard import SCHEMA, OneShard, Row


def shard(size: int, **options: Any) -> OneShard:
    aggregates = {"n": count(), "sum": sum_("value"), "all": collect_list("value")}
    return OneShard(window_spec(session(messages=size), SCHEMA, aggregates, keys=["key"], max_ahead=None, **options))


def results(s: OneShard) -> list[tuple[Any, ...]]:
    assert s.outcome is not None
    rows = s.outcome.results.to_pylist()
    assert all(row["n"] == len(row["all"]) and row["sum"] == sum(row["all"]) for row in rows)
    return [(r["reason"], r["revision"], r["key"], r["all"], r["start_offset"], r["last_offset"]) for r in rows]


def loop(rows: list[Row], size: int) -> tuple[list[Any], dict[Any, list[Row]]]:
    """Give full results in order, and the open sessions."""
    live: dict[Any, tuple[int, list[Row]]] = {}
    out = []
    for position, row in enumerate(rows):
        for key, (last, mine) in list(live.items()):
            if key != row[2] and position - last >= size:
                out.append(("full", 0, key, [r[3] for r in mine], mine[0][0], mine[-1][0]))
                del live[key]
        _, mine = live.get(row[2], (0, []))
        live[row[2]] = (position, [*mine, row])
    return out, {key: mine for key, (_, mine) in live.items()}


MESSAGES = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(-5, 5)), max_size=26)
CUTS = st.lists(st.integers(0, 26), max_size=4)


@share(0.4)
@given(size=st.integers(1, 5), messages=MESSAGES, cuts=CUTS)
def test_any_cut_is_the_plain_loop(size, messages, cuts):
    rows: list[Row] = [(3 * at, at % 7, key, value) for at, (key, value) in enumerate(messages)]
    expected, live = loop(rows, size)
    whole, parts = shard(size), shard(size)
    whole.batch(rows)
    assert results(whole) == expected
    found = []
    for piece in cut(rows, cuts):
        parts.batch(piece)
        found += results(parts)
        check_messages(parts)
    assert found == expected
    assert parts.visible() == whole.visible()
    check_replay(parts, [{0: rows}])
    parts.batch([], drain=True)
    assert sorted(row[3] for row in results(parts)) == sorted([r[3] for r in mine] for mine in live.values())


@share(0.2)
@given(
    size=st.integers(1, 4),
    batches=st.lists(
        st.lists(st.tuples(st.sampled_from("aabc"), st.integers(0, 1)), max_size=8), min_size=1, max_size=5
    ),
)
def test_two_source_partitions_count_in_the_order_of_the_micro_batches(size, batches):
    s, number, found = shard(size), 0, []
    arrived: list[Row] = []
    fed: list[dict[int, list[Row]]] = []
    for batch in batches:
        sides: dict[int, list[Row]] = {0: [], 1: []}
        for key, partition in batch:
            sides[partition].append((number, partition, key, number))
            number += 1
        arrived += sides[0] + sides[1]
        fed.append(sides)
        s.batch(sides[0], more={1: sides[1]})
        found += [(*row[:3], sorted(row[3]), *row[4:]) for row in results(s)]
        check_messages(s)
    check_replay(s, fed)
    assert found == [(*row[:3], sorted(row[3]), *row[4:]) for row in loop(arrived, size)[0]]


def test_the_message_that_makes_it_so_many_without_the_key_ends_the_session():
    s = shard(2)
    s.batch([(0, 0, "a", 1), (1, 0, "b", 2), (2, 0, "a", 3), (3, 0, "b", 4)])
    assert results(s) == []
    s.batch([(4, 0, "b", 5)])
    assert results(s) == [("full", 0, "a", [1, 3], 0, 2)]
    s.batch([(5, 0, "a", 6), (6, 0, "a", 7)])
    assert results(s) == [("full", 0, "b", [2, 4, 5], 1, 4)]


def test_early_and_drain_show_open_sessions():
    s = shard(3, policies=policies(early="10 s"))
    s.batch([(0, 0, "a", 1)], 0)
    s.batch([(1, 0, "b", 2), (2, 0, "a", 4)], 5_000)
    assert results(s) == []
    assert s.outcome is not None
    assert s.outcome.next_due_ms == 10_000
    s.batch([], 10_000)
    assert results(s) == [("early", 0, "a", [1, 4], 0, 2)]
    assert s.outcome.next_due_ms == 15_000
    s.batch([], 11_000, drain=True)
    assert results(s) == [("drain", 0, "b", [2], 1, 1), ("drain", 1, "a", [1, 4], 0, 2)]
    assert s.outcome.next_due_ms is None
    s.batch([(3, 0, "a", 8), (4, 0, "a", 16)], 12_000)
    assert results(s) == [("full", 1, "b", [2], 1, 1)]


def test_a_session_by_messages_needs_a_key():
    with pytest.raises(ValueError, match=r"keys=\(\)"):
        WindowOperator(window_spec(session(messages=3), SCHEMA, {"n": count()}, max_ahead=None))
