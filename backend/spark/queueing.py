"""A start's part in the queue: what a launch hands to its tasks, and what comes between tasks and publication."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from backend.batch import Operator
from backend.sinks.sealing import unsealed
from backend.spark.resume import newest_planned
from backend.spark.session.jvm import speculates
from recovery.commit.lease import Lease
from recovery.commit.option_sets import ByVersion, versions_in
from recovery.jobs import Incarnation, next_incarnation
from recovery.killpoints import kill_point
from recovery.queue.seals import decisions_in, prune_seals, read_seal, write_seal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from backend.sinks import Sink
    from backend.sinks.sealing import Seal

DEFAULT_QUEUE_BYTES = 1 << 27
log = logging.getLogger("rewind.start")


def queue_limit(spark: SparkSession, sink: Sink, option: str | int | None) -> int | None:
    """Give how many bytes a shard may queue; None where the query stops for a restore instead.

    Args:
        spark: The session.
        sink: As it is before a start opens it.
        option: The option `queue_bytes` of `start`; None is `DEFAULT_QUEUE_BYTES` where the job can queue at all.

    Raises:
        ValueError: The option asks for what cannot be; names it.
    """
    if option == "off":
        return None
    try:
        if speculates(spark):
            raise ValueError(
                f"queue_bytes={option!r}: under spark.speculation='true' a second attempt elsewhere would find no"
                " state and queue: allowed is 'off', or spark.speculation='false'"
            )
        seal_by(sink, unsealed)
    except ValueError as error:
        if option is not None:
            raise
        log.info("the query stops when a shard is to be restored: %s", error)
        return None
    return DEFAULT_QUEUE_BYTES if option is None else int(option)


def incarnation_of(checkpoint: str, operators: ByVersion[Operator], queues: bool) -> Incarnation:
    """Count a start of the query, and read what binds the tasks of the micro-batch that it runs again.

    Args:
        checkpoint: Spark's checkpoint location.
        operators: The operator by version.
        queues: Whether shards may begin to queue.
    """
    commits, planned = versions_in(checkpoint, "commits"), newest_planned(checkpoint)
    prune_seals(checkpoint, min(commits, default=0), planned)
    again = planned if planned > max(commits, default=-1) else -1
    number = next_incarnation(checkpoint, max([planned, *commits]))
    return Incarnation(checkpoint, number, operators, queues, again, read_seal(checkpoint, again))


def seal_by(sink: Sink, function: Seal) -> None:
    """Have a sink call a function between the tasks of a micro-batch and its publication.

    Raises:
        ValueError: The sink does not, or lets tasks publish.
    """
    take = getattr(sink, "seal_by", None)
    if take is None:
        raise ValueError(f"sink={sink!r}: a sink without seal_by() cannot publish while shards queue their input")
    take(function)


class Sealing:
    """Has a sink seal what shards decide, from the first start of a query on that may need it.

    Args:
        sink: The sink.
        lease: Of the checkpoint.
        restoring: Whether shards queue by what was committed before.
    """

    def __init__(self, sink: Sink, lease: Lease, restoring: bool) -> None:
        self._sink, self._lease, self._needed = sink, lease, restoring

    def begin(self, started: Incarnation) -> None:
        """Seal for a start of the query from now on.

        Raises:
            ValueError: The sink cannot, see `seal_by`.
        """
        # what queued in a micro-batch that runs again queues again, also where nothing may begin to, and adopts later
        self._needed = self._needed or started.queues or bool(started.sealed)
        # also a driver before, which stood still, may yet seal what this one runs again
        seals = self._needed or started.planned >= 0
        try:  # without a seal too: another query that it wrote for has left its own there
            seal_by(self._sink, partial(seal, started, self._lease) if seals else unsealed)
        except ValueError:
            if self._needed:
                raise


def seal(started: Incarnation, lease: Lease, version: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write down what shards decided in a micro-batch.

    Raises:
        CheckpointTaken: A newer start has taken the checkpoint over.
    """
    decided = decisions_in(rows)
    if decided or version == started.planned:
        lease.check()
        kill_point("before_seal", version)
        write_seal(started.checkpoint, version, started.number, decided)
        lease.check()  # who takes over from here on reads the seal; who did before knows nothing of it
        kill_point("after_seal", version)
