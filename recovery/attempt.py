"""One task attempt on one shard: it runs the micro-batch, queues it, or adopts what was queued. No Spark in here.

Spark commits a micro-batch after its tasks ran and may run a task twice, so an attempt never changes the database with
what is not committed: it *confirms* (ingests) what the pointer names, and *stages* what it made itself. The pointer it
returns goes into Spark's state; if Spark commits it, the next attempt confirms, else it never happened.

Spark's processor, the operator tester and the simulation all drive this module, so what is tested is what runs.
"""

from __future__ import annotations

import uuid
from base64 import b64encode
from collections.abc import Callable

from backend.batch import Position, Positions, SourcePartition
from backend.errors import PointerDamaged, StateCorrupted, StateUnavailable
from recovery.commit.pointer import Commit, Pointer, RestoringPointer, encode
from recovery.jobs import ShardJob
from recovery.killpoints import kill_point
from recovery.operate import Done, Share, run
from recovery.queue.entries import Queue, read_queue
from recovery.queue.seals import DECISION, Decision
from recovery.share import ShardInput

TAKEOVER_BYTES = 1 << 27
"""What a task fetches of snapshots at most, where it may queue its input instead: about a second of a fast network."""


def positions_of(pointer: Pointer | None) -> dict[SourcePartition, Position]:
    """Give the committed positions."""
    return {(s, p): position for s, p, position in pointer.positions} if pointer is not None else {}


def run_attempt(
    job: ShardJob,
    pointer: Pointer | None,
    version: int,
    read: Callable[[Positions], ShardInput],
) -> Done:
    """Run one attempt of micro-batch `version` on a shard.

    Args:
        job: The shard and its operator.
        pointer: What Spark's state holds: the committed pointer, None before the first commit.
        version: Spark's batch id.
        read: Gives the shard's input, told the committed positions.

    Returns:
        The new pointer and the outcome; the staged file and the changelog record are durable.

    Raises:
        StateUnavailable: The state that the pointer names is not here and cannot be fetched.
        StateAhead: The local state is newer than the pointer; nothing was touched.
        StateCorrupted: The local state is damaged; it is put aside, the next attempt does not use it.
        PointerDamaged: The pointer is another shard's.
        StorageFailed: A disk or filesystem refused; nothing that is committed was touched.
    """
    if pointer is not None and pointer.shard != job.shard:
        raise PointerDamaged(
            "the pointer in Spark's state is another shard's",
            where=job.where,
            why=f"it is of shard {pointer.shard}",
            command="rewind verify <checkpoint>",
        )
    positions = positions_of(pointer)
    given = read(positions)
    queue, queued = job.queue, list[Share]()
    runs, may_queue, most_bytes, why = True, False, None, ""
    if queue is not None and isinstance(pointer, RestoringPointer):
        sealed = queue.decided(job.shard, version)
        # where a queue has begun it was planned before anybody asked to adopt it: that is no refusal
        runs = sealed is not Decision.QUEUED and given.adopt == pointer.since.commit.name
        may_queue = sealed is not Decision.ADOPTED
        queued = _queued(queue, pointer, version) if runs else []
    elif queue is not None and pointer is not None:
        runs = queue.decided(job.shard, version) is not Decision.QUEUED
        why = "the micro-batch was queued when it ran before"
        may_queue = queue.may_begin(version)
        most_bytes = TAKEOVER_BYTES if may_queue else None
    if runs:
        own = Share(version, job.operator, positions, lambda: given)
        try:
            return run(job, pointer, version, [*queued, own], most_bytes)
        except (StateUnavailable, StateCorrupted) as error:
            if not may_queue:
                raise
            why = f"{error.what}: {error.why}" if error.why else error.what  # nobody need do anything
    assert queue is not None and pointer is not None, "else it runs, or fails"
    kill_point("before_queue", version)
    new = queue.put(pointer, version, given, Commit(version, uuid.uuid4().hex))
    kill_point("after_queue", version)
    metrics: dict[str, float | str] = {
        DECISION: Decision.QUEUED.value,
        "queued": new.queued,
        "queued_bytes": new.queued_bytes,
        "since": b64encode(encode(new.since)).decode(),
        "drained": new.drained,
        **({"queued_why": why} if why else {}),
    }
    return Done(new, [], metrics)


def _queued(queue: Queue, pointer: RestoringPointer, version: int) -> list[Share]:
    """Read what is to be run before the micro-batch that adopts it, each under its own options."""
    entries = read_queue(queue.files, pointer)
    kill_point("before_adopt", version)
    return [Share(e.commit.version, queue.operators.at(e.commit.version), e.positions, e.given) for e in entries]
