"""What a micro-batch costs as more is kept, and on more shards: `python -m bench.growth [--quick] [--messages N]`.

No Spark: full-state windows of an hour (count, median). Each micro-batch has its messages of 1,000 keys in an hour of
event time, and closes a window. Retention is as long as it takes to have so many messages in it; from then on as many
go as come. Then, in steady state: microseconds of CPU per message (compaction with it) and seconds per micro-batch,
means over the measured ones, and the peak of the process's resident memory: all to be flat. First one shard with
25,000 messages per micro-batch as more messages are kept, then 500,000 per micro-batch divided among more shards, one
after the other. Each row is a process of its own; Linux only.
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
from backend.windows.operator import WindowOperator
from backend.windows.spec import window_spec
from bench.table import Options, report
from recovery.attempt import run_attempt
from recovery.changelog import open_changelog
from recovery.commit.pointer import Pointer
from recovery.jobs import ShardJob
from recovery.share import ShardInput

ROWS, SHARED_ROWS = 25_000, 500_000
"""Messages per micro-batch: of one shard as more is kept, and of all shards as there are more of them."""
SHARDS = (1, 2, 4, 8)
KEYS = 1_000
SPAN_MS = 3_600_000
MEASURED, SHARED_MEASURED = 64, 10
"""Micro-batches: enough for RocksDB to compact several times, and, of one shard, for a base of the changelog."""
SCHEMA = pa.schema([pa.field("key", pa.string()), pa.field("x", pa.int64())])


def peak_mb() -> float:
    """Give the peak of this process's resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status does not tell VmHWM")


class Shard:
    """One shard's attempts, and where it is."""

    def __init__(self, number: int, directory: Path, retention: timedelta, rows: int, keys: int) -> None:
        windows = {"keys": ["key"], "retention": retention, "max_ahead": None, "policies": policies(late="off")}
        operator = WindowOperator(
            window_spec(tumbling("1 hour"), SCHEMA, {"n": count(), "mid": median("x")}, **windows)
        )
        self._fields = tuple(SCHEMA.field(name) for name in operator.input_fields)
        log = open_changelog(str(directory / "log"))
        self._job = ShardJob("growth", number, directory / "local", operator, self._fields, log)
        self._random, self._rows = np.random.default_rng(3 + number), rows
        self._names = pa.array([f"key-{number}-{key:06d}" for key in range(keys)])
        self._pointer: Pointer | None = None
        self._newest = NO_TIME
        self.stored = 0

    def turn(self, version: int) -> tuple[float, float]:
        """Run a micro-batch; give seconds of CPU, and seconds."""
        rows = self._rows
        times = np.sort(self._random.integers(0, SPAN_MS, rows)) + version * SPAN_MS
        columns = {
            STREAM: pa.array(np.zeros(rows), pa.uint16()),
            PARTITION: pa.array(np.zeros(rows), pa.int32()),
            OFFSET: pa.array(np.arange(version * rows, (version + 1) * rows)),
            TIME: pa.array(times),
            BEFORE: pa.array(np.concatenate([[self._newest], times[:-1]])),
            "key": self._names.take(pa.array(self._random.integers(0, len(self._names), rows))),
            "x": pa.array(self._random.integers(0, 1000, rows)),
        }
        self._newest = int(times[-1])
        schema = pa.schema([*MESSAGE_FIELDS, *self._fields])
        table = pa.table([columns[field.name] for field in schema], schema=schema)
        given = ShardInput(version, table, {(0, 0): Position((version + 1) * rows, self._newest, version)})
        began, used = time.perf_counter(), time.process_time()
        done = run_attempt(self._job, self._pointer, version, lambda _: given)
        taken = time.process_time() - used, time.perf_counter() - began
        self._pointer, self.stored = done.pointer, int(done.metrics["messages_stored"])
        return taken


def run(messages: int, shards: int, rows: int, measured: int, directory: Path) -> dict[str, Any]:
    """Keep so many messages; give what a micro-batch costs then, and the peak of memory.

    Args:
        messages: Kept by all shards.
        shards: Run one after the other.
        rows: Messages per micro-batch, of all shards.
        measured: Micro-batches.
        directory: For state.
    """
    hours = messages // rows
    retention = timedelta(hours=hours - 1)  # behind the end of a window, which has one hour itself
    running = [
        Shard(number, directory / str(number), retention, rows // shards, KEYS // shards) for number in range(shards)
    ]
    taken = [[shard.turn(version) for shard in running] for version in range(hours + measured)][-measured:]
    stored = sum(shard.stored for shard in running)
    assert messages - rows < stored <= messages + 2 * rows, (stored, messages)
    return {
        "messages kept": messages,
        "shards": shards,
        "messages per micro-batch": rows,
        "CPU us per message": statistics.mean(sum(cpu for cpu, _ in turn) for turn in taken) / rows * 1e6,
        "s per micro-batch": statistics.mean(sum(wall for _, wall in turn) for turn in taken),
        "peak MB": peak_mb(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = Options("growth", __doc__)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--one", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse(arguments)
    if options.one:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            print(json.dumps(run(*options.one, Path(name))))
        return
    most = 4 * ROWS if options.quick else options.messages
    measured, shared = (2, 2) if options.quick else (MEASURED, SHARED_MEASURED)
    one = [(kept, 1, ROWS, measured) for kept in sorted({max(ROWS, most // 100), max(ROWS, most // 10), most})]
    per_batch, in_all = (ROWS, 2 * ROWS) if options.quick else (SHARED_ROWS, 6 * SHARED_ROWS)
    many = [(in_all, shards, per_batch, shared) for shards in SHARDS]
    rows = []
    for sizes in (*one, *many):
        command = [sys.executable, "-m", "bench.growth", "--one", *map(str, sizes)]
        rows.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        print(json.dumps(rows[-1]), flush=True)
    for number, row in enumerate(rows):
        first = rows[0] if number < len(one) else rows[len(one)]
        row["CPU / first"] = row["CPU us per message"] / first["CPU us per message"]
    report(
        "growth",
        options,
        "Full-state windows without Spark, as more messages are kept, and on more shards",
        rows,
    )


if __name__ == "__main__":
    main()
