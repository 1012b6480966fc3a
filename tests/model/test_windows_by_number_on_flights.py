"""Windows by number of messages on real departures, without Spark, against plain loops over the same file.

Messages come as they do in the archive: a source partition per airport, in the order of departure, a thousand per
micro-batch, and each disk is lost in the middle; what is open at the end comes with the drain.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backend import archive, count, max_, median, session, sliding, stream, tumbling
from recovery.drill.flights import first_days, read_flights
from recovery.testing import OperatorTester

DAYS = 12
SCHEMA = pa.schema(
    [
        pa.field("origin", pa.string()),
        pa.field("tailnum", pa.string()),
        pa.field("delay", pa.float64()),
        pa.field("at", pa.int64()),
    ]
)


@pytest.fixture(scope="module")
def airports() -> dict[str, list[dict[str, Any]]]:
    """The departures of each airport in the order in which they left; cancelled flights never did."""
    flights = first_days(read_flights(), DAYS)
    columns = [flights[name].to_pylist() for name in ("origin", "tailnum", "dep_delay", "scheduled_ms")]
    order = defaultdict(list)
    for index, (origin, plane, delay, at) in enumerate(zip(*columns, strict=True)):
        if delay != "NA":
            order[origin].append((at + int(delay) * 60_000, index, plane, float(delay), at))
    return {
        origin: [
            {"origin": origin, "tailnum": plane, "delay": delay, "at": at} for *_, plane, delay, at in sorted(legs)
        ]
        for origin, legs in sorted(order.items())
    }


def run(airports: dict[str, list[dict[str, Any]]], path: Path, key: Any, window: Any, **aggregates: Any) -> list[Any]:
    """Run a shard per airport, as `route="partition"` does."""
    rows: list[Any] = []
    for origin, legs in airports.items():
        source = archive(str(path / "nowhere"), value="origin string, tailnum string, delay double, at long")
        job = stream(source, event_time="at", key=key).window(window, max_ahead=None).aggregate(**aggregates)
        tester = OperatorTester(job, SCHEMA, path / origin)
        for first in range(0, len(legs), 1000):
            if first == 2000:
                tester.lose_disk()
                tester.restore()
            rows += tester.batch(legs[first : first + 1000]).results.to_pylist()
        rows += tester.drain().results.to_pylist()
    return rows


def in_order(
    rows: list[Any], *key: str, window: tuple[str, ...] = ("start_offset",)
) -> dict[tuple[Any, ...], list[tuple[int, float]]]:
    """What each key's windows came to, in the order of their offsets; the last revision of each."""
    last: dict[tuple[Any, ...], Any] = {}
    for row in rows:
        identity = tuple(row[name] for name in (*key, *window))
        if row["reason"] == "retracted":
            last.pop(identity, None)
        else:
            last[identity] = row
    found = defaultdict(list)
    for row in sorted(last.values(), key=lambda row: (row["start_offset"], row["last_offset"])):
        found[tuple(row[name] for name in key)].append((row["n"], row["value"]))
    return dict(found)


@pytest.mark.slow
def test_tumbling_windows(airports: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    rows = run(airports, tmp_path, "origin", tumbling(messages=50), n=count(), value=max_("delay"))
    wanted = {}
    for origin, legs in airports.items():
        inside = [legs[first : first + 50] for first in range(0, len(legs), 50)]
        wanted[(origin,)] = [(len(window), max(leg["delay"] for leg in window)) for window in inside]
    assert in_order(rows, "origin") == wanted
    assert {row["reason"] for row in rows if row["n"] == 50} == {"full"}


def test_sliding_windows(airports: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    rows = run(airports, tmp_path, "origin", sliding(messages=20), n=count(), value=max_("delay"))
    wanted = {}
    for origin, legs in airports.items():
        inside = [legs[max(0, last - 19) : last + 1] for last in range(len(legs))]
        wanted[(origin,)] = [(len(window), max(leg["delay"] for leg in window)) for window in inside]
    assert {row["reason"] for row in rows} == {"full"}
    assert in_order(rows, "origin", window=("start_offset", "last_offset")) == wanted


def test_sessions(airports: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    rows = run(airports, tmp_path, ["origin", "tailnum"], session(messages=300), n=count(), value=median("delay"))
    wanted: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for origin, legs in airports.items():
        by_plane = defaultdict(list)
        for at, leg in enumerate(legs):
            by_plane[leg["tailnum"]].append((at, leg["delay"]))
        for plane, mine in by_plane.items():
            parts = [[mine[0]]]
            for leg in mine[1:]:
                if leg[0] - parts[-1][-1][0] > 300:
                    parts.append([])
                parts[-1].append(leg)
            wanted[origin, plane] = [(len(part), statistics.median(delay for _, delay in part)) for part in parts]
    assert in_order(rows, "origin", "tailnum") == wanted
    assert sum(map(len, wanted.values())) > len(wanted)
