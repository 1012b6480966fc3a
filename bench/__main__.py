"""Run every benchmark, one after the other: `python -m bench [--quick] [--only NAME,...] [--results DIRECTORY]`.

Measured, each is a process of its own, and the table in docs/figures.md is made of what they wrote. In the quick form,
which is for correctness, those that need no more than a local session run in this process and share one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

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


def run(name: str, arguments: Sequence[str]) -> int:
    """Run one in a process of its own; give its exit code."""
    print(f"== {name}", flush=True)
    return subprocess.run([sys.executable, "-m", f"bench.{name}", *arguments], check=False).returncode


def run_here(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Run some in this process, in one session; give those that failed."""
    failed = []
    with session():
        for name in names:
            print(f"== {name}", flush=True)
            try:
                import_module(f"bench.{name}").main(arguments)
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
    here = [name for name in chosen if options.quick and name in SHARED]
    failed = [name for name in chosen if name not in here and run(name, arguments)]
    if here:
        failed += run_here(here, arguments)
    if not options.quick and options.results == RESULTS:
        figures.main()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
