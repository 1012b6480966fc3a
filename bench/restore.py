"""Restoring full-state windows after the local disk is lost: `python -m bench.restore [--quick] [--messages N]`.

A median keeps every message; retention is longer than the data, so all of them are to be restored. The archive has
typed columns, and JSON values for comparison (what parsing leaves). Shown: messages per second from the first shard's
start to the last shard's end as the restore listeners are told, the seconds that are not replay (Spark's pointer read
and the probe of all shards), and windows' metadata alone (an incremental job with 100,000 keys: nothing to replay).
Time against the number of messages and of shards; and state bigger than memory: 2 GB of messages of 1 kB, with the
peak of resident memory over all of Spark's Python workers while the restore runs (Linux only).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from backend import archive, count, median, over_all, stream, tumbling
from backend.sources.archive_files import write_archive
from bench.table import report

START_MS = 1_700_000_000_000
VALUE = "key string, at timestamp, x long, y double, note string"
HOUR_MS = 3_600_000


class Clock:
    """A restore listener that notes when the first shard begins and the last one ends."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0
        self.records = 0
        self.peaks = Peaks()

    def start(self, restoring: Any) -> None:
        """Note the first."""
        if not self.began:
            self.peaks.start()
        self.began = self.began or time.perf_counter()

    def batch(self, *_: Any) -> None:
        """Nothing to note."""

    def suspended(self, restoring: Any, why: str) -> None:
        """A restore that fails is no result.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(why)

    def end(self, restoring: Any, records: int, length: int, seconds: float) -> None:
        """Note the last."""
        self.ended = time.perf_counter()
        self.records += records
        self.peaks.look()


class Peaks(threading.Thread):
    """Follows the peak of resident memory of each Python worker, from its start on."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mb: dict[int, float] = {}
        self.ended = threading.Event()

    def run(self) -> None:
        """Look again and again."""
        for worker in self._workers():
            with suppress(OSError):  # forget the peaks of before
                Path(f"/proc/{worker}/clear_refs").write_text("5")
        while not self.ended.wait(0.1):
            self.look()

    def look(self) -> None:
        """Look once."""
        for worker in self._workers():
            with suppress(OSError):
                for line in Path(f"/proc/{worker}/status").read_text().splitlines():
                    if line.startswith("VmHWM"):
                        self.peak_mb[worker] = max(self.peak_mb.get(worker, 0.0), int(line.split()[1]) / 1024)

    def _workers(self) -> list[int]:
        found = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.name().startswith("python"):
                    found.append(process.pid)
        return found


def write(directory: Path, messages: int, keys: int, *, as_json: bool, note_bytes: int = 0) -> None:
    """Write the archive: two source partitions, in order of time; notes of so many bytes, or a key's."""
    random = np.random.default_rng(5)
    names = pa.array([f"key-{number:07d}" for number in range(keys)])
    per_partition = messages // 2
    tables = []
    for partition in range(2):
        times = np.sort(random.integers(0, 24 * HOUR_MS, per_partition)) + START_MS
        at = pa.array(times, pa.timestamp("ms", tz="UTC"))
        chosen = names.take(pa.array(random.integers(0, keys, per_partition)))
        x, y = random.integers(0, 1000, per_partition), random.random(per_partition)
        note = names.take(pa.array(random.integers(0, keys, per_partition)))
        if note_bytes:
            texts = [random.integers(97, 123, note_bytes, dtype=np.uint8).tobytes().decode() for _ in range(1000)]
            note = pa.array(texts).take(pa.array(random.integers(0, 1000, per_partition)))
        if as_json:
            rows = zip(chosen.to_pylist(), times.tolist(), x.tolist(), y.tolist(), note.to_pylist(), strict=True)
            value: pa.Array = pa.array(
                [
                    f'{{"key":"{k}","at":"{np.datetime64(t, "ms")}Z","x":{a},"y":{b},"note":"{n}"}}'.encode()
                    for k, t, a, b, n in rows
                ],
                pa.binary(),
            )
        else:
            value = pa.StructArray.from_arrays(
                [chosen, at, pa.array(x), pa.array(y), note], ["key", "at", "x", "y", "note"]
            )
        tables.append(
            pa.table(
                {
                    "topic": pa.repeat(pa.scalar("t"), per_partition),
                    "partition": pa.array(np.full(per_partition, partition, np.int32)),
                    "offset": pa.array(np.arange(per_partition)),
                    "timestamp": at,
                    "key": pa.nulls(per_partition, pa.binary()),
                    "value": value,
                }
            )
        )
    write_archive(directory, pa.concat_tables(tables), rows_per_file=500_000, row_group_rows=100_000)


def measure(
    spark: Any, directory: Path, messages: int, keys: int, *, kind: str, shards: int = 2, note_bytes: int = 0
) -> dict[str, Any]:
    """Run a job to its end, lose its disk, start it again, and time the restore."""
    as_json = kind == "JSON"
    write(directory / "archive", messages, keys, as_json=as_json, note_bytes=note_bytes)

    def start(*listeners: Any) -> Any:
        source = archive(
            str(directory / "archive"), value=VALUE, format="json" if as_json else "typed",
            max_offsets_per_batch=500_000 if not note_bytes else 50_000,
        )  # fmt: skip
        aggregates: dict[str, Any] = {"n": count()}
        if kind != "metadata":
            aggregates["typical"] = median("x")
        if note_bytes:  # the whole message is kept
            aggregates["notes"] = over_all("note", function=lambda messages: messages.num_rows, output=pa.int64())
        return (
            stream(source, event_time="at", key="key")
            .window(tumbling("1 hour"), retention="400 days", max_ahead=None)
            .aggregate(**aggregates)
            .start(
                spark, checkpoint=directory / "checkpoint", results=directory / "results",
                errors=directory / "errors", shards=shards, local_dir=directory / "local", trigger="0 seconds",
                until="end", listeners=listeners,
            )
        )  # fmt: skip

    first = start()
    first.await_termination()
    assert first.progress.rows == messages, (first.progress.rows, messages)
    shutil.rmtree(directory / "local")
    clock = Clock()
    started = time.perf_counter()
    again = start(clock)
    again.await_termination()
    clock.peaks.ended.set()
    assert again.progress.restores == 1
    seconds = clock.ended - clock.began
    return {
        "what": kind,
        "messages": messages,
        "shards": shards,
        "keys": keys,
        "rows restored": clock.records,
        "s": seconds,
        "rows/s": clock.records / seconds,
        "s to detect and probe": clock.began - started,
        "peak MB per worker": max(clock.peaks.peak_mb.values(), default=0.0),
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small, for correctness only")
    parser.add_argument("--messages", type=int, default=5_000_000)
    options = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.memory", "2g")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    messages = 20_000 if options.quick else options.messages
    plan: list[dict[str, Any]] = [
        {"kind": "typed", "messages": messages // 5, "keys": 1_000},
        {"kind": "typed", "messages": messages, "keys": 1_000},
        {"kind": "typed", "messages": messages // 5, "keys": 1_000, "shards": 1},
        {"kind": "typed", "messages": messages // 5, "keys": 1_000, "shards": 4},
        {"kind": "JSON", "messages": messages // 5, "keys": 1_000},
        {"kind": "metadata", "messages": messages // 5, "keys": messages // 50},
        {"kind": "1 kB each", "messages": messages * 2 // 5, "keys": 1_000, "note_bytes": 1_000},
    ]
    rows = []
    for one in plan:
        with tempfile.TemporaryDirectory() as name:
            rows.append(measure(spark, Path(name), **one))
            print(json.dumps(rows[-1]), flush=True)
    spark.stop()
    report(
        "restore-quick" if options.quick else "restore",
        "Restoring a lost disk, two shards, two cores",
        rows,
    )


if __name__ == "__main__":
    main()
