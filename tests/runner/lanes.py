"""The processes of a run: as many at a time as there are lanes, until all have ended or the run has to."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.runner.plan import Unit
from tests.runner.processes import Process

ENDING_S = 60.0
"""How long processes have to end in order when the run is ended."""


class Ended(Exception):
    """The run is ended early; the exit status is its argument."""


class Lanes:
    """What runs; `close` it.

    Args:
        root: Where tests run.
        results: Directory of the processes' files.
        minutes: That the run may take, from now on.

    Attributes:
        signal: Set it to a signal's number to end the run.
        deadline: When the run has had its minutes, as `time.monotonic` counts.
    """

    def __init__(self, root: Path, results: Path, minutes: float) -> None:
        self.root, self.results, self.minutes, self.signal = root, results, minutes, 0
        self.deadline = time.monotonic() + 60 * minutes
        self._scratch = Path(tempfile.mkdtemp(prefix="rewind-tests-"))
        self._started = 0
        self._running: dict[Process, Unit] = {}

    def each(
        self, units: Sequence[Unit], arguments: Sequence[str], *, lanes: int = 1, suffix: str = ""
    ) -> Iterator[tuple[Unit, Process, int]]:
        """Run units, and yield each with its exit status as it ends and nothing of it runs any more.

        Args:
            units: In the order of their starts.
            arguments: Of pytest, before the modules.
            lanes: How many run at a time.
            suffix: Of their names.

        Raises:
            Ended: By a signal, or because the run has had its minutes; what runs is ended by `close`.
        """
        waiting = deque(units)
        while waiting or self._running:
            while waiting and len(self._running) < lanes:
                unit, self._started = waiting.popleft(), self._started + 1
                scratch, given = self._scratch / str(self._started), (*arguments, *unit.modules)
                process = Process(unit.name + suffix, given, root=self.root, results=self.results, scratch=scratch)
                self._running[process] = unit
            for process, unit in list(self._running.items()):
                if process.status is not None:
                    process.close()
                    del self._running[process]
                    yield unit, process, process.status
            time.sleep(0.05)
            if self.signal:
                raise Ended(128 + self.signal)
            if time.monotonic() > self.deadline:
                self._say_what_runs()
                raise Ended(1)

    def _say_what_runs(self) -> None:
        print(f"RED: the run has had its {self.minutes:g} minutes", flush=True)
        for process, unit in self._running.items():
            process.write_stacks()
            lines = process.lines()
            ended = {line["end"] for line in lines if "end" in line}
            starts = [line for line in lines if "start" in line and line["start"] not in ended]
            tests = "".join(f", {line['start']} for {time.time() - line['at']:.0f} s" for line in starts)
            print(f"ERROR {unit.subject} still ran{tests}; its stacks: {process.log}", flush=True)

    def close(self) -> None:
        """End what still runs, in order, and remove the scratch directories."""
        for process in self._running:
            process.interrupt()
        until = time.monotonic() + ENDING_S
        while time.monotonic() < until and any(process.status is None for process in self._running):
            time.sleep(0.05)
        for process in self._running:
            process.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
