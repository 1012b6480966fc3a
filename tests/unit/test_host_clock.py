"""The host's clock goes back: seen once, and Spark's query, which would wait for the old time, is started again."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest

from recovery.snapshots.publisher import Snapshots
from recovery.supervise.host_clock import HostClock
from recovery.supervise.housekeeping import Housekeeping
from recovery.supervise.supervisor import QueryPlan, RewindQuery

HOUR_S, DAY_S = 3_600.0, 86_400.0


def test_a_step_back_is_seen_once_and_steps_ahead_are_none() -> None:
    now = {"wall": 1_000_000.0, "steady": 50.0}
    clock = HostClock(lambda: now["wall"] - now["steady"])

    def after(seconds: float, step: float = 0.0) -> float:
        now["steady"] += seconds
        now["wall"] += seconds + step
        return clock.went_back_s()

    assert after(7.0) == 0.0
    assert after(1.0, -HOUR_S) == HOUR_S
    assert after(1.0) == 0.0
    assert after(1.0, DAY_S) == 0.0
    assert after(1.0, -DAY_S) == DAY_S
    assert after(1.0, -4.0) == 0.0
    assert after(1.0, -3.0) == 7.0, "small steps add up"
    assert after(1.0, 2.0) == 0.0


class Standing:
    """One of Spark's queries: waits for a time that its clock does not reach, and ends when it is stopped."""

    lastProgress = None  # noqa: N815 - Spark's name

    def __init__(self) -> None:
        self.isActive = True

    def exception(self) -> None:
        return None

    def stop(self) -> None:
        self.isActive = False


@pytest.mark.slow
def test_the_query_is_started_again_when_the_clock_goes_back_and_not_when_it_goes_ahead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before: Spark's trigger waited for the hour to come again, and nothing was said."""
    made: list[Standing] = []

    def launch(publish: Any) -> Any:
        made.append(Standing())
        return made[-1]

    plan = QueryPlan(
        lease=SimpleNamespace(check=lambda: None, lost=None, release=lambda: None),  # type: ignore[arg-type]
        checkpoint="checkpoint",
        start_query=launch,
        publish=lambda frames, version: [],
        restore=lambda why: 0,
        drain=lambda: 1,
        drain_of=lambda version: 1,
        housekeeping=Housekeeping(None, Snapshots("memory://clock"), 100),  # type: ignore[arg-type]
        shards=1,
    )
    real, step = time.time, [0.0]
    with caplog.at_level(logging.WARNING, logger="rewind.supervisor"):
        query = RewindQuery(plan)
        monkeypatch.setattr(time, "time", lambda: real() + step[0])
        for jump, launches in ((DAY_S, 1), (DAY_S - HOUR_S, 2), (0.0, 3)):
            time.sleep(0.3)  # the supervisor looks every 50 ms
            step[0] = jump
            deadline = time.monotonic() + 10
            while len(made) < launches and time.monotonic() < deadline:
                time.sleep(0.01)
        time.sleep(0.3)
        query.stop()
    assert [one.isActive for one in made] == [False] * 3
    assert query.exception is None
    told = [record.getMessage() for record in caplog.records if "went back" in record.getMessage()]
    assert [text.partition(":")[0] for text in told] == [
        "the host's clock went back by 3600 s",
        "the host's clock went back by 82800 s",
    ]
