"""A process of tests, in a session and a scratch directory of its own, and what it has started."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STACKS_S = 3.0
"""How long a JVM has to write its stacks."""


def family(pid: int, scratch: Path | None = None) -> set[int]:
    """Return a process, if it is alive, and all that it has started (Linux).

    That is: what is of its session, its children and theirs, and what has its scratch directory in the environment,
    such as brokers, which have sessions of their own.
    """
    parents: dict[int, int] = {}
    found = {pid}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is somebody else's
            state, parent, _, session, *_ = (place / "stat").read_text().rpartition(") ")[2].split()
            if state == "Z":
                continue
            parents[int(place.name)] = int(parent)
            ours = scratch is not None and f"TMPDIR={scratch}".encode() in (place / "environ").read_bytes().split(b"\0")
            if ours or int(session) == pid:
                found.add(int(place.name))
    while children := {child for child, parent in parents.items() if parent in found} - found:
        found |= children
    return found & parents.keys()


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def java_stacks(pids: Iterable[int], log: int) -> None:
    """Let the JVMs among some processes write their stacks, and copy them into a log (a descriptor).

    A JVM writes them to its standard output: where that is a file, such as a broker's log, it is copied from.
    """
    outputs: dict[tuple[int, int], tuple[Path, int]] = {}
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "java":
                path = Path(f"/proc/{pid}/fd/1")
                at = path.stat()
                send([pid], signal.SIGQUIT)
                outputs.setdefault((at.st_dev, at.st_ino), (path, at.st_size))
    if outputs:
        time.sleep(STACKS_S)
    here = os.fstat(log)
    for place, (path, begin) in outputs.items():
        with suppress(OSError):
            if path.is_file() and place != (here.st_dev, here.st_ino):
                os.write(log, path.read_bytes()[begin:])


class Process:
    """One pytest with the runner's plugins, started at once; `close` it when it has ended, or to end it.

    Args:
        name: Of its files in `results`: `.log` (both outputs), `.xml` (JUnit), `.jsonl` (see `journal`).
        arguments: Of pytest.
        root: Where it runs.
        results: Where its files go.
        scratch: Its scratch directory, made here and removed by `close`.
    """

    def __init__(self, name: str, arguments: Iterable[str], *, root: Path, results: Path, scratch: Path) -> None:
        self.log, self._journal, self._scratch = results / f"{name}.log", results / f"{name}.jsonl", scratch
        self.began = time.monotonic()
        (scratch / "tmp").mkdir(parents=True)
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
        java = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} -Djava.io.tmpdir={scratch / 'tmp'}".strip()
        environment = {"TMPDIR": str(scratch / "tmp"), "PYTHONPATH": os.pathsep.join(paths), "JAVA_TOOL_OPTIONS": java}
        environment["PYTHONDONTWRITEBYTECODE"] = (
            ""  # what pytest rewrites takes seconds, once instead of in each process
        )
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.runner.journal"]
        command += ["-p", "tests.runner.hangs", f"--journal={self._journal}", f"--basetemp={scratch / 'base'}"]
        command += [f"--junitxml={results / name}.xml", *arguments]
        with self.log.open("ab") as out:  # to append: stacks of its JVMs are copied in between
            self._process = subprocess.Popen(
                command, cwd=root, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def status(self) -> int | None:
        """Exit status, below zero for a signal; None while it runs."""
        return self._process.poll()

    def lines(self) -> list[dict[str, Any]]:
        """Return what its journal has; a line that a kill has torn is left out."""
        found = []
        for line in self._journal.read_text().splitlines() if self._journal.exists() else []:
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def interrupt(self) -> None:
        """Ask pytest alone to end: fixtures end what they have started (tests/conftest.py)."""
        if self.status is None:
            self._process.terminate()

    def write_stacks(self) -> None:
        """Let it and its JVMs write their stacks into its log."""
        with self.log.open("ab") as out:
            java_stacks(self._family(), out.fileno())
        with suppress(OSError):  # before pytest has begun the signal would end it
            if self._journal.exists():
                self._process.send_signal(signal.SIGUSR1)
                time.sleep(0.5)

    def close(self) -> None:
        """End what is left of it, gently first, and remove the scratch directory."""
        for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            until = time.monotonic() + patience_s
            send(self._family(), number)
            while self.status is None or self._family():
                if time.monotonic() > until:
                    break
                time.sleep(0.05)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _family(self) -> set[int]:
        return family(self._process.pid, self._scratch / "tmp")
