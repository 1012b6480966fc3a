"""`Dedupe` against a log that holds whatever failed attempts, zombies and outages may have left in it.

The model promises the reader only what Spark and the broker do: before the first row of a version, the log of each
partition holds every row of the version before at least once. Beyond that an attempt that failed brings any part of its
rows, in any order, at once or much later.
"""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from backend.sinks.dedupe import Dedupe
from tests.model.streams import share

Row = dict[str, Any]


def rows_of(draw: Random, query: str, version: int, shards: int) -> list[Row]:
    return [
        {"query_id": query, "version": version, "shard": shard, "sequence": n, "key": draw.randrange(5)}
        for shard in range(shards)
        for n in range(draw.choice([0, 1, 3, 30, 30, 3000 if draw.random() < 0.05 else 10]))
    ]


def deliver(draw: Random, rows: list[Row], logs: list[list[Row]], *, ordered: bool) -> None:
    rows = list(rows)
    if not ordered:
        draw.shuffle(rows)
    for row in rows:
        logs[row["key"] % len(logs)].append(row)


def part(draw: Random, rows: list[Row]) -> list[Row]:
    """What an attempt that failed brings: a prefix, all but a prefix, a hole, or any rows."""
    kind, low, high = draw.randrange(4), *sorted(draw.randrange(len(rows) + 1) for _ in range(2))
    if kind == 3:
        return [row for row in rows if draw.random() < 0.5]
    return [rows[:low], rows[high:], rows[:low] + rows[high:]][kind]


def write(draw: Random, partitions: int) -> tuple[list[list[Row]], list[Row]]:
    """Write a topic's history; gives the logs, and every row that was ever committed, once."""
    logs: list[list[Row]] = [[] for _ in range(partitions)]
    late: list[Row] = []  # on its way, or in the hands of a zombie
    committed: list[Row] = []
    shards = draw.randint(1, 3)
    for query in draw.sample(["a", "b", "c"], draw.randint(1, 2)):  # one after the other owned the topic
        for version in range(draw.randrange(3), draw.randint(3, 6)):
            rows = rows_of(draw, query, version, shards)
            for _ in range(draw.choice([0, 0, 1, 3])):
                deliver(draw, part(draw, rows), logs, ordered=draw.random() < 0.5)
                late += part(draw, rows)
            keep = [row for row in late if draw.random() < 0.7]
            arrive = [row for row in late if row not in keep]
            whole = [*rows, *arrive]
            if draw.random() < 0.5:
                draw.shuffle(whole)
            deliver(draw, whole, logs, ordered=True)  # now all of it is acknowledged: Spark commits
            late = keep
            committed += rows
    deliver(draw, late, logs, ordered=False)
    return logs, committed


def read(draw: Random, logs: list[list[Row]], *, restarts: float) -> Counter[str]:
    """Read all partitions, in turns, through `Dedupe`; the consumer starts anew now and then."""
    dedupe, places, found = Dedupe(), [0] * len(logs), Counter[str]()
    while any(place < len(log) for place, log in zip(places, logs, strict=True)):
        partition = draw.randrange(len(logs))
        until = min(len(logs[partition]), places[partition] + draw.randint(1, 50))
        for row in logs[partition][places[partition] : until]:
            found[name(row)] += dedupe.is_new(row, "t", partition)
        places[partition] = until
        if draw.random() < restarts:
            dedupe = Dedupe(json.loads(json.dumps(dedupe.state)))
    return found


def name(row: Row) -> str:
    return f"{row['query_id']}/{row['version']}-{row['shard']}-{row['sequence']}"


@share(0.5)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_every_committed_row_comes_through_once(seed, partitions):
    draw = Random(seed)
    logs, committed = write(draw, partitions)
    assert read(draw, logs, restarts=0.3) == Counter(name(row) for row in committed)
