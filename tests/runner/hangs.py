"""A pytest plugin for tests over their limit: stacks of Python and of the JVMs are written, and the process ends.

pytest-timeout's own way, a signal, is unsafe with py4j: the answer of the interrupted call stays unread, and every
later call of the session gets the answer of the one before. The limits are pytest-timeout's: the ini option and marks.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from contextlib import suppress
from typing import Any

import pytest

from tests.runner.processes import family, java_stacks

HANG = 97
"""Exit status of a process that was ended for a hang."""
ENDING_S = 60.0
"""How long a process may take to end after its tests; a thread that is no daemon keeps it."""
STUCK_S = 30.0
"""A call in C may hold the interpreter, so that no thread of Python runs: this much later it is ended without one."""


def pytest_configure(config: pytest.Config) -> None:
    """Take hold of the real standard error: nothing is captured at this moment. SIGUSR1 writes the stacks to it."""
    stderr = os.dup(2)
    faulthandler.register(signal.SIGUSR1, file=stderr)
    config.pluginmanager.register(Limits(config, stderr))


class Limits:
    """The limit that holds now: of the test under way, or of the process's end."""

    def __init__(self, config: pytest.Config, stderr: int) -> None:
        self._config, self._stderr = config, stderr
        self._timer: threading.Timer | None = None

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        self._set(settings.timeout, f"{item.nodeid} is over its limit of {settings.timeout:g} s")
        return True

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_cancel_timer(self) -> bool:
        # asked for where a test fails, too, for a debugger's sake: what tears it down keeps the limit otherwise
        if self._config.option.usepdb:
            self._cancel()
        return True

    def pytest_runtest_logfinish(self) -> None:
        self._cancel()

    def pytest_unconfigure(self) -> None:
        self._set(ENDING_S, f"the tests have ended, their process has not for {ENDING_S:g} s")

    def _set(self, seconds: float, why: str) -> None:
        self._cancel()
        self._timer = threading.Timer(seconds, self._end, (why,))
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(seconds + STUCK_S, exit=True, file=self._stderr)

    def _cancel(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, why: str) -> None:
        try:
            os.write(self._stderr, f"\n{self._captured()}\nHANG: {why}\n".encode(errors="replace"))
            java_stacks(family(os.getpid()), self._stderr)
            faulthandler.dump_traceback(self._stderr)
        finally:
            os._exit(HANG)

    def _captured(self) -> str:
        """Return what the test has written; where it cannot be had, nothing."""
        capture = self._config.pluginmanager.getplugin("capturemanager")
        with suppress(Exception):
            capture.suspend_global_capture(in_=True)
            return "\n".join(capture.read_global_capture())
        return ""
