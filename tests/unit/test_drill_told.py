"""What a drill's process tells on its standard output can be read line by line, whoever tells at the same time."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from queue import SimpleQueue

import pytest

from backend import archive, count, stream, tumbling
from recovery import ROOT
from recovery.drill import process
from recovery.drill.drill import Drill
from recovery.drill.job import of_the_drill, tell
from recovery.drill.process import Runner
from recovery.drill.run import Run


class Pieces(io.StringIO):
    """Keeps each write apart: between two of them another thread may write."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def test_an_event_is_one_write_of_one_whole_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Pieces()
    monkeypatch.setattr(sys, "stdout", out)
    tell("published", version=2, why="two\nlines")
    tell("ended")
    assert len(out.pieces) == 2
    assert all(piece.endswith("\n") and piece.count("\n") == 1 for piece in out.pieces)
    first, last = (json.loads(piece) for piece in out.pieces)
    assert (first["event"], first["version"], first["why"], last["event"]) == ("published", 2, "two\nlines", "ended")


class Process:
    """Stands in for a process that has written some lines, and has ended."""

    def __init__(self, *lines: str) -> None:
        self.stdout = io.StringIO("".join(f"{line}\n" for line in lines))


def test_what_is_no_event_is_passed_over_and_the_end_is_always_told() -> None:
    """A reader that died of such a line left the drill waiting for ever."""
    runner = Runner.__new__(Runner)
    runner.process = Process("{'a': 1}", '{"b": 2}', "[1]", '{"event": 5}', '{"event": "ended", "version": 2}')  # type: ignore[assignment]
    runner._events, runner._idle = SimpleQueue(), threading.Event()
    runner._read()
    assert [event["version"] for event in runner.events()] == [2]
    assert not runner.busy


def test_a_job_that_hangs_is_killed_and_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Runner] = []
    monkeypatch.setattr(process, "WAIT_S", 0.01)
    runner, run = Runner.__new__(Runner), Run()
    runner._events = SimpleQueue()
    monkeypatch.setattr(runner, "kill", lambda: killed.append(runner))
    Drill.__new__(Drill)._listen(runner, run)
    assert (killed, run.error) == ([runner], "the job told nothing for 0.01 seconds")


def test_what_a_job_prints_is_no_event() -> None:
    """Nor what its workers do, which have the process's standard output."""
    code = (
        "import os\nfrom recovery.drill.job import tell, telling_apart\ntelling_apart()\n"
        "print('{\"event\": \"ended\"}', end='', flush=True)\nos.system('echo from a worker')\ntell('idle')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()] == ["idle"]
    assert "from a worker" in done.stderr


def test_a_job_in_a_drill_has_none_of_its_own_places() -> None:
    """Its changelog would be the drill's: the job's own first start was refused then."""
    windows = stream(archive("nowhere", format="raw"), event_time="at").window(tumbling(10), retention=0)
    own = windows.aggregate(n=count()).options(
        changelog="kafka://h:1/log", snapshots=10, standby=1, queue_bytes="off", name="orders", shards=3
    )
    given = of_the_drill(own)._given({})
    assert (given.changelog, given.snapshots, given.standby) == (None, "off", 0)
    assert (given.queue_bytes, given.name, given.shards) == (None, None, 3)


def test_a_run_that_does_not_come_to_its_place_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it went on, and what it told was taken for the next run's."""
    monkeypatch.setattr(process, "WAIT_S", 0.05)
    killed: list[str] = []

    class Slow:
        busy = True

        def kill(self) -> None:
            killed.append("all of it")

    with pytest.raises(TimeoutError, match="did not happen within"):
        process.seize(Slow(), lambda: False, lambda: None)  # type: ignore[arg-type]
    assert killed == ["all of it"]
