"""Run every benchmark, one after the other: `python -m bench [--quick]`."""

from __future__ import annotations

import subprocess
import sys

BENCHES = {
    "stores": ["--rows", "20000"],
    "panes": ["--quick"],
    "growth": ["--quick"],
    "fixed": ["--quick"],
    "windows": ["--quick"],
    "restore": ["--quick"],
    "join": ["--quick"],
    "failover": ["--quick"],
    "snapshots": ["--quick"],
    "changelog_kafka": ["--quick"],
    "kafka": ["--quick"],
    "latency": ["--quick"],
}
"""Benchmark -> its arguments for a quick run."""


def main() -> int:
    """Run them; give the number that failed."""
    quick = "--quick" in sys.argv[1:]
    failed = 0
    for name, small in BENCHES.items():
        print(f"== {name}", flush=True)
        failed += (
            subprocess.run([sys.executable, "-m", f"bench.{name}", *(small if quick else [])], check=False).returncode
            != 0
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
