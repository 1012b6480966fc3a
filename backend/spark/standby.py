"""A start's part in the standby: a round of copies is a Spark job of a thread of its own, which can be cancelled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from backend.spark.session.jvm import Executors, context_of
from recovery.commit.manifest import query_id
from recovery.commit.pointer import Commit, state_of
from recovery.jobs import ShardJob
from recovery.restore.all_shards import POOL
from recovery.restore.replay import read_pointers
from recovery.restore.standby import Round, keep_copies
from recovery.supervise.placement import Placement
from recovery.supervise.standby import Standby

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def standby_of(
    spark: SparkSession, checkpoint: str, make: Callable[[str, int], ShardJob], shards: int, used: bool
) -> Standby:
    """Return what keeps copies of a query's shards on other hosts.

    Args:
        spark: The session.
        checkpoint: Spark's checkpoint location.
        make: Makes the job of a shard, as in the processor.
        shards: Their number.
        used: Whether the checkpoint was started before, so that shards may have committed something.
    """
    group, context = f"rewind-standby {checkpoint}", context_of(spark)
    known = read_pointers(spark, checkpoint, shards) if used else {}

    def copy(commits: Mapping[int, Commit]) -> Round:
        context.setJobGroup(group, "copies of shards on other hosts")
        context.setLocalProperty("spark.scheduler.pool", POOL)
        return keep_copies(spark, partial(make, query_id(checkpoint)), commits)

    committed = {shard: state_of(pointer).commit for shard, pointer in known.items()}
    placement = Placement(Executors(spark), shards) if context.master.partition("[")[0] != "local" else None
    return Standby(copy, committed, partial(context.cancelJobGroup, group), placement)
