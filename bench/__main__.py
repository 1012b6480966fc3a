"""Run every benchmark, one after the other: `python -m bench [--quick] [--only NAME,...] [--results DIRECTORY]`.

Measured, each is a process of its own, and the table in docs/figures.md is made of what they wrote. In the quick form,
which is for correctness, those that need no more than a local session run in this process and share one, and the
others beside it, one after the other; what those print comes behind.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO

from bench import figures
from bench.session import session
from bench.table import RESULTS

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


def run(name: str, arguments: Sequence[str], out: IO[str] | None = None) -> int:
    """Run one in a process of its own, which prints to a file if one is given; return its exit code."""
    print(f"== {name}", file=out, flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", f"bench.{name}", *arguments]
    code = subprocess.run(command, check=False, stdout=out, stderr=out and subprocess.STDOUT).returncode
    print(f"-- {name}: {time.monotonic() - began:.0f} s", file=out, flush=True)
    return code


@contextmanager
def beside(names: Sequence[str], arguments: Sequence[str], failed: list[str]) -> Iterator[None]:
    """Run some, each in a process of its own, while the block runs; then print what they did, and add what failed."""
    with tempfile.TemporaryFile("w+") as out:

        def each() -> None:
            failed.extend([name for name in names if run(name, arguments, out)])

        thread = threading.Thread(target=each)
        thread.start()
        try:
            yield
        finally:
            thread.join()
            out.seek(0)
            shutil.copyfileobj(out, sys.stdout)
            sys.stdout.flush()


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


def main() -> int:
    """Run them; give the number that failed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small, for correctness only")
    parser.add_argument("--only", default=",".join(BENCHES), help="names, with commas between")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args()
    chosen = options.only.split(",")
    unknown = [name for name in chosen if name not in BENCHES]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} is not among {', '.join(BENCHES)}")
    arguments = ["--results", str(options.results), *(["--quick"] if options.quick else [])]
    failed: list[str] = []
    if options.quick:
        here = [name for name in chosen if name in SHARED]
        with beside([name for name in chosen if name not in SHARED], arguments, failed):
            failed += run_here(here, arguments) if here else []
    else:
        failed += [name for name in chosen if run(name, arguments)]
    if not options.quick and options.results == RESULTS:
        figures.main()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
