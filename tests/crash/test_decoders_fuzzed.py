"""Whatever bytes a decoder of stored or sent things is given, it gives a value or a named error, in bounded memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_hurt_bytes_are_refused_by_name() -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.crash.fuzz_decoders", "60", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert " 0 wrong" in done.stdout.splitlines()[-1]
