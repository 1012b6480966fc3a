"""A checkpoint that an operator took back: the query goes on from the state of the version that is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery.restore.replay import read_pointers
from tests.spark.test_rules_in_spark import expected, last_revisions, messages, start, write
from tests.support.heard import Heard

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

BACK_TO = 1


def take_back(checkpoint: Path, version: int) -> None:
    for entry in [*(checkpoint / "commits").iterdir(), *(checkpoint / "offsets").iterdir()]:
        name = entry.name.removeprefix(".").removesuffix(".crc")
        if name.isdecimal() and int(name) > version:
            entry.unlink()


@pytest.fixture(scope="module")
def rows():
    return messages(1200)


@pytest.fixture
def ended(spark, tmp_path: Path, rows, request):
    """Run the job to its end, and take its checkpoint back; give the pointers as of then."""
    write(tmp_path / "archive", rows)
    start(spark, tmp_path, snapshots=request.param).await_termination()
    checkpoint = tmp_path / "checkpoint"
    assert max(int(name.name) for name in (checkpoint / "commits").iterdir() if name.name.isdecimal()) >= BACK_TO + 2
    take_back(checkpoint, BACK_TO)
    pointers = read_pointers(spark, str(checkpoint), 2)
    assert {pointer.commit.version for pointer in pointers.values()} == {BACK_TO}
    return pointers


@pytest.mark.parametrize("ended", [2], indirect=True)
def test_packages_lead_back_and_no_restart_is_needed(spark, tmp_path: Path, rows, ended) -> None:
    listener = Heard()
    query = start(spark, tmp_path, snapshots=2, listeners=(listener,))
    query.await_termination()
    back = [one for one in listener.tries if "rolled back" in one.why]
    assert {(one.shard, one.commit, one.how, one.failed) for one in back} == {
        (shard, pointer.commit.name, "snapshot", "") for shard, pointer in ended.items()
    }
    assert query.progress.restores == 0
    assert last_revisions(spark, tmp_path) == expected(rows)


@pytest.mark.parametrize("ended", ["off"], indirect=True)
def test_changelog_and_source_lead_back(spark, tmp_path: Path, rows, ended) -> None:
    listener = Heard()
    query = start(spark, tmp_path, snapshots="off", queue_bytes="off", listeners=(listener,))
    query.await_termination()
    replayed = {(one.shard, one.commit, one.how, one.failed) for one in listener.tries if one.how != "snapshot"}
    assert replayed == {(shard, pointer.commit.name, "replay", "") for shard, pointer in ended.items()}
    assert query.progress.restores == 1
    assert last_revisions(spark, tmp_path) == expected(rows)
