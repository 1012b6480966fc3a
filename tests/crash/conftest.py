"""Prints what was tried, at the end of a run."""

from __future__ import annotations

from typing import Any

from tests.crash.told import told


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table of damages, and the counts."""
    lines = told.lines()
    if lines:
        terminalreporter.section("what was damaged, and what came of it")
        for line in lines:
            terminalreporter.write_line(line)
