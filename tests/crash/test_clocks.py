"""The clock of a whole job on a real Spark goes an hour back, then a day and an hour ahead, then a day back; small.

`python -m tests.crash.clocks` does the same for longer, in `make torture`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.spark, pytest.mark.long]


@pytest.mark.parametrize("how", ["running", "starts"])
def test_a_job_whose_clock_jumps_goes_on_with_the_same_results(how: str) -> None:
    command = [sys.executable, "-m", "tests.crash.clocks", how, "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = done.stdout.splitlines()
    assert [line.split(":")[0].split(" s")[0] for line in said[:3]] == ["clock -3600", "clock +86400", "clock +0"]
    assert said[-1].startswith("as plain loops say: "), said[-1]
