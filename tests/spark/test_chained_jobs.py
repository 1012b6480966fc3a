"""Hours over the results of minutes: equal to batch SQL over the messages, also when both jobs are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow.dataset as ds
import pytest

from tests.support import chain_job
from tests.support.kills import killed_and_ended

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

KILLS = (
    ("after_publish", 1),
    ("during_publish", 0),
    ("during_publish", 2),
    ("after_publish", 3),
    ("before_publish", 4),
)


def check(home: Path, messages: list[dict[str, Any]]) -> None:
    made = pd.DataFrame(messages)  # noqa: F841 - DuckDB finds it by its name
    found = ds.dataset(home / "hours", partitioning="hive").to_table()  # noqa: F841
    last = "row_number() OVER (PARTITION BY window_start, key ORDER BY version DESC, sequence DESC) = 1"
    with duckdb.connect() as connection:
        rows = connection.sql(f"SELECT epoch_ms(window_start), key, n, worst FROM found QUALIFY {last}").fetchall()
        hour = '"at" // 3600000 * 3600000'
        wanted = connection.sql(f"SELECT {hour}, key, count(*), max(x) FROM made GROUP BY ALL").fetchall()
    assert sorted(rows) == sorted(wanted)
    assert not list((home / "hours-errors").glob("batch=*"))


def test_hours_over_minutes(spark: Any, tmp_path: Path) -> None:
    messages = chain_job.write(tmp_path / "archive")
    chain_job.minutes(spark, tmp_path)
    chain_job.hours(spark, tmp_path)
    check(tmp_path, messages)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_hours_over_minutes_with_drivers_that_are_killed(tmp_path: Path) -> None:
    messages = chain_job.write(tmp_path / "archive")
    killed_and_ended("tests.support.chain_job", tmp_path, KILLS, "hours")
    check(tmp_path, messages)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_join_of_two_jobs_results_with_drivers_that_are_killed(tmp_path: Path) -> None:
    messages = chain_job.write(tmp_path / "archive")
    killed_and_ended("tests.support.chain_job", tmp_path, KILLS, "pairs")
    made = pd.DataFrame(messages)  # noqa: F841 - DuckDB finds it by its name
    found = ds.dataset(tmp_path / "pairs", partitioning="hive").to_table()  # noqa: F841
    names = "epoch_ms(left_time), epoch_ms(right_time), key, n, worst, peak"
    with duckdb.connect() as connection:
        rows = connection.sql(f"SELECT {names} FROM found").fetchall()
        minute = '"at" // 300000 * 300000'
        wanted = connection.sql(
            f"SELECT {minute} AS w, w, key, count(*), max(x), max(x) FILTER (x % 2 = 0) FROM made GROUP BY w, key"
        ).fetchall()
    pairs = [row for row in wanted if row[-1] is not None]
    assert 100 < len(pairs) < len(wanted)
    assert sorted(rows) == sorted(pairs)
