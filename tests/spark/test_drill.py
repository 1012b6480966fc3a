"""The drill on real flights: what must come back comes back equal, what must end in an error ends in that one.

Each scenario is one to three Spark processes; the whole catalogue is `rewind drill`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recovery.drill import Drill
from recovery.drill_report import drill_json, write_html
from recovery.drill_scenarios import choose

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Drill:
    made = Drill(tmp_path_factory.mktemp("drill") / "out", seed=1, days=4)
    assert made.control().windows
    return made


@pytest.mark.parametrize("name", ["lose-all", "corrupt-staged", "zombie", "lose-tail", "source-aged"])
def test_a_scenario_passes(drill: Drill, name: str) -> None:
    verdict = drill.run(choose([name])[0])
    assert verdict.passed, verdict.why
    if verdict.scenario.error is None:
        assert verdict.difference is not None
        assert verdict.difference.equal
    if name == "lose-all":
        assert verdict.restore_s is not None
        assert verdict.catch_up_s is not None
    data = drill_json(drill.job, drill.seed, drill.control_run, [verdict])
    write_html(drill.out / "report.html", data)
    page = (drill.out / "report.html").read_text()
    assert name in page
    assert "http" not in page, "the page needs nothing from elsewhere"
    json.dumps(data)


FORGETFUL = """
from dataclasses import replace
from recovery.demo.job import Forgetful
from recovery.drill_job import departures


def job(spark):
    pipeline = departures(spark)
    return replace(pipeline, streams=tuple(replace(side, source=Forgetful(side.source)) for side in pipeline.streams))
"""


def test_a_replay_that_skips_a_message_fails_the_drill(drill: Drill, tmp_path: Path) -> None:
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    env = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "REWIND_DRILL_DATA": str(drill.out / "departures"),
    }
    out = tmp_path / "out"
    command = ["drill", "lose-all", "--job", "forgetful:job", "--out", str(out), "--json"]
    run = subprocess.run(
        [sys.executable, "-m", "recovery.cli", *command], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1, run.stderr
    (verdict,) = json.loads(run.stdout)["scenarios"]
    assert verdict["passed"] is False
    assert "RestoreMismatch" in verdict["why"]
