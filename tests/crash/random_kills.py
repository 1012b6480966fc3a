"""A job on two executors with a disk each, while its processes are killed at random; it must end as plain loops say.

`python -m tests.crash.random_kills --seconds 120 --seed 7` runs one storm; which blow falls next, and how long after
the one before, comes from the seed (where it strikes is the machine's doing). Blows:

* `worker`: a Python worker is killed; Spark runs its task again.
* `executor`: an executor is killed with its workers; its disk is lost, and another one comes.
* `zombie`: the same, but its Python workers are stopped before, and go on later, when others have taken over: what they
  write then, on their disk, in the changelog and beside the checkpoint, is late.
* `driver`: the driver dies with everything, and is started again.
* `rollback`: likewise, and Spark's newest `commits/` entry is gone: a committed micro-batch runs again.
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

from recovery.compare import state_digest
from recovery.drill_job import CHECKPOINT, ERRORS, HOSTS, LOCAL, RESULTS
from recovery.drill_process import Event, Runner, each, executors
from recovery.pointer import Commit
from recovery.survey import Checkpoint
from tests.conftest import ROOT
from tests.crash import kill_job

BLOWS = ("worker", "worker", "worker", "executor", "executor", "zombie", "zombie", "driver", "rollback")
MASTER = "local-cluster[2,1,1024]"
PAUSE_S = (2.0, 7.0)
ZOMBIE_S = (0.3, 8.0)
"""How long a zombie's workers are stopped."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Python workers that do not run for a while.

    Attributes:
        wake_at: When they go on, by the monotonic clock.
        workers: The workers.
        newest: The newest committed micro-batch when they were stopped.
    """

    wake_at: float
    workers: list[psutil.Process]
    newest: int


@dataclass
class Storm:
    """One job and its misfortunes."""

    root: Path
    seed: int
    seen: Counter[str] = field(default_factory=Counter)
    events: list[Event] = field(default_factory=list)
    error: str = ""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.out = self.root / "out"
        self.out.mkdir(parents=True)
        self.stopped: list[Stopped] = []
        self.began = time.monotonic()
        self.environment = {
            "PYTHONPATH": f"{Path(__file__).parent / 'often'}:{ROOT}",
            "PYSPARK_PYTHON": sys.executable,
            kill_job.ARCHIVE: str(self.root / "archive"),
            "TZ": "UTC",
        }

    def rage(self, messages: int, seconds: float) -> None:
        """Run the job to its end, and strike for so many seconds after its first commit."""
        rows = kill_job.messages(messages)
        kill_job.write(self.root / "archive", rows)
        runner = self._launch()
        try:
            until: float | None = None
            while True:
                self._wait(runner, self.random.uniform(*PAUSE_S))
                if not runner.busy and runner.alive:
                    break
                if until is None and self._newest() >= 1:
                    until = time.monotonic() + seconds
                if until is not None and time.monotonic() < until:
                    runner = self._strike(runner, self.random.choice(BLOWS))
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
        workers = _workers(victim)
        if blow == "worker":
            if workers:
                each([self.random.choice(workers)], "kill")
                self._note("worker")
            return runner
        if blow == "zombie" and workers:
            each(workers, "suspend")
            each([victim], "kill")
            self._stop(workers)
            self._note("zombie")
            return runner
        with suppress(psutil.NoSuchProcess):
            each([victim, *victim.children(recursive=True)], "kill")
        shutil.rmtree(disk, ignore_errors=True)
        self._note("executor")
        return runner

    def _stop(self, workers: list[psutil.Process]) -> None:
        wake_at = time.monotonic() + self.random.uniform(*ZOMBIE_S)
        self.stopped.append(Stopped(wake_at, workers, self._newest()))

    def _wake(self, *, all_of_them: bool = False) -> None:
        """Let those go on whose time has come."""
        for one in list(self.stopped):
            if all_of_them or time.monotonic() > one.wake_at:
                self.stopped.remove(one)
                each(one.workers, "resume")
                if self._newest() > one.newest:
                    self._note("went on after others had committed")
                psutil.wait_procs(one.workers, timeout=1.0)
                each(one.workers, "kill")

    def _roll_back(self) -> bool:
        newest = self._newest()
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
        conf = {
            "spark.local.dir": str(self.out / HOSTS),
            "spark.executor.memory": "512m",
            "spark.deploy.maxExecutorRetries": "-1",
        }
        log, orders = self.root / "log", self.root / "order"
        runner = Runner(kill_job.NAME, MASTER, self.environment, log, orders, conf)
        runner.ask(out=str(self.out), hosts=True)
        return runner

    def _again(self, runner: Runner) -> Runner:
        self.events += runner.events()
        runner.close()
        shutil.rmtree(self.out / HOSTS, ignore_errors=True)
        return self._launch()

    def _wait(self, runner: Runner, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and runner.busy and runner.alive:
            self._wake()
            time.sleep(0.05)

    def _executors(self, runner: Runner) -> dict[str, psutil.Process]:
        return executors(runner.family())

    def _newest(self) -> int:
        return max((int(path.name) for path in (self.out / CHECKPOINT / "commits").glob("[0-9]*")), default=-1)

    def _rivals(self) -> int:
        """Count the micro-batches of which a shard has several records in the changelog, by those still there."""
        records = (self.out / CHECKPOINT / "rewind" / "changelog").glob("*/*.delta")
        return sum(n > 1 for n in Counter((path.parent.name, path.name[:20]) for path in records).values())

    def _note(self, what: str) -> None:
        self.seen[what] += 1
        print(f"{time.monotonic() - self.began:7.1f} s  micro-batch {self._newest()}: {what}", flush=True)


def _workers(executor: psutil.Process) -> list[psutil.Process]:
    """Give the Python workers of an executor, without the daemon that forks them."""
    with suppress(psutil.NoSuchProcess):
        return [one for daemon in executor.children() for one in daemon.children() if "python" in one.name()]
    return []


def main() -> int:
    """Run storms from the command line; the directory of one that fails is kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--messages", type=int, default=6000)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="rewind-storm-"))
    storm = Storm(root, options.seed)
    try:
        storm.rage(options.messages, options.seconds)
        storm.check(options.messages)
    except AssertionError as error:
        print(f"seed {options.seed} FAILS: {error}\nkept: {root}")
        return 1
    restored = sum(event["event"] == "restored" for event in storm.events)
    print(
        f"seed {options.seed}: equal after {storm._newest() + 1} micro-batches; {restored} restores; {dict(storm.seen)}"
    )
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
