"""Shards that move between executors with a disk each: at every micro-batch, and because executors die.

The query goes on all the while, and the results are those of plain loops over the messages. A move costs what changed.
`MOVES=50` lets a shard move so often, and prints what each move cost (`-s`).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from backend.sources.archive_files import write_archive
from bench.data import TIME, topic_rows, typed
from recovery.restore.tries import moves
from tests.support.moving_job import KILLS, SNAPSHOT_EVERY

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
START_MS, SIZE_MS = 1_700_000_000_000, 10_000
ROWS = 300
MICRO_BATCHES = {"few": int(os.environ.get("MOVES", "8")), "many": 12}
Told = dict[str, list[dict[str, Any]]]


def make(directory: Path, rows: int) -> list[tuple[str, int, int]]:
    """Write an archive of one source partition; give its (key, event time, x)."""
    random = np.random.default_rng(11)
    keys = [f"k{number}" for number in random.integers(0, 40, rows)]
    times = (np.sort(random.integers(0, rows * 20, rows)) + START_MS).tolist()
    values = random.integers(0, 1000, rows).tolist()
    value = typed(key=pa.array(keys), at=pa.array(times, TIME), x=pa.array(values))
    write_archive(directory, topic_rows(0, 0, np.array(times), value), rows_per_file=rows, row_group_rows=rows)
    return list(zip(keys, times, values, strict=True))


def expected(messages: list[tuple[str, int, int]]) -> dict[tuple[str, int], tuple[int, int, float]]:
    """Count, sum and median per key and window, by plain loops."""
    windows: dict[tuple[str, int], list[int]] = defaultdict(list)
    for key, time, value in messages:
        windows[key, time // SIZE_MS * SIZE_MS].append(value)
    return {where: (len(v), sum(v), float(statistics.median(v))) for where, v in windows.items()}


def found(results: Path) -> tuple[dict[tuple[str, int], tuple[int, int, float]], int]:
    """Give the newest row of each window, and how many rows had one of the same id before them."""
    rows = ds.dataset(results, format="parquet", partitioning=None).to_table().to_pylist()
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (row["version"], row["sequence"])):
        newest[row["key"], int(row["window_start"].timestamp() * 1000)] = row
    doubled = len(rows) - len({row["id"] for row in rows})
    return {where: (row["n"], row["total"], row["typical"]) for where, row in newest.items()}, doubled


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moving")


@pytest.fixture(scope="module")
def messages(home: Path) -> dict[str, list[tuple[str, int, int]]]:
    return {name: make(home / name, ROWS * number) for name, number in MICRO_BATCHES.items()}


def run(home: Path, job: str) -> list[dict[str, Any]]:
    """Run jobs in a process; give what they told."""
    command = [sys.executable, "-m", "tests.support.moving_job", str(home), str(ROWS), job]
    with (home / "log").open("w") as log:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=log,
            text=True, check=False, timeout=540 + 10 * MICRO_BATCHES["few"],
        )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        del line["at"]
    if done.returncode != 0:  # a JVM's stacks fill any tail of the log: what is said between them
        said = [line for line in (home / "log").read_text().splitlines() if not line.startswith("\tat ")]
        print("\n".join(line[:1000] for line in said[-200:]))
    assert done.returncode == 0, lines[-1:]
    return lines


@pytest.fixture(scope="module")
def told(home: Path, messages: dict[str, Any]) -> Told:
    """Run the jobs; give what they told, by job."""
    lines = run(home, "moving") + run(home, "placed") + run(home, "returned")
    ends = [at + 1 for at, line in enumerate(lines) if line["event"] == "ended"]
    parts = [lines[low:high] for low, high in pairwise([0, *ends])]
    return {part[-1]["job"]: part for part in parts}


def test_a_shard_alternates_between_two_executors_at_every_micro_batch(
    home: Path, told: Told, messages: dict[str, Any]
) -> None:
    published = [line for line in told["alternate"] if line["event"] == "published"]
    # after the data there may be a micro-batch in which no shard takes part: it has its turn all the same
    published = published[: MICRO_BATCHES["few"]]
    held = [line["held"] for line in published]
    for line in published:
        moved, staged = (line["shards"][0][name] for name in ("fetched_bytes", "staged_bytes"))
        print(
            f"micro-batch {line['version']}: {moved:,} bytes moved, {staged:,} staged, {line['state_bytes']:,} of state"
        )
    assert len(set(held)) == 2
    assert all(a != b for a, b in pairwise(held)), "another executor each time"
    shards = [line["shards"][0] for line in published]
    how = [[(one.how, one.failed) for one in moves(shard)] for shard in shards]
    assert how[0] == []
    assert how[1] in ([("snapshot", "")], [("steps", "")]), "the first move brings everything"
    assert all(one == [("steps", "")] for one in how[2:]), "later ones what the other executor staged"
    fetched = [shard["fetched_bytes"] for shard in shards]
    assert fetched[2:] == [shard["staged_bytes"] for shard in shards[1:-1]]
    assert told["alternate"][-1] == {"event": "ended", "job": "alternate", "same": True, "restores": 0}
    assert found(home / "alternate" / "results") == (expected(messages["few"]), 0)


def test_executors_die_in_turn_and_the_query_goes_on(home: Path, told: Told, messages: dict[str, Any]) -> None:
    kills = [line for line in told["kill"] if line["event"] == "killed"]
    print(*(f"time without results: {line['without_results_s']:.1f} s" for line in kills), sep="\n")
    assert [line["left"] for line in kills] == [1, 0], "each time another one"
    assert told["kill"][-1] == {"event": "ended", "job": "kill", "same": True, "restores": 0}
    assert found(home / "kill" / "results") == (expected(messages["many"]), 0)
    published = [line for line in told["kill"] if line["event"] == "published"]
    moved = [line["version"] for line in published for shard in line["shards"] if moves(shard)]
    assert {version for version in moved if version > KILLS[0]}, "somebody took over what was lost"
    snapshots = [path.name for path in (home / "kill").glob("checkpoint/rewind/snapshots/*/*.full.json")]
    assert len(snapshots) > MICRO_BATCHES["many"] // SNAPSHOT_EVERY


def test_who_takes_over_with_a_copy_fetches_no_whole_package(home: Path, told: Told, messages: dict[str, Any]) -> None:
    [killed] = [line for line in told["standby"] if line["event"] == "killed"]
    assert killed["copied"] > 0
    published = {line["version"]: line for line in told["standby"] if line["event"] == "published"}
    taken = [move for shard in published[killed["version"]]["shards"] for move in moves(shard)]
    print(f"copies were given {killed['copied']:,} bytes; taken over in micro-batch {killed['version']}: {taken}")
    assert [move.how for move in taken if move.how != "steps"] == []
    assert told["standby"][-1] == {"event": "ended", "job": "standby", "same": True, "restores": 0}
    assert found(home / "standby" / "results") == (expected(messages["many"]), 0)


def test_a_shard_of_a_dead_executor_runs_at_once_where_its_copy_is(
    home: Path, told: Told, messages: dict[str, Any]
) -> None:
    ended = told["placed"][-1]
    [left] = ended["left"]
    assert left in ended["before"]
    assert set(ended["before"]) != {left}
    assert ended["after"] == [left, left], "not on the executor that came in its place, and not held back for it"
    assert ended["restores"] == 0
    assert ended["copied"][0] == 0 < ended["copied"][1]
    # at its own start the query is placed anew: only what the death made move is told by this
    since = [line for line in told["placed"] if line["event"] == "published" and line["version"] > ended["died_after"]]
    assert since
    assert {move.how for line in since for shard in line["shards"] for move in moves(shard)} <= {"steps"}
    assert found(home / "placed" / "results") == (expected(messages["many"]), 0)


def test_without_copies_a_shard_runs_on_the_executor_that_is_left_and_is_given_back_later(
    home: Path, told: Told, messages: dict[str, Any]
) -> None:
    ended = told["returned"][-1]
    published = [line for line in told["returned"] if line["event"] == "published"]
    log = (home / "log").read_text().splitlines()
    print(*(line[:300] for line in log if "shard" in line or "executor" in line), sep="\n")
    print(ended, *((line["version"], [moves(shard) for shard in line["shards"]]) for line in published), sep="\n")
    assert ended["same"], "Spark's query was started again: where its shards run then says nothing of the executor"
    assert set(ended["taken"]) == {ended["left"]}, "it does not wait for the executor that is to come"
    assert sorted(one == ended["left"] for one in ended["returned"]) == [False, True]
    assert ended["restores"] == 0
    assert ended["copied"] > 0, "the new disk was given a copy first"
    since = [line["shards"] for line in published if line["version"] > ended["returned_after"]]
    assert since
    assert {move.how for shards in since for shard in shards for move in moves(shard)} <= {"steps"}
    assert found(home / "returned" / "results") == (expected(messages["many"]), 0)
