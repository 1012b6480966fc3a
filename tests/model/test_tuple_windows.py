"""Windows by number of messages against a plain loop; cuts change neither results nor state."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from backend.aggregates import collect_list, count, first, sum_
from backend.windows.definitions import Window, hopping, sliding, tumbling
from backend.windows.policies import policies
from backend.windows.spec import window_spec
from tests.model.streams import share
from tests.model.tuple_checks import check_messages, check_replay, cut
from tests.unit.one_shard import SCHEMA, OneShard, Row

INCREMENTAL = {"n": count(), "sum": sum_("value"), "first": first("value")}
FULL = {**INCREMENTAL, "all": collect_list("value")}


def shard(window: Window, aggregates: Any = None, keys: Any = ("key",), **options: Any) -> OneShard:
    return OneShard(window_spec(window, SCHEMA, aggregates or FULL, keys=keys, max_ahead=None, **options))


def results(s: OneShard) -> list[tuple[Any, ...]]:
    """Give reason, revision, key, values, start_offset, last_offset."""
    assert s.outcome is not None
    out = []
    for row in s.outcome.results.to_pylist():
        assert row["window_start"] is None
        assert row["window_end"] is None
        out.append(
            (row["reason"], row["revision"], row.get("key"), row["all"], row["start_offset"], row["last_offset"])
        )
        assert row["n"] == len(row["all"])
        assert row["sum"] == sum(row["all"])
        assert row["first"] == row["all"][0]
    return out


def loop(
    rows: list[Row], size: int, step: int, lowest: int, keyed: bool, place: Any = itemgetter(0)
) -> tuple[list[Any], dict[Any, list[Row]]]:
    """Give full results in order, and the messages of each key."""
    seen: dict[Any, list[Row]] = {}
    out = []
    for row in rows:
        key = row[2] if keyed else None
        mine = seen.setdefault(key, [])
        mine.append(row)
        for start in range(lowest * step, len(mine), step):
            if start + size == len(mine):
                window = mine[max(start, 0) :]
                values = [r[3] for r in sorted(window, key=place)]
                out.append(("full", 0, key, values, window[0][0], window[-1][0]))
    return out, seen


KINDS = [
    (tumbling(messages=3), 3, 3, 0),
    (tumbling(messages=1), 1, 1, 0),
    (hopping(messages=4, every=2), 4, 2, 0),
    (hopping(messages=7, every=3), 7, 3, 0),
    (sliding(messages=3), 3, 1, -2),
    (sliding(messages=1), 1, 1, 0),
]

MESSAGES = st.lists(st.tuples(st.sampled_from("aab"), st.integers(-5, 5)), max_size=26)
CUTS = st.lists(st.integers(0, 26), max_size=4)


@share(0.4)
@given(kind=st.sampled_from(KINDS), keyed=st.booleans(), messages=MESSAGES, cuts=CUTS)
def test_any_cut_is_the_plain_loop(kind, keyed, messages, cuts):
    window, size, step, lowest = kind
    rows: list[Row] = [(3 * at, at % 7, key, value) for at, (key, value) in enumerate(messages)]
    keys = ("key",) if keyed else ()
    expected, _ = loop(rows, size, step, lowest, keyed)
    whole, parts = shard(window, keys=keys), shard(window, keys=keys)
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


@share(0.2)
@given(
    kind=st.sampled_from(KINDS),
    batches=st.lists(
        st.lists(st.tuples(st.sampled_from("aab"), st.integers(0, 1)), max_size=8), min_size=1, max_size=5
    ),
)
def test_two_source_partitions_count_in_the_order_of_the_micro_batches(kind, batches):
    window, size, step, lowest = kind
    s, number, found = shard(window), 0, []
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
        found += results(s)
        check_messages(s)
    check_replay(s, fed)
    assert found == loop(arrived, size, step, lowest, True, itemgetter(1, 0))[0]


@share(0.2)
@given(kind=st.sampled_from(KINDS[:4]), messages=MESSAGES, cuts=CUTS)
def test_early_and_drain_show_every_open_window(kind, messages, cuts):
    window, size, step, lowest = kind
    rows: list[Row] = [(at, 0, key, value) for at, (key, value) in enumerate(messages)]
    s = shard(window, policies=policies(early="each"))
    sent: dict[Any, int] = {}
    done: list[Row] = []
    pieces = cut(rows, cuts)
    for number, piece in enumerate([*pieces, []]):
        done += piece
        drain = number == len(pieces)
        s.batch(piece, drain=drain)
        touched = {row[2] for row in piece}
        _, seen = loop(done, size, step, lowest, True)
        expected = {
            (key, mine[start][0]): [r[3] for r in mine[start:]]
            for key, mine in seen.items()
            if drain or key in touched
            for start in range(0, len(mine), step)
            if start + size > len(mine)
        }
        shown = {(r[2], r[4]): r for r in results(s) if r[0] != "full"}
        assert {place: r[3] for place, r in shown.items()} == expected
        assert {r[0] for r in shown.values()} <= {"drain" if drain else "early"}
        for row in results(s):
            assert row[1] == sent.get((row[2], row[4]), 0), row
            sent[row[2], row[4]] = row[1] + 1
