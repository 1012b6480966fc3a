"""A micro-batch leaves no cycle behind: its Arrow tables and its open database go when it ends.

Python's collector counts objects, not bytes: cycles around tables of megabytes stay for many micro-batches, and a
worker grew by the size of a micro-batch with each.
"""

from __future__ import annotations

import gc

import pyarrow as pa
import pytest

from backend import archive, count, hopping, median, session, sliding, stream, tumbling
from backend.batch import TIME
from backend.joins.operator import JoinOperator
from backend.joins.spec import join_spec
from recovery.testing import OperatorTester

pytestmark = pytest.mark.slow

MINUTE = 60_000
SCHEMA = pa.schema([pa.field("key", pa.string()), pa.field("at", pa.int64()), pa.field("x", pa.int64())])
WINDOWS = {
    "tumbling": tumbling("1 minute"),
    "hopping": hopping("1 minute", "20 seconds"),
    "sliding": sliding("1 minute"),
    "session": session("30 seconds"),
    "tumbling by number": tumbling(messages=4),
    "hopping by number": hopping(messages=4, every=2),
    "sliding by number": sliding(messages=3),
    "session by number": session(messages=5),
}


NOWHERE = archive("nowhere", format="raw")
"""A tester reads no source."""


def source(**key):
    return stream(NOWHERE, event_time="at", **key)


def rows(first):
    return [{"key": f"k{i % 3}", "at": i * 7_000, "x": i} for i in range(first, first + 40)]


def left_by(operate):
    """Run something without the collector; name the kinds of our own objects that only a cycle still holds."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        operate()
        gc.collect()
        return {f"{type(it).__module__}.{type(it).__name__}" for it in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def ours(kinds):
    return {kind for kind in kinds if kind.split(".")[0] in ("backend", "recovery", "pyarrow", "rocksdict")}


@pytest.mark.parametrize("kind", WINDOWS)
def test_windows(kind, tmp_path):
    job = (
        source(key="key")
        .window(WINDOWS[kind], retention="5 minutes", max_ahead=None)
        .aggregate(n=count(), mid=median("x"))
    )
    tester = OperatorTester(job, SCHEMA, tmp_path)
    tester.batch(rows(0))

    def operate():
        tester.batch(rows(40))
        tester.batch(rows(20))  # late ones
        tester.drain()

    assert ours(left_by(operate)) == set()


def test_joins(tmp_path):
    side = pa.schema([pa.field("k", pa.int64()), pa.field("n", pa.int64())])
    kept = {"left_retention": "5 minutes", "right_retention": "5 minutes"}
    spec = join_spec(side, side, on="k", within="30 seconds", how="outer", max_ahead=None, **kept)
    tester = OperatorTester(JoinOperator(spec), pa.schema([f for s in spec.sides for f in s.columns]), tmp_path)

    def send(first):
        tester.send([{TIME: i * 7_000, "left.k": i % 4, "left.n": i} for i in range(first, first + 40)], stream=0)
        tester.send([{TIME: i * 7_000, "right.k": i % 3, "right.n": i} for i in range(first, first + 40)], stream=1)

    def operate():
        send(40)
        assert tester.batch().results.num_rows
        send(20)
        tester.batch()
        tester.drain()

    send(0)
    tester.batch()
    assert ours(left_by(operate)) == set()
