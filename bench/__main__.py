"""Run every benchmark, one after the other: `python -m bench [--quick] [--only NAME,...] [--results DIRECTORY]`.

Measured, each is a process of its own, and the table in docs/figures.md is made of what they wrote. In the quick form,
which is for correctness, those that need no more than a local session run in this process and share one. The others run
beside it and after it, those on Kafka's topics in one process and session, each other one in a process of its own; what
such a one prints comes whole when it has ended. All share one broker.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path

from bench import figures
from bench.session import session
from bench.table import RESULTS
from recovery.testing.broker import open_broker

BENCHES = (
    "stores",
    "panes",
    "growth",
    "fixed",
    "windows",
    "restore",
    "beside",
    "join",
    "failover",
    "snapshots",
    "sinks",
    "changelog_kafka",
    "kafka",
    "kafka_restore",
    "latency",
)
SHARED = frozenset({"fixed", "windows", "restore", "beside", "join", "snapshots"})
"""Need a local session and nothing else."""
LONGEST = ("kafka,kafka_restore,latency", "failover", "sinks", "growth", "changelog_kafka", "stores", "panes")
"""The others by process, those that take longest in the quick form first."""
ON_A_BROKER = frozenset({"kafka", "kafka_restore", "latency", "sinks", "changelog_kafka"})
PRINTING = threading.Lock()


def run(name: str, arguments: Sequence[str], *, whole: bool = False) -> int:
    """Run one, or some with commas between, in a process of its own, return its exit code.

    What it prints comes as it does, or whole at its end.
    """
    began = time.monotonic()
    module = ["bench", "--together", "--only", name] if "," in name else [f"bench.{name}"]
    command = [sys.executable, "-m", *module, *arguments]
    with tempfile.TemporaryFile("w+") if whole else nullcontext() as out:
        if out is None:
            print(f"== {name}", flush=True)
        # a copy: another thread may set a variable of the environment just when this process is started
        own = dict(os.environ)
        code = subprocess.run(command, check=False, env=own, stdout=out, stderr=out and subprocess.STDOUT).returncode
        said = ""
        if out is not None:
            out.seek(0)
            said = f"== {name}\n{out.read()}"
    with PRINTING:
        print(f"{said}-- {name}: {time.monotonic() - began:.0f} s", flush=True)
    return code


def run_quick(here: Sequence[str], others: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Run some in this process and the others beside it, on two lanes until none is left; give those that failed."""
    left = deque(others)

    def lane() -> list[str]:
        failed = []
        while True:
            try:
                name = left.popleft()
            except IndexError:
                return failed
            if run(name, arguments, whole=True):
                failed.append(name)

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(lane)
        failed = run_here(here, arguments) if here else []
        return failed + lane() + beside.result()


def run_here(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Run some in this process, in one session; give those that failed."""
    failed = []
    with session():
        for name in names:
            print(f"== {name}", flush=True)
            began = time.monotonic()
            try:
                import_module(f"bench.{name}").main(arguments)
                print(f"-- {name}: {time.monotonic() - began:.0f} s", flush=True)
            except Exception:
                traceback.print_exc()
                failed.append(name)
    return failed


@contextmanager
def one_broker() -> Iterator[None]:
    """Start a broker, which the processes begun meanwhile find as the one that they are given."""
    name = "KAFKA_BOOTSTRAP_SERVERS"
    if name in os.environ:
        yield
        return
    broker, close = open_broker()
    try:
        os.environ[name] = broker.settings.servers
        yield
    finally:
        os.environ.pop(name, None)
        close()


def main() -> int:
    """Run them; give the number that failed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small, for correctness only")
    parser.add_argument("--together", action="store_true", help="in this process, in one session")
    parser.add_argument("--only", default=",".join(BENCHES), help="names, with commas between")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args()
    chosen = options.only.split(",")
    unknown = [name for name in chosen if name not in BENCHES]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} is not among {', '.join(BENCHES)}")
    arguments = ["--results", str(options.results), *(["--quick"] if options.quick else [])]
    if options.together:
        failed = run_here(chosen, arguments)
    elif options.quick:
        here = [name for name in chosen if name in SHARED]
        units = [[name for name in unit.split(",") if name in chosen] for unit in LONGEST]
        with one_broker() if ON_A_BROKER.intersection(chosen) else nullcontext():
            failed = run_quick(here, [",".join(names) for names in units if names], arguments)
    else:
        failed = [name for name in chosen if run(name, arguments)]
    if not failed and not options.quick and options.results == RESULTS:
        figures.main()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
