"""Copies are told whatever came of an attempt that failed; little is remembered; what cannot be read is refused."""

from __future__ import annotations

import json
import random

import pytest

from backend.errors import UnknownFormat
from backend.sinks.dedupe import Dedupe


def row(version: int, sequence: int, shard: int = 0, query: str = "q") -> dict[str, object]:
    return {"query_id": query, "shard": shard, "version": version, "sequence": sequence}


def test_an_attempt_with_a_gap_at_its_start_takes_nothing_from_the_next_one():
    """150 rows, of which the first 100 expired in an outage: then all 150 again."""
    dedupe = Dedupe()
    written = [*range(100, 150), *range(150)]
    assert [n for n in written if dedupe.is_new(row(0, n), "t", 0)] == [*range(100, 150), *range(100)]


def test_rows_are_told_by_topic_partition_query_and_shard():
    dedupe = Dedupe()
    places = [("t", 0, "q", 0), ("u", 0, "q", 0), ("t", 1, "q", 0), ("t", 0, "p", 0), ("t", 0, "q", 1)]
    for topic, partition, query, shard in places * 2:
        dedupe.is_new(row(3, 0, shard, query), topic, partition)
    assert all(not dedupe.is_new(row(3, 0, s, q), t, p) for t, p, q, s in places)
    again = Dedupe()
    assert all(again.is_new(row(3, 0, s, q), t, p) for t, p, q, s in places), "another owner's rows are not copies"
    assert again.is_new({"shard": 0, "version": 0, "sequence": 0}, "t", 0), "rows of release 0.1 name no query"


def test_a_row_of_an_older_version_is_a_copy():
    dedupe = Dedupe()
    assert dedupe.is_new(row(4, 9), "t", 0)
    assert not dedupe.is_new(row(3, 10), "t", 0)
    assert dedupe.is_new(row(5, 9), "t", 0)


def test_what_is_remembered_is_small():
    """A partition of a million rows in order takes a few dozen bytes; every third one at random, one bit per row."""
    dedupe = Dedupe()
    for n in range(100_000):
        assert dedupe.is_new(row(0, n), "t", 0)
    assert len(json.dumps(dedupe.state)) < 400
    chosen = [n for n in range(100_000) if n % 3 == 0]
    random.Random(1).shuffle(chosen)
    for n in chosen:
        assert dedupe.is_new(row(0, n), "t", 1)
    assert len(json.dumps(dedupe.state)) < 100_000 / 8 * 2 + 98 * 10 + 500
    kept = Dedupe(json.loads(json.dumps(dedupe.state)))
    assert not any(kept.is_new(row(0, n), "t", 1) for n in chosen)
    assert not any(kept.is_new(row(0, n), "t", 0) for n in range(0, 100_000, 7))
    assert all(kept.is_new(row(0, n + 1), "t", 1) for n in chosen)
    assert kept.is_new(row(1, 0), "t", 1)
    assert len(json.dumps(kept.state)) < 600, "a new version forgets the rows of the one before"


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"t-0-0": [7, 12]}, "format 1, this release reads 2"),
        ({"format": 3, "seen": {}}, "format 3, this release reads 2"),
        ({"format": 2}, "seen"),
        ({"format": 2, "seen": {"t/0/q/0": [7]}}, "unpack"),
        ({"format": 2, "seen": {"t/0/q/0": [7, 0, {"0": "xyz"}]}}, "xyz"),
    ],
)
def test_a_state_of_another_release_is_refused_by_name(state, why):
    with pytest.raises(UnknownFormat, match=why):
        Dedupe(state)


def test_the_state_of_this_release_is_read():
    """Frozen: version 7, the first 1,024 rows, and rows 1,025 and 1,026."""
    dedupe = Dedupe({"format": 2, "seen": {"t/2/q/5": [7, 1, {"1": "6"}]}})
    found = [n for n in range(1020, 1030) if dedupe.is_new(row(7, n, 5), "t", 2)]
    assert found == [1024, 1027, 1028, 1029]
    assert dedupe.state == {"format": 2, "seen": {"t/2/q/5": [7, 1, {"1": "3f"}]}}
