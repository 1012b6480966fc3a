"""The snippets of README.md and docs/ that need Spark, run as they stand there on departures that are made."""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend import archive, count, policies, stream, tumbling
from backend.sources.archive_files import write_archive
from recovery.drill.data import PER_DAY, made_flights
from recovery.drill.flights import YEAR_START_MS, archive_of
from tests.support.snippets import run

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

ENDS = {"checkpoint=": 'until="end", trigger="0 s", checkpoint='}
"""A reader stops a job; a test lets it end."""
DEPARTURE = "origin string, delay double, scheduled timestamp"
AIRPORTS = ("EWR", "JFK", "LGA")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give the directory in which a reader stands, with a day's departures and its weather."""
    path = tmp_path_factory.mktemp("reader")
    departures = archive_of(made_flights(1), path / "data" / "departures")
    hours = [(airport, YEAR_START_MS + hour * 3_600_000) for hour in range(-1, 25) for airport in range(3)]
    values = [{"origin": AIRPORTS[airport], "observed": at // 1000, "temp": 1.0} for airport, at in hours]
    weather = pa.table(
        {
            "topic": ["weather"] * len(hours),
            "partition": pa.array([airport for airport, _ in hours], pa.int32()),
            "offset": pa.array([row // 3 for row in range(len(hours))], pa.int64()),
            "timestamp": pa.array([at for _, at in hours], pa.timestamp("ms", tz="UTC")),
            "key": pa.array([None] * len(hours), pa.binary()),
            "value": pa.array([_json(value) for value in values], pa.binary()),
        }
    )
    write_archive(path / "data" / "weather", weather)
    before = Path.cwd()
    os.chdir(path)
    yield path, departures
    os.chdir(before)


def _json(value: dict[str, Any]) -> bytes:
    at = datetime.fromtimestamp(value["observed"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f'{{"origin": "{value["origin"]}", "observed": "{at}", "temp": {value["temp"]}}}'.encode()


def _good(departures: pa.Table) -> list[dict[str, Any]]:
    values = [json.loads(value) for value in departures["value"].to_pylist()]
    return [value for value in values if value["delay"] != "NA"]


def test_the_job_of_the_readme(spark: Any, place: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path, departures = place
    run("README.md:1", {"spark": spark}, ENDS | {'retention="120 days"': 'retention="6 hours"'})  # some are refused
    here = {"out/windows": str(path / "out" / "windows")}  # Spark reads where its JVM was started
    run("README.md:2", {"spark": spark}, here)
    assert "window_start" in capsys.readouterr().out
    run("docs/windows.md:1", {"spark": spark}, here)
    assert "window_start" in capsys.readouterr().out
    run("docs/refused.md:1", {"spark": spark}, {"out/errors": str(path / "out" / "errors")})
    assert "|departures|" in capsys.readouterr().out
    rows = pq.read_table(path / "out" / "windows").to_pylist()
    newest = {(row["window_start"], row["origin"]): row["flights"] for row in sorted(rows, key=lambda r: r["revision"])}
    wanted = Counter((value["scheduled"][:13], value["origin"]) for value in _good(departures))
    found = {(f"{start:%Y-%m-%dT%H}", origin): n for (start, origin), n in newest.items()}
    bad = pq.read_table(path / "out" / "errors").to_pylist()
    refused = [row for row in bad if row["reason"] == "out_of_retention"]
    assert sum(found.values()) + len(refused) == sum(wanted.values())
    assert sum(found[key] != n for key, n in wanted.items()) <= len(refused)
    assert len(bad) - len(refused) == PER_DAY - sum(wanted.values())


def test_the_join(spark: Any, place: Any) -> None:
    path, _ = place
    changed = {**ENDS, "out/errors": "out/join-errors"}
    run("docs/joins.md:1", {"spark": spark}, changed)["query"].await_termination()
    rows = pq.read_table(path / "out" / "joined").to_pylist()
    assert len(rows) == PER_DAY - pq.read_table(path / "out" / "join-errors").num_rows
    assert all(row["temp"] == 1.0 for row in rows)  # every departure has the weather of the hour before it


def test_a_function_with_stores(spark: Any, place: Any) -> None:
    path, _ = place
    users = [("ann", "bob", "ann")[row % 3] for row in range(30)]
    visits = pa.table(
        {
            "topic": ["visits"] * 30,
            "partition": pa.array([0] * 30, pa.int32()),
            "offset": pa.array(range(30), pa.int64()),
            "timestamp": pa.array([YEAR_START_MS] * 30, pa.timestamp("ms", tz="UTC")),
            "key": pa.array([None] * 30, pa.binary()),
            "value": pa.array([json.dumps({"user": user}).encode() for user in users], pa.binary()),
        }
    )
    write_archive(path / "data" / "visits", visits)
    job = run("docs/stores.md:1", {})["job"]
    places = {"checkpoint": "checkpoints/visits", "results": "out/visits", "errors": "out/visits-errors"}
    job.start(spark, until="end", trigger="0 s", **places).await_termination()
    rows = pq.read_table(path / "out" / "visits").to_pylist()
    assert {row["user"]: row["n"] for row in sorted(rows, key=lambda row: row["n"])} == {"ann": 20, "bob": 10}


def test_any_dataframe(spark: Any, place: Any) -> None:
    path, departures = place
    good = [value for value in _good(departures) if value["delay"] is not None]
    columns = {
        "origin": [value["origin"] for value in good],
        "delay": [float(value["delay"]) for value in good],
        "scheduled": [datetime.fromisoformat(value["scheduled"]) for value in good],
    }
    (path / "data" / "files").mkdir()
    pq.write_table(pa.table(columns), path / "data" / "files" / "0.parquet")
    here = {'"data/files"': f'"{path}/data/files"'}  # Spark reads where its JVM was started
    run("docs/dataframes.md:1", {"spark": spark}, {**ENDS, **here})
    rows = pq.read_table(path / "out" / "files").to_pylist()
    newest = {(row["window_start"], row["origin"]): row["flights"] for row in sorted(rows, key=lambda r: r["revision"])}
    hours = [at.replace(minute=0, second=0) for at in columns["scheduled"]]
    wanted = Counter(zip(hours, columns["origin"], strict=True))
    assert newest == wanted  # one micro-batch: nothing is late
    table = {
        'format("delta")': 'schema("user string, at timestamp").format("parquet")',
        "/data/clicks": f"{path}/data/files",
    }
    clicks = run("docs/dataframes.md:2", {"spark": spark, "stream": stream}, table)["clicks"]
    assert clicks.source.topics == ("clicks",)


def _hourly(departures: pa.Table) -> Counter[tuple[str, str]]:
    return Counter((value["scheduled"][:13], value["origin"]) for value in _good(departures))


def test_a_table_a_function_and_a_second_job(spark: Any, place: Any) -> None:
    from deltalake import DeltaTable

    path, departures = place
    run("docs/sinks.md:1", {"spark": spark}, ENDS)
    rows = DeltaTable(path / "out" / "delta").to_pyarrow_table().to_pylist()
    refused = DeltaTable(path / "out" / "delta-errors").to_pyarrow_table().num_rows
    assert len({(row["window_start"], row["origin"]) for row in rows}) == len(rows)
    assert sum(row["flights"] for row in rows) + refused == PER_DAY
    wanted = _hourly(departures)
    assert all(row["flights"] <= wanted[f"{row['window_start']:%Y-%m-%dT%H}", row["origin"]] for row in rows)

    job = (
        stream(archive("data/departures", value=DEPARTURE), event_time="scheduled", key="origin")
        .window(tumbling("1 minute"), retention="6 hours", policies=policies(late="off"))
        .aggregate(flights=count())
    )
    here = {f'f"out/{name}/': f'f"{path}/out/{name}/' for name in ("busiest", "refused")}  # Spark writes as it reads
    run("docs/sinks.md:3", {"spark": spark, "pipeline": job}, {**ENDS, **here})
    busiest = pq.read_table(path / "out" / "busiest").to_pylist()
    places = {"checkpoint": "checkpoints/minutes", "results": "out/minutes", "errors": "out/minutes-errors"}
    job.start(spark, until="end", trigger="0 s", **places).await_termination()
    sent = pq.read_table(path / "out" / "minutes").to_pylist()
    assert sum(row["sum(flights)"] for row in busiest) == sum(row["flights"] for row in sent)
    run("docs/sinks.md:5", {"spark": spark}, ENDS)
    days = sorted(pq.read_table(path / "out" / "days").to_pylist(), key=lambda row: (row["version"], row["sequence"]))
    newest = {(row["window_start"], row["origin"]): row["flights"] for row in days}
    assert not list((path / "out" / "days-errors").glob("batch=*"))
    assert sum(newest.values()) == sum(row["flights"] for row in sent)
