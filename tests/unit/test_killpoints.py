"""Kill points: one process dies of an order, where it says; passing is free of effects otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recovery import killpoints
from recovery.killpoints import order, passing, taken

PASSER = """
from recovery.killpoints import kill_point
for version in range(3):
    kill_point("open", version)
    print(version, flush=True)
"""


def passed(path: Path) -> tuple[int, list[str]]:
    env = {**os.environ, "REWIND_KILL": str(path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PASSER], env=env, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout.split()


def test_the_first_process_that_passes_dies_and_no_other(tmp_path: Path) -> None:
    order(tmp_path / "order", "open", 1)
    assert passed(tmp_path / "order") == (-9, ["0"])
    assert taken(tmp_path / "order").exists()
    assert passed(tmp_path / "order") == (0, ["0", "1", "2"])


def test_the_first_process_that_passes_stops_and_goes_on_when_it_may(tmp_path: Path) -> None:
    path = tmp_path / "order"
    order(path, "open", 1, stop=True)
    env = {**os.environ, "REWIND_KILL": str(path), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", PASSER], env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            assert taken(path).read_text() == str(process.pid)
            assert passed(path) == (0, ["0", "1", "2"]), "one process took the order"
        finally:
            process.send_signal(signal.SIGCONT)
        assert process.communicate()[0].split() == ["0", "1", "2"]


def test_a_point_that_does_not_exist_cannot_be_ordered(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="point='lunch': allowed are open"):
        order(tmp_path / "order", "lunch")


def test_a_point_lies_behind_every_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace"
    monkeypatch.setattr(killpoints, "_TRACE", str(trace))
    for number, _ in enumerate(passing("abc", "prune_packages", 7)):
        assert (trace.read_text().count("\n") if trace.exists() else 0) == number
    assert trace.read_text() == "prune_packages 7\n" * 3


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals that this process would have got."""
    signals: list[int] = []
    monkeypatch.setattr(killpoints, "_ORDER", str(tmp_path / "order"))
    monkeypatch.setattr(killpoints.os, "kill", lambda _, number: signals.append(number))
    return signals


@pytest.mark.parametrize("stop", [False, True])
def test_an_order_that_is_deleted_as_soon_as_it_is_taken_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: list[int], stop: bool
) -> None:
    path, rename = tmp_path / "order", Path.rename

    def seen_at_once(source: Path, target: Path) -> Path:
        made = rename(source, target)
        taken(path).unlink(missing_ok=True)
        return made

    order(path, "open", stop=stop)
    monkeypatch.setattr(Path, "rename", seen_at_once)
    killpoints.kill_point("open", 3)
    assert killed == [signal.SIGSTOP if stop else signal.SIGKILL]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("newer", [False, True])
def test_an_order_that_came_since_another_was_looked_at_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: list[int], newer: bool
) -> None:
    path, asks = tmp_path / "order", killpoints._asks
    seen: list[Path] = []

    def stale(of: Path, name: str, version: int | None) -> bool:
        seen.append(of)
        if len(seen) == 1:  # another process took it then, and the next one was ordered
            return True
        if newer:
            order(path, "prune")
        return asks(of, name, version)

    order(path, "upload")
    monkeypatch.setattr(killpoints, "_asks", stale)
    killpoints.kill_point("open", 3)
    assert killed == []
    assert [file.name for file in tmp_path.iterdir()] == ["order"]
    assert path.read_text() == ("prune" if newer else "upload")
