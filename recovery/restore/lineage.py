"""See at a start that the changelog can still give every shard back, or that the state itself is there.

A changelog may have been emptied, deleted, cut by somebody's retention, or another one may be named: nobody reads it
until a restore needs it, and then it is too late. So a start compares it with the pointers that Spark has committed.
Where it lacks a shard's lineage and the shard's state is whole, the tasks append a complete base before their next
commit (`recovery.operate`); where neither is there, the start ends before Spark plans anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING

from backend.errors import HistoryLost
from recovery.changelog import Changelog
from recovery.commit.manifest import query_id
from recovery.commit.pointer import Pointer, RestoringPointer, state_of
from recovery.jobs import ShardJob
from recovery.restore.probe import probe

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("rewind.changelog")


def check_lineage(
    spark: SparkSession,
    checkpoint: str,
    changelog: Changelog,
    committed: Mapping[int, Pointer | RestoringPointer],
    make: Callable[[str, int], ShardJob],
) -> dict[int, str]:
    """Check that each shard's committed state is in the changelog, or else here; no query may be running.

    Args:
        spark: The session.
        checkpoint: Spark's checkpoint location.
        changelog: The job's.
        committed: What Spark's state holds, by shard.
        make: Makes the job of a shard, as in the processor.

    Returns:
        Shards whose lineage the changelog does not have and whose state is whole, and why; each is logged.

    Raises:
        HistoryLost: Neither is there.
    """
    pointers = {shard: state_of(one) for shard, one in committed.items()}
    found = {
        shard: changelog.lost(shard, pointer.commit, pointer.changelog, whole=True)
        for shard, pointer in sorted(pointers.items())
    }
    lost = {shard: why for shard, why in found.items() if why}
    if not lost:
        return {}
    gone = probe(spark, {shard: pointers[shard] for shard in lost}, partial(make, query_id(checkpoint)))
    if gone:
        shard = min(gone)
        raise HistoryLost(
            "the changelog has lost a shard's state, and the state itself is not here",
            where=f"shard {shard}" + (f" and {len(gone) - 1} more" if len(gone) > 1 else ""),
            why=f"{lost[shard]}; and: {gone[shard].why.partition('; next: ')[0]}",
            command="name the changelog that has it, changelog=...; where its manifest still names that one, as of a"
            f" copy, rewind restore {quote(checkpoint)} <module:function> restores from it first; rewind reset"
            f" {quote(checkpoint)} accepts the loss",
        )
    for shard, why in lost.items():
        log.warning(
            "the changelog cannot give shard %d back: its state is here, a complete base is appended before its next"
            " commit; %s",
            shard,
            why,
        )
    return lost


def based(shard: int, why: str) -> None:
    """Say in the log that a task has appended a base because the changelog had lost what it needs."""
    log.warning("the changelog could not give shard %d back: a complete base was appended; %s", shard, why)
