"""One job is killed at every kill point, with SIGKILL, and ends as if nothing had been.

A chain of driver processes goes on with one checkpoint. In each, Python workers die at some points, one after the
other, and Spark runs their tasks again; then the driver dies at a point of its own. Between them disks are lost, so
that shards are fetched, and restored. What the driver tidies up behind commits dies in processes of its own, without
Spark. In the end windows, errors and state are those of an undisturbed run, and of plain loops.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from recovery.commit.pointer import Commit
from recovery.drill.job import CHECKPOINT, ERRORS, LOCAL, RESULTS
from recovery.drill.process import Event, Runner, each
from recovery.inspect.checkpoint_view import Checkpoint
from recovery.inspect.compare import Output, compare, read_output
from recovery.killpoints import POINTS, order, taken
from tests.conftest import ROOT
from tests.crash import kill_job
from tests.support.waiting import Died, until

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(1500)]  # on a busy host five JVMs take long

SNAPSHOTS = f"{CHECKPOINT}/rewind/snapshots"
MESSAGES = 400


TIDY = """
import json, sys
from recovery.changelog import open_changelog
from recovery.supervise.housekeeping import Housekeeping
from recovery.jobs import snapshots
from recovery.commit.pointer import Commit

checkpoint, newest = sys.argv[1], {int(s): Commit.of_name(name) for s, name in json.loads(sys.argv[2]).items()}
log = open_changelog(f"{checkpoint}/rewind/changelog")
keeping = Housekeeping(lambda: log, snapshots(checkpoint), 2, 1)
for shard, commit in newest.items():
    for one in (*reversed(log.read(shard, commit).record.ancestors), commit):
        keeping.made(shard, one)
print(keeping.maintain(max(commit.version for commit in newest.values())))
"""


@dataclass(frozen=True, slots=True)
class Life:
    """A driver process.

    Attributes:
        lost: What is deleted before it starts.
        workers: Points at which a Python worker of it dies, in this order; a micro-batch is committed between groups.
        driver: Where it dies itself; empty: it lives to the end.
    """

    lost: tuple[str, ...] = ()
    workers: tuple[tuple[str, ...], ...] = ()
    driver: str = ""


LIVES = (
    Life(
        workers=(
            ("open", "before_stage", "during_stage"),
            ("after_stage", "before_changelog", "before_ingest"),
            ("after_ingest", "upload", "during_upload"),
            ("before_base", "after_changelog", "prune"),
            ("before_pointer", "after_pointer"),
        ),
        driver="before_publish",
    ),
    Life((LOCAL,), (("fetch", "during_fetch", "after_fetch"),), "during_publish"),
    Life((LOCAL, SNAPSHOTS), driver="restore_replay"),
    Life(
        workers=(("during_replay", "restore_changelog", "restore_proof", "restore_commit", "restore_publish"),),
        driver="after_publish",
    ),
    Life(),
)
TIDYING = ("prune_changelog", "prune_packages")
"""Where processes die that prune what the job left."""


@dataclass
class Story:
    """What happened.

    Attributes:
        killed: Point -> what died of it.
        events: What the processes told.
        passed: Points that were passed at all.
    """

    out: Path
    killed: dict[str, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    control: list[Event] = field(default_factory=list)
    passed: set[str] = field(default_factory=set)


def test_every_kill_point_is_in_the_plan() -> None:
    lives = [point for life in LIVES for group in (*life.workers, (life.driver,)) for point in group if point]
    assert sorted((*lives, *TIDYING)) == sorted(POINTS)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    root = tmp_path_factory.mktemp("kills")
    kill_job.write(root / "archive", kill_job.messages(MESSAGES))
    told = Story(root / "killed")
    told.out.mkdir()
    runner = launch(root)
    try:
        (root / "control").mkdir()
        told.control = follow(runner, root / "control")
        for life in LIVES:
            for place in life.lost:
                shutil.rmtree(told.out / place)
            runner.ask(out=str(told.out), as_it_is=True)
            live(runner, life, told)
            if life.driver:
                runner.close()
                runner = launch(root)
    finally:
        runner.close()
    for point in (*TIDYING, ""):
        tidy(root, told, point)
    told.passed = {line.split()[0] for line in (root / "trace").read_text().splitlines()}
    return told


def environment(root: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": f"{Path(__file__).parent / 'often'}:{ROOT}",
        kill_job.ARCHIVE: str(root / "archive"),
        "REWIND_KILL_TRACE": str(root / "trace"),
        "TZ": "UTC",
    }


def launch(root: Path) -> Runner:
    return Runner(kill_job.NAME, "local[2,4]", environment(root), root / "log", root / "order")


def tidy(root: Path, told: Story, point: str) -> None:
    """Prune what the job left, in a process that dies at a point, or does not."""
    if point:
        order(root / "order", point)
    env = {**os.environ, **environment(root), "REWIND_KILL": str(root / "order")}
    commits = json.dumps(committed(told.events))
    ended = subprocess.run([sys.executable, "-c", TIDY, str(told.out / CHECKPOINT), commits], env=env, check=False)
    assert ended.returncode == (-9 if point else 0)
    if point:
        taken(root / "order").unlink()
        told.killed[point] = "driver"


def follow(runner: Runner, out: Path) -> list[Event]:
    runner.ask(out=str(out), as_it_is=True)
    events = list(runner.events())
    assert [event["event"] for event in events if event["event"] in ("ended", "failed")] == ["ended"], events
    return events


def live(runner: Runner, life: Life, told: Story) -> None:
    """Let a driver process live to its end."""
    for group in life.workers:
        before = newest(told.out)
        for point in group:
            kill(runner, point)
            assert runner.alive, f"the driver died at {point}"
            told.killed[point] = "worker"
        wait(runner, lambda seen=before: newest(told.out) > seen, f"no commit after {group}")
    if life.driver:
        kill(runner, life.driver)
        told.killed[life.driver] = "driver"
    told.events += runner.events()
    if life.driver:
        assert runner.process.wait(10) == -9, f"not the driver died at {life.driver}"


def kill(runner: Runner, point: str) -> None:
    """Order a death and wait for it."""
    family = runner.family()
    order(runner.order, point)
    wait(runner, taken(runner.order).exists, f"nothing passed {point}")
    taken(runner.order).unlink()
    print(f"{time.strftime('%X')} {point}", file=sys.stderr)
    if not runner.alive:
        _, left = psutil.wait_procs(family, timeout=10)
        each(left, "kill")


def wait(runner: Runner, there: Callable[[], bool], otherwise: str) -> None:
    try:
        until(there, what=otherwise, alive=lambda: runner.busy)
    except Died as error:
        error.add_note(f"{[*runner.events()][-3:]}")
        raise


def newest(out: Path) -> int:
    """Give the newest micro-batch that Spark has committed."""
    return max((int(path.name) for path in (out / CHECKPOINT / "commits").glob("[0-9]*")), default=-1)


def committed(events: list[Event]) -> dict[str, str]:
    return [event["commits"] for event in events if event["event"] == "ended"][-1]


def output(out: Path, events: list[Event]) -> Output:
    pointers = {int(shard): Commit.of_name(name) for shard, name in committed(events).items()}
    return read_output(Checkpoint(str(out / CHECKPOINT), out / LOCAL, pointers), out / RESULTS, out / ERRORS)


def test_every_point_was_passed_and_killed(story: Story) -> None:
    assert set(story.killed) == set(POINTS)
    # a micro-batch that runs again is sealed, too: there test_queue_kills.py kills
    assert story.passed - {"before_seal", "after_seal"} == set(POINTS)


def test_windows_errors_and_state_are_those_of_an_undisturbed_run(story: Story) -> None:
    control = output(story.out.parent / "control", story.control)
    difference = compare(control, output(story.out, story.events))
    assert difference.equal, difference
    assert difference.windows > 20
    assert difference.errors > 10


def test_windows_and_errors_are_those_of_plain_loops(story: Story) -> None:
    windows, errors = kill_job.expected(kill_job.messages(MESSAGES))
    found: tuple[Any, Any] = kill_job.written(story.out / RESULTS, story.out / ERRORS)
    assert found == (windows, errors)


def test_what_was_lost_was_fetched_and_restored_and_nothing_else(story: Story) -> None:
    # a shard whose snapshot was published before the other one's restore died again is fetched then
    restored = [event["shard"] for event in story.events if event["event"] == "restored"]
    assert restored
    assert len(restored) == len(set(restored))
    assert any(event["event"] == "fetched" for event in story.events)


def test_nothing_is_left_of_the_dead(story: Story) -> None:
    left = [*story.out.glob(f"{CHECKPOINT}/rewind/replay/*"), *story.out.glob(f"{LOCAL}/*/restore-*")]
    left += [path for path in story.out.glob(f"{CHECKPOINT}/rewind/**/*") if ".tmp-" in path.name]
    assert left == []
