"""`windows_open` after every micro-batch: how many windows a recount of all accepted messages finds open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.aggregates import collect_list, count
from backend.store.memory import MemoryStore
from backend.store.protocol import Changes
from backend.store.workspace import Workspace
from backend.windows import ledger
from backend.windows.definitions import Window, hopping, session, sliding, tumbling
from backend.windows.policies import policies
from backend.windows.spec import window_spec
from tests.model.streams import Feed, feeds, share
from tests.model.test_window_oracle import AGGREGATES, kinds, operator_of, set_of, specs
from tests.model.window_driver import Driver, Shard, shard_of
from tests.oracle.windows import Key, Message, Spec, WindowOracle
from tests.unit.one_shard import SCHEMA, OneShard, Row

pytestmark = pytest.mark.slow

# -- the recount ---------------------------------------------------------------------------------------------------


def open_shared(spec: Spec, messages: Iterable[Message], closing: int, gone_of: dict[Any, int]) -> int:
    """Count tumbling and hopping windows, once for all group keys, by trying one start after the other."""
    step, found = spec.step or spec.size, set()
    for message in messages:
        start = spec.origin + (message.time - spec.origin) // step * step
        while start + spec.size > message.time:
            if start + spec.size > closing and start + spec.size > gone_of[message.place]:
                found.add(start)
            start -= step
    return len(found)


def open_following(spec: Spec, messages: Iterable[Message], closing: int, gone_of: dict[Any, int]) -> int:
    """Count sliding windows: a group key has one per event time."""
    found = set()
    for message in messages:
        if message.time + 1 > closing and message.time + 1 > gone_of[message.place]:
            found.add((key_of(spec, message), message.time))
    return len(found)


def open_sessions(spec: Spec, messages: Iterable[Message], closing: int) -> int:
    """Count sessions: event times of a group key, each at a distance of at most the gap from the next."""
    times: dict[Key, list[int]] = {}
    for message in messages:
        times.setdefault(key_of(spec, message), []).append(message.time)
    lasts = []
    for mine in times.values():
        mine.sort()
        lasts += [one for one, following in pairwise([*mine, mine[-1] + spec.size + 1]) if following - one > spec.size]
    return sum(last + spec.size + 1 > closing for last in lasts)


def open_by_number(spec: Spec, there: dict[Key, list[Message]], shard: Callable[[Key], bool]) -> int:
    """Count windows by number of messages of what is there of each group key; a session is there while it is open."""
    found = 0
    for key, mine in there.items():
        if not shard(key) or spec.kind == "sliding":
            continue
        starts = [0] if spec.kind == "session" else range(0, len(mine), spec.step or spec.size)
        found += sum(spec.kind == "session" or start + spec.size > len(mine) for start in starts)
    return found


def key_of(spec: Spec, message: Message) -> Key:
    return tuple(message.fields[name] for name in spec.keys)


def recount(spec: Spec, oracle: WindowOracle, shard: Callable[[Key], bool]) -> int:
    """Count the open windows of a shard anew."""
    if spec.unit == "messages":
        return open_by_number(spec, oracle.there, shard)
    accepted = [message for message in oracle.accepted if shard(key_of(spec, message))]
    if spec.kind == "session":
        return open_sessions(spec, accepted, oracle.closing)
    of_kind = open_following if spec.kind == "sliding" else open_shared
    return of_kind(spec, accepted, oracle.closing, oracle.gone_of)


# -- side by side --------------------------------------------------------------------------------------------------


def forget(store: MemoryStore) -> None:
    """Leave the ledger as an older release writes it: without its last field."""
    data = store.get(ledger.KEY)
    if data is not None:
        store.write(Changes([ledger.KEY], [msgspec.msgpack.encode(msgspec.msgpack.decode(data)[:8])]))


def told(shard: Shard) -> int:
    """Give what the last micro-batch reported; the ledger says the same."""
    assert shard.outcome is not None
    found = shard.outcome.metrics["windows_open"]
    assert ledger.read(Workspace(shard.store, shard.bounds)).open == found
    return found


def judge(spec: Spec, feed: Feed, shards: int, forgets: int) -> None:
    """Compare the figure of each micro-batch and shard; now and then an older release was there before it."""
    spec = replace(spec, aggregates=(AGGREGATES["list" if feed.partitions > 1 else "n"][1],))
    if spec.retention_messages is not None:
        shards = 1  # a shard counts the messages that it sees, the oracle all of them
    oracle = WindowOracle(spec, feed.partitions, batched=True)
    sources = [(0, partition) for partition in range(feed.partitions)]
    by_number = spec.unit == "messages"
    driver = Driver(
        operator_of(spec), spec.keys, sources, shards=shards, by_number=by_number, max_ahead_ms=spec.max_ahead_ms
    )
    for number, (batch, wall) in enumerate(zip(feed.batches, feed.walls, strict=True)):
        drain = number == len(feed.batches) // 2
        for message in sorted(set_of(batch), key=lambda m: m.place):
            oracle.add_message(message, wall)
        oracle.end_of_batch(wall, drain)
        if forgets >> number & 1:
            for shard in driver.shards:
                forget(shard.store)
        driver.batch(batch, wall, drain=drain)
        expected = [recount(spec, oracle, lambda key, at=at: shard_of(key, shards) == at) for at in range(shards)]
        assert [told(shard) for shard in driver.shards] == expected


FORGETS = st.sampled_from((0, 0, 0b10, 0b100, 0b1010, 0b111110))


@kinds("tumbling", "hopping", "sliding", "session")
@share(0.6)
@given(st.data())
def test_time_windows(kind, data):
    feed = data.draw(feeds(partitions=data.draw(st.sampled_from((1, 1, 2, 3)))))
    judge(data.draw(specs(kind)), feed, data.draw(st.sampled_from((1, 1, 3))), data.draw(FORGETS))


@kinds("tumbling", "hopping", "sliding", "session")
@share(0.6)
@given(st.data())
def test_windows_by_number_of_messages(kind, data):
    feed = data.draw(feeds(partitions=data.draw(st.sampled_from((1, 1, 3)))))
    spec = data.draw(specs(kind, "messages"))
    shards = data.draw(st.sampled_from((1, 3))) if spec.keys and kind != "session" else 1
    judge(spec, feed, shards, data.draw(FORGETS))


# -- by hand -------------------------------------------------------------------------------------------------------


def shard(window: Window, *, retention: int | None = 100, **options: Any) -> OneShard:
    aggregates = {"n": count(), "all": collect_list("value")}
    return OneShard(
        window_spec(window, SCHEMA, aggregates, keys=["key"], max_ahead=None, retention=retention, **options)
    )


def figures(s: OneShard, *batches: Sequence[Row]) -> list[int]:
    """Give the figure after each micro-batch."""
    found = []
    for rows in batches:
        s.batch(rows)
        assert s.outcome is not None
        found.append(s.outcome.metrics["windows_open"])
    return found


def rows(*times: int, key: str = "a", begin: int = 0) -> list[Row]:
    return [(begin + at, time, key, at) for at, time in enumerate(times)]


def test_a_clock_that_jumps_closes_many_at_once_and_what_is_late_opens_nothing():
    s = shard(tumbling(10))
    # a window of its own for each of 0, 10, ... 90; the clock closes all but the last; then two of them are late
    assert figures(s, rows(*range(0, 100, 10)), rows(1_000, begin=10), rows(950, 951, begin=11), []) == [1, 1, 1, 1]
    s = shard(hopping(10, 5))
    assert figures(s, rows(12), rows(14, begin=1), rows(15, begin=2), rows(11, begin=3)) == [2, 2, 2, 2]
    assert figures(s, rows(500, begin=4), rows(495, 499, begin=5)) == [2, 2]


def test_windows_of_a_partition_that_lags_stay_open():
    s = shard(tumbling(10), idle_after=None)
    s.batch(rows(5), more={1: rows(*range(0, 1_000, 10), key="b")})
    assert figures(s, [], rows(25, begin=1), rows(2_000, begin=2)) == [100, 98, 2]


def test_a_window_that_is_open_but_out_of_retention_for_its_only_message_has_none():
    s = shard(hopping(10, 5), retention=0, idle_after=None)
    s.batch(rows(0), more={1: rows(17)})
    assert figures(s, []) == [4]  # [-5, 5), [0, 10), [10, 20), [15, 25)
    s.batch([], more={1: rows(7, 12, begin=1)})  # partition 1 is past [5, 15): 12 is in [10, 20) only
    assert figures(s, []) == [4]
    s.batch(rows(12, begin=1))
    assert figures(s, []) == [3]  # now [5, 15) has it too; the two before it are closed


def test_sliding_windows_are_one_per_group_key_and_event_time():
    s = shard(sliding(10))
    assert figures(s, [*rows(7, 7), *rows(7, 7, key="b", begin=2)], rows(8, begin=4), rows(7, 3, begin=5)) == [2, 1, 1]


def test_sessions_that_merge_are_one():
    s = shard(session(10), idle_after=None)
    s.batch(rows(0), more={1: rows(20, 40, key="a")})
    assert figures(s, [], rows(10, begin=1), rows(30, begin=2), rows(51, begin=3)) == [3, 2, 1, 2]
    s.batch([], more={1: rows(51, 500, begin=2)})
    assert figures(s, [], rows(499, begin=4), rows(2_000, begin=5)) == [2, 1, 2]


def test_a_late_message_prolongs_a_session_that_is_closed_until_it_is_open_again():
    s = shard(session(10))
    assert figures(s, rows(0), rows(11, key="b", begin=1), rows(9, begin=2), rows(12, begin=3)) == [1, 1, 2, 2]


def test_windows_by_number_of_messages_are_open_until_they_are_full():
    assert figures(shard(tumbling(messages=3)), rows(0, 0), rows(0, begin=2), rows(0, begin=3)) == [1, 0, 1]
    assert figures(shard(hopping(messages=4, every=2)), rows(0), rows(0, 0, begin=1), rows(0, begin=3)) == [1, 2, 1]
    assert figures(shard(sliding(messages=3)), rows(0), rows(0, 0, begin=1)) == [0, 0]
    s = shard(session(messages=2))
    a, b = rows(0, begin=0), rows(0, 0, key="b", begin=1)
    assert figures(s, a, b, rows(0, 0, key="c", begin=3)) == [1, 1, 1]


def test_what_falls_out_is_not_open():
    for window in (tumbling(messages=3), session(messages=100)):
        s = shard(window)
        assert figures(s, rows(0), rows(50, key="b", begin=1), rows(100, key="c", begin=2), []) == [1, 2, 2, 2]
        assert figures(s, rows(10_000, key="d", begin=3)) == [1]


def test_a_drain_closes_nothing():
    for window in (tumbling(10), hopping(10, 5), sliding(10), session(10), tumbling(messages=9), session(messages=9)):
        s = shard(window, policies=policies(early="each"))
        found = figures(s, rows(3, 3))
        s.batch([], 10, drain=True)
        assert s.outcome is not None
        assert [s.outcome.metrics["windows_open"]] == found != [0]


def test_a_ledger_of_an_older_release_is_read_and_ours_by_it():
    class Older(msgspec.Struct, array_like=True):
        format: int
        clock: int
        messages: int
        digest: int
        due_ms: int | None
        sent_open: bool
        counted: int
        kind_format: int

    s = shard(tumbling(10))
    assert figures(s, rows(5, 15, 12)) == [1]
    data = s.store.get(ledger.KEY)
    assert data is not None
    older = msgspec.msgpack.decode(data, type=Older)
    assert (older.format, older.clock, older.messages) == (1, 15, 3)
    s.store.write(Changes([ledger.KEY], [msgspec.msgpack.encode(older)]))
    known = ledger.read(Workspace(s.store))
    assert (known.open, known.clock, known.kind_format) == (None, 15, older.kind_format)
    assert figures(s, []) == [1]  # also when nothing came
    assert ledger.read(Workspace(s.store)).open == 1


@pytest.mark.parametrize("window", [sliding(10), session(10), tumbling(messages=9), session(messages=9)])
def test_only_what_an_older_release_wrote_is_scanned_and_once(window, monkeypatch):
    asked = []
    s = shard(window)
    kind = s.operator.kind
    real = kind.count_open
    monkeypatch.setattr(kind, "count_open", lambda *given: asked.append(given) or real(*given))
    first = figures(s, rows(5, 5, key="b"), rows(5, begin=2))
    assert not asked
    forget(s.store)
    assert figures(s, [], [], rows(5, begin=3)) == [first[-1]] * 3
    assert len(asked) == 1


def test_a_scan_of_the_state_finds_what_was_counted():
    s = shard(hopping(60, 1))
    assert figures(s, rows(1_000)) == [60]
    assert s.operator.kind.count_open(Workspace(s.store, s.bounds), 1_030) == 30
