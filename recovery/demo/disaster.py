"""The disasters: a disk is taken under a running query; a process dies inside a micro-batch, and its disk is gone."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil

from recovery.drill.damage import lose_disk
from recovery.drill.process import each, family_of, inside, kill

_POLL_S = 0.02


def inside_micro_batch(local: Path, checkpoint: Path, version: int) -> bool:
    """Tell whether a micro-batch has staged state that Spark has not committed: the worst moment to die."""
    return inside(local, version) and not (checkpoint / "commits" / str(version)).exists()


def strike(pid: int, local: Path, checkpoint: Path, after: int, *, timeout_s: float = 900) -> int | None:
    """Kill a process and all its descendants inside the first micro-batch that allows it, from `after` on.

    The processes are stopped first (SIGSTOP), so that what is seen on disk stays true until they are dead (SIGKILL).

    Args:
        pid: The process.
        local: Its directory of local state.
        checkpoint: Spark's checkpoint location.
        after: Earliest micro-batch.
        timeout_s: Bound on waiting.

    Returns:
        The micro-batch in which it died; None when the process ended by itself.

    Raises:
        TimeoutError: Nothing was staged in time.
    """
    process = psutil.Process(pid)
    version = after
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return None
        if (checkpoint / "commits" / str(version)).exists():
            version += 1
        elif inside_micro_batch(local, checkpoint, version):
            family = family_of(pid)
            each(family, "suspend")
            if inside_micro_batch(local, checkpoint, version):
                kill(pid)
                return version
            each(family, "resume")
        time.sleep(_POLL_S)
    raise TimeoutError(f"no micro-batch from {after} on staged anything within {timeout_s} seconds")


def take_disk(pid: int, shard: Path, *, timeout_s: float = 900) -> int:
    """Delete a shard's local state while the processes that use it run, between two tasks.

    They are stopped meanwhile (SIGSTOP): a task that has the files open would fail for files that vanish, as it should.

    Args:
        pid: The process that they descend from.
        shard: The shard's directory.
        timeout_s: Bound on waiting.

    Returns:
        The bytes that are gone.

    Raises:
        TimeoutError: The shard was in use all the time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        family = family_of(pid)
        each(family, "suspend")
        try:
            if not any(_uses(one, shard) for one in family):
                return lose_disk(shard)
        finally:
            each(family, "resume")
        time.sleep(_POLL_S)
    raise TimeoutError(f"{shard} was in use for {timeout_s} seconds")


def _uses(process: psutil.Process, directory: Path) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any(file.path.startswith(f"{directory}/") for file in process.open_files())
    return False
