"""A pytest plugin that writes down what is collected and what comes of each test: `--journal FILE`, a JSON line each.

Lines have one of these keys. `item`: a collected test, with `room` (only with `--collect-only`). `error`: what could
not be collected. `start` and `end`: a test, with `at` in seconds; an end has `outcome`, for a skip `why`, and
`failures`, each with `phase`, `types` and `text`. `finished`: pytest's exit status; nothing of ours follows it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.runner.plan import room_of

JVM_DIED = "py4j.protocol.Py4JError of a dead JVM"
"""py4j has no type of its own for the call under way when the JVM dies."""


def types_of(error: BaseException | None) -> list[list[str]]:
    """Return the qualified names along an error's classes, then those of what it was raised `from`, and so on."""
    links: list[list[str]] = []
    while error is not None and len(links) < 20:
        names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
        links.append([JVM_DIED, *names] if names[0] == "py4j.protocol.Py4JError" and jvm_died() else names)
        error = error.__cause__
    return links


def jvm_died() -> bool:
    """Return whether the JVM of this process's Spark session has ended."""
    spark = sys.modules.get("pyspark.core.context")
    process = getattr(spark.SparkContext._gateway, "proc", None) if spark is not None else None
    if process is None:
        return False
    with suppress(subprocess.TimeoutExpired):  # its connections end a moment before it
        process.wait(1)
    return process.poll() is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--journal", type=Path, help="Write down what comes of each test, a JSON line each.")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to write, if there is a file to write to."""
    path = config.getoption("--journal")
    if path is not None:
        config.pluginmanager.register(Journal(path))


class Journal:
    """The hooks; a line is in the file when its hook returns."""

    def __init__(self, path: Path) -> None:
        self._out = path.open("a", buffering=1)
        self._outcome, self._why = "passed", ""
        self._failures: list[dict[str, Any]] = []

    def _write(self, **line: Any) -> None:
        self._out.write(json.dumps(line) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(error=report.nodeid, text=report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            for item in session.items:
                self._write(item=item.nodeid, room=room_of({mark.name for mark in item.iter_markers()}))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome, self._why, self._failures = "passed", "", []
        self._write(start=nodeid, at=time.time())

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # the outermost: xfail marks change the report inside
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            error = call.excinfo.value if call.excinfo is not None else None
            text = f"{type(error).__name__}: {error}" if error is not None else report.longreprtext
            text = " ".join(text.split())[:300]
            self._failures.append({"phase": report.when, "types": types_of(error), "text": text})
        elif report.skipped and hasattr(report, "wasxfail"):
            self._outcome = "xfailed"
        elif report.skipped:
            place = report.longrepr
            why = place[2] if isinstance(place, tuple) else str(place)
            self._outcome, self._why = "skipped", why.removeprefix("Skipped: ")
        if report.when == "teardown":
            outcome = "failed" if self._failures else self._outcome
            self._write(end=item.nodeid, at=time.time(), outcome=outcome, why=self._why, failures=self._failures)
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        yield
        self._write(finished=int(session.exitstatus))
