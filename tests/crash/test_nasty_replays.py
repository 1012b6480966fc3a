"""Streams that make a replay go wrong when it is done by the obvious rule; each restored state is the lost one.

Expected offsets are worked out by hand from SAMZA-552's rules: hours as windows, times in minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backend import aggregates as agg
from backend.errors import RestoreMismatch
from backend.windows import definitions as win
from backend.windows.operator import WindowOperator
from backend.windows.spec import window_spec
from recovery.commit.pointer import Pointer
from recovery.commit.shard_directory import ShardDirectory
from recovery.restore.open_shard import OpenShard
from recovery.testing import OperatorTester

MINUTE = 60_000
SCHEMA = pa.schema([pa.field("k", pa.string()), pa.field("x", pa.int64())])


HOURS = win.tumbling("1 hour")


def operator(window: win.Window = HOURS, **options: Any) -> WindowOperator:
    options = {"retention": "1 hour", "max_ahead": None, "keys": ["k"], **options}
    return WindowOperator(window_spec(window, SCHEMA, {"n": agg.count(), "mid": agg.median("x")}, **options))


def rows(minutes: Sequence[int], k: str = "a") -> list[dict[str, Any]]:
    return [{"_time": minute * MINUTE, "k": k, "x": minute} for minute in minutes]


def committed(tester: OperatorTester, pointer: Pointer | None = None) -> dict[bytes, bytes]:
    """Give every row of the database at the pointer that its bounds do not hide."""
    job = tester._job
    opened = OpenShard(ShardDirectory(job.local_dir, job.query_id, 0), job.where).at(pointer or tester.pointer)
    bounds = opened.row.bounds if opened.row is not None else {}
    with opened.store as store:
        return {key: value for key, value in store.scan(b"", None) if key >= bounds.get(key[0], b"")}


def restored_exactly(tester: OperatorTester) -> Pointer:
    """Lose the disk, restore, compare all rows; give the pointer."""
    before, pointer = committed(tester), tester.pointer
    assert pointer is not None
    tester.lose_disk()
    tester.restore()
    assert committed(tester) == before
    return pointer


def record(tester: OperatorTester) -> Any:
    assert tester.pointer is not None
    return tester._job.changelog.read(0, tester.pointer.commit).record


def test_a_later_window_with_a_smaller_offset_than_the_earliest(tmp_path: Path) -> None:
    tester = OperatorTester(operator(), SCHEMA, tmp_path)
    tester.batch(rows([70, 65, 30, 80, 20]))  # offset 2 begins the first hour, offset 0 the second
    assert record(tester).replay_from == [(0, 0, 0)]
    restored_exactly(tester)
    # the first hour expires: what is left begins at offset 0, before messages that are gone
    tester.batch(rows([125]))
    restored_exactly(tester)
    assert tester.batch(rows([61])).errors.num_rows == 0, "it can still be revised"


def test_sessions_with_rejected_messages_in_their_range(tmp_path: Path) -> None:
    tester = OperatorTester(operator(win.session("5 minutes"), retention="0 minutes"), SCHEMA, tmp_path)
    tester.batch([*rows(range(85, 121, 4), "b"), *rows([120], "c")])  # one session of b, 85 to 117: nine messages
    refused = tester.batch(rows([90, 80, 100, 110], "b"))
    assert refused.errors["offset"].to_pylist() == [10, 11, 12, 13], "a session of each alone would be over"
    assert record(tester).rejected == [(0, 0, 10), (0, 0, 12), (0, 0, 13)], "a replay would take them for the session's"
    assert record(tester).message_count == 10
    restored_exactly(tester)


def test_retention_by_size(tmp_path: Path) -> None:
    tester = OperatorTester(operator(retention="10 hours", retention_messages=3), SCHEMA, tmp_path)
    tester.batch(rows([10, 70, 130]))
    tester.batch(rows([190, 200, 250, 260]))
    state = restored_exactly(tester)
    late = tester.batch(rows([15]))
    assert late.errors["reason"].to_pylist() == ["out_of_retention"], "by time there would be room for ten hours"
    assert restored_exactly(tester).commit != state.commit


@pytest.mark.parametrize("window", [HOURS, win.hopping("1 hour", "30 minutes"), win.sliding("20 minutes")])
def test_a_retention_made_longer_reopens_nothing(tmp_path: Path, window: win.Window) -> None:
    tester = OperatorTester(operator(window), SCHEMA, tmp_path)
    tester.batch(rows([10, 70, 130, 190]))  # with one hour the first two windows are gone
    longer = operator(window, retention="5 hours")
    tester.operator = longer
    tester._job = replace(tester._job, operator=longer)
    assert tester.batch(rows([195])).errors.num_rows == 0
    restored_exactly(tester)
    late = tester.batch(rows([15, 135]))
    assert late.errors["offset"].to_pylist() == [5], "its window's messages are gone; the other one is there"
    restored_exactly(tester)
    tester.batch(rows([490]))
    assert tester.batch(rows([135])).errors["offset"].to_pylist() == [8], "from here on five hours hold"
    restored_exactly(tester)


def test_an_idle_partition_that_wakes_up(tmp_path: Path) -> None:
    tester = OperatorTester(operator(idle_after="1 minute", retention="0 minutes"), SCHEMA, tmp_path)
    tester.send(rows([5]), partition=1)
    tester.batch(rows([10, 70]))
    assert record(tester).replay_from == [(0, 0, 0), (0, 1, 0)], "partition 1 holds the first hour open"
    tester.now_ms += 2 * MINUTE
    full = tester.batch(rows([71]))
    assert full.results["window_start"].to_pylist() == [0], "without the idle partition the first hour is over"
    awake = tester.batch(rows([20, 80]), partition=1)
    assert awake.errors["offset"].to_pylist() == [1]
    restored_exactly(tester)


def test_a_source_whose_middle_was_deleted(tmp_path: Path) -> None:
    tester = OperatorTester(operator(), SCHEMA, tmp_path)
    tester.batch(rows([5, 10, 15, 65, 70]))
    before = committed(tester)
    topic = tester._topics[0, 0]
    kept, topic.sent = topic.sent, [*topic.sent[:1], *topic.sent[2:]]
    tester.lose_disk()
    with pytest.raises(RestoreMismatch) as caught:
        tester.restore()
    assert "2 messages, 3 were committed" in caught.value.why
    assert caught.value.command
    topic.sent = kept
    tester.restore()
    assert committed(tester) == before
