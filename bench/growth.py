"""What a micro-batch costs as more is kept: `python -m bench.growth [--quick] [--messages N]`.

One shard, no Spark: full-state windows of an hour (count, median). Each micro-batch has 25,000 messages of 1,000 keys
in an hour of event time, and closes a window. Retention is as long as it takes to have so many messages in it; from
then on as many go as come. Then, in steady state, as more messages are kept: microseconds of CPU per message
(compaction with it) and seconds per micro-batch, means over 40 of them, and the peak of the process's resident memory:
all to be flat. Each row is a process of its own; Linux only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from backend import count, median, policies, tumbling
from backend.batch import BEFORE, MESSAGE_FIELDS, NO_TIME, OFFSET, PARTITION, STREAM, TIME, Position
from backend.operators.spec import window_spec
from backend.operators.window import WindowOperator
from bench.table import Options, report
from recovery.attempt import ShardInput, ShardJob, run_attempt
from recovery.changelog import open_changelog

ROWS = 25_000
SPAN_MS = 3_600_000
MEASURED = 40
"""Micro-batches: enough for RocksDB to compact several times, however little there is."""
SCHEMA = pa.schema([pa.field("key", pa.string()), pa.field("x", pa.int64())])


def peak_mb() -> float:
    """Give the peak of this process's resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status does not tell VmHWM")


def run(messages: int, measured: int, directory: Path) -> dict[str, Any]:
    """Keep so many messages; give what a micro-batch costs then, and the peak of memory."""
    hours = messages // ROWS
    retention = timedelta(hours=hours - 1)  # behind the end of a window, which has one hour itself
    windows = {"keys": ["key"], "retention": retention, "max_ahead": None, "policies": policies(late="off")}
    operator = WindowOperator(window_spec(tumbling("1 hour"), SCHEMA, {"n": count(), "mid": median("x")}, **windows))
    fields = tuple(SCHEMA.field(name) for name in operator.input_fields)
    job = ShardJob("growth", 0, directory / "local", operator, fields, open_changelog(str(directory / "log")))
    random = np.random.default_rng(3)
    names = pa.array([f"key-{number:06d}" for number in range(1000)])
    pointer, newest, cpu, wall, stored = None, NO_TIME, [], [], 0
    for version in range(hours + measured):
        times = np.sort(random.integers(0, SPAN_MS, ROWS)) + version * SPAN_MS
        columns = {
            STREAM: pa.array(np.zeros(ROWS), pa.uint16()),
            PARTITION: pa.array(np.zeros(ROWS), pa.int32()),
            OFFSET: pa.array(np.arange(version * ROWS, (version + 1) * ROWS)),
            TIME: pa.array(times),
            BEFORE: pa.array(np.concatenate([[newest], times[:-1]])),
            "key": names.take(pa.array(random.integers(0, 1000, ROWS))),
            "x": pa.array(random.integers(0, 1000, ROWS)),
        }
        newest = int(times[-1])
        schema = pa.schema([*MESSAGE_FIELDS, *fields])
        table = pa.table([columns[field.name] for field in schema], schema=schema)
        given = ShardInput(version, table, {(0, 0): Position((version + 1) * ROWS, newest, version)})
        began, used = time.perf_counter(), time.process_time()
        done = run_attempt(job, pointer, version, lambda _, it=given: it)
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
        pointer, stored = done.pointer, int(done.metrics["messages_stored"])
    assert abs(stored - messages) <= 2 * ROWS, (stored, messages)
    return {
        "messages kept": messages,
        "CPU us per message": statistics.mean(cpu[-measured:]) / ROWS * 1e6,
        "s per micro-batch": statistics.mean(wall[-measured:]),
        "peak MB": peak_mb(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = Options("growth", __doc__)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse(arguments)
    if options.one:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(run(options.one, 2 if options.quick else MEASURED, Path(name))))
        return
    most = 4 * ROWS if options.quick else options.messages
    rows = []
    for messages in sorted({max(ROWS, most // 100), max(ROWS, most // 10), most}):
        command = [
            sys.executable,
            "-m",
            "bench.growth",
            "--one",
            str(messages),
            *(["--quick"] if options.quick else []),
        ]
        rows.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        print(json.dumps(rows[-1]), flush=True)
    for row in rows:
        row["CPU / first"] = row["CPU us per message"] / rows[0]["CPU us per message"]
    report(
        "growth",
        options,
        f"Full-state windows, one shard, {ROWS:,} messages per micro-batch, as more messages are kept",
        rows,
    )


if __name__ == "__main__":
    main()
