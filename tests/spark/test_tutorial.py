"""docs/tutorial.md: its files and commands as they stand there, in an empty directory, print what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(1500)]

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
ANYTHING = "..."
"""Stands in the page for what is another text each time."""
_BLOCK = re.compile(r'^```(?:python title="(?P<file>[\w.]+)"|console)\n(?P<text>.*?)^```', re.S | re.M)
_COMMAND = re.compile(r"^\$ (?P<command>.*)\n(?P<printed>(?:(?!\$ ).*\n)*)", re.M)


def begins(line: str, said: str) -> bool:
    """Tell whether a printed line is the page's; blanks do not count, tables are as wide as what is in them."""
    pattern = ".*".join(re.escape(" ".join(part.split())) for part in said.split(ANYTHING))
    return re.fullmatch(pattern, " ".join(line.split())) is not None


def missing(printed: str, said: str) -> list[str]:
    """Return the page's lines from the first on that is not among those printed, in the page's order."""
    wanted = [line for line in said.splitlines() if line.strip()]
    for line in printed.splitlines():
        if wanted and begins(line, wanted[0]):
            wanted.pop(0)
    return wanted


def test_lines_are_compared() -> None:
    said = "a ... c\n\nd  e\n"
    assert missing("noise\na b c\nmore\nd e\n", said) == []
    assert missing("d e\na b c\n", said) == ["d  e"]
    assert missing("a b\nd e\n", said) == ["a ... c", "d  e"]


def follow(place: Path, env: dict[str, str]) -> None:
    """Make the page's files and run its commands in a directory; each must succeed and print what the page says."""
    for block in _BLOCK.finditer(PAGE):
        if block["file"]:
            (place / block["file"]).write_text(block["text"])
            continue
        for step in _COMMAND.finditer(block["text"]):
            both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            done = subprocess.run(
                step["command"], shell=True, cwd=place, env=env, text=True, timeout=900, check=False, **both
            )
            assert done.returncode == 0, f"{step['command']}: {done.stdout[-3000:]}"
            assert missing(done.stdout, step["printed"]) == [], f"{step['command']}: {done.stdout[-3000:]}"


def test_the_tutorial(tmp_path: Path) -> None:
    programs, place = tmp_path / "bin", tmp_path / "orders"
    programs.mkdir()
    place.mkdir()
    for name, what in (("python", ""), ("rewind", "-m recovery.cli ")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {what}"$@"\n')
        (programs / name).chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    env.pop("PYSPARK_PYTHON", None)
    follow(place, env)
    assert (place / "drill-out" / "report.html").exists()
