"""A restore takes a bounded part of a worker's memory, however many messages a shard has.

Here 300 MB of messages with every bound an eighth of the product's (`make bench` restores 2 GB with the real ones,
under 512 MB per worker). Linux only: the peak is what /proc tells.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MESSAGES = 300_000
"""Of 1,000 bytes."""
LIMIT_MB = 95

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see a process's peak memory"),
]


def step(name: str, directory: Path, scale: int) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.crash.big_shard", name, str(directory), str(MESSAGES), str(scale)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_neither_replay_nor_build_keeps_a_shard_in_memory(tmp_path: Path) -> None:
    step("make", tmp_path, 1)
    replayed = step("replay", tmp_path, 8)
    built = step("build", tmp_path, 8)
    assert replayed["grown_mb"] < LIMIT_MB, replayed
    assert built["grown_mb"] < LIMIT_MB, built
