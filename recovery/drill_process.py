"""The processes of a drill: followed while they tell, killed at the worst moment, ended with all that they started."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from recovery.drill_job import CHECKPOINT, LOCAL

START_TIMEOUT_S = 600.0
_POLL_S = 0.005


def events_of(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """Give what a process tells, until it ends."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def strike(process: subprocess.Popen[str], out: Path, at: int, *, between: bool = False) -> int | None:
    """Kill a job with all its processes; they are stopped first, so that what was seen stays true until they are dead.

    Args:
        process: The job.
        out: Its directory.
        at: The micro-batch, or the next one that allows it.
        between: Right after the micro-batch was committed, when its staged files wait to be ingested; otherwise inside
            it, with files staged and not committed.

    Returns:
        The micro-batch in which it died; None when it ended by itself.

    Raises:
        TimeoutError: It never came to the place.
    """
    version = at
    deadline = time.monotonic() + START_TIMEOUT_S
    root = psutil.Process(process.pid)
    here = _committed if between else inside
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return None
        if not between and _committed(out, version):
            version += 1
        elif here(out, version):
            family = [root, *root.children(recursive=True)]
            each(family, "suspend")
            if here(out, version):
                each([*family, *root.children(recursive=True)], "kill")
                psutil.wait_procs(family, timeout=30)
                return version
            each(family, "resume")
        time.sleep(_POLL_S)
    raise TimeoutError(f"micro-batch {at} was not reached within {START_TIMEOUT_S:g} seconds")


def _committed(out: Path, version: int) -> bool:
    return (out / CHECKPOINT / "commits" / str(version)).exists()


def inside(out: Path, version: int) -> bool:
    """Tell whether a micro-batch has staged state that Spark has not committed: the worst moment to die."""
    staged = next((out / LOCAL).glob(f"*/*/*/staged/{version:020d}_*.sst"), None)
    return staged is not None and not _committed(out, version)


def each(family: Sequence[psutil.Process], what: str) -> None:
    """Do one thing to every process that is still there."""
    for process in family:
        try:
            getattr(process, what)()
        except psutil.NoSuchProcess:
            continue


def end(process: subprocess.Popen[str]) -> None:
    """End a process that we started, and all that it started."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
    each([one for one in family if one.is_running()], "kill")
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def snapshot(path: Path) -> dict[str, int]:
    """Give name and time of every file below a directory: equal when nothing was touched."""
    return {str(file.relative_to(path)): file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}
