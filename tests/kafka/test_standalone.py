"""The deployment's topology without containers: a broker, a Spark master, two workers, the deployment's own job.

One worker dies midway by SIGKILL with all its processes, and the local state is gone: the other one restores it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from backend.spark.session import jars
from recovery.demo.produce import in_order, produce
from recovery.demo.proof import prove
from recovery.drill.flights import make_archive
from recovery.drill.process import kill
from tests.support.standalone import Cluster
from tests.support.waiting import Died, WaitedTooLong, until

pytestmark = [pytest.mark.kafka, pytest.mark.spark]

ROOT = Path(__file__).resolve().parents[2]
HOUR_MS = 3_600_000
WAIT_S = 300


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.close()


def wait_for(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    try:
        until(path.exists, what=f"{path}", alive=lambda: process.poll() is None)
    except (WaitedTooLong, Died) as error:
        error.add_note(log.read_text()[-3000:])
        raise


@pytest.mark.long
def test_a_worker_dies_and_the_other_restores_its_state(
    cluster: Cluster, kafka_broker: Any, kafka_topics: Any, tmp_path: Path, spark: Any
) -> None:
    rows = in_order(make_archive(tmp_path / "archive", days=3))
    topic = kafka_topics.create(3)
    kafka_topics.adopt(f"{topic}-changelog")
    produce(kafka_broker.settings, topic, rows)
    servers = kafka_broker.settings.servers
    out, local = tmp_path / "out", tmp_path / "local"
    job = cluster.submit(
        ROOT / "docker" / "job.py",
        {"spark.jars": ",".join(map(str, jars.resolve(jars.connector()))), "spark.sql.shuffle.partitions": "3"},
        *("--servers", servers, "--topic", topic, "--checkpoint", str(out), "--local-dir", str(local)),
        *("--offsets", "500", "--until-end"),
    )
    log = tmp_path / "job.log"
    wait_for(out / "state" / "commits" / "2", job, log)
    executors = psutil.Process(cluster.workers[0].pid).children(recursive=True)
    assert executors, "the worker that is to die has no executor"
    kill(cluster.workers[0].pid)
    # at once: the worker that lives goes on writing below, and would race with a removal of one file after the other
    local.rename(tmp_path / "lost")
    assert job.wait(WAIT_S) == 0, log.read_text()[-3000:]
    restores = re.search(r" micro-batches, (\d+) restores, (\d+) beside the query", log.read_text())
    assert restores is not None
    assert int(restores[1]) + int(restores[2]) >= 1
    proof = prove(
        spark, tmp_path / "archive", out / "windows", out / "errors", size_ms=HOUR_MS, retention_ms=6 * HOUR_MS
    )
    assert proof.windows.total > 0
    assert proof.windows.equal == proof.windows.total, proof
    assert proof.full.equal == proof.full.total, proof
    assert proof.duplicates == 0
