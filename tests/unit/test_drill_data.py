"""The drill's own data: made, in the form of real flights, with their troubles, without the package of real ones."""

from __future__ import annotations

import json

import pytest

from recovery.drill import flights
from recovery.drill.data import PER_DAY, made_flights


def test_departures_are_made_without_the_package_of_real_ones(tmp_path, monkeypatch):
    def gone(name):
        raise FileNotFoundError(name)

    monkeypatch.setattr(flights, "data_file", gone)
    rows = flights.archive_of(made_flights(2), tmp_path / "archive").to_pylist()
    assert len(rows) == 2 * PER_DAY
    assert list((tmp_path / "archive").glob("*.parquet"))
    by_partition = {partition: [row for row in rows if row["partition"] == partition] for partition in range(3)}
    for own in by_partition.values():
        assert [row["offset"] for row in own] == list(range(len(own)))
    values = [json.loads(row["value"]) for row in rows]
    assert {value["origin"] for value in values} == {"EWR", "JFK", "LGA"}
    malformed = [value for value in values if value["delay"] == "NA"]
    assert 10 <= len(malformed) <= 90  # a fortieth of 1,800
    scheduled = [json.loads(row["value"])["scheduled"] for row in by_partition[0]]
    assert scheduled != sorted(scheduled)


@pytest.mark.parametrize("days", [1, 3])
def test_the_same_departures_each_time(days):
    assert made_flights(days).equals(made_flights(days))
