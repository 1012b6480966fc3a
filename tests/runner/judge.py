"""What an ended process means: passed, a wrong answer, or a failure by time or by the machine."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.runner.hangs import HANG
from tests.runner.journal import JVM_DIED
from tests.runner.plan import Unit, module_of

MACHINE = frozenset(
    {
        "builtins.TimeoutError",  # and WaitedTooLong
        "subprocess.TimeoutExpired",
        "builtins.ConnectionError",
        "py4j.protocol.Py4JNetworkError",
        JVM_DIED,
        "backend.errors.BrokerUnavailable",
    }
)
"""Errors by time or by the machine."""
WRONG = frozenset({"builtins.AssertionError", "backend.errors.RewindError"})
"""Nothing that was raised `from` one of these is by time or by the machine, unless it is of `MACHINE`."""
FAIL = "_pytest.outcomes.OutcomeException"
"""`pytest.fail`: where it was raised `from` an error it is that error."""


def by_machine(types: Sequence[Sequence[str]]) -> bool:
    """Return whether a failure is by time or by the machine.

    Args:
        types: As `journal.types_of` gives them.
    """
    links = types[1:] if types and FAIL in types[0] else types
    named = [not MACHINE.isdisjoint(link) for link in links]
    return any(named[:1]) and all(ok or WRONG.isdisjoint(link) for ok, link in zip(named, links, strict=True))


def said(status: int) -> str:
    """Return how a process ended."""
    if status < 0:
        return f"its process was killed by {signal.Signals(-status).name}"
    return "its process was ended for a hang" if status == HANG else f"its process ended with status {status}"


@dataclass
class Verdict:
    """What came of a process, or of a run.

    Attributes:
        outcomes: Test -> passed, skipped, xfailed or failed, for each that has ended.
        skips: Test -> reason.
        wrong: Test, module or process -> why it is a wrong answer.
        machine: The same for failures by time or by the machine.
        seconds: Module -> how long its tests took.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    skips: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)

    def counts(self) -> str:
        """Return how many tests came to what."""
        numbers = Counter(self.outcomes.values())
        shown = ("passed", *(name for name in ("failed", "skipped", "xfailed") if numbers[name]))
        return ", ".join(f"{numbers[name]} {name}" for name in shown)

    def add(self, unit: Unit, other: Verdict) -> None:
        """Take what came of a process; of an earlier try of its modules only wrong answers stay."""
        for kept in (self.outcomes, self.skips, self.machine, self.seconds):
            for name in [name for name in kept if module_of(name) in (*unit.modules, unit.subject)]:
                del kept[name]
        self.outcomes |= other.outcomes
        self.skips |= other.skips
        self.wrong |= other.wrong
        self.machine |= other.machine
        self.seconds |= other.seconds

    def again(self, unit: Unit) -> list[Unit]:
        """Return what has a second try: suspect modules alone, then in one process those that were not run."""
        suspects = dict.fromkeys(module_of(name) for name in self.machine)
        if not suspects or unit.subject in suspects:
            return [unit] if suspects else []
        missing = {module_of(test) for test in unit.tests if test not in self.outcomes} - suspects.keys()
        return [unit.part([name]) for name in suspects] + ([unit.part(sorted(missing))] if missing else [])


def judge(unit: Unit, status: int, lines: Sequence[Mapping[str, Any]]) -> Verdict:
    """Judge a process by its exit status and its journal."""
    verdict, started, finished = Verdict(), {}, None
    for line in lines:
        if "error" in line:
            verdict.wrong[line["error"]] = line["text"].strip().splitlines()[-1]
        elif "start" in line:
            started[line["start"]] = line["at"]
        elif "end" in line:
            test = line["end"]
            if test in verdict.outcomes or test not in unit.tests:
                verdict.wrong[test] = "it ran twice" if test in verdict.outcomes else "it was not collected before"
            verdict.outcomes[test] = line["outcome"]
            verdict.seconds[module_of(test)] += line["at"] - started[test]
            if line["outcome"] == "skipped":
                verdict.skips[test] = line["why"]
            for failure in line["failures"]:
                found = verdict.machine if by_machine(failure["types"]) else verdict.wrong
                found[test] = f"{failure['text']} [{failure['phase']}]"
        elif "finished" in line:
            finished = line["finished"]

    missing = [test for test in unit.tests if test not in verdict.outcomes]
    if finished is None and status != 0:
        under_way = [test for test in started if test not in verdict.outcomes]
        where = under_way or [module_of(test) for test in missing] or [unit.subject]
        verdict.machine[where[0]] = said(status)
    elif finished is not None and finished != status:
        verdict.machine[unit.subject] = f"{said(status)}, after its tests"
    else:
        verdict.wrong |= dict.fromkeys(missing, "it was collected and has not been run")
        if finished is None:
            verdict.wrong.setdefault(unit.subject, "its process ended with status 0 before pytest did")
    return verdict
