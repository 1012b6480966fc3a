"""A job on two executors with a disk each, while its processes are killed at random; it must end as plain loops say.

`python -m tests.crash.random_kills --seconds 120 --seed 7` runs one storm; which blow falls next, and how long after
the one before, comes from the seed (where it strikes is the machine's doing). When a job has ended before the time is
up, the next one begins, with the next seed. `--standalone` takes Spark standalone, two workers under different host
names, with speculation. Blows:

* `worker`: a Python worker is killed; Spark runs its task again.
* `executor`: an executor is killed with its workers; its disk is lost, and another one comes.
* `zombie`: the same, but its Python workers are stopped before, and go on later, when others have taken over: what they
  write then, on their disk, in the changelog and beside the checkpoint, is late.
* `driver`: the driver dies with everything, and is started again.
* `rollback`: likewise, and Spark's newest `commits/` entry is gone: a committed micro-batch runs again.
* `host`, with `--standalone`: a worker of Spark dies with its executor, its disk is lost, and another one comes.
* `stall`, with `--standalone`: a Python worker is stopped for a while, and Spark runs a second attempt of its task on
  the other host. The first one goes on in the middle of the second, or behind it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from recovery.commit.pointer import Commit
from recovery.drill.job import CHECKPOINT, ERRORS, HOSTS, LOCAL, RESULTS
from recovery.drill.process import Event, Runner, each, executors
from recovery.inspect.checkpoint_view import Checkpoint
from recovery.inspect.compare import state_digest
from tests.conftest import ROOT
from tests.crash import kill_job
from tests.support.standalone import TWO_NAMES, Cluster, OnCluster

BLOWS = ("worker", "worker", "worker", "executor", "executor", "zombie", "zombie", "driver", "rollback")
STANDALONE = (*BLOWS, "host", "host", "stall", "stall", "stall", "stall", "stall")
MASTER = "local-cluster[2,1,1024]"
CONF = {
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.locality.wait": "0s",
    "spark.shuffle.io.maxRetries": "1",
    "spark.shuffle.io.retryWait": "200ms",
}
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.2",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "500ms",
    "spark.speculation.task.duration.threshold": "2s",
}
PAUSE_S = (0.5, 5.0)
COMMITS = (0, 0, 1, 1, 1, 2)
"""For how many commits the next blow waits: the one after it may strike while what the last one broke is mended."""
PATIENCE_S = 60.0
ZOMBIE_S = (0.3, 8.0)
"""How long a zombie's workers are stopped."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Python workers that do not run for a while.

    Attributes:
        wake_at: When they go on, by the monotonic clock.
        workers: The workers.
        newest: The newest committed micro-batch when they were stopped.
        last: They have lost their executor: what they do when they go on is the last thing they do.
    """

    wake_at: float
    workers: list[psutil.Process]
    newest: int
    last: bool


@dataclass
class Storm:
    """One job and its misfortunes."""

    root: Path
    seed: int
    cluster: Cluster | None = None
    seen: Counter[str] = field(default_factory=Counter)
    events: list[Event] = field(default_factory=list)
    error: str = ""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.out = self.root / "out"
        self.out.mkdir(parents=True)
        self.disks = self.cluster.disks if self.cluster is not None else self.out / HOSTS
        self.stopped: list[Stopped] = []
        self.began = time.monotonic()
        self.blows = STANDALONE if self.cluster is not None else BLOWS
        self.environment = environment(self.root)

    def rage(self, messages: int, seconds: float) -> None:
        """Run the job to its end, and strike for so many seconds after its first commit."""
        rows = kill_job.messages(messages)
        kill_job.write(self.root / "archive", rows)
        runner = self._launch()
        try:
            until: float | None = None
            while True:
                self._wait(runner, self.random.uniform(*PAUSE_S), self.random.choice(COMMITS))
                if not runner.busy and runner.alive:
                    break
                if until is None and self.newest >= 1:
                    until = time.monotonic() + seconds
                if until is not None and time.monotonic() < until:
                    runner = self._strike(runner, self.random.choice(self.blows))
                elif not runner.alive:
                    runner = self._again(runner)
            self.events += runner.events()
        finally:
            self._wake(all_of_them=True)
            runner.close()
        self.error = next((event["error"] for event in self.events if event["event"] == "failed"), "")

    def check(self, messages: int) -> None:
        """Compare with plain loops, and let the changelog prove the state.

        Raises:
            AssertionError: Something differs.
        """
        assert not self.error, self.error
        windows, errors = kill_job.expected(kill_job.messages(messages))
        found_windows, found_errors = kill_job.written(self.out / RESULTS, self.out / ERRORS)
        wrong = {key for key in windows.keys() | found_windows.keys() if windows.get(key) != found_windows.get(key)}
        assert not wrong, f"{len(wrong)} of {len(windows)} windows differ, such as {sorted(wrong)[:3]}"
        assert found_errors == errors
        ended = [event for event in self.events if event["event"] == "ended"][-1]
        pointers = {int(shard): Commit.of_name(name) for shard, name in ended["commits"].items()}
        checkpoint = Checkpoint(str(self.out / CHECKPOINT), self.out / LOCAL, pointers)
        kept = sum(state_digest(checkpoint, shard)[1] for shard in checkpoint.shards)
        assert kept == sum(totals[0] for totals in windows.values()), "messages in the state"

    # --------------------------------------------------------------------------------------------------------- blows

    def _strike(self, runner: Runner, blow: str) -> Runner:
        if blow in ("driver", "rollback") or not runner.alive:
            self._wake(all_of_them=True)
            runner.kill()
            self._note("driver")
            if blow == "rollback" and self._roll_back():
                self._note("rollback")
            return self._again(runner)
        found = self._executors(runner)
        if not found:
            return runner
        disk, victim = self.random.choice(sorted(found.items(), key=lambda one: one[0]))
        workers = workers_of(victim)
        if blow == "worker":
            if workers:
                each([self.random.choice(workers)], "kill")
                self._note("worker")
            return runner
        if blow == "zombie" and workers:
            each(workers, "suspend")
            each([victim], "kill")
            self._stop(workers, last=True)
            self._note("zombie")
            return runner
        if blow == "stall":
            each(workers, "suspend")
            self._stop(workers, last=False)
            self._note("stall")
            return runner
        if blow == "host" and self.cluster is not None:
            numbers = [n for n in (0, 1) if disk in executors(self.cluster.family(n))]
            if numbers:
                self.cluster.replace(numbers[0])
                shutil.rmtree(disk, ignore_errors=True)
                self._note("host")
            return runner
        with suppress(psutil.NoSuchProcess):
            each([victim, *victim.children(recursive=True)], "kill")
        shutil.rmtree(disk, ignore_errors=True)
        self._note("executor")
        return runner

    def _stop(self, workers: list[psutil.Process], *, last: bool) -> None:
        wake_at = time.monotonic() + self.random.uniform(*ZOMBIE_S)
        self.stopped.append(Stopped(wake_at, workers, self.newest, last))

    def _wake(self, *, all_of_them: bool = False) -> None:
        """Let those go on whose time has come."""
        for one in list(self.stopped):
            if all_of_them or time.monotonic() > one.wake_at:
                self.stopped.remove(one)
                each(one.workers, "resume")
                if self.newest > one.newest:
                    self._note("went on after others had committed")
                if one.last:
                    psutil.wait_procs(one.workers, timeout=1.0)
                    each(one.workers, "kill")

    def _roll_back(self) -> bool:
        newest = self.newest
        if newest < 1:
            return False
        folder = self.out / CHECKPOINT
        for path in folder.glob("offsets/[0-9]*"):  # what Spark planned behind it, it plans anew
            if int(path.name) > newest:
                path.unlink()
                (path.parent / f".{path.name}.crc").unlink(missing_ok=True)
        (folder / "commits" / str(newest)).unlink()
        (folder / "commits" / f".{newest}.crc").unlink(missing_ok=True)
        return True

    # ----------------------------------------------------------------------------------------------------- processes

    def _launch(self) -> Runner:
        log, orders = self.root / "log", self.root / "order"
        if self.cluster is not None:
            conf, url = {**CONF, **SPECULATION}, self.cluster.url
            runner: Runner = OnCluster(self.cluster, kill_job.NAME, url, self.environment, log, orders, conf)
        else:
            conf = {**CONF, "spark.local.dir": str(self.out / HOSTS), "spark.deploy.maxExecutorRetries": "-1"}
            runner = Runner(kill_job.NAME, MASTER, self.environment, log, orders, conf)
        runner.ask(out=str(self.out), hosts=True, as_it_is=True)
        return runner

    def _again(self, runner: Runner) -> Runner:
        self.events += runner.events()
        runner.close()
        for disk in self.disks.glob("*/executor-*"):
            shutil.rmtree(disk, ignore_errors=True)
        return self._launch()

    def _wait(self, runner: Runner, seconds: float, commits: int) -> None:
        began, before = time.monotonic(), self.newest
        while runner.busy and runner.alive and time.monotonic() < began + PATIENCE_S:
            self._wake()
            if time.monotonic() > began + seconds and self.newest >= before + commits:
                return
            time.sleep(0.05)

    def _executors(self, runner: Runner) -> dict[str, psutil.Process]:
        return executors(runner.family())

    @property
    def newest(self) -> int:
        """The newest micro-batch that Spark has committed, -1 before the first."""
        return max((int(path.name) for path in (self.out / CHECKPOINT / "commits").glob("[0-9]*")), default=-1)

    def rivals(self) -> int:
        """Count the micro-batches of which a shard has several records in the changelog, by those still there."""
        records = (self.out / CHECKPOINT / "rewind" / "changelog").glob("*/*.delta")
        return sum(n > 1 for n in Counter((path.parent.name, path.name[:20]) for path in records).values())

    def _note(self, what: str) -> None:
        self.seen[what] += 1
        print(f"{time.monotonic() - self.began:7.1f} s  micro-batch {self.newest}: {what}", flush=True)


def workers_of(executor: psutil.Process) -> list[psutil.Process]:
    """Give the Python workers of an executor, without the daemon that forks them."""
    with suppress(psutil.NoSuchProcess):
        return [one for daemon in executor.children() for one in daemon.children() if "python" in one.name()]
    return []


def environment(root: Path) -> dict[str, str]:
    """Give what the job's processes need."""
    return {
        "PYTHONPATH": f"{Path(__file__).parent / 'often'}:{ROOT}",
        "PYSPARK_PYTHON": sys.executable,
        kill_job.ARCHIVE: str(root / "archive"),
        "TZ": "UTC",
    }


def one(seed: int, messages: int, seconds: float, *, standalone: bool) -> Storm | None:
    """Run and check one storm; give it, or None when something was wrong: its directory is kept then."""
    root = Path(tempfile.mkdtemp(prefix="rewind-storm-"))
    cluster = Cluster(root, TWO_NAMES, "1g", environment(root)) if standalone else None
    storm = Storm(root, seed, cluster)
    try:
        storm.rage(messages, seconds)
        storm.check(messages)
    except AssertionError as error:
        print(f"seed {seed} FAILS: {error}\nkept: {root}")
        return None
    finally:
        if cluster is not None:
            cluster.close()
    for event in storm.events:
        if event["event"] in ("restored", "fetched"):
            storm.seen[event["event"]] += 1
    storm.seen += Counter({"micro-batches": storm.newest + 1, "micro-batches of two attempts": storm.rivals()})
    shutil.rmtree(root)
    return storm


def main() -> int:
    """Run storms from the command line until the time is up; the directory of one that fails is kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--messages", type=int, default=1200)
    parser.add_argument("--standalone", action="store_true")
    options = parser.parse_args()
    seed, end = options.seed, time.monotonic() + options.seconds
    seen: Counter[str] = Counter()
    while time.monotonic() < end:
        storm = one(seed, options.messages, end - time.monotonic(), standalone=options.standalone)
        if storm is None:
            return 1
        print(f"seed {seed}: equal, {dict(storm.seen)}", flush=True)
        seen += storm.seen + Counter({"storms": 1})
        seed += 1
    print(f"all equal: {dict(seen)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
