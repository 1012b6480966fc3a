"""Bytes that go to the checkpoint's filesystem per event: `python -m bench.snapshots [--quick]`.

The same messages for all: windows with incremental aggregates (few keys, many keys) and a median, which keeps every
message. Ours with snapshots every so many commits, and without (changelog only); Spark's own RocksDB store with and
without changelog checkpointing. Counted is what lies in the checkpoint at the end, under `rewind/changelog` and
`rewind/snapshots`, or under `state`: nothing is pruned in so few micro-batches, and what is named by its content was
uploaded once. (Our pointers in Spark's own state are counted with ours.) The quick form has the few keys only.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from backend import stream
from bench.session import session, size, sparks_own
from bench.table import Options, report
from bench.windows import CASES, Case, our_source, sparks_source, write

SNAPSHOT_EVERY = 10
NAMES = {"tumbling": "incremental, few keys", "keys": "incremental, many keys", "median": "full state"}


def ours(
    spark: Any, directory: Path, case: Case, rows: int, run: Path, snapshots: str | int, events: int
) -> dict[str, int]:
    """Run our job over so many messages; give the bytes."""
    query = case.ours(stream(our_source(directory, rows), event_time="at", key="key")).start(
        spark, checkpoint=run / "checkpoint", results=run / "results", errors=run / "errors", shards=2,
        local_dir=run / "local", snapshots=snapshots, trigger="0 seconds", until="end",
    )  # fmt: skip
    query.await_termination()
    assert query.progress.rows == events, (query.progress.rows, events)
    checkpoint = run / "checkpoint"
    steps = sum(path.stat().st_size for path in (checkpoint / "rewind" / "snapshots").glob("*/*.step.*"))
    return {
        "log": size(checkpoint / "rewind" / "changelog"),
        "steps": steps,
        "snapshots": size(checkpoint / "rewind" / "snapshots") - steps,
        "pointers": size(checkpoint / "state"),
    }


def sparks(spark: Any, directory: Path, case: Case, run: Path, events: int, *, changelog: bool) -> dict[str, int]:
    """Run Spark's own operator over so many messages; give the bytes."""
    own = sparks_own(spark, changelog=changelog)
    query = (
        case.sparks(sparks_source(own, directory))
        .writeStream.format("noop")
        .option("checkpointLocation", str(run / "checkpoint"))
        .outputMode("append")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    read = sum(progress["numInputRows"] for progress in query.recentProgress)
    assert read == events, (read, events)
    log = size(run / "checkpoint" / "state", ".changelog")
    return {"log": log, "steps": 0, "snapshots": size(run / "checkpoint" / "state") - log, "pointers": 0}


def compare(spark: Any, case: Case, directory: Path, *, batches: int, rows: int) -> list[dict[str, Any]]:
    """Run all four over the same messages."""
    write(directory, case, batches, rows)
    events = batches * rows
    mine, theirs = partial(ours, spark, directory, case, rows), partial(sparks, spark, directory, case)
    runs = {
        f"ours, snapshots every {SNAPSHOT_EVERY}": partial(mine, snapshots=SNAPSHOT_EVERY, events=events),
        "ours, no snapshots": partial(mine, snapshots="off", events=events),
        "Spark's, changelog checkpointing": partial(theirs, events=events, changelog=True),
        "Spark's, snapshots only": partial(theirs, events=events, changelog=False),
    }
    found = []
    for number, (label, go) in enumerate(runs.items()):
        run = directory / f"run-{number}"
        taken = go(run)
        shutil.rmtree(run, ignore_errors=True)
        found.append(
            {
                "windows": NAMES[case.name],
                "store": label,
                "bytes per event": sum(taken.values()) / events,
                "changelog": taken["log"] / events,
                "staged files": taken["steps"] / events,
                "snapshots": taken["snapshots"] / events,
                "pointers": taken["pointers"] / events,
            }
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    options = Options("snapshots", __doc__).parse(arguments)
    batches, rows = (4, 5_000) if options.quick else (20, 50_000)
    started = time.perf_counter()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, session() as spark:
        names = list(NAMES)[:1] if options.quick else list(NAMES)
        for case in CASES:
            if case.name in names:
                directory = Path(name) / case.name
                directory.mkdir()
                found += compare(spark, case, directory, batches=batches, rows=rows)
                shutil.rmtree(directory, ignore_errors=True)
    report(
        "snapshots",
        options,
        f"Bytes to the checkpoint's filesystem per event, {batches} micro-batches of {rows:,} messages",
        found,
        [f"{time.perf_counter() - started:.0f} s in all"],
    )


if __name__ == "__main__":
    main()
