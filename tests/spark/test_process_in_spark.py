"""A function with named stores inside Spark: the same commit, changelog and restore as everything else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend import archive, key_value_store, list_state, map_state, session_store, stream, value_state, window_store
from backend.sources.archive_files import WRITE_SCHEMA
from backend.stores.session_store import SessionKey
from tests.support.waiting import ended

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

RESULT = pa.schema([("user", pa.string()), ("times", pa.list_(pa.int64())), ("n", pa.int64()), ("windows", pa.int64())])
USERS = ("anna", "bert", "cleo", "dora", "emil")


def _visits() -> Callable[..., pa.Table | None]:
    """Give a function that travels by value: workers cannot import a test."""

    def fold(messages: pa.Table, context: Any) -> pa.Table | None:
        stores = context.stores
        for user, time in zip(messages["user"].to_pylist(), messages["_time"].to_pylist(), strict=True):
            stores["times"].append_value(user, time)
            stores["totals"].put(user, (stores["totals"].get(user) or 0) + 1)
            start = time - time % 1_000
            stores["windows"].put(user, (stores["windows"].fetch_one(user, start) or 0) + 1, start)
            stores["sessions"].put(SessionKey(user, time, time), 1)
            stores["last"].update(user, time)
            stores["days"].update_value(user, time // 10_000, time)
        seen = sorted(set(messages["user"].to_pylist()))
        rows = [
            {
                "user": user,
                "times": list(stores["times"].get(user)),
                "n": stores["totals"].get(user),
                "windows": sum(count for _, count in stores["windows"].fetch(user)),
            }
            for user in seen
        ]
        return pa.Table.from_pylist(rows, RESULT) if rows else None

    return fold


def _write(path: Path, first: int, last: int) -> None:
    offsets = list(range(first, last))
    times = pa.array([100 * offset for offset in offsets], pa.int64()).cast(pa.timestamp("ms", tz="UTC"))
    values = [json.dumps({"user": USERS[offset % 5], "n": offset}).encode() for offset in offsets]
    n = len(offsets)
    path.mkdir(exist_ok=True)
    table = pa.table([["t"] * n, [0] * n, offsets, times, [b"k"] * n, values], schema=WRITE_SCHEMA)
    pq.write_table(table, path / f"from-{first}.parquet")


def _run(spark: Any, place: Path) -> None:
    job = stream(archive(place / "in", value="user string, n int", max_offsets_per_batch=60), key="user").process(
        _visits(),
        stores=[
            list_state("times", value_type=int),
            key_value_store("totals"),
            window_store("windows", retention="1 day", window_size=1_000),
            session_store("sessions", retention="1 minute"),
            value_state("last", ttl="1 day"),
            map_state("days", ttl="1 day"),
        ],
        result=RESULT,
        fields=["user"],
    )
    query = job.start(
        spark,
        checkpoint=place / "checkpoint",
        results=place / "results",
        errors=place / "errors",
        local_dir=place / "local",
        shards=2,
        trigger="0 seconds",
        until="end",
    )
    ended(query)


def _last_rows(place: Path) -> dict[str, dict[str, Any]]:
    rows = pq.read_table(place / "results").sort_by([("version", "ascending")]).to_pylist()
    return {row["user"]: row for row in rows}


def _expected(last: int) -> dict[str, list[int]]:
    return {user: [100 * offset for offset in range(last) if offset % 5 == n] for n, user in enumerate(USERS)}


@pytest.mark.long
def test_stores_go_on_after_a_restart_without_the_local_disk(spark: Any, tmp_path: Path) -> None:
    for first, last in ((0, 100), (100, 150)):
        _write(tmp_path / "in", first, last)
        shutil.rmtree(tmp_path / "local", ignore_errors=True)
        _run(spark, tmp_path)
        rows = _last_rows(tmp_path)
        assert {user: row["times"] for user, row in rows.items()} == _expected(last)
        for row in rows.values():
            assert row["n"] == row["windows"] == len(row["times"])
