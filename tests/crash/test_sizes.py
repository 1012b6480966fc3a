"""Sizes, small: a worker's memory per message, value and window, and what micro-batches leave behind.

`python -m tests.crash.sizes` does the same with the sizes that docs and releases go by.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.crash.sizes import growing


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.crash.sizes", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see a process's peak memory")
@pytest.mark.parametrize(
    ("case", "small", "large", "each_bytes"),
    [("median", 20_000, 120_000, 700), ("collect", 100, 400, 700_000), ("open", 100_000, 500_000, 1_000)],
)
def test_a_worker_takes_no_more_per_row_than_the_docs_say(case: str, small: int, large: int, each_bytes: int) -> None:
    """Measured: 350 bytes a message, 5.2 times a collected value (3.1 from 400 values on), 700 to 850 an open window.

    Fewer open windows take more each, up to 1,350 bytes between 20,000 and 120,000: what is not theirs counts.
    """
    grown = [json.loads(run("worker", case, str(count)))["grown_mb"] for count in (small, large)]
    assert (grown[1] - grown[0]) * 2**20 < (large - small) * each_bytes, grown


def test_growth_is_told_from_logs_that_fill_and_are_cut() -> None:
    saw = [{"micro_batch": n, "driver_mb": 180, "local": 30 + n % 7, "results": n} for n in range(30, 100)]
    assert growing(saw, 10) == []
    leaking = [{**one, "local": one["local"] + one["micro_batch"]} for one in saw]
    assert growing(leaking, 10) == ["local: 62 -> 97"]
    swept = [{**one, "spark": 60 + 6 * (n % 40)} for n, one in enumerate(saw)]
    assert growing(swept, 10) == []
    assert growing([{**one, "spark": 60 + 6 * n} for n, one in enumerate(saw)], 10) == ["spark: 162 -> 270"]
    swelling = [{**one, "driver_mb": 100 + 2 * one["micro_batch"]} for one in saw]
    assert growing(swelling, 10) == ["driver_mb: 160 -> 230"]
    with pytest.raises(SystemExit, match="too few"):
        growing(saw, 100)


@pytest.mark.long
def test_many_source_partitions_on_many_shards() -> None:
    assert json.loads(run("partitions", "60", "24").splitlines()[-1])["shards"] == 24


@pytest.mark.long
def test_micro_batches_leave_nothing_behind() -> None:
    """Files and memory of a driver while micro-batches run back to back; 300 of them in `make torture`."""
    said = run("batches", "90", "10").splitlines()
    assert said[-1] == "nothing grew", said[-3:]


@pytest.mark.long
def test_more_micro_batches_than_spark_can_write_without_a_copy_of_its_state() -> None:
    """It ends at 864; the query starts again, and copies from then on."""
    ran = json.loads(run("uncopied", "900").splitlines()[-1])
    assert ran["micro_batches"] >= 899
    assert ran["copies"] > 30
