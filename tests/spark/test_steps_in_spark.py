"""Steps before windows inside Spark, with the local disk lost between two runs, so that a replay runs them again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from backend import ManifestMismatch, archive, key_value_store, stream, tumbling
from backend import median as median_of
from backend.sources.archive_files import WRITE_SCHEMA
from tests.support.waiting import ended

pytestmark = [pytest.mark.spark, pytest.mark.gentle]
USERS = ("anna", "bert", "cleo")
TOTALS = pa.schema([("who", pa.string()), ("total", pa.int64())])


def _refusing() -> Callable[[pa.Table], pa.Table]:
    """Give a function that travels by value: workers cannot import a test."""

    def without_bert(table: pa.Table) -> pa.Table:
        if 13 in table["n"].to_pylist():
            raise ArithmeticError("thirteen")
        return table.filter(pc.not_equal(table["user"], "bert"))

    return without_bert


def _write(path: Path, first: int, last: int) -> None:
    offsets = list(range(first, last))
    times = pa.array([100 * offset for offset in offsets], pa.int64()).cast(pa.timestamp("ms", tz="UTC"))
    values = [json.dumps({"user": USERS[offset % 3], "n": offset}).encode() for offset in offsets]
    n = len(offsets)
    path.mkdir(exist_ok=True)
    table = pa.table([["t"] * n, [0] * n, offsets, times, [b"k"] * n, values], schema=WRITE_SCHEMA)
    pq.write_table(table, path / f"from-{first}.parquet")


def _totals() -> Callable[..., pa.Table | None]:
    """Give a function that travels by value."""

    def add(messages: pa.Table, context: Any) -> pa.Table | None:
        totals = context.stores["totals"]
        for who, twice in zip(messages["who"].to_pylist(), messages["twice"].to_pylist(), strict=True):
            totals.put(who, (totals.get(who) or 0) + twice)
        rows = [{"who": who, "total": totals.get(who)} for who in sorted(set(messages["who"].to_pylist()))]
        return pa.Table.from_pylist(rows, TOTALS) if rows else None

    return add


def _medians(rows: Any) -> Any:
    return rows.window(tumbling("10 seconds"), retention="1 day").aggregate(middle=median_of("twice"))


def _run(spark: Any, place: Path, above: int, end: Callable[[Any], Any] = _medians) -> None:
    rows = (
        stream(archive(place / "in", value="user string, n long", max_offsets_per_batch=60), key="who")
        .where(pc.field("n") >= above)
        .map_batches(_refusing())
        .with_columns(twice=pc.field("n") * 2, who=pc.field("user"))
        .select("who", "twice")
    )
    query = end(rows).start(
        spark,
        checkpoint=place / "checkpoint",
        results=place / "results",
        errors=place / "errors",
        local_dir=place / "local",
        shards=2,
        trigger="0 seconds",
        until="end",
        debug_steps=True,
    )
    ended(query)


def test_a_replay_runs_the_steps(spark: Any, tmp_path: Path) -> None:
    for first, last in ((0, 130), (130, 160)):
        _write(tmp_path / "in", first, last)
        shutil.rmtree(tmp_path / "local", ignore_errors=True)
        _run(spark, tmp_path, 5)
    rows = pq.read_table(tmp_path / "results").sort_by([("version", "ascending")]).to_pylist()
    newest = {(row["who"], row["window_start"].timestamp()): row["middle"] for row in rows}
    kept: dict[tuple[str, float], list[int]] = {}
    for n in range(5, 160):
        if n != 13 and USERS[n % 3] != "bert":
            kept.setdefault((USERS[n % 3], 10.0 * (n // 100)), []).append(2 * n)
    assert newest == {key: median(values) for key, values in kept.items()}
    errors = pq.read_table(tmp_path / "errors").to_pylist()
    assert [(row["offset"], row["reason"], json.loads(row["value"])["n"]) for row in errors] == [(13, "poison", 13)]
    with pytest.raises(ManifestMismatch, match="steps"):
        _run(spark, tmp_path, 6)


@pytest.mark.long
def test_process_takes_what_the_steps_leave(spark: Any, tmp_path: Path) -> None:
    def totals(rows: Any) -> Any:
        return rows.process(
            _totals(), stores=[key_value_store("totals")], result=TOTALS, fields=["who", "twice"], max_ahead=None
        )

    for first, last in ((0, 130), (130, 160)):
        _write(tmp_path / "in", first, last)
        shutil.rmtree(tmp_path / "local", ignore_errors=True)
        _run(spark, tmp_path, 5, totals)
    rows = pq.read_table(tmp_path / "results").sort_by([("version", "ascending")]).to_pylist()
    kept = [n for n in range(5, 160) if n != 13 and USERS[n % 3] != "bert"]
    wanted = {who: sum(2 * n for n in kept if USERS[n % 3] == who) for who in ("anna", "cleo")}
    assert {row["who"]: row["total"] for row in rows} == wanted
    errors = pq.read_table(tmp_path / "errors").to_pylist()
    assert [(row["offset"], row["reason"], json.loads(row["value"])["n"]) for row in errors] == [(13, "poison", 13)]
