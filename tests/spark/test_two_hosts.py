"""Spark standalone, two workers under different host names, a disk per executor: two attempts at once, hosts that die.

One driver process runs one job three times: undisturbed; while Spark's speculation runs a second attempt of a
micro-batch's task on the other host, with both of them held at points of the test's choosing; while executors and
workers are killed in turn, with their disks. Results, errors and state must be those of the undisturbed run and of
plain loops, and the query is never started again.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from recovery.commit.pointer import Commit
from recovery.drill.job import CHECKPOINT, ERRORS, LOCAL, RESULTS
from recovery.drill.process import Event, each, executors, inside, query_id
from recovery.inspect.checkpoint_view import Checkpoint
from recovery.inspect.compare import Output, compare, read_output
from recovery.killpoints import POINTS, order, taken
from tests.conftest import ROOT
from tests.crash import kill_job
from tests.support import waiting
from tests.support.standalone import TWO_NAMES, Cluster, OnCluster
from tests.support.waiting import Died

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(1500)]

T = TypeVar("T")
MESSAGES = 256
CONF = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.task.duration.threshold": "3s",  # where a stage has one task: the stateful one
    "spark.speculation.minTaskRuntime": "1h",  # nowhere else: on a busy host copies would beget copies
    "spark.locality.wait": "0s",
    "spark.shuffle.io.maxRetries": "1",  # of an executor that is dead: not four times five seconds
    "spark.shuffle.io.retryWait": "200ms",
}

BLOWS = ("executor", "worker")


@dataclass(frozen=True, slots=True)
class Duel:
    """Two attempts of one task, and who is let go on first; the other one goes on when that one is committed.

    Attributes:
        first: Where the first attempt stops.
        second: Where Spark's copy of it stops.
        winner: 0 for the first attempt.
    """

    first: str
    second: str
    winner: int


DUELS = (
    Duel("open", "before_pointer", 1),  # the first one has not even looked at its state
    Duel("after_stage", "before_changelog", 0),
    Duel("before_stage", "after_changelog", 0),  # the copy's record is in the changelog, and never counts
    Duel("after_changelog", "after_stage", 1),  # the other way round
)


@dataclass
class Seen:
    """What a duel looked like while both were held.

    Attributes:
        version: The micro-batch.
        disks: Each attempt's executor, by its disk.
        staged: Files of the micro-batch staged on each of them.
        records: Names of the micro-batch's records in the changelog.
    """

    version: int
    disks: list[str]
    staged: list[list[str]]
    records: list[str]


@dataclass(frozen=True, slots=True)
class Kill:
    """An executor that died.

    Attributes:
        how: Alone, or with its worker.
        version: The micro-batch that it was inside.
        pid: Its process.
        at: When, in seconds since the epoch.
    """

    how: str
    version: int
    pid: int
    at: float


@dataclass
class Story:
    """Three runs, and what happened in them."""

    out: Path
    events: dict[str, list[Event]] = field(default_factory=dict)
    duels: list[Seen] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    root = tmp_path_factory.mktemp("hosts")
    kill_job.write(root / "archive", kill_job.messages(MESSAGES))
    env = {
        "PYTHONPATH": f"{Path(kill_job.__file__).parent / 'often'}:{ROOT}",
        kill_job.ARCHIVE: str(root / "archive"),
        "REWIND_KILL": str(root / "order"),
        "TZ": "UTC",
    }
    conf = {"spark.executor.memory": "512m", "spark.executor.cores": "1", **CONF}
    told = Story(root)
    cluster = Cluster(root, TWO_NAMES, "1g", env)
    try:
        runner = OnCluster(cluster, kill_job.ON_ONE_SHARD, cluster.url, env, root / "log", root / "order", conf)
        try:
            for name, trouble in (("control", None), ("duels", fight), ("kills", strike)):
                (root / name).mkdir()
                runner.ask(out=str(root / name), hosts=True, as_it_is=True)
                if trouble is not None:
                    trouble(runner, told)
                told.events[name] = list(runner.events())
        finally:
            runner.close()
    finally:
        cluster.close()
    yield told
    shutil.rmtree(root, ignore_errors=True)


def until(runner: OnCluster, there: Callable[[], T], otherwise: str) -> T:
    """Wait until something is there, and give it."""
    try:
        return waiting.until(there, what=otherwise, alive=lambda: runner.busy)
    except Died as error:
        error.add_note(f"{[*runner.events()][-3:]}")
        raise


def newest(out: Path) -> int:
    return max((int(path.name) for path in (out / CHECKPOINT / "commits").glob("[0-9]*")), default=-1)


# -- two attempts at once ---------------------------------------------------------------------------------------------


def fight(runner: OnCluster, story: Story) -> None:
    """Fight one duel after the other, one in each micro-batch from the second one on."""
    out = story.out / "duels"
    order(runner.order, DUELS[0].first, 1, stop=True)
    for version, duel in enumerate(DUELS, 1):
        first = stopped(runner, f"nobody stopped at {duel.first}")
        try:
            order(runner.order, duel.second, version, stop=True)
            second = stopped(runner, f"no second attempt came to {duel.second}")
        except BaseException:
            first.resume()
            raise
        here = [disk_of(one) for one in (first, second)]
        records = sorted(path.stem for path in out.glob(f"{CHECKPOINT}/rewind/changelog/0/{version:020d}_*.delta"))
        story.duels.append(Seen(version, here, [staged(Path(disk), version, out) for disk in here], records))
        if version < len(DUELS):
            order(runner.order, DUELS[version].first, version + 1, stop=True)
        (first, second)[duel.winner].resume()
        until(runner, lambda at=version: newest(out) >= at, f"{duel}: the winner does not commit")
        each([(second, first)[duel.winner]], "resume")  # Spark may have killed it by now


def stopped(runner: OnCluster, otherwise: str) -> psutil.Process:
    """Wait until somebody has taken the order and has stopped, and give it."""
    there = taken(runner.order)
    until(runner, lambda: there.exists() and there.read_text().isdigit(), otherwise)
    process = psutil.Process(int(there.read_text()))
    until(runner, lambda: process.status() == psutil.STATUS_STOPPED, otherwise)
    return process


def disk_of(worker: psutil.Process) -> str:
    return worker.environ()["SPARK_EXECUTOR_DIRS"]


def staged(disk: Path, version: int, out: Path) -> list[str]:
    return sorted(path.stem for path in (disk / LOCAL).glob(f"{query_id(out)}/0/*/staged/{version:020d}_*.sst"))


# -- hosts that die ---------------------------------------------------------------------------------------------------


def strike(runner: OnCluster, story: Story) -> None:
    """Kill the executor that is inside a micro-batch, or its worker as well; its disk is lost."""
    out, cluster = story.out / "kills", runner.cluster
    for how in BLOWS:
        cluster.both()  # a new one may take over, not only the other old one
        before = newest(out)
        until(runner, lambda before=before: newest(out) > before, f"no commit before a {how} is to die")
        version, disk = until(runner, lambda: working(cluster, out), f"no {how} is inside a micro-batch")
        victim, began = cluster.executors()[disk], time.time()
        if how == "worker":
            cluster.replace(next(number for number in (0, 1) if disk in executors(cluster.family(number))))
        else:
            each([victim, *victim.children(recursive=True)], "kill")
        shutil.rmtree(disk, ignore_errors=True)
        story.kills.append(Kill(how, version, victim.pid, began))


def working(cluster: Cluster, out: Path) -> tuple[int, str] | None:
    """Give the micro-batch that runs, and the disk of the executor that has files of it staged."""
    version = newest(out) + 1
    disks = [disk for disk in cluster.executors() if inside(Path(disk) / LOCAL, version, query_id(out))]
    return (version, disks[0]) if disks else None


# -- what must hold ---------------------------------------------------------------------------------------------------


def output(story: Story, name: str) -> Output:
    out = story.out / name
    ended = story.events[name][-1]
    assert ended["event"] == "ended", ended
    pointers = {int(shard): Commit.of_name(commit) for shard, commit in ended["commits"].items()}
    return read_output(Checkpoint(str(out / CHECKPOINT), out / LOCAL, pointers), out / RESULTS, out / ERRORS)


def test_two_attempts_of_one_micro_batch_ran_at_once_on_two_hosts(story: Story) -> None:
    assert len(story.duels) == len(DUELS)
    for duel, seen in zip(DUELS, story.duels, strict=True):
        print(
            f"micro-batch {seen.version}: {duel.first} and {duel.second}, staged {seen.staged}, logged {seen.records}"
        )
        assert len(set(seen.disks)) == 2, "an executor each"
        points = [POINTS.index(point) for point in (duel.first, duel.second)]
        has_staged = [point >= POINTS.index("after_stage") for point in points]
        assert [len(files) for files in seen.staged] == has_staged
        has_logged = sum(point >= POINTS.index("after_changelog") for point in points)
        assert len(seen.records) == has_logged
        attempts = {name for files in seen.staged for name in files}
        assert len(attempts) == sum(has_staged), "each under a commit of its own"
        assert set(seen.records) <= attempts


@pytest.mark.parametrize("name", ["duels", "kills"])
def test_results_errors_and_state_are_those_of_an_undisturbed_run(story: Story, name: str) -> None:
    difference = compare(output(story, "control"), output(story, name))
    assert difference.equal, difference
    assert difference.windows > 20
    assert difference.errors > 5
    out = story.out / name
    assert kill_job.written(out / RESULTS, out / ERRORS) == kill_job.expected(kill_job.messages(MESSAGES))


@pytest.mark.parametrize("name", ["duels", "kills"])
def test_the_query_goes_on_without_a_restart(story: Story, name: str) -> None:
    events = story.events[name]
    assert [event["event"] for event in events if event["event"] in ("started", "restoring", "failed")] == ["started"]
    assert (events[-1]["same"], events[-1]["restores"]) == (True, 0)
    launches = json.loads((story.out / name / CHECKPOINT / "rewind" / "launches.json").read_text())
    assert launches["launch"] == 1
    assert any(event["event"] == "fetched" for event in events), "a shard moved"


def test_hosts_died_in_turn_and_results_came_again(story: Story) -> None:
    assert [kill.how for kill in story.kills] == list(BLOWS)
    assert len({kill.pid for kill in story.kills}) == len(BLOWS)
    progress = [event for event in story.events["kills"] if event["event"] == "progress"]
    for kill in story.kills:
        came = min(event["at"] for event in progress if event["version"] >= kill.version)
        print(f"{kill.how} killed inside micro-batch {kill.version}: {came - kill.at:.1f} s without results")
        assert came > kill.at
