"""Window definitions: durations, options, and which windows and panes a time belongs to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from backend.windows.definitions import Grid, duration_ms, hopping, session, sliding, tumbling
from backend.windows.policies import Policies, policies


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1 hour", 3_600_000),
        ("2 hours", 7_200_000),
        ("90 s", 90_000),
        ("1 min 30 s", 90_000),
        ("1 minute, 30 seconds", 90_000),
        ("0.5 s", 500),
        ("1500ms", 1500),
        ("1 week", 604_800_000),
        ("1 Day", 86_400_000),
        (250, 250),
        (timedelta(hours=1, milliseconds=1), 3_600_001),
    ],
)
def test_durations(text, ms):
    assert duration_ms(text, "size") == ms


@pytest.mark.parametrize(
    "value", ["", "hour", "1", "1 fortnight", "1 hour ago", "--1 s", True, 1.5, None, "0.0001 s", 0, -5, "-1 s", 2**59]
)
def test_a_bad_duration_names_the_option(value):
    with pytest.raises(ValueError, match=r"^size="):
        duration_ms(value, "size")


def test_negative_durations_where_they_are_allowed():
    assert duration_ms("-1 s 500 ms", "origin", least=-10_000) == -1500


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (tumbling, "size="),
        (lambda: tumbling(0), "size="),
        (lambda: tumbling("1 s", messages=3), "measured by time or by messages"),
        (lambda: tumbling(messages=0), "messages="),
        (lambda: tumbling(messages=True), "messages="),
        (lambda: tumbling(messages=3, origin=1), "origin="),
        (lambda: tumbling("1 s", origin=datetime(2013, 1, 1)), "origin="),
        (lambda: hopping("1 s"), "step="),
        (lambda: hopping("1 s", "2 s"), "step="),
        (lambda: hopping("1 s", -1), "step="),
        (lambda: hopping("1 day", 1), "step="),
        (
            lambda: hopping("7 days", "1 day 1 ms"),
            "step='1 day 1 ms' with size='7 days': a window would have 604800000",
        ),
        (lambda: hopping(messages=3), "every="),
        (lambda: hopping(messages=3, every=4), "every="),
        (sliding, "size="),
        (lambda: session("soon"), "gap="),
        (lambda: session("1 s", messages=2), "measured by time or by messages"),
        (lambda: policies(early="sometimes"), "early="),
        (lambda: policies(late=-1), "late="),
        (lambda: policies(full="yes"), "full="),  # type: ignore[arg-type]
    ],
)
def test_bad_options_fail_at_once_and_are_named(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_the_origin_is_a_phase():
    assert tumbling(10, origin=-3).origin == 7
    assert hopping(60, 20, origin="1 s").origin == 0
    two_minutes = tumbling("2 minutes", origin=datetime(2013, 1, 1, 8, 59, tzinfo=UTC))
    assert two_minutes.origin == 60_000


def test_policies_have_the_defaults_of_the_design():
    assert policies() == Policies(early_ms=None, full=True, late_ms=10_000)
    assert policies(early="each", late="off") == Policies(0, True, None)


@pytest.mark.parametrize(("size", "step", "origin"), [(10, 10, 3), (10, 4, 0), (7, 3, 2), (12, 1, 0), (9, 6, 5)])
def test_a_time_is_in_the_windows_of_its_pane(size, step, origin):
    grid = Grid(size, step, origin)
    for time in range(-50, 50):
        pane = grid.pane_of(np.array([time]))
        first, last = int(grid.first_window(pane)[0]), int(grid.last_window(pane)[0])
        holding = [k for k in range(-100, 100) if origin + k * step <= time < origin + k * step + size]
        assert list(range(first, last + 1)) == holding
        assert origin + int(pane[0]) * grid.pane <= time < origin + (int(pane[0]) + 1) * grid.pane


def test_the_last_window_that_ended():
    grid = Grid(10, 4, 0)
    for clock in range(-30, 30):
        ended = [k for k in range(-50, 50) if k * 4 + 10 <= clock]
        assert grid.last_ended_at(clock) == max(ended)
