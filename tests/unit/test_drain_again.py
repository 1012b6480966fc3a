"""A drain that nothing new came before sends nothing: the rows would be the same again. Expected values by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backend import archive, count, hopping, policies, session, sliding, stream, tumbling
from backend.batch import NO_TIME, Position
from backend.windows.watermark import came
from recovery.testing import OperatorTester

SCHEMA = pa.schema([("at", pa.int64()), ("who", pa.string())])
EVENTS = [(0, "ann"), (7, "bob"), (12, "ann"), (13, "ann")]
KINDS = {
    # the windows that are open when stream time is 13, or after four messages: (start, who, count); and the same after
    # a fifth message, of ann at 14
    "tumbling": (tumbling(10), [(10, "ann", 2)], [(10, "ann", 3)]),
    "hopping": (hopping(10, 5), [(5, "ann", 2), (5, "bob", 1), (10, "ann", 2)],
                [(5, "ann", 3), (5, "bob", 1), (10, "ann", 3)]),
    "sliding": (sliding(5), [(8, "ann", 2)], [(9, "ann", 3)]),
    "session": (session(5), [(12, "ann", 2)], [(12, "ann", 3)]),
    "tumbling by number": (tumbling(messages=3), [(None, "bob", 1)], [(None, "ann", 1), (None, "bob", 1)]),
    "session by number": (session(messages=3), None, None),
}  # fmt: skip
"""None: what the first drain gives is taken from it, and only that the second gives none is looked at."""


NOWHERE = archive("nowhere", format="raw")
"""A tester reads no source."""


def made(window: Any, path: Path, **options: Any) -> OperatorTester:
    job = stream(NOWHERE, event_time="at", key="who").window(window, retention=1_000, **options)
    return OperatorTester(job.aggregate(n=count()), SCHEMA, path)


def rows(*events: tuple[int, str]) -> list[dict[str, object]]:
    return [{"at": at, "who": who} for at, who in events]


def drained(emitted: Any) -> list[tuple[Any, ...]]:
    found = emitted.results.to_pylist()
    return sorted((one["window_start"], one["who"], one["n"]) for one in found if one["reason"] == "drain")


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_drain_sends_nothing_until_a_message_comes(kind: str, early: bool, tmp_path: Path) -> None:
    window, first, second = KINDS[kind]
    options = {"policies": policies(early="1 second")} if early else {}
    tester = made(window, tmp_path, **options)
    shown = drained(tester.batch(rows(*EVENTS), drain=True))
    assert shown
    assert first is None or shown == first
    assert tester.drain().results.num_rows == 0
    assert tester.batch().results.num_rows == 0, "nor does a micro-batch between them matter"
    assert tester.drain().results.num_rows == 0
    again = drained(tester.batch(rows((14, "ann")), drain=True))
    assert again
    assert second is None or again == second
    assert tester.drain().results.num_rows == 0


def test_a_message_that_came_before_the_drain_counts_as_new(tmp_path: Path) -> None:
    tester = made(tumbling(10), tmp_path)
    assert drained(tester.batch(rows((0, "ann")), drain=True)) == [(0, "ann", 1)]
    tester.batch(rows((1, "ann")))
    tester.batch()
    assert drained(tester.drain()) == [(0, "ann", 2)]
    tester.lose_disk()
    tester.restore()
    assert drained(tester.drain()) == [], "what was drained is in the state"


def test_whether_something_came_does_not_hang_on_shards() -> None:
    """Every shard is told every source partition's positions: all of them see the same."""
    at = {(0, 0): Position(5, 100, 7), (0, 1): Position(3, 90, 7)}
    assert not came(at, dict(at))
    assert not came(at, {**at, (0, 1): Position(3, 90, 8)})
    assert came(at, {**at, (0, 1): Position(4, 90, 8)})
    assert came(at, {**at, (0, 2): Position(1, 90, 8)})
    assert not came({}, {})
    assert not came(at, {**at, (0, 2): Position(0, NO_TIME, 8)}), "it has become known, and is empty"


def test_an_empty_source_partition_that_becomes_known_is_nothing_new(tmp_path: Path) -> None:
    tester = made(tumbling(10), tmp_path)
    assert drained(tester.batch(rows((0, "ann")), drain=True)) == [(0, "ann", 1)]
    tester.send([], partition=1)
    tester.batch()
    assert tester.pointer is not None
    assert [partition for _, partition, _ in tester.pointer.positions] == [0, 1]
    assert tester.drain().results.num_rows == 0
    assert drained(tester.batch(rows((1, "ann")), partition=1, drain=True)) == [(0, "ann", 2)]


def test_windows_go_on_after_a_drain_that_sent_nothing(tmp_path: Path) -> None:
    tester = made(tumbling(10), tmp_path)
    tester.batch(rows((0, "ann")), drain=True)
    tester.drain()
    full = tester.batch(rows((10, "ann"))).results.to_pylist()
    assert [(one["reason"], one["revision"], one["window_start"], one["n"]) for one in full] == [("full", 1, 0, 1)]
