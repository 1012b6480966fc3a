"""Random disturbances of a played Spark change nothing: the same rows with the same ids, each once, the same state."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.model.planned_options import KINDS
from tests.support.played_spark import compare

RUNS = int(os.environ.get("QUEUE_RUNS", "120"))
FIRST = int(os.environ.get("QUEUE_FIRST", "0"))
RARE = (
    "shard queued",
    "shard adopted",
    "shard queued rather than fetch",
    "restored beside the query",
    "disk lost",
    "two attempts of one task",
    "result of a task lost",
    "shard moved to another host",
    "staged file damaged",
    "snapshot lost after the row was asked for",
    "entry lost",
    "entries made again from the source",
    "row of the control stream that means nothing",
    "driver died before it sealed",
    "driver died between seal and publication",
    "driver died between publication and commit",
    "published micro-batch ran again",
    "committed micro-batch ran again",
    "query started again",
    "late attempt of a zombie",
    "zombie stopped: StateAhead",
    "died in an attempt",
    "died in a restore",
    "the query stopped to restore",
    "restored with no task running",
    "pruned",
    *KINDS,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hopping", "join", "process"])
def test_a_disturbed_run_equals_the_undisturbed_one(kind: str, tmp_path: Path) -> None:
    assert compare(1_000, tmp_path, kind)["rows"]


@pytest.mark.long
@pytest.mark.timeout(1800)  # each run has a disk of its own, and waits for it
def test_random_disturbances_change_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    seen: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + RUNS):
        seen += compare(seed, tmp_path_factory.mktemp("played"))
    print("\n".join(f"{count:7d}  {what}" for what, count in sorted(seen.items())))
    assert [what for what in RARE if not seen[what]] == []
