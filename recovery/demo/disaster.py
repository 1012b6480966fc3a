"""The disaster that a query survives: a shard's disk is taken under it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from recovery.drill.damage import lose_disk
from recovery.drill.process import Runner, seize


def take_disk(runner: Runner, shard: Path) -> int:
    """Delete a shard's local state while the processes that use it run, between two tasks.

    They are stopped meanwhile (SIGSTOP): a task that has the files open would fail for files that vanish, as it should.

    Args:
        runner: Runs the job.
        shard: The shard's directory.

    Returns:
        The bytes that are gone.

    Raises:
        TimeoutError: The shard was in use all the time.
    """
    gone: list[int] = []
    seize(
        runner,
        lambda: not any(_uses(one, shard) for one in runner.family()),
        lambda: gone.append(lose_disk(shard)),
    )
    return sum(gone)


def _uses(process: psutil.Process, directory: Path) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any(file.path.startswith(f"{directory}/") for file in process.open_files())
    return False
