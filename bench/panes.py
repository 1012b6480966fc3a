"""What an overlap of 60 costs: `python -m bench.panes [--quick]`.

One operator, no Spark: hopping windows of one hour every minute, beside tumbling windows at the pane's size (one
minute), over the same messages. State is what the database holds, changelog what the micro-batches wrote to it; the
results of the hopping windows are checked against plain sums of the tumbling ones.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from backend import count, hopping, max_, sum_, tumbling
from backend.batch import BEFORE, MESSAGE_FIELDS, NO_TIME, OFFSET, PARTITION, STREAM, TIME, Position
from backend.windows.definitions import Window
from backend.windows.operator import WindowOperator
from backend.windows.spec import window_spec
from bench.table import Options, report
from recovery.attempt import run_attempt
from recovery.changelog import open_changelog
from recovery.jobs import ShardJob
from recovery.share import ShardInput

MINUTE_MS = 60_000
SCHEMA = pa.schema([pa.field("key", pa.string()), pa.field("x", pa.int64())])


def micro_batches(batches: int, rows: int, keys: int) -> list[pa.Table]:
    """Messages in order of time, a quarter of an hour per micro-batch."""
    random = np.random.default_rng(11)
    names = pa.array([f"key-{number:06d}" for number in range(keys)])
    made, newest = [], NO_TIME
    for number in range(batches):
        times = np.sort(random.integers(0, 15 * MINUTE_MS, rows)) + number * 15 * MINUTE_MS
        before = np.concatenate([[newest], times[:-1]])
        newest = int(times[-1])
        columns = {
            STREAM: np.zeros(rows, np.uint16),
            PARTITION: np.zeros(rows, np.int32),
            OFFSET: np.arange(number * rows, (number + 1) * rows),
            TIME: times,
            BEFORE: before,
        }
        chosen = names.take(pa.array(random.integers(0, keys, rows)))
        fields = [*(pa.array(column) for column in columns.values()), chosen, pa.array(random.integers(0, 1000, rows))]
        made.append(pa.table(fields, schema=pa.schema([*MESSAGE_FIELDS, *SCHEMA])))
    return made


def run(window: Window, tables: list[pa.Table], directory: Path) -> tuple[dict[str, float | int | str], pa.Table]:
    """Run a shard over the micro-batches; give bytes and seconds, and the full results."""
    spec = window_spec(window, SCHEMA, {"n": count(), "total": sum_("x"), "worst": max_("x")}, keys=["key"],
                       retention="1 hour", max_ahead=None)  # fmt: skip
    changelog = open_changelog(str(directory / "changelog"))
    job = ShardJob("bench", 0, directory / "local", WindowOperator(spec), tuple(SCHEMA), changelog, retain=10**6)
    pointer, seconds, results, logged = None, 0.0, [], 0
    for version, table in enumerate(tables):
        times, offsets = table[TIME].to_numpy(), table[OFFSET].to_numpy()
        after = {(0, 0): Position(int(offsets[-1]) + 1, int(times[-1]), version)}
        started = time.perf_counter()
        done = run_attempt(job, pointer, version, lambda _, t=table, a=after, v=version: ShardInput(v, t, a))
        seconds += time.perf_counter() - started
        pointer = done.pointer
        results.append(done.outcome.results)
    for entry in changelog.entries(0):
        logged += entry.length
    staged = sum(path.stat().st_size for path in (directory / "local").rglob("staged/*.sst"))
    history = changelog.read(0, pointer.commit)
    state = sum(len(k) + len(v) for keys, values in history.chunks() for k, v in zip(keys, values, strict=True))
    whole = pa.concat_tables(results)
    label = f"{window.kind} {window.size // MINUTE_MS} min" + (
        f" every {window.step // MINUTE_MS} min" if window.step != window.size else ""
    )
    return {
        "windows": label,
        "state rows": history.rows,
        "state MB": state / 1e6,
        "changelog MB": logged / 1e6,
        "staged MB": staged / 1e6,
        "results": whole.num_rows,
        "s": seconds,
    }, whole


def check(tumbled: pa.Table, hopped: pa.Table) -> None:
    """Each full hopping window is the sum of the sixty minutes in it.

    Raises:
        AssertionError: One is not.
    """
    per_minute: dict[tuple[str, int], tuple[int, int]] = {}
    for row in tumbled.to_pylist():
        per_minute[(row["key"], row["window_start"])] = (row["n"], row["total"])
    rows = hopped.slice(0, 5_000).to_pylist()
    for row in rows:
        inside = [per_minute.get((row["key"], row["window_start"] + i * MINUTE_MS), (0, 0)) for i in range(60)]
        assert (row["n"], row["total"]) == (sum(n for n, _ in inside), sum(t for _, t in inside)), row
    assert rows, "no window was full"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    options = Options("panes", __doc__).parse(arguments)
    tables = micro_batches(12, 2_000 if options.quick else 50_000, 20 if options.quick else 200)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        one, tumbled = run(tumbling("1 minute"), tables, Path(name, "tumbling"))
        sixty, hopped = run(hopping("1 hour", "1 minute"), tables, Path(name, "hopping"))
    check(tumbled, hopped)
    ratios = {
        name: float(sixty[name]) / float(one[name]) for name in ("state rows", "state MB", "changelog MB", "staged MB")
    }
    report("panes", options, "An overlap of 60 beside tumbling windows at the pane's size", [one, sixty],
           [f"{name}: {ratio:.2f} times" for name, ratio in ratios.items()])  # fmt: skip


if __name__ == "__main__":
    main()
