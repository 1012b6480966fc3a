"""The demo's proof finds what is wrong: each kind of damage to a right output makes it fail."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recovery.demo.proof import Proof, prove
from recovery.drill.flights import make_archive

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

HOUR_MS = 3_600_000
Rows = list[dict[str, Any]]


def replay(messages: pa.Table) -> tuple[Rows, Rows]:
    """Do the job one message at a time, the slow and obvious way: (results, errors)."""
    import json
    from datetime import datetime

    results: Rows = []
    errors: Rows = []
    newest: dict[int, int] = {}
    windows: dict[tuple[str, int], list[float]] = {}
    emitted: dict[tuple[str, int], int] = {}

    def emit(reason: str, window: tuple[str, int]) -> None:
        delays = windows[window]
        revision = emitted.get(window, -1) + 1
        emitted[window] = revision
        results.append(
            {
                "origin": window[0], "window_start": window[1], "reason": reason, "revision": revision,
                "flights": len(delays), "mean": sum(delays) / len(delays), "worst": max(delays),
                "typical": statistics.median(delays),
            }
        )  # fmt: skip

    for row in messages.to_pylist():
        value, partition = json.loads(row["value"]), row["partition"]
        at = {"partition": partition, "offset": row["offset"]}
        if value["delay"] == "NA":
            errors.append({**at, "reason": "malformed"})
            continue
        time = int(datetime.fromisoformat(value["scheduled"]).timestamp() * 1000)
        window = (value["origin"], time // HOUR_MS * HOUR_MS)
        before = newest.get(partition, -1)
        if before >= window[1] + 7 * HOUR_MS:
            errors.append({**at, "reason": "out_of_retention"})
            continue
        newest[partition] = max(before, time)
        for other in sorted(windows):
            if other[0] == window[0] and other not in emitted and other[1] + HOUR_MS <= time:
                emit("full", other)
        windows.setdefault(window, []).append(float(value["delay"]))
        if before >= window[1] + HOUR_MS:
            emit("late", window)
    for window in sorted(windows):
        if window not in emitted:
            emit("drain", window)
    return results, errors


def write(rows: Rows, directory: Path) -> None:
    table = pa.Table.from_pylist(rows)
    if "window_start" in table.schema.names:
        times = table["window_start"].cast(pa.timestamp("ms", tz="UTC"))
        table = table.set_column(table.schema.get_field_index("window_start"), "window_start", times)
    directory.mkdir(parents=True)
    pq.write_table(table, directory / "part.parquet")


def damaged(results: Rows, errors: Rows) -> tuple[Rows, Rows]:
    """Do one thing of each kind: five windows are wrong (one of them is too many), three errors, two rows are twice."""
    revised = {(row["origin"], row["window_start"]) for row in results if row["revision"] > 0}
    single = [row for row in results if row["reason"] == "full" and (row["origin"], row["window_start"]) not in revised]
    rest = [row for row in results if row not in single[:5]]
    fewer, median, mean, _missing, twice = single[:5]
    results = [
        *rest,
        {**fewer, "flights": fewer["flights"] - 1},
        {**median, "typical": median["typical"] + 1},
        {**mean, "mean": mean["mean"] + 1e-6},
        twice,
        twice,
        {**twice, "window_start": 0},
    ]
    _gone, again, other, *kept = errors
    return results, [*kept, again, again, {**other, "reason": "in_future"}, {**other, "offset": 0}]


def test_the_proof_holds_for_the_right_output_and_counts_each_damage(spark: Any, tmp_path: Path) -> None:
    messages = make_archive(tmp_path / "archive", days=4)
    results, errors = replay(messages)
    assert {row["reason"] for row in errors} == {"malformed", "out_of_retention"}
    assert {row["reason"] for row in results} == {"full", "late", "drain"}

    def judge(name: str, results: Rows, errors: Rows) -> Proof:
        write(results, tmp_path / name / "results")
        write(errors, tmp_path / name / "errors")
        where = tmp_path / name
        archive, size, retention = tmp_path / "archive", HOUR_MS, 6 * HOUR_MS
        return prove(spark, archive, where / "results", where / "errors", size_ms=size, retention_ms=retention)

    right = judge("right", results, errors)
    assert right.holds, right
    assert right.messages == messages.num_rows
    assert right.malformed + right.too_late == right.errors.total == len(errors)
    assert right.late == sum(row["reason"] == "late" for row in results)
    wrong = judge("wrong", *damaged(results, errors))
    assert not wrong.holds
    assert (wrong.windows.total, wrong.windows.equal) == (right.windows.total + 1, right.windows.total - 4)
    assert (wrong.full.total - wrong.full.equal) >= 5
    assert (wrong.errors.total, wrong.errors.equal) == (len(errors) + 2, len(errors) - 1)
    assert wrong.duplicates == 2
    assert len(wrong.windows.samples) == 5
