"""The catalogue of a drill: every way in which a job is broken, and what must come of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recovery.drill.damage import (
    Damage,
    Done,
    corrupt_changelog,
    corrupt_database,
    corrupt_staged,
    cut_changelog,
    lose_all,
    lose_shard,
    old_database,
)

NONE, SOME, ALL = "none", "some", "all"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way to break a job.

    A job that is killed is killed once for all scenarios that begin like this; each goes on with a copy of what was
    left.

    Attributes:
        name: For the command line.
        text: What happens, one sentence.
        killed: The whole job is killed: `inside` a micro-batch, with files staged and not committed, or `between`,
            right after a commit, when its staged files wait to be ingested. Empty: it is not.
        damage: Done to the dead job's directory.
        kill_point: A Python worker dies at this point of an attempt; with `killed` the driver too, with a worker that
            dies at this point of the restore.
        hosts: The job runs on two executors with a disk each, and snapshots are on. With `alternate` the other executor
            runs the tasks at every micro-batch. Without, one executor is killed inside a micro-batch, and its disk is
            lost. Shards must move, and the query goes on.
        alternate: See `hosts`.
        aged: Share of every source partition that is gone when the job starts again.
        zombie: Attempts with old pointers come back after the run.
        restores: `all` damaged shards must be restored, `some` of them may be (a damage that nothing reads is not
            noticed), or `none`: nothing that is not damaged is ever restored.
        error: Code of the error that it must end in, which names the damaged file, or a source partition that aged;
            empty when it must end equal.
    """

    name: str
    text: str
    killed: str = ""
    damage: Damage | None = None
    kill_point: str = ""
    hosts: bool = False
    alternate: bool = False
    aged: float = 0.0
    zombie: bool = False
    restores: str = NONE
    error: str = ""


def _both(*damages: Damage) -> Damage:
    def damage(out: Path, chance: random.Random) -> Done:
        done = [one(out, chance) for one in damages]
        return Done("; ".join(one.what for one in done), done[0].shards, done[-1].file)

    return damage


DAYS = 3
"""Of departures in 2013: the drill's own job, unless told."""

CATALOGUE = (
    Scenario("kill-driver", "SIGKILL of the driver with its JVM and workers, inside a micro-batch", "inside"),
    Scenario(
        "kill-worker",
        "SIGKILL of a Python worker between its staged file and its changelog record; Spark runs the task again",
        kill_point="after_stage",
    ),
    Scenario(
        "move",
        "every shard moves to the other one of two executors at every micro-batch; the query goes on",
        hosts=True,
        alternate=True,
    ),
    Scenario(
        "lose-executor-with-snapshots",
        "SIGKILL of one of two executors inside a micro-batch, its disk is gone; its shards move, the query goes on",
        hosts=True,
    ),
    Scenario(
        "lose-shard", "the job is killed, and one shard's local state is gone", "inside", lose_shard, restores=ALL
    ),
    Scenario(
        "lose-all", "the job is killed, and the disk with all local state is gone", "inside", lose_all, restores=ALL
    ),
    Scenario(
        "corrupt-sst",
        "one byte in an SST file of one shard is flipped, and a check of the database finds it",
        "inside",
        corrupt_database,
        restores=SOME,
    ),
    Scenario(
        "corrupt-staged",
        "one bit in the staged file that a pointer names is flipped, before it is ingested",
        "between",
        corrupt_staged,
        restores=ALL,
    ),
    Scenario(
        "old-database",
        "an older copy of one shard's database comes back, and the staged file that a pointer names does not fit on it",
        "between",
        old_database,
        restores=ALL,
    ),
    Scenario(
        "kill-restore",
        "all local state is gone, and worker and driver are killed before the restore's proof",
        "inside",
        lose_all,
        kill_point="restore_changelog",
        restores=ALL,
    ),
    Scenario("zombie", "attempts with old pointers finish late: they must touch nothing", zombie=True),
    Scenario(
        "corrupt-changelog",
        "all local state is gone, and a byte of the changelog is flipped: an error that names the file",
        "inside",
        _both(lose_all, corrupt_changelog),
        error="HistoryLost",
    ),
    Scenario(
        "lose-tail",
        "all local state is gone, and the changelog's newest record: an error that names the file",
        "inside",
        _both(lose_all, cut_changelog),
        error="HistoryLost",
    ),
    Scenario(
        "source-aged",
        "all local state is gone, and the source no longer has what the windows need: an error that names the offsets",
        "inside",
        lose_all,
        aged=1.0,
        error="HistoryLost",
    ),
)
"""Every scenario, by name."""


def choose(names: Sequence[str]) -> list[Scenario]:
    """Give scenarios by name; all of them for none.

    Raises:
        ValueError: There is no such scenario.
    """
    known = {scenario.name: scenario for scenario in CATALOGUE}
    for name in names:
        if name not in known:
            raise ValueError(f"scenario={name!r}: allowed are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)] if names else list(CATALOGUE)


def in_order(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Put scenarios in the order in which the fewest processes are started: what kills comes first."""
    return sorted(
        scenarios, key=lambda one: (one.hosts, not one.alternate, not one.killed, not one.kill_point, one.killed)
    )
