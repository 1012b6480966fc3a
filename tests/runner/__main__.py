"""Run the tests: `python -m tests.runner [--group all|long|fast] [modules]`; exit status 0 only when all is green.

The results directory (build/tests) has for each process its output, JUnit and journal, and `durations.txt`; a second
try's files have `.again` in their names.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.runner.judge import Verdict, judge
from tests.runner.lanes import Ended, Lanes
from tests.runner.plan import DURATIONS, GROUPS, Unit, module_of, plan, read_durations, write_durations
from tests.runner.processes import ROOT, Process

AGAIN = 5
"""How many second tries a run has; where more failed, it was not the machine."""
SHOWN = 400
"""Lines of a log that are printed; all of it lies in the results directory."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and return the exit status: 0 green, 1 red, 130 or 143 when a signal ended the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="instead of all that the group has")
    parser.add_argument("--group", default=os.environ.get("GROUP", "all"), help=f"{', '.join(GROUPS)} (or GROUP=...)")
    cores = os.environ.get("LANES", os.cpu_count() or 1)
    parser.add_argument("--lanes", type=int, default=cores, help="processes at a time (or LANES=...)")
    quota = os.environ.get("QUOTA")
    parser.add_argument("--quota", type=float, default=quota, help="minutes that the run may take (or QUOTA=...)")
    parser.add_argument("--keep-durations", action="store_true", help=f"write {DURATIONS} anew, for the next plans")
    parser.add_argument("--root", type=Path, default=ROOT, help="directory of pytest's configuration")
    options = parser.parse_args(arguments)
    if options.group not in GROUPS:
        parser.error(f"GROUP={options.group}: allowed are {', '.join(GROUPS)}")
    if options.lanes < 1:
        parser.error(f"--lanes {options.lanes}: at least 1")

    results = options.root / "build" / "tests"
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    lanes = Lanes(options.root, results, GROUPS[options.group][2] if options.quota is None else options.quota)

    def ended(number: int, frame: object) -> None:
        lanes.signal = number

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ended)
    try:
        return run(lanes, options)
    except Ended as early:
        status: int = early.args[0]
        return status
    finally:
        lanes.close()


def run(lanes: Lanes, options: argparse.Namespace) -> int:
    """Collect, plan, run, try once more what failed by time or by the machine, and return the exit status."""
    began = time.monotonic()
    sources = [name for name in ("backend", "recovery", "tests", "bench") if (lanes.root / name).exists()]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *sources], cwd=lanes.root, check=False)
    marks, places, _ = GROUPS[options.group]
    tests = collect(lanes, marks, tuple(options.modules) or places)
    durations = read_durations(lanes.root / DURATIONS)
    units = plan(tests, durations, options.lanes)
    print(f"{len(tests)} tests in {len(units)} processes on {options.lanes} lanes: {lanes.results}", flush=True)

    total, again = Verdict(), list[Unit]()
    for unit, process, status in lanes.each(units, ("-m", marks), lanes=options.lanes):
        verdict = judged(unit, process, status)
        total.add(unit, verdict)
        again += verdict.again(unit)
    first = {module_of(name): why for name, why in total.machine.items()}
    tries = 2 if again and not total.wrong and len(again) <= AGAIN else 1
    if tries == 2:
        print(f"Once more, alone: {', '.join(unit.subject for unit in again)}", flush=True)
        for unit, process, status in lanes.each(again, ("-m", marks), suffix=".again"):
            total.add(unit, judged(unit, process, status))

    durations = {name: took for name, took in durations.items() if (lanes.root / name).exists()} | total.seconds
    for path in (lanes.results / DURATIONS.name, *([lanes.root / DURATIONS] if options.keep_durations else [])):
        write_durations(path, durations)
    return conclude(list(tests), total, first, tries, time.monotonic() - began)


def collect(lanes: Lanes, marks: str, places: Sequence[str]) -> dict[str, str]:
    """Return the tests, and in which room each runs.

    Raises:
        Ended: A module cannot be imported, or nothing was collected: nothing is run.
    """
    there = tuple(place for place in places if (lanes.root / place.partition("::")[0]).exists())
    arguments = ("-m", marks, "--collect-only", "-q", "--ignore=tests/postgres")
    ((_, process, status),) = lanes.each([Unit("collected", there, ())], arguments)
    tests = {line["item"]: line["room"] for line in process.lines() if "item" in line}
    if status != 0 or not tests:
        show(process)
        for line in process.lines():
            if "error" in line:
                print(f"ERROR {line['error']}")
        print(f"RED: not collected, status {status}", flush=True)
        raise Ended(1)
    return tests


def judged(unit: Unit, process: Process, status: int) -> Verdict:
    """Judge a process that has ended, and print what came of it; the log where something failed."""
    verdict = judge(unit, status, process.lines())
    print(f"{time.monotonic() - process.began:7.1f} s  {verdict.counts()}  {unit.subject}", flush=True)
    for name, why in verdict.wrong.items():
        print(f"WRONG ANSWER {name}: {why}", flush=True)
    for name, why in verdict.machine.items():
        print(f"BY TIME OR MACHINE {name}: {why}", flush=True)
    if verdict.wrong or verdict.machine:
        show(process, "" if verdict.wrong else "| ")  # what may yet be green has no line that begins with FAILED
    return verdict


def show(process: Process, before: str = "") -> None:
    """Print the end of a log, with something before each line."""
    lines = process.log.read_text(errors="replace").splitlines()
    print(f"{before}---- {process.log}, {len(lines)} lines")
    print("\n".join(before + line for line in lines[-SHOWN:]), flush=True)


def conclude(tests: Sequence[str], total: Verdict, first: dict[str, str], tries: int, took_s: float) -> int:
    """Print the last lines, and return the exit status.

    Args:
        tests: Each must have passed, been skipped or failed as expected.
        total: What came of them.
        first: Module -> why it failed by time or by the machine at its first try.
        tries: How many tries such modules had.
        took_s: How long all took.
    """
    failed = total.machine | total.wrong
    unsteady = [f"{name} ({why})" for name, why in first.items() if name not in {module_of(test) for test in failed}]
    lost: dict[str, list[str]] = {}
    for test in tests:
        if test not in total.outcomes and test not in failed:
            lost.setdefault(module_of(test), []).append(test)
    for test, why in total.skips.items():
        print(f"SKIPPED {test}: {why}")
    for name, why in failed.items():
        print(f"FAILED {name}: {why}")
    for module, names in lost.items():
        print(f"FAILED {module}: {len(names)} of its tests not run: {', '.join(names)}")
    if unsteady:
        print(f"UNSTEADY {len(unsteady)}: {', '.join(unsteady)}")
    last = f"{total.counts()} in {took_s:.0f} s"
    if failed or lost:
        ended = (
            f"{len(total.wrong)} wrong, {len(total.machine)} failed {('once', 'twice')[tries - 1]} by time or machine"
        )
        print(f"RED: {ended}, {sum(map(len, lost.values()))} not run; {last}", flush=True)
        return 1
    print(last + (f", {len(unsteady)} unsteady" if unsteady else ""), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
