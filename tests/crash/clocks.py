"""A job on a real Spark whose clock jumps an hour back and a day ahead, for the JVM and all Python processes.

`python -m tests.crash.clocks running [<n>]` moves the clock while the job runs, after every n micro-batches (10);
`... starts [<n>]` between starts after kill -9, n micro-batches (4) after each.
The clock is that of `shifted_clock.c`, which is compiled first: without a C compiler nothing is tried, which is said,
and the exit code is 77. Printed is how long the query stood still after each jump. The results have to be those of
plain loops.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.conftest import ROOT, spark_environment
from tests.crash import kill_job
from tests.crash.sizes import session

JUMPS = (-3_600, 86_400, 0)
"""Seconds from the host's own clock: the job's goes an hour back, then a day and an hour ahead, then a day back."""
STANDS_S = 240.0
"""For so long a query may stand still when the clock has jumped; a busy host may take a minute for a micro-batch."""


def job(directory: Path) -> None:
    """Run the job to its end, or until it is killed; prints each micro-batch, and what the clock said."""
    from backend import policies

    os.environ[kill_job.ARCHIVE] = str(directory / "archive")
    spark = session(directory)
    pipeline = kill_job.job(spark, policies=policies(early="2 seconds", late="1 second"))
    query = pipeline.start(
        spark, checkpoint=directory / "checkpoint", results=directory / "results", errors=directory / "errors",
        local_dir=directory / "local", trigger="500 ms", until="end",
    )  # fmt: skip
    told = -1
    while not query.await_termination(0.1):
        if query.progress.version > told:
            told = query.progress.version
            print(json.dumps({"micro_batch": told, "clock": time.time()}), flush=True)
    print(json.dumps({"ended": query.progress.version}), flush=True)
    spark.stop()


class Job:
    """The job in processes of its own, under a clock that this process sets."""

    def __init__(self, directory: Path, library: Path) -> None:
        self._directory, self._clock, self._library = directory, directory / "clock", library
        self._clock.write_bytes(bytes(8))

    def set(self, shift_s: int) -> None:
        """Set the clock, relative to the host's; its processes have the file mapped, and see it at once."""
        with self._clock.open("r+b") as file:
            file.write(struct.pack("=q", shift_s))

    def begin(self) -> None:
        """Start the job, or start it again."""
        environment = os.environ | spark_environment() | {
            "LD_PRELOAD": str(self._library),
            "SHIFTED_CLOCK": str(self._clock),
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.crash.clocks", "job", str(self._directory)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, start_new_session=True
        )

    def until(self, version: int | None) -> list[dict[str, Any]]:
        """Follow the job until it has published a micro-batch, or to its end."""
        assert self._process.stdout is not None
        told = []
        for line in self._process.stdout:
            if not line.startswith("{"):
                continue
            told.append(json.loads(line) | {"at": time.monotonic()})
            if "ended" in told[-1] or (version is not None and told[-1]["micro_batch"] >= version):
                return told
        raise SystemExit(f"the job ended with {self._process.wait()}")

    def kill(self) -> None:
        """Kill the job with all its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def running(run: Job, each: int) -> None:
    """Move the clock while the job runs."""
    run.begin()
    reached = run.until(each)[-1]["micro_batch"]
    for jump in JUMPS:
        run.set(jump)
        began = time.monotonic()
        told = run.until(reached + each)
        ours = [began, *(one["at"] for one in told)]
        still = max(later - earlier for earlier, later in pairwise(ours))
        ahead = round(told[-1].get("clock", time.time()) - time.time())
        reached = told[-1]["micro_batch"]
        print(f"clock {jump:+d} s: seen {ahead:+d} s; stood still for {still:.1f} s at most", flush=True)
        if still > STANDS_S:
            raise SystemExit("the query stood still")
    run.until(None)


def starts(run: Job, each: int) -> None:
    """Move the clock between starts."""
    run.begin()
    reached = run.until(each)[-1]["micro_batch"]
    for jump in JUMPS:
        run.kill()
        run.set(jump)
        run.begin()
        began = time.monotonic()
        reached = run.until(reached + each)[-1]["micro_batch"]
        print(
            f"clock {jump:+d} s between starts: {each} micro-batches after {time.monotonic() - began:.1f} s", flush=True
        )
    run.until(None)


def main(arguments: list[str]) -> int:
    """Run from the command line."""
    if arguments[0] == "job":
        job(Path(arguments[1]))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if shutil.which("cc") is None:
        print("no cc here: no clock was moved", flush=True)
        return 77
    with tempfile.TemporaryDirectory(prefix="rewind-clocks-") as made:
        directory = Path(made)
        each = int(arguments[1]) if len(arguments) > 1 else {"running": 10, "starts": 4}[arguments[0]]
        rows = kill_job.messages((len(JUMPS) + 2) * each * 2 * kill_job.PER_BATCH)
        kill_job.write(directory / "archive", rows)
        shim = directory / "shifted_clock.so"
        source = Path(__file__).with_name("shifted_clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl", "-lpthread"], check=True)
        run = Job(directory, shim)
        try:
            {"running": running, "starts": starts}[arguments[0]](run, each)
        finally:
            run.kill()
        windows, errors = kill_job.written(directory / "results", directory / "errors")
        if (windows, errors) != kill_job.expected(rows):
            print("the results are not those of plain loops", flush=True)
            return 1
    print(f"as plain loops say: {len(windows)} windows, {sum(errors.values())} errors", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
