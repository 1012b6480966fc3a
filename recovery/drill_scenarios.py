"""The catalogue of a drill: every way in which a job is broken, and what must come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recovery.drill_damage import (
    Damage,
    corrupt_changelog,
    corrupt_database,
    corrupt_staged,
    cut_changelog,
    lose_all,
    lose_shard,
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way to break a job.

    Attributes:
        name: For the command line.
        text: What happens, one sentence.
        damage: Done to the dead job's directory; gives what was done.
        kill_point: Instead of killing the whole process, die at this point of an attempt or restore.
        on_restart: The kill point is armed for the start after the damage: a restore is killed.
        master: Spark's master.
        aged: Share of every source partition that is gone when the job starts again.
        between: The job is killed right after a commit, when its staged files wait, instead of inside a micro-batch.
        zombie: Attempts with old pointers come back after the run.
        error: Code of the error that it must end in; None when it must end equal.
    """

    name: str
    text: str
    damage: Damage | None = None
    kill_point: str = ""
    on_restart: bool = False
    master: str = "local[2]"
    aged: float = 0.0
    between: bool = False
    zombie: bool = False
    error: str | None = None


def _both(*damages: Damage) -> Damage:
    return lambda out, chance: "; ".join(damage(out, chance) for damage in damages)


CATALOGUE = (
    Scenario("kill-driver", "SIGKILL of the driver with its JVM and workers, inside a micro-batch"),
    Scenario(
        "kill-worker",
        "SIGKILL of a Python worker between its staged file and its changelog record; Spark runs the task again",
        kill_point="after_stage",
        master="local[2,4]",
    ),
    Scenario("lose-shard", "the job is killed, and one shard's local state is gone", damage=lose_shard),
    Scenario("lose-all", "the job is killed, and the disk with all local state is gone", damage=lose_all),
    Scenario("corrupt-sst", "one byte in an SST file of one shard is flipped", damage=corrupt_database),
    Scenario(
        "corrupt-staged",
        "one bit in the staged file that a pointer names is flipped, before it is ingested",
        damage=corrupt_staged,
        between=True,
    ),
    Scenario(
        "kill-restore",
        "all local state is gone, and the restore is killed before its proof",
        damage=lose_all,
        kill_point="restore_changelog",
        on_restart=True,
    ),
    Scenario("zombie", "attempts with old pointers finish late: they must touch nothing", zombie=True),
    Scenario(
        "corrupt-changelog",
        "all local state is gone, and a byte of the changelog is flipped: an error that names the file",
        damage=_both(lose_all, corrupt_changelog),
        error="ChangelogDamaged",
    ),
    Scenario(
        "lose-tail",
        "all local state is gone, and the changelog's newest record: an error that names the file",
        damage=_both(lose_all, cut_changelog),
        error="ChangelogDamaged",
    ),
    Scenario(
        "source-aged",
        "all local state is gone, and the source no longer has what the windows need: an error that names the offsets",
        damage=lose_all,
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
    return [known[name] for name in names] if names else list(CATALOGUE)
