"""A start's part in the standby: a round of copies is a Spark job of a thread of its own, which can be cancelled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from backend.spark.session.jvm import Executors, context_of, is_local
from recovery.commit.manifest import query_id
from recovery.commit.pointer import Commit, state_of
from recovery.jobs import ShardJob
from recovery.restore.all_shards import POOL
from recovery.restore.replay import read_pointers
from recovery.restore.standby import Disks, Round, keep_copies
from recovery.supervise.placement import Placement
from recovery.supervise.standby import Standby

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXECUTOR_DIRS = "$SPARK_EXECUTOR_DIRS"
"""In `local_dir`: directories that an executor has for itself, and that go with it."""


def standby_of(
    spark: SparkSession,
    checkpoint: str,
    make: Callable[[str, int], ShardJob],
    shards: int,
    used: bool,
    option: int,
    local_dir: Path,
) -> Standby | None:
    """Return what keeps copies of a query's shards on other hosts, and sees to those whose executor is gone.

    Args:
        spark: The session.
        checkpoint: Spark's checkpoint location.
        make: Makes the job of a shard, as in the processor.
        shards: Their number.
        used: Whether the checkpoint was started before, so that shards may have committed something.
        option: `standby` of `start`: 1 keeps copies all the time; 0 only of shards that are to be given back to a new
            executor, on its disk.
        local_dir: Local state, with variables.

    Returns:
        None where there is nothing to see to: no cluster, and no copies are wanted.
    """
    context = context_of(spark)
    always, local = option == 1, is_local(spark)
    if local and not always:
        return None
    known = read_pointers(spark, checkpoint, shards) if used and always else {}

    start, rounds = uuid4().hex, [0]

    def group_of_round() -> str:
        return f"rewind-standby {checkpoint} {start} {rounds[0]}"

    def copy(commits: Mapping[int, Commit]) -> Round:
        rounds[0] += 1
        context.setJobGroup(group_of_round(), "copies of shards on other hosts")
        context.setLocalProperty("spark.scheduler.pool", POOL)
        where = Disks.ALL if always else Disks.NEW
        return keep_copies(spark, partial(make, query_id(checkpoint)), commits, where)

    committed = {shard: state_of(pointer).commit for shard, pointer in known.items()}
    executors = Executors(spark)
    return Standby(
        copy,
        committed,
        cancel=lambda: context.cancelJobGroup(group_of_round()),
        ran=lambda: executors.ran(group_of_round()),
        placement=None if local else Placement(executors, shards, own_disks=EXECUTOR_DIRS in str(local_dir)),
        always=always,
    )
