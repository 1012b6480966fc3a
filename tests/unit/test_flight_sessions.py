"""Sessions of real aircraft: every departure of New York's airports in January 2013, by tail number."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from backend.aggregates import count, max_, median, sum_
from backend.batch import MESSAGE_FIELDS, NO_TIME, MicroBatch, Position
from backend.store.memory import MemoryStore
from backend.store.workspace import Workspace
from backend.windows.definitions import session
from backend.windows.operator import WindowOperator
from backend.windows.spec import window_spec
from recovery.drill.flights import first_days, read_flights

HOUR = 3_600_000
GAP, RETENTION = 8 * HOUR, 48 * HOUR
FIELDS = pa.schema([pa.field("tailnum", pa.string()), pa.field("distance", pa.int64())])


@pytest.fixture(scope="module")
def flights() -> pa.Table:
    """The departures of one log in order of departure; the event time is the scheduled one, so many come late."""
    known = first_days(read_flights(), 14)
    known = known.filter(pc.and_(pc.not_equal(known["dep_delay"], "NA"), pc.not_equal(known["tailnum"], "NA")))
    left = np.asarray(known["scheduled_ms"]) + 60_000 * np.asarray(known["dep_delay"].cast(pa.int64()))
    order = np.argsort(left, kind="stable")
    time = np.asarray(known["scheduled_ms"])[order]
    before = np.concatenate([[NO_TIME], np.maximum.accumulate(time)[:-1]])
    count_ = len(order)
    own = [np.zeros(count_), np.zeros(count_), np.arange(count_), time, before]
    arrays = [pa.array(column.astype(np.int64)).cast(f.type) for column, f in zip(own, MESSAGE_FIELDS, strict=True)]
    fields = [known[name].cast(FIELDS.field(name).type).take(pa.array(order)) for name in FIELDS.names]
    return pa.table([*arrays, *fields], schema=pa.schema([*MESSAGE_FIELDS, *FIELDS]))


def run(flights: pa.Table, cuts: list[int], aggregates: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Give the rows that stand at the end, and how many messages were refused."""
    spec = window_spec(session(GAP), FIELDS, aggregates, keys=["tailnum"], retention=RETENTION, max_ahead=None)
    operator, store = WindowOperator(spec), MemoryStore()
    bounds: dict[int, bytes] = {}
    standing: dict[tuple[Any, ...], dict[str, Any]] = {}
    before: dict[tuple[int, int], Position] = {}
    refused = 0
    edges = [0, *cuts, flights.num_rows]
    for version, (low, high) in enumerate(pairwise(edges)):
        piece = flights.slice(low, high - low)
        newest = int(pc.max(flights["_time"].slice(0, high)).as_py())
        after = {(0, 0): Position(high, newest, 0)}
        work = Workspace(store, bounds)
        drain = high == flights.num_rows
        outcome = operator.process(MicroBatch(version, 60_000 * version, piece, before, after, drain), work)
        store.write(work.changes())
        bounds, before = dict(work.bounds), after
        refused += outcome.errors.num_rows
        for row in outcome.results.to_pylist():
            name = row["tailnum"], row["window_start"], row["window_end"]
            if row["reason"] == "retracted":
                assert {**standing.pop(name), "reason": None} == {**row, "reason": None}
            else:
                assert row["revision"] == (standing[name]["revision"] + 1 if name in standing else 0)
                standing[name] = row
    return list(standing.values()), refused


def loop(flights: pa.Table) -> list[tuple[Any, ...]]:
    """Cut each aircraft's scheduled departures where they are more than the gap apart."""
    by_tail: dict[str, list[tuple[int, int]]] = {}
    for row in flights.select(["tailnum", "_time", "distance"]).to_pylist():
        by_tail.setdefault(row["tailnum"], []).append((row["_time"], row["distance"]))
    out = []
    for tail, legs in by_tail.items():
        legs.sort()
        current = [legs[0]]
        for leg in legs[1:]:
            if leg[0] - current[-1][0] > GAP:
                out.append((tail, current))
                current = []
            current.append(leg)
        out.append((tail, current))
    return sorted(
        (tail, legs[0][0], legs[-1][0], len(legs), sum(d for _, d in legs), max(d for _, d in legs),
         float(statistics.median(d for _, d in legs)))
        for tail, legs in out
    )  # fmt: skip


@pytest.mark.parametrize("cuts", [[], [1, 500, 501, 4_000, 9_000]])
def test_sessions_per_tail_number_are_those_of_a_plain_loop(flights: pa.Table, cuts: list[int]) -> None:
    aggregates = {
        "legs": count(),
        "miles": sum_("distance"),
        "longest": max_("distance"),
        "typical": median("distance"),
    }
    rows, refused = run(flights, cuts, aggregates)
    assert refused == 0  # nothing was later than 48 hours: the loop may take all
    names = ("tailnum", "window_start", "window_end", *aggregates)
    assert sorted(tuple(row[name] for name in names) for row in rows) == loop(flights)
    assert len(rows) > 5_000
    assert any(row["reason"] == "late" for row in rows)
