"""The job of a shard as executors make it: a light module, because every Python worker imports it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from backend.batch import Operator
from recovery.changelog import Changelog, open_changelog
from recovery.changelog import message_log as logged_messages
from recovery.changelog.message_log import MessageLog
from recovery.commit.option_sets import ByVersion
from recovery.commit.spark_files import planned_time
from recovery.files import Files, open_files
from recovery.queue.entries import DIRECTORY, Queue
from recovery.queue.seals import Decision
from recovery.snapshots.publisher import Snapshots

SNAPSHOTS_DIRECTORY = "rewind/snapshots"
INCARNATIONS = "rewind/launches.json"
_INCARNATIONS_FORMAT = 1
_MAX_STARTS = 100
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


@dataclass(frozen=True, slots=True)
class ShardJob:
    """What every attempt on a shard of one query needs.

    Attributes:
        query_id: Spark's query id.
        shard: The shard.
        local_dir: Local state of all queries on this host.
        operator: The stateful operator.
        message_fields: Arrow fields of the operator's input, in the order in which frames carry them.
        changelog: Where commits are logged.
        snapshots: Copies on the checkpoint's filesystem: where restored and moved shards come from.
        snapshot_every: Publish each staged file, and a whole snapshot every so many commits; None publishes nothing.
        retain: Staged files kept behind the committed version, for stale copies.
        lock_wait_s: Bound on waiting for the shard's lock.
        incarnation: Number of the query's start that the task belongs to, see `CommitRecord`.
        queue: Where the shard's input waits while its state is restored; None where nothing is queued.
        message_log: Where messages are logged that cannot be read again; None where there are none to keep.
    """

    query_id: str
    shard: int
    local_dir: Path
    operator: Operator
    message_fields: tuple[pa.Field, ...]
    changelog: Changelog
    snapshots: Snapshots | None = None
    snapshot_every: int | None = None
    retain: int = 2
    lock_wait_s: float = 30.0
    incarnation: int = 0
    queue: Queue | None = None
    message_log: MessageLog | None = None

    @property
    def where(self) -> str:
        """Name the shard in errors."""
        return f"shard {self.shard} of query {self.query_id}, {self.local_dir}"


def snapshots(checkpoint: str) -> Snapshots:
    """Give the snapshots beside a checkpoint."""
    return Snapshots(f"{checkpoint.rstrip('/')}/{SNAPSHOTS_DIRECTORY}")


def queue_files(checkpoint: str) -> Files:
    """Return the directory of the entries that shards queued."""
    return open_files(f"{checkpoint.rstrip('/')}/{DIRECTORY}")


def message_log(checkpoint: str, streams: frozenset[int]) -> MessageLog:
    """Give the message log beside a checkpoint.

    Args:
        checkpoint: Spark's checkpoint location.
        streams: Streams whose messages are logged.
    """
    return MessageLog(f"{checkpoint.rstrip('/')}/{logged_messages.DIRECTORY}", streams)


def shard_job(
    local_dir: Path,
    checkpoint: str,
    changelog_uri: str,
    operator: Operator,
    message_fields: tuple[pa.Field, ...],
    retain: int,
    snapshot_every: int | None,
    query_id: str,
    shard: int,
    *,
    owner: str = "",
    logged: frozenset[int] = frozenset(),
) -> ShardJob:
    """Make the job of one shard; all but `query_id` and `shard` are the same for every shard of a query.

    Args:
        local_dir: See `place`.
        checkpoint: Where snapshots of restored or moved shards are.
        changelog_uri: For `open_changelog`.
        operator: The stateful operator.
        message_fields: Arrow fields of its input.
        retain: Staged files kept behind the committed version.
        snapshot_every: See `ShardJob`.
        query_id: Spark's query id.
        shard: The shard.
        owner: The query in the manifest, whose changelog it is.
        logged: Streams whose messages are logged.
    """
    return ShardJob(
        query_id=query_id,
        shard=shard,
        local_dir=place(local_dir, shard),
        operator=operator,
        message_fields=message_fields,
        changelog=open_changelog(changelog_uri, owner),
        snapshots=snapshots(checkpoint),
        snapshot_every=snapshot_every,
        retain=retain,
        message_log=message_log(checkpoint, logged) if logged else None,
    )


def place(local_dir: Path, shard: int) -> Path:
    """Give the directory of a shard's local state on this executor.

    Args:
        local_dir: Local state of all queries on the host, where all executors that are given the same one share it.
            `$NAME` is that of the environment where this is called; of a list of directories, as Spark gives an
            executor in `SPARK_EXECUTOR_DIRS`, each shard takes one. A variable that is not set stays, and is refused
            later.
        shard: The shard.
    """

    def value(found: re.Match[str]) -> str:
        text = os.environ.get(found.group(1) or found.group(2))
        paths = text.split(os.pathsep) if text else [found.group(0)]
        return paths[shard % len(paths)]

    return Path(_VARIABLE.sub(value, str(local_dir)))


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One start of a query, as its tasks know it.

    Attributes:
        checkpoint: Spark's checkpoint location.
        number: See `CommitRecord`.
        operators: The operator by version.
        queues: See `Queue.begins`.
        planned: See `Queue`.
        sealed: See `Queue`.
    """

    checkpoint: str
    number: int
    operators: ByVersion[Operator]
    queues: bool
    planned: int
    sealed: Mapping[int, Decision]

    def job(self, make: Callable[[str, int], ShardJob], query_id: str, shard: int, version: int) -> ShardJob:
        """Make the job of one shard in one micro-batch, for the tasks of this start.

        A task opens the queue's files itself: what the driver opened would bring the driver's credentials.

        Args:
            make: Makes the job of a shard under the options of today.
            query_id: Spark's query id.
            shard: The shard.
            version: The micro-batch.
        """
        files, operator = queue_files(self.checkpoint), self.operators.at(version)
        queue = Queue(files, self.operators, self.queues, self.planned, dict(self.sealed))
        return replace(make(query_id, shard), operator=operator, incarnation=self.number, queue=queue)


def next_incarnation(checkpoint: str, planned: int) -> int:
    """Count the starts of a query, restarts by the supervisor too; durable on return.

    `<checkpoint>/rewind/launches.json` (format 1): `{"format": 1, "launch": 7, "planned": [[6, 40, 1767225600000]]}`,
    where `planned` is what `planned_at` gives with the time of each start, and was not written before release 0.2. What
    cannot be read counts as none: then a database that is ahead looks like a zombie's again, which the supervisor copes
    with. A start after which the checkpoint was put back is left out: what comes next was planned before it.

    Args:
        checkpoint: Spark's checkpoint location.
        planned: The newest micro-batch that Spark has planned or committed, -1 before the first.
    """
    files = open_files(checkpoint)
    last, starts = _starts(files)
    before = [start for start in starts if start[1] < planned][1 - _MAX_STARTS :]
    while before and (next_ms := planned_time(checkpoint, before[-1][1] + 1)) is not None and next_ms < before[-1][2]:
        before.pop()
    now_ms = time.time_ns() // 1_000_000
    found = {"format": _INCARNATIONS_FORMAT, "launch": last + 1, "planned": [*before, (last + 1, planned, now_ms)]}
    files.write(INCARNATIONS, [json.dumps(found).encode()])
    return last + 1


def planned_at(checkpoint: str) -> list[tuple[int, int]]:
    """Return (incarnation, newest micro-batch that was planned then) of starts, both rising.

    A commit of an earlier incarnation and a later micro-batch is not committed: Spark was taken back before it. A start
    that a later one at the same or an earlier micro-batch says as much as is left out, and so are all but the newest.
    """
    return [(number, planned) for number, planned, _ in _starts(open_files(checkpoint))[1]]


def _starts(files: Files) -> tuple[int, list[tuple[int, int, int]]]:
    """Read the number of the newest start, 0 for none, and what `planned_at` gives with the time of each, in ms."""
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        found = json.loads(files.read(INCARNATIONS))
        if found["format"] == _INCARNATIONS_FORMAT:
            starts = [(*start, 0)[:3] for start in found.get("planned", [])]  # at first without the time
            return int(found["launch"]), [(int(number), int(version), int(at)) for number, version, at in starts]
    return 0, []
