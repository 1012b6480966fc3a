"""The hunt: every suite that takes a seed, in rounds with fresh seeds, until the time is up.

`python -m tests.crash.torture <minutes> [<first round>]` (`make torture MINUTES=... SEED=...`). Each command is printed
before it runs, and can be run again alone. It ends with what was run how often, and with exit code 1 if anything
failed. The last command may run over the time by a few minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROPERTY_S = 600
"""For so long a file of properties may run in a round; where the time is up, what was tried so far has held."""

Command = tuple[str, int, dict[str, str], list[str]]
"""What is counted, how many of it, environment, arguments of Python."""


def round_of(number: int) -> Iterator[Command]:
    """Give the commands of a round."""
    low = 100_000 + 100 * number
    yield "simulated runs", 100, {}, ["-m", "tests.crash.simulation", f"{low}-{low + 99}"]
    rocks = 500_000 + 20 * number
    yield "simulated runs on RocksDB", 20, {}, ["-m", "tests.crash.simulation", "--rocks", f"{rocks}-{rocks + 19}"]
    yield (
        "rounds of damaged files",
        1,
        {"DAMAGE_SEED": f"{number} ", "DAMAGE_PLACES": "4"},
        _pytest("test_damage_matrix.py"),
    )
    yield "fuzzed decodings", 24 * 2000, {}, ["-m", "tests.crash.fuzz_decoders", "2000", str(number)]
    streams = 1000 + 200 * number
    keys = ["1000000"] if number % 4 == 0 else []
    yield "fuzzed streams", 200, {}, ["-m", "tests.crash.hostile", f"{streams}-{streams + 199}", *keys]
    yield "jobs on a failing disk", 20, {}, ["-m", "tests.crash.faulty_disk", "preload", "20", str(20 * number)]
    moving = ["-m", "pytest", "-q", "-s", "tests/spark/test_moving_shards.py"]
    yield "moves of a shard, at every micro-batch", 50, {"MOVES": "50"}, moving
    storm = ["-m", "tests.kafka.storm", "--seconds", "900", "--seed", str(10 * number)]
    yield "quarters of an hour of storms on Kafka", 1, {}, storm
    failing = ["-m", "pytest", "-q", "tests/spark/test_failures_in_spark.py"]
    yield "jobs whose helpers die and whose disks fill", 1, {"FAILURES_SEED": str(number)}, failing
    changing = ["-m", "tests.model.changed_options", "--runs", "500", "--seed", str(1_000_000 + 500 * number)]
    yield "runs with changed options", 500, {}, changing
    planned = ["-m", "tests.model.planned_options", "--runs", "500", "--seed", str(2_000_000 + 500 * number)]
    yield "runs with options changed between publishing and committing", 500, {}, planned
    for clock in ("running", "starts"):
        yield f"jobs whose clock jumps ({clock})", 1, {}, ["-m", "tests.crash.clocks", clock]
    if number % 4 == 1:
        yield "jobs of 300 micro-batches with files and memory watched", 1, {}, ["-m", "tests.crash.sizes", "batches"]
        yield "jobs of 200 partitions on 64 shards", 1, {}, ["-m", "tests.crash.sizes", "partitions"]
    files = sorted((ROOT / "tests" / "model").glob("test_*.py"))
    one = files[number % len(files)]
    command = ["-m", "pytest", "-q", "-x", "-o", "timeout=0", str(one.relative_to(ROOT))]
    yield f"hunts in {one.stem}", 1, {"HYPOTHESIS_PROFILE": "nightly"}, command


def _pytest(name: str) -> list[str]:
    return ["-m", "pytest", "-q", "-o", "timeout=0", f"tests/crash/{name}"]


def main(arguments: list[str]) -> int:
    """Run from the command line."""
    end = time.monotonic() + 60 * float(arguments[0])
    number = int(arguments[1]) if len(arguments) > 1 else 0
    done: Counter[str] = Counter()
    failed: list[str] = []
    while time.monotonic() < end:
        for what, count, environment, command in round_of(number):
            if time.monotonic() >= end:
                break
            said = " ".join([*(f'{k}="{v}"' for k, v in environment.items()), "python", *command])
            print(f"--- {said}", flush=True)
            left = max(60.0, min(PROPERTY_S, end - time.monotonic())) if "hunts" in what else None
            try:
                code = subprocess.run(
                    [sys.executable, *command], env=os.environ | environment, cwd=ROOT, timeout=left, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = 0
            done[what] += count
            if code:
                failed.append(said)
        number += 1
    print("\n".join(f"{count:10d} {what}" for what, count in done.items()))
    print("\n".join(f"failed: {said}" for said in failed) or "nothing failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
