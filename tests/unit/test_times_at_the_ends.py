"""Event times at the ends of what is accepted, and windows as long as can be: no sum leaves int64."""

from __future__ import annotations

import pytest

from backend.aggregates import count, median
from backend.batch import MAX_EVENT_TIME, MIN_EVENT_TIME
from backend.windows.definitions import MAX_DURATION_MS, hopping, session, sliding, tumbling
from backend.windows.spec import window_spec
from tests.unit.one_shard import SCHEMA, OneShard

LONG = MAX_DURATION_MS


@pytest.mark.parametrize(("retention", "keep"), [(0, None), (LONG, 2)])
@pytest.mark.parametrize("aggregate", [{"n": count()}, {"n": count(), "m": median("value")}], ids=["light", "full"])
@pytest.mark.parametrize(
    "window",
    [tumbling(1), tumbling(LONG), hopping(LONG, LONG // 4), hopping(10, 3), sliding(1), sliding(LONG), session(LONG)],
    ids=lambda w: f"{w.kind} {w.size}",
)
def test_times_at_the_ends(window, aggregate, retention, keep):
    keep = None if window.kind == "session" else keep  # sessions are kept by time alone
    spec = window_spec(
        window, SCHEMA, aggregate, keys=["key"], retention=retention, retention_messages=keep, max_ahead=None
    )
    s = OneShard(spec)
    rows = []
    for offset, time in enumerate([MIN_EVENT_TIME, MIN_EVENT_TIME + 1, -1, 0, 1, MAX_EVENT_TIME - 1, MAX_EVENT_TIME]):
        rows += s.batch([(offset, time, "a", 1)], 0, drain=time == MAX_EVENT_TIME)
        assert s.errors() == []
    counted = {row[2:4]: row[5] for row in rows}
    if window.kind in {"tumbling", "session"}:
        assert sum(counted.values()) == 7
    assert all(start < end or window.kind == "session" for start, end in counted)
