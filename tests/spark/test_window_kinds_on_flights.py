"""Every kind of window on real departures, against Spark batch SQL or plain loops over the same file.

Retention is longer than the data, so every departure counts, and the last revision of a window is its final value; what
is still open at the end of the archive comes with the drain.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from backend import archive, count, hopping, max_, mean, median, session, sliding, stream, sum_, tumbling
from recovery.drill.flights import make_archive, read_flights
from tests.support.waiting import ended

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

DAYS = 12
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
VALUE = "origin string, carrier string, tailnum string, delay double, scheduled timestamp"
EVER = "400 days"


@pytest.fixture(scope="module")
def departures(spark, tmp_path_factory):
    """The archive, and its departures (cancelled flights never departed) as the view `departures`."""
    path = tmp_path_factory.mktemp("flights") / "archive"
    make_archive(path, days=DAYS)
    flights = read_flights()
    columns = [flights[name].to_pylist() for name in ("origin", "carrier", "tailnum", "dep_delay", "scheduled_ms")]
    end = min(columns[4]) // DAY_MS * DAY_MS + DAYS * DAY_MS
    rows = [
        {"origin": origin, "carrier": carrier, "tailnum": plane, "delay": float(delay), "at": at}
        for origin, carrier, plane, delay, at in zip(*columns, strict=True)
        if delay != "NA" and at < end
    ]
    frame = spark.createDataFrame(rows, "origin string, carrier string, tailnum string, delay double, at bigint")
    frame.selectExpr("*", "timestamp_millis(at) as scheduled").createOrReplaceTempView("departures")
    return path, rows


def run(spark, source: Path, out: Path, key, window, *, route="key", retention=EVER, **aggregates):
    query = (
        stream(archive(str(source), value=VALUE, max_offsets_per_batch=3000), event_time="scheduled", key=key)
        .window(window, retention=retention)
        .aggregate(**aggregates)
        .start(
            spark,
            checkpoint=out / "checkpoint",
            results=out / "results",
            errors=out / "errors",
            local_dir=out / "local",
            shards=3 if route == "partition" else 2,
            route=route,
            trigger="0 seconds",
            until="end",
        )
    )
    ended(query)
    return spark.read.parquet(str(out / "results")).collect()


def newest(rows, *identity):
    """The last revision of each window that was not retracted."""
    last, gone = {}, set()
    for row in sorted(rows, key=lambda row: (row["version"], row["sequence"])):
        window = tuple(row[name] for name in identity)
        if row["reason"] == "retracted":
            last.pop(window, None)
            gone.add(window)
        else:
            last[window] = row
    return last


def millis(moment):
    from datetime import UTC

    return (
        round(moment.replace(tzinfo=UTC).timestamp() * 1000)
        if moment.tzinfo is None
        else round(moment.timestamp() * 1000)
    )


@pytest.mark.parametrize(
    ("window", "sql"),
    [
        pytest.param(tumbling("1 hour"), "'1 hour'", marks=pytest.mark.long),
        (hopping("3 hours", "1 hour"), "'3 hours', '1 hour'"),
    ],
)
def test_time_windows_equal_spark_batch_sql(spark, departures, tmp_path, window, sql):
    source, _ = departures
    rows = run(
        spark, source, tmp_path, "carrier", window,
        n=count(), mean=mean("delay"), worst=max_("delay"), typical=median("delay"),
    )  # fmt: skip
    wanted = spark.sql(
        f"""select unix_millis(w.start) start, unix_millis(w.end) end, carrier, count(*) n, avg(delay) mean,
                   max(delay) worst, percentile(delay, 0.5) typical
            from (select *, window(scheduled, {sql}) w from departures) group by w, carrier"""
    ).collect()
    found = newest(rows, "window_start", "carrier")
    assert len(found) == len(wanted) > 1000
    found = {(millis(start), carrier): row for (start, carrier), row in found.items()}
    for row in wanted:
        mine = found[(row["start"], row["carrier"])]
        assert (mine["n"], mine["worst"], mine["typical"]) == (row["n"], row["worst"], row["typical"])
        assert mine["mean"] == pytest.approx(row["mean"], rel=1e-12)
        assert millis(mine["window_end"]) == row["end"]


def test_sliding_windows_equal_sqls_range_preceding(spark, departures, tmp_path):
    source, _ = departures
    rows = run(spark, source, tmp_path, "carrier", sliding("1 hour"), n=count(), total=sum_("delay"))
    wanted = spark.sql(
        f"""select distinct carrier, at, n, total from (select carrier, at, count(*) over w n, sum(delay) over w total
            from departures window w as (partition by carrier order by at range between {HOUR_MS} preceding
            and current row))"""
    ).collect()
    found = {(millis(end), carrier): row for (end, carrier), row in newest(rows, "window_end", "carrier").items()}
    assert len(found) == len(wanted) > 1000
    for row in wanted:
        mine = found[(row["at"], row["carrier"])]
        assert (mine["n"], mine["total"]) == (row["n"], row["total"])
        assert millis(mine["window_end"]) - millis(mine["window_start"]) == HOUR_MS


def test_sessions_per_aeroplane_equal_a_plain_loop(spark, departures, tmp_path):
    source, flights = departures
    gap = 6 * HOUR_MS
    rows = run(
        spark, source, tmp_path, "tailnum", session("6 hours"), n=count(), worst=max_("delay"), mid=median("delay")
    )
    by_plane = defaultdict(list)
    for flight in flights:
        by_plane[flight["tailnum"]].append((flight["at"], flight["delay"]))
    wanted = {}
    for plane, legs in by_plane.items():
        legs.sort()
        current = [legs[0]]
        for leg in [*legs[1:], (float("inf"), 0.0)]:
            if leg[0] - current[-1][0] <= gap:
                current.append(leg)
                continue
            delays = sorted(delay for _, delay in current)
            middle = len(delays) // 2
            mid = delays[middle] if len(delays) % 2 else (delays[middle - 1] + delays[middle]) / 2
            wanted[(plane, current[0][0], current[-1][0])] = (len(current), delays[-1], mid)
            current = [leg]
    found = {
        (plane, millis(start), millis(end)): (row["n"], row["worst"], row["mid"])
        for (plane, start, end), row in newest(rows, "tailnum", "window_start", "window_end").items()
    }
    assert len(wanted) > 1000
    assert found == wanted


def test_windows_by_number_of_messages_equal_a_plain_loop(spark, departures, tmp_path):
    """The other kinds by number are in tests/model/test_windows_by_number_on_flights.py."""
    source, flights = departures
    size, step = 50, 20
    rows = run(
        spark, source, tmp_path, "origin", hopping(messages=size, every=step), route="partition", retention=None,
        n=count(), worst=max_("delay"),
    )  # fmt: skip
    # offsets are the order of departure per airport: scheduled time plus delay, ties in the order of the file
    order = defaultdict(list)
    for index, flight in enumerate(flights):
        order[flight["origin"]].append((flight["at"] + int(flight["delay"]) * 60_000, index, flight["delay"]))
    wanted = set()
    for origin, legs in order.items():
        delays = [delay for _, _, delay in sorted(legs)]
        for start in range(0, len(delays), step):
            inside = delays[start : start + size]
            wanted.add((origin, len(inside), max(inside)))
    found = newest(rows, "origin", "start_offset")
    assert {(origin, row["n"], row["worst"]) for (origin, _), row in found.items()} == wanted
    full = [row for row in rows if row["reason"] == "full"]
    assert full
    assert all(row["n"] == size for row in full)
    assert len(found) == sum(len(range(0, len(legs), step)) for legs in order.values())
