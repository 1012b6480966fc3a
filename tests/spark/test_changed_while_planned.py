"""A driver dies between publishing and Spark's commit, and the job starts again with other options."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from backend.errors import OutputDiffers
from recovery.killpoints import order
from tests.conftest import ROOT, spark_environment
from tests.support import planned_job
from tests.support.waiting import ended

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

DIED_IN = 2


def rows(directory: Path) -> list[dict]:
    found = ds.dataset(directory, format="parquet", partitioning="hive").to_table().to_pylist()
    return sorted(found, key=lambda row: row["id"])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the job until its driver is killed between publishing and committing a micro-batch."""
    home = tmp_path_factory.mktemp("planned")
    order(home / "order", "after_publish", DIED_IN)
    env = {**os.environ, **spark_environment(), "REWIND_KILL": str(home / "order")}
    command = [sys.executable, "-m", "tests.support.planned_job", str(home)]
    ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == -signal.SIGKILL, ran.stderr[-3000:]
    assert (home / "checkpoint" / "offsets" / str(DIED_IN)).exists()
    assert not (home / "checkpoint" / "commits" / str(DIED_IN)).exists()
    return home


@pytest.fixture
def died(tmp_path: Path, killed: Path) -> Path:
    """Give a copy of what the killed driver left."""
    return Path(shutil.copytree(killed, tmp_path / "home", symlinks=True))


def test_what_was_planned_runs_under_its_options_and_what_comes_after_under_the_new_ones(spark, died: Path) -> None:
    """Late updates were sent at once, messages of 2099 were refused; from the next micro-batch on neither is so."""
    seen = rows(died / "results"), rows(died / "errors")
    query = planned_job.start(spark, died, late="off", max_ahead=None)
    ended(query)
    results, errors = rows(died / "results"), rows(died / "errors")
    assert [row for row in results if row["version"] <= DIED_IN] == seen[0]
    assert [row for row in errors if row["version"] <= DIED_IN] == seen[1]
    # one late message and one of 2099 in each micro-batch, as far as the options of then hold
    assert [row["version"] for row in results if row["reason"] == "late"] == list(range(DIED_IN + 1))
    assert [row["version"] for row in errors if row["reason"] == "in_future"] == list(range(DIED_IN + 1))
    assert max(row["version"] for row in results) > DIED_IN
    assert query.progress.restores == 0


def test_other_rows_than_were_published_end_the_query_by_name(spark, died: Path) -> None:
    """A manifest that forgets what was planned with: nothing is replaced, nothing is committed."""
    seen = rows(died / "results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recovery.commit.manifest.versions_in", lambda *_: [])  # as if nothing had been planned
        query = planned_job.start(spark, died, late="off", max_ahead="1 day")
    with pytest.raises(OutputDiffers, match=f"micro-batch {DIED_IN} was published, ran again, and made other rows"):
        ended(query)
    assert rows(died / "results") == seen
    assert not (died / "checkpoint" / "commits" / str(DIED_IN)).exists()
