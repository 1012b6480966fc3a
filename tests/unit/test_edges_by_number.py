"""Windows by number of messages of two source partitions, whose offsets are alike: by hand, which message is which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backend import every
from backend.aggregates import collect_list, sum_
from backend.batch import EDGES
from backend.windows.by_number import contents
from backend.windows.by_number.contents import TupleContents
from backend.windows.definitions import Window, hopping, session, sliding, tumbling
from backend.windows.policies import policies
from backend.windows.spec import window_spec
from tests.unit.one_shard import SCHEMA, OneShard

AGGREGATES = ({"v": sum_("value")}, {"v": collect_list("value")})


def shard(window: Window, aggregates: Any, **options: Any) -> OneShard:
    return OneShard(window_spec(window, SCHEMA, aggregates, keys=["key"], max_ahead=None, **options))


def edges(s: OneShard) -> list[tuple[Any, ...]]:
    """Give reason, revision, first and last message of the last results."""
    assert s.outcome is not None
    return [tuple(row[name] for name in ("reason", "revision", *EDGES)) for row in s.outcome.results.to_pylist()]


@pytest.mark.parametrize("aggregates", AGGREGATES)
def test_messages_are_known_by_partition_and_offset(aggregates: Any) -> None:
    s = shard(tumbling(messages=2), aggregates)
    s.batch([(5, 1, "a", 1)], more={1: [(5, 1, "a", 2)]})
    assert edges(s) == [("full", 0, 0, 5, 1, 5)]
    s.batch([], more={1: [(6, 1, "a", 3)]})
    assert edges(s) == []
    s.batch([(6, 1, "a", 4), (7, 1, "a", 5), (8, 1, "a", 6)])
    assert edges(s) == [("full", 0, 1, 6, 0, 6), ("full", 0, 0, 7, 0, 8)]


@pytest.mark.parametrize("aggregates", AGGREGATES)
def test_panes_that_windows_share_keep_their_ends(aggregates: Any) -> None:
    s = shard(hopping(messages=4, every=2), aggregates)
    s.batch([(5, 1, "a", 1)], more={1: [(5, 1, "a", 2)]})
    s.batch([], more={1: [(6, 1, "a", 3), (9, 1, "a", 4)]})
    assert edges(s) == [("full", 0, 0, 5, 1, 9)]
    s.batch([(9, 1, "a", 5), (10, 1, "a", 6)])
    assert edges(s) == [("full", 0, 1, 6, 0, 10)]
    s = shard(sliding(messages=2), aggregates)
    s.batch([(5, 1, "a", 1)], more={1: [(5, 1, "a", 2)]})
    s.batch([(6, 1, "a", 3)])
    assert edges(s) == [("full", 0, 1, 5, 0, 6)]


@pytest.mark.parametrize("aggregates", AGGREGATES)
def test_a_session_that_grows_by_the_same_offset_of_another_partition_is_withdrawn(aggregates: Any) -> None:
    s = shard(session(messages=9), aggregates, policies=policies(early=every(1)))
    s.batch([(5, 1, "a", 1)])
    assert edges(s) == [("early", 0, 0, 5, 0, 5)]
    s.batch([], more={1: [(5, 1, "a", 2)]})
    assert edges(s) == [("retracted", 0, 0, 5, 0, 5), ("early", 0, 0, 5, 1, 5)]
    s.batch([], drain=True)
    assert edges(s) == [("drain", 1, 0, 5, 1, 5)]


@pytest.mark.parametrize("window", [tumbling(messages=5), session(messages=10_000)], ids=lambda window: window.kind)
def test_each_message_of_many_keys_is_looked_at_for_its_own_key_alone(
    window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is live of several source partitions is written down key by key."""
    compared = 0

    class Counted(np.ndarray[Any, Any]):
        def __array_ufunc__(self, ufunc: np.ufunc, method: str, *given: Any, **options: Any) -> Any:
            nonlocal compared
            compared += self.size
            plain = [np.asarray(one) if isinstance(one, Counted) else one for one in given]
            made = getattr(ufunc, method)(*plain, **options)
            return made.view(Counted) if isinstance(made, np.ndarray) else made

    real, compress = TupleContents.read, contents.compress

    def read(self: TupleContents, moves: Any) -> None:
        real(self, moves)
        self._all_key, self._all_number = self._all_key.view(Counted), self._all_number.view(Counted)

    monkeypatch.setattr(TupleContents, "read", read)
    monkeypatch.setattr(contents, "compress", lambda values: tuple(one.view(Counted) for one in compress(values)))
    s = shard(window, AGGREGATES[1])
    names = [f"k{at:03d}" for at in range(200)]
    found = []
    for number in range(3):
        sides = [[(number * 200 + at, 1, name, 2 * number + side) for at, name in enumerate(names)] for side in (0, 1)]
        found += s.batch(sides[0], more={1: sides[1]})
    expected = [0, 2, 4, 1, 3]
    if window.kind == "session":
        found, expected = s.batch([], drain=True), [0, 2, 4, 1, 3, 5]
    assert [row[4:] for row in found] == [(name, expected) for name in names]
    assert 0 < compared < 20 * 1200, "as many as there are messages, not as messages and keys"
