"""The drill on real flights: what must come back comes back equal, what must end in an error ends in that one.

And three broken builds, each of which must fail a scenario: a drill that passes whatever is broken proves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from recovery.drill.drill import Drill, Verdict
from recovery.drill.job import CHECKPOINT
from recovery.drill.report import drill_json, write_html
from recovery.drill.scenarios import CATALOGUE, choose, in_order

pytestmark = [pytest.mark.spark, pytest.mark.long]

ROOT = Path(__file__).resolve().parent.parent.parent
BROKEN_BUILDS = Path(__file__).resolve().parent / "broken_builds"


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    out = tmp_path_factory.mktemp("drill") / "out"
    env = {"PYTHONPATH": f"{BROKEN_BUILDS}:{ROOT}", "REWIND_TEST_DEFECT": str(out / "defect")}
    with Drill(out, seed=1, days=2, env=env) as made:
        assert made.control().windows
        yield made


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    return {}


@pytest.mark.parametrize("name", [scenario.name for scenario in in_order(CATALOGUE)])
def test_a_scenario_passes(drill: Drill, verdicts: dict[str, Verdict], name: str) -> None:
    verdict = verdicts[name] = drill.run(choose([name])[0])
    assert verdict.passed, verdict.why
    if not verdict.scenario.error:
        assert verdict.difference is not None
        assert verdict.difference.equal
    if name == "kill-restore":  # driver and workers died with the replayed chunks written, and not yet used
        assert [*(drill.out / name / CHECKPOINT / "rewind" / "replay").glob("*")] == []


@pytest.mark.parametrize(
    ("defect", "scenario", "why"),
    [
        ("skip the last replayed message", "lose-all", "RestoreMismatch"),
        ("ignore the parent", "old-database", ""),
        ("ingest every staged file", "kill-driver", "restored without need"),
    ],
)
def test_a_broken_build_fails(drill: Drill, defect: str, scenario: str, why: str) -> None:
    (drill.out / "defect").write_text(defect)
    try:
        verdict = drill.run(replace(choose([scenario])[0], name=defect.replace(" ", "-")))
    finally:
        (drill.out / "defect").unlink()
    assert not verdict.passed
    assert why in verdict.why
    assert "AttributeError" not in verdict.why, "the build is broken as it says, not in another way"


def test_a_restore_that_leaves_a_row_out_fails(drill: Drill, tmp_path: Path) -> None:
    """No later micro-batch looks at the row, so results and changelog are the control's."""
    defect = tmp_path / "defect"
    env = {**drill.env, "REWIND_TEST_DEFECT": str(defect)}
    with Drill(tmp_path / "out", job="long_retention:departures", seed=1, env=env) as broken:
        assert broken.control().windows
        defect.write_text("skip a logged row")
        verdict = broken.run(choose(["lose-all"])[0])
    assert not verdict.passed
    assert "shard 0, local state: aggregates: " in verdict.why
    assert verdict.difference is not None
    assert not verdict.difference.state_equal
    assert verdict.difference.samples == ()


def test_the_report_tells_each_scenario(drill: Drill, verdicts: dict[str, Verdict]) -> None:
    if len(verdicts) < 2:
        pytest.skip("runs after the scenarios")
    data = json.loads(json.dumps(drill_json(drill, list(verdicts.values()))))
    write_html(drill.out / "report.html", data)
    page = (drill.out / "report.html").read_text()
    assert all(name in page for name in verdicts)
    assert "http" not in page, "the page needs nothing from elsewhere"
    lost = next((one for one in data["scenarios"] if one["name"] == "lose-all"), None)
    assert lost is None or (lost["restore_s"] > 0 and lost["rto_s"] > lost["restore_s"])
    assert all(one["rpo"] == {"lost": 0, "doubled": 0, "changed": 0} for one in data["scenarios"] if one["proof"])
