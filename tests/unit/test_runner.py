"""The runner of the tests, on planted modules: what is tried again, what is red at once, and what is left behind."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.runner.journal import types_of
from tests.runner.judge import by_machine, judge
from tests.runner.lanes import Ended, Lanes
from tests.runner.plan import Unit, plan, room_of
from tests.support.waiting import WaitedTooLong, until

INI = """
[pytest]
addopts = -p pytest_timeout --strict-markers
timeout = 100
markers =
    spark: has a process of its own
    kafka: the same
    long: not in the group all
    slow: not in the group fast
"""

CONFTEST = """
import signal
from tests.runner import hangs

hangs.ENDING_S = 1

def pytest_configure():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
"""

HEAD = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
import pytest
from tests.support.waiting import WaitedTooLong

RAN = Path(__file__).with_suffix(".ran")

def tries():
    "Count a try, and return how many there were before."
    with RAN.open("a") as out:
        out.write("x")
    return RAN.stat().st_size - 1
"""
OWN = "pytestmark = pytest.mark.spark\n"
WAITS = OWN + "def test_it():\n    if not tries():\n        raise WaitedTooLong('rows: not within 3 s')\n"
SOUND = "def test_it():\n    tries()\n"


class Planted:
    """A directory with modules, and the runner on it."""

    def __init__(self, root: Path, **modules: str) -> None:
        self.root, self.results, self.scratch = root / "root", root / "root" / "build" / "tests", root / "scratch"
        (self.root / "tests").mkdir(parents=True)
        self.scratch.mkdir()
        (self.root / "pytest.ini").write_text(INI)
        (self.root / "conftest.py").write_text(CONFTEST)
        for name, text in modules.items():
            (self.root / "tests" / f"test_{name}.py").write_text(HEAD + text)

    @property
    def environment(self) -> dict[str, str]:
        outer = {name: value for name, value in os.environ.items() if name not in ("GROUP", "LANES", "QUOTA")}
        paths = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.scratch)}
        return {**outer, **paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "tests.runner", "--root", str(self.root), "--lanes", "2", *arguments]

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run; return the exit status and what was printed. No scratch is left, whatever came."""
        done = subprocess.run(
            self.command(*arguments), env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.stderr == ""
        assert list(self.scratch.iterdir()) == []
        return done.returncode, done.stdout

    def tries(self) -> dict[str, int]:
        """Return module -> how many times it has run."""
        return {path.stem.removeprefix("test_"): path.stat().st_size for path in (self.root / "tests").glob("*.ran")}

    def log(self, name: str) -> str:
        return (self.results / f"tests.test_{name}.log").read_text()


def lines(out: str, beginning: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith(beginning)]


def last(out: str) -> str:
    return re.sub(r"in \d+ s", "in _ s", out.splitlines()[-1])


@pytest.mark.slow
def test_what_fails_by_time_or_machine_has_a_second_try_alone(tmp_path: Path) -> None:
    hangs = "@pytest.mark.timeout(1)\ndef test_it():\n    if not tries():\n        time.sleep(60)\n"
    stays = "def test_it():\n    if not tries():\n        threading.Thread(target=time.sleep, args=(60,)).start()\n"
    leaves = """
def test_it():
    tries()
    for session in (True, False):
        with RAN.with_suffix(f".{session}").open("w") as out:
            out.write(str(subprocess.Popen(["sleep", "300"], start_new_session=session).pid))
"""
    planted = Planted(
        tmp_path,
        waits=WAITS,
        killed=OWN + "def test_it():\n    if not tries():\n        os.kill(os.getpid(), signal.SIGKILL)\n",
        hangs=OWN + hangs,
        stays=OWN + stays,
        leaves=OWN + leaves,
        sound=SOUND + "@pytest.mark.skip(reason='no printer')\ndef test_print(): pass\n",
        other=SOUND + "@pytest.mark.xfail\ndef test_wish(): assert False\n",
    )
    status, out = planted.run()

    assert status == 0, out
    assert last(out) == "7 passed, 1 skipped, 1 xfailed in _ s, 4 unsteady"
    assert planted.tries() == {"waits": 2, "killed": 2, "hangs": 2, "stays": 2, "leaves": 1, "sound": 1, "other": 1}
    (unsteady,) = lines(out, "UNSTEADY 4: ")
    assert "tests/test_waits.py (WaitedTooLong: rows: not within 3 s [call])" in unsteady
    assert "tests/test_killed.py (its process was killed by SIGKILL)" in unsteady
    assert "tests/test_hangs.py (its process was ended for a hang)" in unsteady
    assert "tests/test_stays.py (its process was ended for a hang, after its tests)" in unsteady
    assert lines(out, "SKIPPED ") == ["SKIPPED tests/test_sound.py::test_print: no printer"]
    assert lines(out, "FAILED ") == lines(out, "ERROR ") == []

    hung = planted.log("hangs")
    assert "HANG: tests/test_hangs.py::test_it is over its limit of 1 s" in hung
    assert re.search(r'test_hangs.py", line \d+ in test_it', hung)
    assert "1 passed" in planted.log("hangs.again")
    assert "HANG: the tests have ended" in planted.log("stays")
    for path in (planted.root / "tests").glob("test_leaves.*e"):
        assert not Path(f"/proc/{path.read_text()}").exists()
    durations = (planted.results / "durations.txt").read_text().splitlines()
    assert [line.split()[1] for line in durations] == sorted(f"tests/test_{name}.py" for name in planted.tries())


@pytest.mark.slow
def test_a_wrong_answer_is_red_and_nothing_is_tried_again(tmp_path: Path) -> None:
    both = "def test_rows():\n    tries()\n    assert [1] == [2]\ndef test_wait():\n    raise WaitedTooLong('slow')\n"
    planted = Planted(
        tmp_path,
        wrong=OWN + "def test_it():\n    assert tries() == 5\n",
        both=OWN + both,
        exits=OWN + "def test_it():\n    tries()\n    os._exit(0)\n",
        waits=WAITS,
        sound=SOUND,
    )
    status, out = planted.run()

    assert status == 1
    assert planted.tries() == {"wrong": 1, "both": 1, "exits": 1, "waits": 1, "sound": 1}
    assert {line.split(":: ")[0].split(": ")[0] for line in lines(out, "WRONG ANSWER ")} == {
        "WRONG ANSWER tests/test_wrong.py::test_it",
        "WRONG ANSWER tests/test_both.py::test_rows",
        "WRONG ANSWER tests/test_exits.py::test_it",
        "WRONG ANSWER tests/test_exits.py",
    }
    names = {line.split(": ")[0].split(" - ")[0] for line in lines(out, "FAILED ")}
    assert {"FAILED tests/test_wrong.py::test_it", "FAILED tests/test_both.py::test_wait"} < names
    assert last(out) == "RED: 4 wrong, 2 failed once by time or machine, 0 not run; 1 passed, 4 failed in _ s"


@pytest.mark.slow
def test_a_module_that_hangs_twice_is_red_and_costs_no_other(tmp_path: Path) -> None:
    hangs = "@pytest.mark.timeout(1)\ndef test_it():\n    tries()\n    time.sleep(60)\n"
    planted = Planted(tmp_path, before=SOUND, hangs=hangs, hangs_not=SOUND)
    status, out = planted.run("--lanes", "1")

    assert status == 1
    assert planted.tries() == {"before": 1, "hangs": 2, "hangs_not": 1}
    assert last(out) == "RED: 0 wrong, 1 failed twice by time or machine, 0 not run; 2 passed in _ s"
    assert lines(out, "FAILED ") == ["FAILED tests/test_hangs.py::test_it: its process was ended for a hang"]


@pytest.mark.slow
def test_six_modules_that_fail_by_time_are_red_without_a_second_try(tmp_path: Path) -> None:
    six = {f"waits_{number}": WAITS for number in range(6)}
    planted = Planted(tmp_path, **six)
    status, out = planted.run()

    assert status == 1
    assert planted.tries() == dict.fromkeys(six, 1)
    assert last(out) == "RED: 0 wrong, 6 failed once by time or machine, 0 not run; 0 passed, 6 failed in _ s"


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_is_red(tmp_path: Path) -> None:
    planted = Planted(tmp_path, torn="import no_such_module\n", sound=SOUND)
    status, out = planted.run()

    assert status == 1
    assert "No module named 'no_such_module'" in out
    assert "ERROR tests/test_torn.py" in lines(out, "ERROR ")
    assert last(out).startswith("RED: ")


@pytest.mark.slow
def test_a_signal_ends_all_in_order(tmp_path: Path) -> None:
    module = """
@pytest.fixture(scope="session")
def broker():
    process = subprocess.Popen(["sleep", "300"])
    yield
    time.sleep(0.3)
    if process.poll() is None:  # nobody but pytest has been asked to end
        RAN.with_suffix(".cleaned").touch()

def test_it(broker):
    RAN.with_suffix(".pid").write_text(str(os.getpid()))
    tries()
    time.sleep(300)
"""
    planted = Planted(tmp_path, sleeps=OWN + module)
    with subprocess.Popen(planted.command(), env=planted.environment, stdout=subprocess.PIPE, text=True) as runner:
        until(planted.tries, what="the test", alive=lambda: runner.poll() is None)
        runner.send_signal(signal.SIGTERM)
        runner.communicate()
    assert runner.returncode == 128 + signal.SIGTERM
    assert (planted.root / "tests" / "test_sleeps.cleaned").exists()
    assert not Path("/proc", (planted.root / "tests" / "test_sleeps.pid").read_text()).exists()
    assert list(planted.scratch.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_has_had_its_minutes_says_what_still_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = Planted(tmp_path, sleeps=OWN + "def test_it():\n    tries()\n    time.sleep(300)\n")
    for name, value in planted.environment.items():
        monkeypatch.setenv(name, value)
    planted.results.mkdir(parents=True)
    lanes = Lanes(planted.root, planted.results, 60)

    def now() -> None:
        until(planted.tries, what="the test")
        lanes.deadline = 0.0

    waits = threading.Thread(target=now)
    waits.start()
    unit = Unit("tests.test_sleeps", ("tests/test_sleeps.py",), ())
    try:
        with pytest.raises(Ended, match="1"):
            list(lanes.each([unit], ()))
    finally:
        lanes.close()
        waits.join()
    out = capsys.readouterr().out
    assert re.search(r"^ERROR tests/test_sleeps.py still ran, tests/test_sleeps.py::test_it for \d+ s; ", out, re.M)
    assert "in test_it" in planted.log("sleeps").partition("KeyboardInterrupt")[0]


# ---------------------------------------------------------------------------------------------------- without processes


def raised(error: BaseException, cause: BaseException | None = None) -> list[list[str]]:
    error.__cause__ = cause
    return types_of(error)


def test_errors_by_time_or_machine_are_a_fixed_list() -> None:
    from py4j.protocol import Py4JJavaError, Py4JNetworkError

    from backend.errors import BrokerUnavailable, SourceUnavailable

    broker, source = BrokerUnavailable("no broker"), SourceUnavailable("no answer")
    failed = pytest.fail.Exception("no broker", pytrace=False)
    for machine in (
        raised(WaitedTooLong("x")),
        raised(subprocess.TimeoutExpired("x", 1)),
        raised(ConnectionRefusedError()),
        raised(Py4JNetworkError()),
        raised(broker),
        raised(WaitedTooLong("x"), KeyError("x")),
        raised(failed, broker),
    ):
        assert by_machine(machine), machine
    for wrong in (
        raised(AssertionError()),
        raised(AssertionError(), WaitedTooLong("x")),
        raised(WaitedTooLong("x"), AssertionError()),
        raised(WaitedTooLong("x"), source),
        raised(source, ConnectionResetError()),
        raised(RuntimeError(), TimeoutError()),
        raised(pytest.fail.Exception("x")),
        raised(Py4JJavaError.__new__(Py4JJavaError)),
        raised(ExceptionGroup("two", [TimeoutError()])),
        [],
    ):
        assert not by_machine(wrong), wrong


def test_a_test_that_runs_twice_or_was_not_collected_is_a_wrong_answer() -> None:
    def end(test: str) -> list[dict[str, object]]:
        return [{"start": test, "at": 0}, {"end": test, "at": 1, "outcome": "passed", "why": "", "failures": []}]

    unit = Unit("shared-1", ("m.py",), ("m.py::a", "m.py::b"))
    found = itertools.chain(end("m.py::a"), end("m.py::a"), end("m.py::c"), [{"finished": 0}])
    assert judge(unit, 0, list(found)).wrong == {
        "m.py::a": "it ran twice",
        "m.py::b": "it was collected and has not been run",
        "m.py::c": "it was not collected before",
    }


def test_the_unknown_begin_then_the_longest_and_the_shares_are_about_equal() -> None:
    tests = {f"{name}.py::test": "alone" if name.isupper() else "shared" for name in ("A", "B", "C", "d", "e", "f")}
    durations = {"A.py": 5.0, "C.py": 40.0, "d.py": 10.0, "e.py": 6.0, "f.py": 5.0}
    units = plan(tests, durations, 2)
    assert [unit.modules for unit in units] == [("B.py",), ("C.py",), ("e.py", "f.py"), ("d.py",), ("A.py",)]
    assert sorted(test for unit in units for test in unit.tests) == sorted(tests)


def test_modules_that_only_use_spark_share_one_and_the_strictest_of_its_tests_says_where_a_module_runs() -> None:
    rooms = {"a": {"spark", "gentle"}, "b": {"spark", "gentle", "long"}, "c": {"spark"}, "d": {"kafka"}, "e": {"long"}}
    tests = {f"{name}.py::test": room_of(marks) for name, marks in rooms.items()}
    tests |= {"c.py::more": room_of({"gentle", "spark"}), "a.py::more": room_of(())}
    units = {unit.name: unit.modules for unit in plan(tests, dict.fromkeys(["a.py", "b.py"], 30.0), 1)}
    assert units == {"gentle-1": ("a.py", "b.py"), "c": ("c.py",), "d": ("d.py",), "shared-1": ("e.py",)}
