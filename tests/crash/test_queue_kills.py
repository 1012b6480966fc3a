"""Disks are taken under a running job whose shards queue their input, and it is killed at every step of that path.

As in `test_kill_points`: a chain of driver processes on one checkpoint. In each, disks of shards are taken while the
query runs. Python workers die where the shard queues, is restored beside the query, and adopts; then the driver dies
where it writes down what was decided, or asks for the adoption. Deaths in the restore of a death are among them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from recovery.drill.job import ERRORS, LOCAL, RESULTS
from recovery.drill.process import Event, Runner
from recovery.inspect.compare import compare
from recovery.killpoints import QUEUE_POINTS, taken
from tests.crash import kill_job
from tests.crash.test_kill_points import environment, follow, kill, newest, output, wait

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(1500)]

MESSAGES, PER_BATCH = 640, 2
_taken = count()


@dataclass(frozen=True, slots=True)
class Loss:
    """A disk that is taken under the running query.

    Attributes:
        shard: Whose.
        workers: Points at which a Python worker dies behind it, one after the other.
    """

    shard: int
    workers: tuple[str, ...] = ()


LIVES: tuple[tuple[tuple[Loss, ...], str], ...] = (
    ((Loss(0, ("before_queue", "after_queue", "before_pointer")), Loss(1)), "before_seal"),
    ((Loss(1, ("during_replay", "restore_changelog")), Loss(0)), "after_seal"),
    ((Loss(0, ("restore_proof", "restore_commit", "restore_publish")), Loss(1)), "before_ask"),
    ((Loss(1),), "after_ask"),
    ((Loss(0, ("before_adopt",)), Loss(1, ("before_adopt", "after_stage", "after_pointer"))), "before_publish"),
    ((), ""),
)
"""Per driver process: what is lost while it runs, and where it dies itself, behind the last loss."""


def test_every_point_of_the_path_is_in_the_plan() -> None:
    lives = {point for losses, driver in LIVES for point in (driver, *(p for loss in losses for p in loss.workers))}
    assert set(QUEUE_POINTS) <= lives


def test_what_is_killed_while_shards_queue_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    kill_job.write(tmp_path / "archive", kill_job.messages(MESSAGES))
    out, events = tmp_path / "killed", list[Event]()
    out.mkdir()
    (tmp_path / "control").mkdir()
    runner = launch(tmp_path)
    try:
        control = follow(runner, tmp_path / "control")
        for losses, driver in LIVES:
            runner.ask(out=str(out), as_it_is=True)
            for loss in losses:
                lose(runner, out, loss)
            if driver:
                kill(runner, driver)
                events += runner.events()
                assert runner.process.wait(10) == -9, f"not the driver died at {driver}"
                runner.close()
                runner = launch(tmp_path)
            else:
                events += runner.events()
    finally:
        runner.close()
    assert [event["event"] for event in events if event["event"] in ("ended", "failed")] == ["ended"], events[-3:]
    difference = compare(output(tmp_path / "control", control), output(out, events))
    assert difference.equal, difference
    windows, errors = kill_job.expected(kill_job.messages(MESSAGES))
    found: tuple[Any, Any] = kill_job.written(out / RESULTS, out / ERRORS)
    assert found == (windows, errors)


def launch(root: Path) -> Runner:
    env = environment(root) | {kill_job.EACH: str(PER_BATCH)}
    return Runner(kill_job.QUEUEING, "local[2,4]", env, root / "log", root / "order")


def lose(runner: Runner, out: Path, loss: Loss) -> None:
    """Take a shard's disk at once, as if it were unmounted, and let workers die behind it."""
    places: list[Path] = []

    def there() -> bool:
        places[:] = [path for path in (out / LOCAL).glob(f"*/{loss.shard}") if (path / "CURRENT").exists()]
        return bool(places)

    def goes_on() -> bool:
        """Whether it has committed on its state: that of a shard that still queues lies there before it is asked."""
        made = [int(path.name[:20]) for path in places[0].glob("*/staged/*.sst")] if there() else []
        return any(seen < version <= newest(out) for version in made)

    wait(runner, there, f"shard {loss.shard} has no state")
    # lost inside its first micro-batch, or inside an adoption, it would begin anew, or be fetched again, at once
    seen = newest(out)
    wait(runner, lambda: newest(out) > seen + 1 and goes_on(), f"shard {loss.shard} does not go on")
    gone = out.parent / f"gone-{next(_taken)}"
    places[0].rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
    for point in loss.workers:
        kill(runner, point)
        assert runner.alive, f"the driver died at {point}"
        assert not taken(runner.order).exists()
