"""Restoring full-state windows after the local disk is lost: `python -m bench.restore [--quick] [--messages N]`.

A median keeps every message; retention is longer than the data, so all of them are to be restored. The archive has
typed columns, and JSON values for comparison (what parsing leaves). Beside it windows' metadata alone (an incremental
job with many keys: nothing to replay), other numbers of messages and of shards, and state bigger than memory: 2 GB of
messages of 1 kB, with the peak of resident memory over all of Spark's Python workers while the restore runs (Linux
only).

The query stops for it (`queue_bytes="off"`; a restore beside the running query is in `bench.beside`), so that nothing
else runs. The time from the query's start until it is back is shown in parts, as the supervisor logs and the restore
listeners are told: `s to detect` (Spark starts, and the first tasks find no state), `s to probe` (Spark's pointers are
read, all shards looked at), `s to restore` (from the first shard's start to the last one's end, proofs with it: the
rate is of this), `s until back` (the query starts again, fetches the snapshots, and publishes a micro-batch).
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from backend import archive, count, median, over_all, stream, tumbling
from backend.sources.archive_files import write_archive
from bench.data import START_MS, TIME, topic_rows, typed
from bench.session import session
from bench.table import Options, report
from recovery.restore.tries import FETCHES

VALUE = "key string, at timestamp, x long, y double, note string"
HOUR_MS = 3_600_000
LOOK_S = 1.0


class Clock(logging.Handler):
    """A restore listener that notes when the parts of a restore end; also a handler of the supervisor's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.started = time.perf_counter()
        self.failed = self.began = self.ended = self.back = 0.0
        self.records = 0
        self.peaks = Peaks()

    def __enter__(self) -> Clock:
        logging.getLogger("rewind.supervisor").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("rewind.supervisor").removeHandler(self)
        self.peaks.ended.set()

    def emit(self, record: logging.LogRecord) -> None:
        """Note when the query has failed: what the supervisor warns of first."""
        self.failed = self.failed or time.perf_counter()

    def start(self, restoring: Any) -> None:
        """Note the first start; what tasks fetch afterwards is told too, and no part of the restore."""
        if restoring.how not in FETCHES and not self.began:
            self.began = time.perf_counter()
            self.peaks.start()

    def batch(self, *_: Any) -> None:
        """Nothing to note."""

    def suspended(self, restoring: Any, why: str) -> None:
        """Note a failure: no result then."""
        self.records = -(10**12)

    def end(self, restoring: Any, records: int, length: int, seconds: float) -> None:
        """Note the last end."""
        if restoring.how in FETCHES:
            self.back = time.perf_counter()
            return
        self.ended = time.perf_counter()
        self.records += records
        self.peaks.look()


class Peaks(threading.Thread):
    """Follows the peak of resident memory of each Python worker, from its start on.

    The kernel keeps the peak: it is read so often only because workers end.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mb: dict[int, float] = {}
        self.ended = threading.Event()

    def run(self) -> None:
        """Look again and again."""
        for worker in self._workers():
            with suppress(OSError):  # forget the peaks of before
                Path(f"/proc/{worker}/clear_refs").write_text("5")
        while not self.ended.wait(LOOK_S):
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


def write(
    directory: Path, messages: int, keys: int, *, as_json: bool, note_bytes: int = 0, span_ms: int = 24 * HOUR_MS
) -> None:
    """Write the archive: two source partitions, in order of time; notes of so many bytes, or a key's."""
    random = np.random.default_rng(5)
    names = pa.array([f"key-{number:07d}" for number in range(keys)])
    per_partition = messages // 2
    tables = []
    for partition in range(2):
        at = np.sort(random.integers(0, span_ms, per_partition)) + START_MS
        chosen = names.take(pa.array(random.integers(0, keys, per_partition)))
        x, y = random.integers(0, 1000, per_partition), random.random(per_partition)
        note = names.take(pa.array(random.integers(0, keys, per_partition)))
        if note_bytes:
            texts = [random.integers(97, 123, note_bytes, dtype=np.uint8).tobytes().decode() for _ in range(1000)]
            note = pa.array(texts).take(pa.array(random.integers(0, 1000, per_partition)))
        if as_json:
            rows = zip(chosen.to_pylist(), at.tolist(), x.tolist(), y.tolist(), note.to_pylist(), strict=True)
            texts = [
                f'{{"key":"{k}","at":"{np.datetime64(t, "ms")}Z","x":{a},"y":{b},"note":"{n}"}}'
                for k, t, a, b, n in rows
            ]
            value: pa.Array = pa.array(texts).cast(pa.binary())
        else:
            value = typed(key=chosen, at=pa.array(at, TIME), x=pa.array(x), y=pa.array(y), note=note)
        tables.append(topic_rows(partition, 0, at, value))
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
                until="end", listeners=listeners, queue_bytes="off",
            )
        )  # fmt: skip

    first = start()
    first.await_termination()
    assert first.progress.rows == messages, (first.progress.rows, messages)
    shutil.rmtree(directory / "local")
    with Clock() as clock:
        again = start(clock)
        again.await_termination()
    assert again.progress.restores == 1
    assert clock.records >= (messages if kind != "metadata" else 1), clock.records
    assert clock.started < clock.failed < clock.began < clock.ended < clock.back
    seconds = clock.ended - clock.began
    return {
        "what": kind,
        "messages": messages,
        "shards": shards,
        "keys": keys,
        "rows restored": clock.records,
        "s to detect": clock.failed - clock.started,
        "s to probe": clock.began - clock.failed,
        "s to restore": seconds,
        "rows/s": clock.records / seconds,
        "s until back": clock.back - clock.ended,
        "peak MB per worker": max(clock.peaks.peak_mb.values(), default=0.0),
    }


def plan(messages: int, *, quick: bool) -> list[dict[str, Any]]:
    """Give what is measured; the first two differ in the number of messages alone, the next two likewise."""
    every: list[dict[str, Any]] = [
        {"kind": "typed", "messages": messages // 5, "keys": 1_000},
        {"kind": "typed", "messages": messages, "keys": 1_000},
        {"kind": "JSON", "messages": messages // 5, "keys": 1_000},
        {"kind": "JSON", "messages": messages, "keys": 1_000},
        {"kind": "metadata", "messages": messages // 5, "keys": messages // 50},
        {"kind": "typed", "messages": messages // 5, "keys": 1_000, "shards": 1},
        {"kind": "typed", "messages": messages // 5, "keys": 1_000, "shards": 4},
        {"kind": "1 kB each", "messages": messages * 2 // 5, "keys": 1_000, "note_bytes": 1_000},
    ]
    return every[2:3] if quick else every


def without_fixed(small: dict[str, Any], large: dict[str, Any]) -> str:
    """Tell the rate of what the larger of two restores had more: what costs the same for both falls out."""
    messages = large["messages"] - small["messages"]
    seconds = large["s to restore"] - small["s to restore"]
    if seconds <= 0:
        return "too few messages for a rate without the fixed cost"
    fixed = max(0.0, small["s to restore"] - small["messages"] * seconds / messages)
    return (
        f"{large['what']} without the fixed cost of {fixed:.1f} s: {messages / seconds:,.0f} messages/s "
        "(difference of two numbers of messages)"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = Options("restore", __doc__)
    parser.add_argument("--messages", type=int, default=5_000_000)
    options = parser.parse(arguments)
    rows = []
    with session() as spark:
        for one in plan(20_000 if options.quick else options.messages, quick=options.quick):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
                rows.append(measure(spark, Path(name), **one))
                print(json.dumps(rows[-1]), flush=True)
    notes = [] if options.quick else [without_fixed(*rows[at : at + 2]) for at in (0, 2)]
    report("restore", options, "Restoring a lost disk, two cores", rows, notes)


if __name__ == "__main__":
    main()
