"""Calendar windows: where they begin and end, by hand and by Python's own clock, and in the operator."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from backend.aggregates import median, sum_
from backend.joins.options import measured_by_number
from backend.store.workspace import Workspace
from backend.windows import views
from backend.windows.aligned.kind import Aligned
from backend.windows.definitions import Window, assigner, tumbling
from backend.windows.policies import policies
from backend.windows.spec import window_spec
from recovery.inspect.known_operator import window_operator
from tests.unit.one_shard import SCHEMA, OneShard

BERLIN = "Europe/Berlin"
HOUR = 3_600_000


def ms(text: str) -> int:
    """Milliseconds of an ISO time with an offset."""
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def window_of(window: Window, time: int) -> tuple[int, int]:
    grid = assigner(window)
    at = grid.pane_of(np.array([time]))
    return int(grid.starts(at)[0]), int(grid.ends(at)[0])


def test_a_month_has_its_own_length():
    month = tumbling("1 month")
    assert window_of(month, ms("2024-02-29T23:59:59+00:00")) == (
        ms("2024-02-01T00:00:00+00:00"),
        ms("2024-03-01T00:00:00+00:00"),
    )
    assert window_of(month, ms("2024-03-01T00:00:00+00:00"))[0] == ms("2024-03-01T00:00:00+00:00")
    assert window_of(month, -1) == (ms("1969-12-01T00:00:00+00:00"), 0)


def test_a_day_is_as_long_as_the_clocks_make_it():
    day = tumbling("1 day", timezone=BERLIN)
    spring = window_of(day, ms("2026-03-29T12:00:00+02:00"))
    assert spring == (ms("2026-03-29T00:00:00+01:00"), ms("2026-03-30T00:00:00+02:00"))
    assert spring[1] - spring[0] == 23 * HOUR
    autumn = window_of(day, ms("2026-10-25T12:00:00+01:00"))
    assert autumn == (ms("2026-10-25T00:00:00+02:00"), ms("2026-10-26T00:00:00+01:00"))
    assert autumn[1] - autumn[0] == 25 * HOUR


@pytest.mark.parametrize(
    ("size", "begin", "end"),
    [
        ("1 week", "2026-03-23T00:00:00+01:00", "2026-03-30T00:00:00+02:00"),
        ("1 month", "2026-03-01T00:00:00+01:00", "2026-04-01T00:00:00+02:00"),
        ("1 quarter", "2026-01-01T00:00:00+01:00", "2026-04-01T00:00:00+02:00"),
        ("3 months", "2026-01-01T00:00:00+01:00", "2026-04-01T00:00:00+02:00"),
        ("1 year", "2026-01-01T00:00:00+01:00", "2027-01-01T00:00:00+01:00"),
        ("10 years", "2020-01-01T00:00:00+01:00", "2030-01-01T00:00:00+01:00"),
    ],
)
def test_units_begin_where_a_calendar_says(size, begin, end):
    for time in (ms(begin), ms("2026-03-29T12:00:00+02:00"), ms("2026-03-29T23:59:59+02:00")):
        assert window_of(tumbling(size, timezone=BERLIN), time) == (ms(begin), ms(end))
    assert window_of(tumbling(size, timezone=BERLIN), ms(begin) - 1)[1] == ms(begin)


@pytest.mark.parametrize("zone", ["UTC", BERLIN, "America/Sao_Paulo", "Asia/Kathmandu", "Pacific/Auckland"])
def test_every_hour_of_years_is_in_the_day_that_clocks_show(zone):
    """Python's own conversion of times is the judge; in these zones and years it never goes back over midnight."""
    hours = np.arange(ms("2015-01-01T00:30:00+00:00"), ms("2018-01-01T00:30:00+00:00"), HOUR)
    shown = [datetime.fromtimestamp(at / 1000, ZoneInfo(zone)).date() for at in hours.tolist()]
    days = assigner(tumbling("1 day", timezone=zone)).pane_of(hours)
    assert days.tolist() == [(day - date(1970, 1, 1)).days for day in shown]
    months = assigner(tumbling("1 month", timezone=zone)).pane_of(hours)
    assert months.tolist() == [(day.year - 1970) * 12 + day.month - 1 for day in shown]


def test_a_day_that_a_place_skipped_has_no_time():
    """Samoa had no 30 December 2011."""
    day = tumbling("1 day", timezone="Pacific/Apia")
    assert window_of(day, ms("2011-12-29T23:59:59-10:00"))[1] == ms("2011-12-31T00:00:00+14:00")
    assert window_of(day, ms("2011-12-31T00:00:00+14:00")) == (
        ms("2011-12-31T00:00:00+14:00"),
        ms("2012-01-01T00:00:00+14:00"),
    )


@pytest.mark.parametrize("size", ["1 day", "3 days", "1 month", "7 years"])
def test_windows_follow_one_another_without_end(size):
    grid = assigner(tumbling(size, timezone="America/St_Johns"))
    random = np.random.default_rng(20)
    far = random.integers(-(2**62), 2**62, 500)
    near = ms("1987-10-25T02:31:00+00:00") + np.arange(-300, 300) * 60_000  # clocks went back from 00:01 to 23:01
    for times in (np.sort(far), near, np.array([-(2**62), 2**62])):
        windows = grid.pane_of(times)
        assert (grid.starts(windows) <= times).all() and (times < grid.ends(windows)).all()
        assert (np.diff(windows) >= 0).all()
        assert grid.last_ended(times).tolist() == (windows - 1).tolist()
        assert (grid.last_begun(grid.starts(windows)) == windows).all()
        assert [grid.last_ended_at(time) for time in times.tolist()[:20]] == (windows[:20] - 1).tolist()


def test_a_window_of_a_day_that_clocks_shorten_closes_an_hour_earlier():
    begin, end = ms("2026-03-29T00:00:00+01:00"), ms("2026-03-30T00:00:00+02:00")
    s = OneShard(
        window_spec(
            tumbling("1 day", timezone=BERLIN),
            SCHEMA,
            {"sum": sum_("value"), "median": median("value")},
            keys=["key"],
            retention="1 hour",
            max_ahead=None,
            policies=policies(late="each", early="each"),
        )
    )
    assert s.batch([(0, begin - 1, "a", 1), (1, begin, "a", 2), (2, end - 1, "a", 4)]) == [
        ("full", 0, begin - 24 * HOUR, begin, "a", 1, 1.0),
        ("early", 0, begin, end, "a", 6, 3.0),
    ]
    assert s.batch([(3, end, "a", 8)]) == [
        ("full", 1, begin, end, "a", 6, 3.0),
        ("early", 0, end, end + 24 * HOUR, "a", 8, 8.0),
    ]
    assert s.batch([(4, end - 1, "a", 10)]) == [("late", 2, begin, end, "a", 16, 4.0)]
    kind, work = s.operator.kind, Workspace(s.store, s.bounds)
    assert isinstance(kind, Aligned)
    found = views.windows(kind, work, begin, end + 1)
    assert [(view.start, view.end, view.messages) for view in found] == [(begin, end, 3), (end, end + 24 * HOUR, 1)]
    s.batch([(5, end + HOUR, "a", 1), (6, end - 1, "a", 1)])
    assert s.errors() == [(0, 6, "out_of_retention")]


def test_the_manifest_gives_the_windows_back():
    spec = window_spec(tumbling("1 day", timezone=BERLIN), SCHEMA, {"sum": sum_("value")}, retention="1 day")
    entry = spec.describe()
    assert entry["window"] == {
        "kind": "tumbling",
        "unit": "time",
        "size": 1,
        "step": 1,
        "origin": 0,
        "calendar": "day",
        "timezone": BERLIN,
    }
    assert window_operator(entry).spec.window == spec.window
    assert set(tumbling("1 day").describe()) == {"kind", "unit", "size", "step", "origin"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": "1 hour", "timezone": BERLIN}, r"size='1 hour' with a timezone: allowed are a number of days, weeks"),
        ({"size": 86_400_000, "timezone": BERLIN}, "size=86400000 with a timezone"),
        ({"size": "1 day", "timezone": "Europe/Berlin2"}, "timezone='Europe/Berlin2': allowed are names such as"),
        ({"size": "1 day", "timezone": "localtime"}, "timezone='localtime': allowed are names such as"),
        ({"size": "1 day", "timezone": "../etc/passwd"}, "timezone='../etc/passwd'"),
        ({"size": "1 day", "timezone": "Europe"}, "timezone='Europe'"),
        ({"size": "1 day", "timezone": ""}, "timezone=''"),
        ({"size": "1 day", "timezone": 1}, "timezone=1"),
        ({"size": "0 months"}, "size='0 months': allowed are 1 to 10000 months"),
        ({"size": "10001 months"}, "size='10001 months'"),
        ({"size": "1 month", "origin": 5}, "origin=5: calendar windows begin at midnight"),
        ({"messages": 5, "timezone": "UTC"}, "timezone='UTC': windows by number of messages"),
    ],
)
def test_options_that_no_calendar_has_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        tumbling(**options)


def test_a_join_refuses_calendar_windows():
    with pytest.raises(ValueError, match=r"left_window=.*a join takes windows of a fixed length"):
        measured_by_number(tumbling("1 month"), None)


def test_the_end_of_the_calendar_is_the_end_of_no_time():
    """The years that a time zone has rules for end at 9999; windows go on in UTC."""
    last = (datetime(9999, 12, 31, tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    grid = assigner(tumbling("1 day", timezone=BERLIN))
    windows = np.arange(last // (24 * HOUR) - 3, last // (24 * HOUR) + 4)
    assert (np.diff(grid.starts(windows)) >= 23 * HOUR).all()


@pytest.mark.parametrize("size", ["3000 years", "10000 years", "10000 quarters"])
def test_the_longest_windows_take_a_time_of_today(size):
    shard = OneShard(window_spec(tumbling(size), SCHEMA, {"sum": sum_("value")}, retention=0, max_ahead=None))
    today = 1_706_918_400_000
    assert shard.batch([(0, today, "a", 1), (1, today + 1, "a", 2)]) == []
    assert [(row[0], row[-1]) for row in shard.batch([], drain=True)] == [("drain", 3)]
