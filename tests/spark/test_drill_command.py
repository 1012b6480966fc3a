"""`rewind drill` as a user calls it, on a job of their own: its report, its page, its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from backend.sources.archive_files import write_archive
from bench.data import TIME, topic_rows, typed
from tests.support.own_job import ARCHIVE, ROWS

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
START_MS, MICRO_BATCHES = 1_700_000_000_000, 6
SCENARIOS = ("lose-all", "source-aged")
"""A lost disk is restored by replaying typed values, and one restore must be refused because they are gone."""


@pytest.fixture(scope="module")
def sales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write sales of nine customers, one every 50 ms, in event-time order."""
    random = np.random.default_rng(21)
    rows = ROWS * MICRO_BATCHES
    at = START_MS + np.arange(rows) * 50
    value = typed(
        customer=pa.array([f"c{number}" for number in random.integers(0, 9, rows)]),
        at=pa.array(at, TIME),
        cents=pa.array(random.integers(1, 900, rows)),
    )
    directory = tmp_path_factory.mktemp("sales")
    write_archive(directory, topic_rows(0, 0, at, value, "sales"), rows_per_file=1000, row_group_rows=500)
    return directory


def drill(sales: Path, out: Path) -> tuple[int, dict[str, Any], str]:
    """Run the command; give its exit code, its report, and what it told a person meanwhile."""
    command = [sys.executable, "-m", "recovery.cli", "drill", *SCENARIOS, "--job", "tests.support.own_job:sales"]
    done = subprocess.run(
        [*command, "--seed", "4", "--out", str(out), "--json"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), ARCHIVE: str(sales)},
        capture_output=True, text=True, check=False, timeout=800,
    )  # fmt: skip
    assert done.stdout.startswith("{"), done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout), done.stderr


def test_a_users_own_job_is_lost_restored_and_proven(sales: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, told, said = drill(sales, out)
    assert [(one["name"], one["passed"], one["why"]) for one in told["scenarios"]] == [
        ("lose-all", True, ""),
        ("source-aged", True, ""),
    ]
    assert (code, told["passed"], told["job"]) == (0, True, "tests.support.own_job:sales")
    lost, aged = told["scenarios"]
    # nine customers; the windows overlap by half: one more than ten-second steps
    steps = ROWS * MICRO_BATCHES * 50 // 10_000
    assert lost["proof"]["windows"] == 9 * (steps + 1)
    assert lost["rpo"] == {"lost": 0, "doubled": 0, "changed": 0}
    assert {event["shard"] for event in lost["events"] if event["event"] == "restored"} == {0, 1}
    assert "HistoryLost" in aged["error"]
    assert f"the earliest is {ROWS * MICRO_BATCHES}" in aged["error"], "nothing is left of the source"
    assert json.loads((out / "report.json").read_text()) == told
    assert "lose-all" in (out / "report.html").read_text()
    assert "restored shard 0 by replay" in said
