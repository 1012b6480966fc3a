"""The disaster: a process with its JVM and its Python workers dies inside a micro-batch, and its disk is gone."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import psutil

_POLL_S = 0.02


def inside_micro_batch(local: Path, checkpoint: Path, version: int) -> bool:
    """Tell whether a micro-batch has staged state that Spark has not committed: the worst moment to die."""
    staged = next(local.glob(f"*/*/*/staged/{version:020d}_*.sst"), None)
    return staged is not None and not (checkpoint / "commits" / str(version)).exists()


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
            family = [process, *process.children(recursive=True)]
            _each(family, "suspend")
            if inside_micro_batch(local, checkpoint, version):
                kill(pid)
                return version
            _each(family, "resume")
        time.sleep(_POLL_S)
    raise TimeoutError(f"no micro-batch from {after} on staged anything within {timeout_s} seconds")


def kill(pid: int) -> None:
    """Kill a process and all its descendants with SIGKILL, and wait until they are gone."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    _each(family, "kill")
    psutil.wait_procs(family, timeout=30)


def lose_disk(local: Path) -> int:
    """Delete the local state; gives the bytes that are gone."""
    length = sum(path.stat().st_size for path in local.rglob("*") if path.is_file())
    shutil.rmtree(local)
    return length


def _each(family: list[psutil.Process], what: str) -> None:
    for process in family:
        try:
            getattr(process, what)()
        except psutil.NoSuchProcess:
            continue
