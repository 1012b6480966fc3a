"""The processes of a drill: told what to run, followed while they tell, killed at the worst moment.

A `Runner` is one process of `recovery.drill.job` with a Spark of its own. It runs one thing after the other, so that
what is not killed need not start Spark again; whoever kills it gets a fresh one for what comes next.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import psutil

from recovery import ROOT
from recovery.drill.damage import OLD
from recovery.drill.job import CHECKPOINT, LOCAL
from recovery.killpoints import taken

WAIT_S = 3600.0
"""For so long a run may take to come to the place where it is to be broken, and may tell nothing."""
BEFORE = 2
"""How many micro-batches before the kill the local state is copied, for what brings an older copy of it back."""
_POLL_S = 0.005

Event = dict[str, Any]


class Runner:
    """A process that runs a job as often as it is asked, until it is killed.

    Args:
        job: `module:function`.
        master: Spark's master.
        env: Beside this process's environment.
        log: Its standard error goes there.
        order: File at which it looks for orders to die (`recovery.killpoints`).
        conf: Further settings of Spark.
    """

    def __init__(
        self,
        job: str,
        master: str,
        env: Mapping[str, str],
        log: Path,
        order: Path,
        conf: Mapping[str, str] | None = None,
    ) -> None:
        given = {"job": job, "master": master, "conf": {**(conf or {})}}
        command = [sys.executable, "-m", "recovery.drill.job", json.dumps(given)]
        whole = environment({**env, "REWIND_KILL": str(order)})
        self.order = order
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._idle = threading.Event()
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=whole
            )
        self._reader = threading.Thread(target=self._read, name="rewind-drill", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Take in what it tells, until it is dead."""
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                event = _event(line)
                if event is not None:
                    if event["event"] == "idle":
                        self._idle.set()
                    self._events.put(event if event["event"] != "idle" else None)
        finally:
            self._idle.set()
            self._events.put(None)

    @property
    def alive(self) -> bool:
        """Whether the process is still there."""
        return self.process.poll() is None

    @property
    def busy(self) -> bool:
        """Whether it still runs what it was asked."""
        return not self._idle.is_set()

    def ask(self, **what: Any) -> None:
        """Tell it what to run next; what happens comes from `events`."""
        assert self.process.stdin is not None
        self._idle.clear()
        with suppress(BrokenPipeError):  # it died: `events` ends at once
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()

    def events(self) -> Iterator[Event]:
        """Give what it tells, until it has done what it was asked, or is dead; one that hangs is killed, and failed."""
        try:
            while (event := self._events.get(timeout=WAIT_S)) is not None:
                yield event
        except Empty:
            self.kill()
            yield {"event": "failed", "at": time.time(), "error": f"the job told nothing for {WAIT_S:g} seconds"}

    def family(self) -> list[psutil.Process]:
        """Give the process and all that it started."""
        return family_of(self.process.pid)

    def kill(self) -> None:
        """Kill it with all that it started."""
        kill(self.process.pid)

    def close(self) -> None:
        """End it, and all that it started."""
        family = self.family()
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.alive:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10)
        each([one for one in family if one.is_running()], "kill")
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with some of it changed, for a process that is to find both packages."""
    known = os.pathsep.join([given.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")])
    paths = [*filter(None, known.split(os.pathsep)), str(ROOT), str(Path.cwd())]
    return {**os.environ, **given, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}


def _event(line: str) -> Event | None:
    """Return what a line tells; None where it is something else, such as a library's warning."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("event"), str) else None


def strike(runner: Runner, out: Path, at: int, how: str) -> int | None:
    """Kill a job with all its processes; they are stopped first, so that what was seen stays true until they are dead.

    Args:
        runner: Runs the job.
        out: The job's directory; a copy of its local state from `BEFORE` micro-batches before is made there.
        at: The micro-batch, or the next one that allows it.
        how: `between`: right after the micro-batch was committed, when its staged files wait to be ingested; `inside`
            it, with files staged and not committed.

    Returns:
        The micro-batch in which it died; None when it ended by itself.

    Raises:
        TimeoutError: It never came to the place.
    """
    if how == "between" and not seize(
        runner, lambda: _committed(out, max(0, at - BEFORE)), lambda: shutil.copytree(out / LOCAL, out / OLD)
    ):
        return None
    version = at

    def there() -> bool:
        nonlocal version
        if how == "between":
            return _committed(out, version)
        while _committed(out, version):
            version += 1
        return inside(out / LOCAL, version)

    return version if seize(runner, there, runner.kill) else None


def strike_restore(runner: Runner) -> bool:
    """Kill a job as soon as one of its workers has died by order; False when it ended by itself."""
    return seize(runner, taken(runner.order).exists, runner.kill)


def strike_host(runner: Runner, out: Path, disks: Path, at: int) -> int | None:
    """Kill the executor that is inside a micro-batch with its workers, and delete its disk.

    Args:
        runner: Runs the job.
        out: The job's directory.
        disks: Executors have theirs below it.
        at: The micro-batch, or the next one that allows it.

    Returns:
        The micro-batch in which it died; None when the job ended by itself.
    """
    found: list[Path] = []
    version = at

    def there() -> bool:
        nonlocal version
        while _committed(out, version):
            version += 1
        here = [one for one in disks.glob("*/executor-*") if inside(one / LOCAL, version, query_id(out))]
        running = executors(runner.family()) if here else {}
        found[:] = [disk for disk in here if str(disk) in running]
        return bool(found)

    def lose() -> None:
        executor = executors(runner.family()).get(str(found[0]))
        each(family_of(executor.pid) if executor is not None else [], "kill")
        shutil.rmtree(found[0] / LOCAL, ignore_errors=True)

    return version if seize(runner, there, lose) else None


def executors(family: Sequence[psutil.Process]) -> dict[str, psutil.Process]:
    """Give the executors among some processes, by the disk that each has of its own."""
    found = {}
    for process in family:
        with suppress(psutil.Error):
            disk = process.environ().get("SPARK_EXECUTOR_DIRS", "")
            if process.name() == "java" and disk:
                found[disk.split(os.pathsep)[0]] = process
    return found


def seize(runner: Runner, there: Callable[[], bool], do: Callable[[], object]) -> bool:
    """Wait for something, stop all processes, and do something if it is still so; False when the job ended first."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if not runner.busy:
            return False
        if there():
            family = runner.family()
            each(family, "suspend")
            try:
                if there():
                    do()
                    return True
            finally:
                each(family, "resume")
        time.sleep(_POLL_S)
    runner.kill()  # else it would go on, and be taken for the next run
    raise TimeoutError(f"what the drill waits for did not happen within {WAIT_S:g} seconds")


def _committed(out: Path, version: int) -> bool:
    return (out / CHECKPOINT / "commits" / str(version)).exists()


def inside(local: Path, version: int, query_id: str = "*") -> bool:
    """Tell whether a micro-batch has files staged: the worst moment to die, if it is not committed."""
    return next(local.glob(f"{query_id}/*/*/staged/{version:020d}_*.sst"), None) is not None


def query_id(out: Path) -> str:
    """Give the job's query id, as soon as it has one: executors keep the state of earlier jobs beside its own."""
    try:
        return str(json.loads((out / CHECKPOINT / "metadata").read_text())["id"])
    except (FileNotFoundError, ValueError):
        return "none yet"


def family_of(pid: int) -> list[psutil.Process]:
    """Give a process and all that it started; nothing when it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def each(family: Sequence[psutil.Process], what: str) -> None:
    """Do one thing to every process that is still there."""
    for process in family:
        with suppress(psutil.NoSuchProcess):
            getattr(process, what)()


def kill(pid: int) -> None:
    """Kill a process with all that it started (SIGKILL), stopped first, so that nobody sees anybody die; and wait."""
    family = family_of(pid)
    each(family, "suspend")
    family = list(dict.fromkeys([*family, *family_of(pid)]))
    each(family, "kill")
    psutil.wait_procs(family, timeout=30)


def snapshot(path: Path) -> dict[str, int]:
    """Give name and time of every file below a directory: equal when nothing was touched."""
    return {str(file.relative_to(path)): file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}
