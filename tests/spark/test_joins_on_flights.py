"""Departures joined with the weather at their airport (real data), against Spark batch SQL over the same files.

A departure of one of the hour's first thirty minutes has a partner, the observation of that hour; a later one has none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend import archive, join, stream, tumbling
from recovery.drill.flights import make_archive, read_flights
from recovery.killpoints import order, taken
from recovery.supervise.patience import Patience
from tests.support import weather
from tests.support.waiting import ended

pytestmark = pytest.mark.spark

DAYS = 12
DAY_MS = 86_400_000
FLIGHT = "origin string, flight bigint, carrier string, delay double, scheduled timestamp"
COLUMNS = ("scheduled", "origin", "flight", "carrier", "observed", "temp", "visib")
MINUTES = 29


@pytest.fixture(scope="module")
def data(spark, tmp_path_factory) -> Path:
    """The two archives, and their rows as the views `departures` (cancelled flights never departed) and `weather`."""
    root = tmp_path_factory.mktemp("joins")
    make_archive(root / "departures", days=DAYS)
    weather.make_archive(root / "weather", days=DAYS)
    flights = read_flights()
    columns = [flights[name].to_pylist() for name in ("origin", "flight", "carrier", "dep_delay", "scheduled_ms")]
    end = min(columns[-1]) // DAY_MS * DAY_MS + DAYS * DAY_MS
    rows = [(*row[:3], row[4]) for row in zip(*columns, strict=True) if row[3] != "NA" and row[4] < end]
    frame = spark.createDataFrame(rows, "origin string, flight bigint, carrier string, at bigint")
    frame.selectExpr("*", "timestamp_millis(at) as scheduled").createOrReplaceTempView("departures")
    observed = weather.read_weather(DAYS).select(["origin", "temp", "visib", "observed_ms"]).to_pylist()
    frame = spark.createDataFrame(observed, "origin string, temp double, visib double, observed_ms bigint")
    frame.selectExpr("*", "timestamp_millis(observed_ms) as observed").createOrReplaceTempView("weather")
    return root


def expected(spark, how: str) -> list[tuple[object, ...]]:
    """What Spark's own batch join gives."""
    rows = spark.sql(
        f"""
        SELECT scheduled, d.origin AS origin, flight, carrier, observed, temp, visib
        FROM departures d {how} JOIN weather w
        ON d.origin = w.origin AND w.observed BETWEEN d.scheduled - INTERVAL {MINUTES} MINUTES AND d.scheduled
        """
    )
    return ordered(rows.collect())


def ordered(rows) -> list[tuple[object, ...]]:
    return sorted((tuple(row[name] for name in COLUMNS) for row in rows), key=repr)


def joined(data: Path, how: str, **options):
    departures = archive(str(data / "departures"), value=FLIGHT, max_offsets_per_batch=1000)
    observations = archive(str(data / "weather"), value=weather.VALUE, max_offsets_per_batch=80)
    return join(
        stream(departures, event_time="scheduled"),
        stream(observations, event_time="observed"),
        on="origin",
        within=(f"{MINUTES} minutes", "0 s"),
        how=how,
        left_retention="2 days",
        right_retention="2 days",
        right_fields=["observed", "temp", "visib"],
        **options,
    )


def start(spark, pipeline, out: Path, **options):
    return pipeline.start(
        spark,
        checkpoint=out / "checkpoint",
        results=out / "results",
        errors=out / "errors",
        local_dir=out / "local",
        shards=2,
        trigger="0 seconds",
        **options,
    )


@pytest.mark.parametrize("how", ["inner", "left"])
def test_departures_with_their_weather_are_what_batch_sql_gives(spark, data, tmp_path, how):
    ended(start(spark, joined(data, how), tmp_path, until="end"))
    rows = spark.read.parquet(str(tmp_path / "results")).collect()
    want = expected(spark, how)
    assert ordered(rows) == want
    assert len(want) > 3000
    assert {row["reason"] for row in rows} <= {"full", "late", "drain"}
    unmatched = [row for row in rows if row["observed"] is None]
    assert bool(unmatched) == (how == "left")
    assert all(row["right_time"] is None for row in unmatched)
    assert all(row["left_time"] == row["scheduled"] for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)


@pytest.mark.long
def test_a_join_whose_worker_is_killed_and_whose_disk_is_lost_gives_the_same(spark, data, tmp_path, monkeypatch):
    """SIGKILL between a staged file and its changelog record; `local[2]` tries no task again, so the query fails."""
    order_file = tmp_path / "order"
    order(order_file, "after_stage", 2)
    monkeypatch.setitem(spark.sparkContext.environment, "REWIND_KILL", str(order_file))

    pause = Patience.after

    def lose_the_disk(patience: Patience, failure: Any, committed: int) -> float:
        """No query runs while the supervisor finds out how long to wait."""
        if taken(order_file).exists() and not lost.exists():
            (tmp_path / "local").rename(lost)
        return pause(patience, failure, committed)

    lost = tmp_path / "lost"
    monkeypatch.setattr(Patience, "after", lose_the_disk)
    query = start(spark, joined(data, "left"), tmp_path, until="end")
    ended(query)
    assert lost.exists(), "nobody died"
    assert query.progress.restores == 1
    assert query.progress.version > 2
    assert ordered(spark.read.parquet(str(tmp_path / "results")).collect()) == expected(spark, "left")


def test_what_a_join_cannot_do_is_refused_before_anything_starts(spark, data, tmp_path):
    departures = stream(archive(str(data / "departures"), value=FLIGHT), event_time="scheduled")
    observations = stream(archive(str(data / "weather"), value=weather.VALUE), event_time="observed")
    keep = {"left_retention": "1 hour", "right_retention": "1 hour"}
    with pytest.raises(ValueError, match=r"equal fields.*or a time range"):
        start(spark, join(departures, observations, **keep), tmp_path)
    with pytest.raises(ValueError, match="shards=2: a join without equal fields"):
        start(spark, join(departures, observations, within="1 minute", **keep), tmp_path)
    with pytest.raises(ValueError, match="route='partition': a join is routed by its equal fields"):
        start(
            spark, join(departures, observations, on="origin", within="1 minute", **keep), tmp_path, route="partition"
        )
    with pytest.raises(ValueError, match="on: 'tailnum' is not a field of the left side"):
        start(spark, join(departures, observations, on="tailnum", **keep), tmp_path)
    with pytest.raises(ValueError, match=r"right: key=\['origin'\] is not allowed"):
        join(departures, stream(observations.source, key="origin"), on="origin", **keep)
    with pytest.raises(TypeError, match="windows"):
        join(departures, observations, on="origin", windows="x", **keep)
    with pytest.raises(ValueError, match="left_retention=None: a join by event time needs a retention"):
        start(spark, join(departures, observations, on="origin", left_window=tumbling("1 minute")), tmp_path)
    assert not (tmp_path / "checkpoint").exists()
