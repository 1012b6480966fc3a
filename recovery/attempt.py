"""One task attempt on one shard: open, plan, operate, stage, log, point. No Spark in here.

Spark commits a micro-batch after its tasks ran and may run a task twice, so an attempt never changes the database with
what is not committed: it *confirms* (ingests) what the pointer names, and *stages* what it made itself. The pointer it
returns goes into Spark's state; if Spark commits it, the next attempt confirms, else it never happened.

Spark's processor, the operator tester and the simulation all drive this module, so what is tested is what runs.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import MESSAGE_FIELDS, MicroBatch, Operator, Outcome, Position, Positions, SourcePartition
from backend.errors import PointerDamaged, StateCorrupted
from backend.rocks import RocksStore
from backend.store import LOGGED_FROM, Changes, Staged
from backend.workspace import Workspace
from recovery.changelog.protocol import Changelog
from recovery.killpoints import kill_point
from recovery.listener import RestoreListener
from recovery.opening import Opened, Opening
from recovery.package import Snapshots
from recovery.pointer import COMMIT_KEY, MAX_ANCESTORS, Commit, CommitRecord, Pointer, encode_record
from recovery.shard import ShardDirectory
from recovery.uploads import begin_upload, has_gap, is_due, upload_step


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
        packages: Copies on the checkpoint's filesystem: where restored and moved shards come from.
        snapshot_every: Publish each staged file, and a whole package every so many commits; None publishes nothing.
        listeners: Told in this process of each try to fetch something; the metrics carry the same to the driver.
        retain: Staged files kept behind the committed version, for stale copies.
        lock_wait_s: Bound on waiting for the shard's lock.
        launch: Number of the query's start that the task belongs to, see `CommitRecord`.
    """

    query_id: str
    shard: int
    local_dir: Path
    operator: Operator
    message_fields: tuple[pa.Field, ...]
    changelog: Changelog
    packages: Snapshots | None = None
    snapshot_every: int | None = None
    listeners: tuple[RestoreListener, ...] = ()
    retain: int = 2
    lock_wait_s: float = 30.0
    launch: int = 0

    @property
    def where(self) -> str:
        """Name the shard in errors."""
        return f"shard {self.shard} of query {self.query_id}, {self.local_dir}"


@dataclass(frozen=True, slots=True)
class ShardInput:
    """What an attempt is given: the shard's share of the micro-batch.

    Attributes:
        time_ms: The batch time that Spark logged.
        messages: As in `MicroBatch`; None for no rows.
        after: Positions after the micro-batch.
        in_future: (stream, partition, offset) refused against the clock: a replay must refuse them again.
        drain: The bounded input ends with this micro-batch.
    """

    time_ms: int
    messages: pa.Table | None
    after: Mapping[SourcePartition, Position]
    in_future: tuple[tuple[int, int, int], ...] = ()
    drain: bool = False


@dataclass(slots=True)
class Done:
    """What an attempt made: nothing of it counts before Spark commits the pointer."""

    pointer: Pointer
    outcome: Outcome
    metrics: dict[str, float | str] = field(default_factory=dict)


def positions_of(pointer: Pointer | None) -> dict[SourcePartition, Position]:
    """Give the committed positions."""
    return {(s, p): position for s, p, position in pointer.positions} if pointer is not None else {}


class _Watch:
    """Milliseconds per step of an attempt."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.ms[f"{name}_ms"] = round((time.perf_counter() - started) * 1000, 3)


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
    watch = _Watch()
    if pointer is not None and pointer.shard != job.shard:
        raise PointerDamaged(
            "the pointer in Spark's state is another shard's",
            where=job.where,
            why=f"it is of shard {pointer.shard}",
            command="rewind verify <checkpoint>",
        )
    before = positions_of(pointer)
    given = read(before)
    directory = ShardDirectory(job.local_dir, job.query_id, job.shard)
    with directory.lock(job.lock_wait_s):
        kill_point("open", version)
        opening = Opening(directory, job.where, job.packages, job.listeners, job.launch)
        fetched = job.packages.fetched_bytes if job.packages is not None else 0
        with watch.step("open"):
            opened = opening.at(pointer)
        try:
            done = _operate(job, directory, opened, pointer, version, given, watch)
            fetched = job.packages.fetched_bytes - fetched if job.packages is not None else 0
            ingest_ms = round(opening.ingest_s * 1000, 3)
            with watch.step("settle"):
                opened.store.settle()
            done.metrics |= {"ingest_ms": ingest_ms, "fetched_bytes": fetched, **watch.ms, **opening.told.metrics()}
            return done
        except StateCorrupted:
            directory.condemn()
            raise
        finally:
            opened.store.close()


def _operate(
    job: ShardJob,
    directory: ShardDirectory,
    opened: Opened,
    pointer: Pointer | None,
    version: int,
    given: ShardInput,
    watch: _Watch,
) -> Done:
    generation, store, row = opened.generation, opened.store, opened.row
    work = Workspace(store, row.bounds if row is not None else {})
    messages = given.messages
    if messages is None:
        messages = pa.schema([*MESSAGE_FIELDS, *job.message_fields]).empty_table()
    batch = MicroBatch(version, given.time_ms, messages, positions_of(pointer), given.after, given.drain)
    with watch.step("operate"):
        outcome = job.operator.process(batch, work)
    commit = Commit(version, uuid.uuid4().hex)
    record = _record(job, commit, row, given, work, outcome)
    changes = work.changes()
    with watch.step("stage"):
        kill_point("before_stage", version)
        whole = Changes([COMMIT_KEY, *changes.keys], [encode_record(record), *changes.values], changes.bounds)
        staged = store.stage(whole, generation.staged(commit), midway=partial(kill_point, "during_stage", version))
        kill_point("after_stage", version)
    with watch.step("changelog"):
        kill_point("before_changelog", version)
        _log_base(job, store, row)
        logged = job.changelog.append(record, changes)
    with watch.step("upload"):
        uploaded = _upload(job, opened, record, staged)
        kill_point("after_changelog", version)
    if pointer is not None:
        kill_point("prune", version)
        directory.prune(generation, pointer.commit, job.retain)
    new = Pointer(
        shard=job.shard,
        commit=commit,
        parent=record.parent,
        staged_length=staged.length,
        staged_digest=staged.digest,
        positions=record.positions,
        bounds=record.bounds,
        changelog=logged.location,
        next_due_ms=outcome.next_due_ms,
        drained=version if given.drain else (pointer.drained if pointer is not None else -1),
    )
    metrics: dict[str, float | str] = {
        **watch.ms,
        "rows": messages.num_rows,
        "results": outcome.results.num_rows,
        "errors": outcome.errors.num_rows,
        "messages_stored": outcome.message_count,
        "staged_bytes": staged.length,
        "logged_bytes": logged.length,
        "uploaded_bytes": uploaded,
        "drained": new.drained,
        **by_reason("results", outcome.results),
        **by_reason("errors", outcome.errors),
        **outcome.metrics,
    }
    return Done(new, outcome, metrics)


def by_reason(of: str, table: pa.Table) -> dict[str, int]:
    """Count rows by their reason: `results_late`, `errors_too_late`; nothing for rows that have none."""
    if "reason" not in table.column_names:
        return {}
    return {f"{of}_{row['values']}": row["counts"] for row in pc.value_counts(table["reason"]).to_pylist()}


def _record(
    job: ShardJob, commit: Commit, row: CommitRecord | None, given: ShardInput, work: Workspace, outcome: Outcome
) -> CommitRecord:
    replay_from = dict(outcome.replay_from)
    older = row.rejected if row is not None else []
    rejected = sorted(
        {
            (s, p, offset)
            for s, p, offset in (*older, *outcome.rejected, *given.in_future)
            if (s, p) in replay_from and offset >= replay_from[(s, p)]
        }
    )
    return CommitRecord(
        shard=job.shard,
        commit=commit,
        parent=row.commit if row is not None else None,
        ancestors=[row.commit, *row.ancestors][:MAX_ANCESTORS] if row is not None else [],
        time_ms=given.time_ms,
        positions=[(s, p, position) for (s, p), position in sorted(given.after.items())],
        bounds={int(region): key for region, key in sorted(work.bounds.items())},
        replay_from=[(s, p, offset) for (s, p), offset in sorted(replay_from.items())],
        rejected=rejected,
        message_count=outcome.message_count,
        message_digest=outcome.message_digest,
        launch=job.launch,
    )


def _log_base(job: ShardJob, store: RocksStore, row: CommitRecord | None) -> None:
    """Append a complete base when the deltas have grown: of the committed state, so that it is never an orphan.

    Before the delta: the changelog knows how much there is up to the commit that it was last given.
    """
    if row is not None and job.changelog.wants_base(job.shard, row.commit):
        kill_point("before_base", row.commit.version)
        job.changelog.append_base(row, store.scan(bytes([LOGGED_FROM]), None))


def _upload(job: ShardJob, opened: Opened, record: CommitRecord, staged: Staged) -> int:
    """Publish the staged file, and begin a whole package when one is due; give the bytes of the step.

    A failing upload costs a rung of the ladder (the changelog and the source still have everything), never a commit.
    """
    if job.packages is None or job.snapshot_every is None:
        return 0
    kill_point("upload", record.commit.version)
    row = opened.row
    if row is not None and (is_due(row, job.snapshot_every) or has_gap(job.packages, job.shard)):
        begin_upload(job.packages, opened.store, row, opened.generation.path)
    return upload_step(job.packages, record, staged)
