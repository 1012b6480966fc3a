"""A checkpoint goes on under another PySpark: `make matrix` names the other one's interpreter."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend.sources.archive_files import WRITE_SCHEMA

OTHER = "REWIND_OTHER_PYTHON"
ROOT = Path(__file__).resolve().parents[2]
EACH = 120
"""Messages a run."""

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(OTHER not in os.environ, reason=f"make matrix sets {OTHER}"),
]


def _message(i: int) -> dict[str, Any]:
    """Message i: each run comes back to the same ten minutes, so it revises what the runs before it stored."""
    return {"key": f"k{i % 3}", "x": i * 37 % 101, "at": 1_700_000_040_000 + i % EACH * 5_000}


def _expected(last: int) -> dict[tuple[int, str], tuple[int, int, float]]:
    values: dict[tuple[int, str], list[int]] = {}
    for message in map(_message, range(last)):
        values.setdefault((message["at"] // 60_000 * 60_000, message["key"]), []).append(message["x"])
    return {window: (len(xs), sum(xs), statistics.median(xs)) for window, xs in values.items()}


def _write(place: Path, first: int, last: int) -> None:
    n = last - first
    values = [json.dumps(_message(i)).encode() for i in range(first, last)]
    times = pa.array([_message(i)["at"] for i in range(first, last)], pa.int64()).cast(pa.timestamp("ms", tz="UTC"))
    place.mkdir(exist_ok=True)
    table = pa.table([["t"] * n, [0] * n, list(range(first, last)), times, [b"k"] * n, values], schema=WRITE_SCHEMA)
    pq.write_table(table, place / f"from-{first}.parquet")


def _run(python: str, place: Path) -> str:
    done = subprocess.run(
        [python, "-m", "tests.support.versions_job", str(place)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": python},
        cwd=place,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()[1]


def _last_revisions(place: Path) -> dict[tuple[int, str], tuple[int, int, float]]:
    rows = pq.read_table(place / "results").sort_by([("revision", "ascending")]).to_pylist()
    return {
        (int(row["window_start"].timestamp() * 1000), row["key"]): (row["n"], row["total"], row["typical"])
        for row in rows
    }


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def test_a_checkpoint_goes_on_under_the_newer_pyspark_and_back(tmp_path: Path) -> None:
    versions = {}
    for python in (sys.executable, os.environ[OTHER]):
        asked = subprocess.run(
            [python, "-c", "import pyspark; print(pyspark.__version__)"], capture_output=True, text=True, check=True
        )
        versions[python] = asked.stdout.strip()
    older, newer = sorted(versions, key=lambda python: _number(versions[python]))
    assert _number(versions[older]) < _number(versions[newer])
    for run, (python, lost) in enumerate([(older, False), (newer, False), (newer, True), (older, False)]):
        _write(tmp_path / "in", run * EACH, (run + 1) * EACH)
        if lost:
            shutil.rmtree(tmp_path / "local")
        assert _run(python, tmp_path) == versions[python]
        assert _last_revisions(tmp_path) == _expected((run + 1) * EACH), (run, versions[python])
        assert pq.read_table(tmp_path / "errors").num_rows == 0
