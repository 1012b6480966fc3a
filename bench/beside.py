"""A shard's disk is lost under a running query: `python -m bench.beside [--quick] [--messages N,...]`.

A median keeps every message; retention is longer than the data. Once so many messages are kept, the disk of one of two
shards is taken, and the query goes on reading: once with shards that queue their input, once with `queue_bytes="off"`,
where the query stops for the restore. Every message must be counted once in both.

`s to new messages`: from the loss until a micro-batch is published in which the lost shard took new messages, queued or
not. `s to results`: until its own results are out again, those of what it queued meanwhile among them. `share of rate`:
messages a second of the whole query between the two, of the rate before the loss. With shards that queue, medians of
three losses, each in a run of its own and a micro-batch later than the one before: a single one may meet a compaction
that the other shard waits for, every eighth micro-batch.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds

from backend import archive, count, median, stream, tumbling
from backend.sinks.parquet import ParquetSink
from bench.restore import HOUR_MS, VALUE, write
from bench.session import session
from bench.table import Options, report

KEYS = 1_000
PER_BATCH = 250_000
"""Messages per micro-batch."""
PER_HOUR = 6.6
"""Micro-batches in an hour of event time, whatever is kept: so no window ends right after a loss at these sizes."""
LOSSES = 3
LOST = 0
AFTER = 24
"""Micro-batches behind the loss, at least."""


@dataclass(frozen=True, slots=True)
class Published:
    """A micro-batch.

    Attributes:
        at: When it was published, `time.perf_counter`.
        decision: What the lost shard did instead of running it, if anything.
        ran: Whether the lost shard said anything.
    """

    at: float
    decision: str
    ran: bool


class Losing(ParquetSink):
    """Takes a shard's disk once a certain micro-batch is published, when no task runs."""

    def __init__(self, out: Path, at: int) -> None:
        super().__init__(out / "results", out / "errors")
        self.local, self.lose_at = out / "local", at
        self.seen: list[Published] = []
        self.lost = 0.0

    def publish(self, frames: Any, version: int) -> list[dict[str, Any]]:
        """Publish, and take note."""
        shards = super().publish(frames, version)
        mine = [shard["metrics"] for shard in shards if shard["shard"] == LOST]
        decision = str(mine[0].get("decision", "")) if mine else ""
        self.seen.append(Published(time.perf_counter(), decision, bool(mine)))
        if version == self.lose_at:
            [place] = self.local.glob(f"*/{LOST}")
            shutil.rmtree(place)
            self.lost = time.perf_counter()
        return shards


def measure(spark: Any, directory: Path, before: int, per_batch: int, total: int, queue_bytes: Any) -> dict[str, Any]:
    """Run a job over the archive, take a disk under it behind so many micro-batches, and time what came then."""
    sink = Losing(directory, before - 1)
    source = archive(
        str(directory.parent / "archive"), value=VALUE, format="typed", max_offsets_per_batch=per_batch // 2
    )
    query = (
        stream(source, event_time="at", key="key")
        .window(tumbling("1 hour"), retention="400 days", max_ahead=None)
        .aggregate(n=count(), typical=median("x"))
        .start(
            spark, checkpoint=directory / "checkpoint", sink=sink, shards=2, local_dir=directory / "local",
            trigger="0 seconds", until="end", queue_bytes=queue_bytes,
        )
    )  # fmt: skip
    query.await_termination()
    if newest(directory / "results") != total:
        raise RuntimeError(f"{newest(directory / 'results'):,} messages were counted, not {total:,}")
    later = [one for one in sink.seen if one.at > sink.lost and one.ran]
    took, whole = later[0], next(one for one in later if one.decision != "queued")
    steps = [b.at - a.at for a, b in zip(sink.seen, sink.seen[1:before], strict=False)]
    between = [one for one in sink.seen if sink.lost < one.at <= whole.at]
    rate = len(between) / (whole.at - sink.lost)
    return {
        "s to new messages": took.at - sink.lost,
        "s to results": whole.at - sink.lost,
        "micro-batches meanwhile": len(between),
        "share of rate": rate * statistics.median(steps[len(steps) // 2 :]),
    }


def newest(results: Path) -> int:
    """Add up the messages of the newest row of each window and key."""
    table = ds.dataset(results, format="parquet").to_table(["window_start", "key", "revision", "n"])
    rows = table.group_by(["window_start", "key"]).aggregate([("n", "max")])
    return int(sum(rows["n_max"].to_pylist()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = Options("beside", __doc__)
    parser.add_argument("--messages", default="500000,5000000", help="kept at the loss; 20000000 takes long")
    options = parser.parse(arguments)
    per_batch, after = (2_000, 16) if options.quick else (PER_BATCH, AFTER)
    sizes = [8_000] if options.quick else [int(one) // per_batch * per_batch for one in options.messages.split(",")]
    rows = []
    with session() as spark:
        for messages in sizes:
            more = after if options.quick else max(after, messages // per_batch)
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
                total = messages + more * per_batch
                span_ms = int(total // per_batch * HOUR_MS / PER_HOUR)
                write(Path(name) / "archive", total, KEYS, as_json=False, span_ms=span_ms)
                for queue_bytes in (1 << 30, "off"):
                    losses = LOSSES if queue_bytes != "off" and not options.quick else 1
                    found = []
                    for number in range(losses):
                        place, before = Path(name) / f"{queue_bytes}-{number}", messages // per_batch + number
                        found.append(measure(spark, place, before, per_batch, total, queue_bytes))
                        print(json.dumps(found[-1]), flush=True)
                        shutil.rmtree(place)
                    new = [one["s to new messages"] for one in found]
                    rows.append(
                        {
                            "messages kept": messages,
                            "query": "stops" if queue_bytes == "off" else "queues",
                            **{column: statistics.median(one[column] for one in found) for column in found[0]},
                            "new messages, min-max": f"{min(new):.2f}-{max(new):.2f}",
                        }
                    )
    report("beside", options, "One of two shards' disks is lost under a running query, two cores", rows)


if __name__ == "__main__":
    main()
