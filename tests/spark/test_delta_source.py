"""A Delta table as a source, with Delta's own connector: windows after a lost disk equal batch SQL over the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backend.spark.session.jars import Artifact, JarSet, resolve
from tests.conftest import ROOT, spark_environment

pytestmark = [pytest.mark.spark, pytest.mark.long]

DELTA = JarSet(
    name="delta-4.4",
    artifacts=(
        Artifact("io.delta", "delta-spark_4.2_2.13", "4.4.0"),
        Artifact("io.delta", "delta-storage", "4.4.0"),
        Artifact("io.delta", "delta-kernel-api", "4.4.0"),
        Artifact("io.delta", "delta-kernel-defaults", "4.4.0"),
        Artifact("io.delta", "delta-kernel-unitycatalog", "4.4.0"),
        Artifact("io.unitycatalog", "unitycatalog-client", "0.6.0"),
        Artifact("io.unitycatalog", "unitycatalog-hadoop", "0.6.0"),
    ),
    transitive=False,
    marker="io.delta.sql.DeltaSparkSessionExtension",
)


def test_a_delta_table_with_lost_disks_and_another_order_equals_batch_sql(tmp_path: Path) -> None:
    jars = ",".join(map(str, resolve(DELTA)))
    command = [sys.executable, "-m", "tests.support.delta_job", str(tmp_path), jars]
    env = {**os.environ, **spark_environment()}
    ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=580)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["found"] == told["expected"]
    before, again = told["runs"]
    assert before == again
    assert len(before) > 6, "both micro-batches sent rows"
    assert sum(n for n, _, _ in told["found"].values()) == 100
    assert list((tmp_path / "checkpoint/rewind/messages").glob("*/*")), "the median keeps messages: they are logged"
