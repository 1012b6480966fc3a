"""A zombie: an attempt with an old pointer that comes back after its shard has gone on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from backend.errors import RewindError
from recovery.attempt import ShardInput, run_attempt
from recovery.drill_job import CHECKPOINT, LOCAL
from recovery.pointer import Pointer
from recovery.survey import Checkpoint
from recovery.user_job import job_of, shard_maker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from backend.spark.stream import Pipeline

BACK = 2
"""How many commits a zombie is behind."""


def late_attempts(spark: SparkSession, pipeline: Pipeline, out: Path) -> dict[int, str]:
    """Let an old attempt of every shard run again, and give what became of each: the code of an error, or `ran`."""
    checkpoint = Checkpoint(str(out / CHECKPOINT), out / LOCAL)
    make = partial(shard_maker(checkpoint, job_of(pipeline, spark, checkpoint.manifest)), checkpoint.query_id)
    outcomes = {}
    for shard in checkpoint.shards:
        commit = checkpoint.committed(shard)
        if commit is None:
            continue
        ancestors = checkpoint.changelog.read(shard, commit).record.ancestors
        if len(ancestors) < BACK:
            continue
        old = checkpoint.changelog.read(shard, ancestors[BACK - 1]).record
        pointer = Pointer(shard, old.commit, old.parent, 0, "", old.positions, old.bounds, "")
        given = ShardInput(old.time_ms, None, {(s, p): position for s, p, position in old.positions})
        try:
            run_attempt(make(shard), pointer, old.commit.version + 1, lambda before, it=given: it)  # type: ignore[misc]
            outcomes[shard] = "ran"
        except RewindError as error:
            outcomes[shard] = error.code
    return outcomes
