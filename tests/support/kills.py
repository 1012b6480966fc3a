"""A job in a process of its own that is killed at kill points, one start after the other, and then runs to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from recovery.killpoints import order, taken
from tests.conftest import ROOT, spark_environment

KILLS = int(os.environ.get("SINK_KILLS", "5"))
"""How many kills of each story are made."""


def killed_and_ended(module: str, home: Path, kills: Iterable[tuple[str, int]], *arguments: str) -> None:
    """Run `python -m <module> <home> <arguments>` until it ends by itself.

    Args:
        module: Of the job; it goes on where it stopped.
        home: Where its files go.
        kills: Kill points and micro-batches, in the order of the starts that die there; the first `KILLS` are made.
        arguments: More of the command line.
    """
    at = home / "order"
    environment = {**os.environ, **spark_environment(), "REWIND_KILL": str(at), "PYTHONPATH": str(ROOT)}

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", module, str(home), *arguments]
        return subprocess.run(command, check=False, env=environment, capture_output=True, text=True, cwd=home)

    for point, version in islice(kills, KILLS):
        order(at, point, version)
        done = run()
        assert taken(at).exists(), done.stderr[-3000:]
    done = run()
    assert done.returncode == 0, done.stderr[-3000:]
