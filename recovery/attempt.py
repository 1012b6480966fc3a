"""One task attempt on one shard: open, plan, operate, stage, log, point. No Spark in here.

Spark commits a micro-batch after its tasks ran and may run a task twice, so an attempt never changes the database with
what is not committed: it *confirms* (ingests) what the pointer names, and *stages* what it made itself. The pointer it
returns goes into Spark's state; if Spark commits it, the next attempt confirms, else it never happened.

Spark's processor, the operator tester and the simulation all drive this module, so what is tested is what runs.
"""

from __future__ import annotations

import time
import uuid
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import (
    GAUGES,
    KNOWN_REASONS,
    MESSAGE_FIELDS,
    MicroBatch,
    Operator,
    Outcome,
    Position,
    Positions,
    SourcePartition,
)
from backend.errors import PointerDamaged, RewindError, StateCorrupted, StateUnavailable, StorageFailed
from backend.rocks import RocksStore
from backend.store.protocol import LOGGED_FROM, Changes, Staged
from backend.store.workspace import Workspace
from backend.windows.combined_rows import counts
from recovery.changelog.message_log import needed
from recovery.changelog.rejected import carry
from recovery.commit.pointer import (
    COMMIT_KEY,
    MAX_ANCESTORS,
    Commit,
    CommitRecord,
    Pointer,
    RestoringPointer,
    Segment,
    encode,
    encode_record,
    state_of,
)
from recovery.commit.shard_directory import ShardDirectory
from recovery.jobs import ShardJob
from recovery.killpoints import kill_point
from recovery.queue.entries import Queue, read_queue
from recovery.queue.seals import DECISION, Decision
from recovery.restore.open_shard import Opened, OpenShard
from recovery.share import ShardInput
from recovery.snapshots.uploads import begin_upload, is_due, is_wanted, upload_step

TAKEOVER_BYTES = 1 << 27
"""What a task fetches of snapshots at most, where it may queue its input instead: about a second of a fast network."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A micro-batch that an attempt ran: its own, or one that was queued before.

    Attributes:
        version: Its version: rows keep it.
        before: Positions as committed before it.
        read: Gives the shard's share of it; of one that was queued it is decoded anew, so that one is at a time.
        outcome: What it came to.
        count: Messages that came with it.
        drain: As in `ShardInput`.
        in_future: As in `ShardInput`.
    """

    version: int
    before: Positions
    read: Callable[[], ShardInput]
    outcome: Outcome
    count: int
    drain: bool
    in_future: tuple[tuple[int, int, int], ...]


@dataclass(slots=True)
class Done:
    """What an attempt made: nothing of it counts before Spark commits the pointer.

    Attributes:
        pointer: For Spark's state.
        ran: The micro-batches that it ran, in order; none where it queued its own.
        metrics: Counters for progress.
        began_ms: Batch time of the commit that it began at, None where that is of an earlier start of the query.
    """

    pointer: Pointer
    ran: list[Ran]
    metrics: dict[str, float | str] = field(default_factory=dict)
    began_ms: int | None = None

    @property
    def outcome(self) -> Outcome:
        """What the newest micro-batch came to."""
        return self.ran[-1].outcome


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
    given = read(positions_of(pointer))
    own = _Share(version, job.operator, positions_of(pointer), lambda: given)
    queue = job.queue
    if queue is None or pointer is None:
        return _run(job, pointer, version, [own], watch)
    sealed = queue.decided(job.shard, version)
    if sealed is Decision.QUEUED:
        # where a queue has begun it was planned before anybody asked to adopt it: that is no refusal
        why = "" if isinstance(pointer, RestoringPointer) else "the micro-batch was queued when it ran before"
        return _put(job, queue, pointer, version, given, why)
    if not isinstance(pointer, RestoringPointer):
        most_bytes = TAKEOVER_BYTES if queue.may_begin(version) else None
        try:
            return _run(job, pointer, version, [own], watch, most_bytes)
        except (StateUnavailable, StateCorrupted) as error:
            if not queue.may_begin(version):
                raise
            return _put(job, queue, pointer, version, given, _cause(error))
    if given.adopt != pointer.since.commit.name:
        return _put(job, queue, pointer, version, given)
    entries = read_queue(queue.files, pointer)
    kill_point("before_adopt", version)
    queued = [_Share(e.commit.version, queue.operators.at(e.commit.version), e.positions, e.given) for e in entries]
    try:
        return _run(job, pointer, version, [*queued, own], watch)
    except (StateUnavailable, StateCorrupted) as error:
        if sealed is Decision.ADOPTED:
            raise
        return _put(job, queue, pointer, version, given, _cause(error))


def _cause(error: RewindError) -> str:
    """Return what an error says happened: nobody need do anything about it."""
    return f"{error.what}: {error.why}" if error.why else error.what


@dataclass(frozen=True, slots=True)
class _Share:
    """A micro-batch that is to be run: its own, or a queued one.

    Attributes:
        version: Its version.
        operator: Under the options of that version.
        before: Positions as committed before it.
        read: Gives the shard's share of it.
    """

    version: int
    operator: Operator
    before: Positions
    read: Callable[[], ShardInput]


def _put(job: ShardJob, queue: Queue, pointer: Pointer, version: int, given: ShardInput, why: str = "") -> Done:
    """Queue a micro-batch. Nothing local is looked at or changed, and nothing of the shard comes out.

    Args:
        job: The shard.
        queue: Its queue.
        pointer: The committed one.
        version: The micro-batch.
        given: The shard's share of it.
        why: What was found instead of usable state; "" where nobody looked.
    """
    kill_point("before_queue", version)
    new = queue.put(pointer, version, given, Commit(version, uuid.uuid4().hex))
    kill_point("after_queue", version)
    return Done(
        new,
        [],
        {
            DECISION: Decision.QUEUED.value,
            "queued": new.queued,
            "queued_bytes": new.queued_bytes,
            "since": b64encode(encode(new.since)).decode(),
            "drained": new.drained,
            **({"queued_why": why} if why else {}),
        },
    )


def _run(
    job: ShardJob,
    pointer: Pointer | None,
    version: int,
    shares: Sequence[_Share],
    watch: _Watch,
    most_bytes: int | None = None,
) -> Done:
    """Run micro-batches on the state that a pointer names, and make one commit of them; `most_bytes`: `OpenShard`."""
    at = state_of(pointer) if pointer is not None else None
    directory = ShardDirectory(job.local_dir, job.query_id, job.shard)
    with directory.lock(job.lock_wait_s):
        kill_point("open", version)
        shard = OpenShard(directory, job.where, job.snapshots, job.incarnation, most_bytes)
        fetched = job.snapshots.fetched_bytes if job.snapshots is not None else 0
        try:
            with watch.step("open"):
                opened = shard.at(at)
            try:
                done = _operate(job, directory, opened, at, version, shares, watch)
                fetched = job.snapshots.fetched_bytes - fetched if job.snapshots is not None else 0
                ingest_ms = round(shard.tries.ingest_s * 1000, 3)
                with watch.step("settle"):
                    opened.store.settle()
            finally:
                opened.store.close()
            moved = shard.tries.recorder.metrics()
            done.metrics |= {"ingest_ms": ingest_ms, "fetched_bytes": fetched, **watch.ms, **moved}
            return done
        except StateCorrupted:
            directory.condemn()
            raise


@contextmanager
def _given_by_disk(local: Path) -> Iterator[None]:
    """Take local state that its disk does not give for damaged: only then is it put aside, and had from elsewhere.

    Raises:
        StateCorrupted: A file below `local` cannot be read.
    """
    try:
        yield
    except StorageFailed as error:
        if not error.unreadable or not Path(error.where).is_relative_to(local):
            raise
        raise StateCorrupted(
            "the disk does not give the local state", where=error.where, why=error.why, command=error.command
        ) from error


def _operate(
    job: ShardJob,
    directory: ShardDirectory,
    opened: Opened,
    pointer: Pointer | None,
    version: int,
    shares: Sequence[_Share],
    watch: _Watch,
) -> Done:
    generation, store, row = opened.generation, opened.store, opened.row
    work = Workspace(store, row.bounds if row is not None else {})
    ran: list[Ran] = []
    due = pointer.next_due_ms if pointer is not None else None
    with watch.step("operate"), _given_by_disk(generation.path):
        for share in shares:
            given = share.read()
            if not given.came and (due is None or due > given.time_ms):
                continue
            messages = given.messages
            if messages is None:
                messages = pa.schema([*MESSAGE_FIELDS, *job.message_fields]).empty_table()
            batch = MicroBatch(
                share.version, given.time_ms, messages, share.before, given.after, given.drain, given.timestamps, due,
                given.firsts,
            )  # fmt: skip
            outcome = share.operator.process(batch, work)
            count = int(counts(messages).sum())
            ran.append(Ran(share.version, share.before, share.read, outcome, count, given.drain, given.in_future))
            due = outcome.next_due_ms
    commit = Commit(version, uuid.uuid4().hex)
    with watch.step("messages"):
        segments = _log_messages(job, commit, row, ran)
    record = _record(job, commit, row, given, work, ran, segments)
    changes = work.changes()
    with watch.step("stage"):
        kill_point("before_stage", version)
        whole = Changes([COMMIT_KEY, *changes.keys], [encode_record(record), *changes.values], changes.bounds)
        staged = store.stage(whole, generation.staged(commit), midway=partial(kill_point, "during_stage", version))
        kill_point("after_stage", version)
    with watch.step("changelog"):
        kill_point("before_changelog", version)
        with _given_by_disk(generation.path):
            lost = _log_base(job, store, row, pointer)
        logged = job.changelog.append(record, changes)
    with watch.step("upload"):
        uploaded = _upload(job, opened, record, staged)
        kill_point("after_changelog", version)
    if pointer is not None:
        kill_point("prune", version)
        directory.prune(generation, pointer.commit, job.retain)
    drains = any(one.drain for one in ran)
    new = Pointer(
        shard=job.shard,
        commit=commit,
        parent=record.parent,
        staged_length=staged.length,
        staged_digest=staged.digest,
        positions=record.positions,
        bounds=record.bounds,
        changelog=logged.location,
        next_due_ms=due,
        drained=version if drains else (pointer.drained if pointer is not None else -1),
    )
    metrics: dict[str, float | str] = {
        **watch.ms,
        "rows": sum(one.count for one in ran),
        "results": sum(one.outcome.results.num_rows for one in ran),
        "errors": sum(one.outcome.errors.num_rows for one in ran),
        "messages_stored": record.message_count,
        "staged_bytes": staged.length,
        "logged_bytes": logged.length,
        "message_log_bytes": sum(segment.length for segment in segments if segment.commit == commit),
        "uploaded_bytes": uploaded,
        "drained": new.drained,
        **({"changelog_lost": lost} if lost else {}),
        **({DECISION: Decision.ADOPTED.value, "adopted": len(shares) - 1} if len(shares) > 1 else {}),
        **_summed(by_reason("results", one.outcome.results) for one in ran),
        **_summed(by_reason("errors", one.outcome.errors) for one in ran),
        **_summed(one.outcome.metrics for one in ran),
        **{name: value for one in ran for name, value in one.outcome.metrics.items() if name in GAUGES},
    }
    began_ms = row.time_ms if row is not None and row.incarnation == job.incarnation else None
    return Done(new, ran, metrics, began_ms)


def _summed(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def by_reason(of: str, table: pa.Table) -> dict[str, int]:
    """Count rows by their reason: `results_late`, `errors_malformed`, and `..._other` for what is no reason of ours.

    Empty for rows that have none.
    """
    if not table.num_rows or "reason" not in table.column_names:
        return {}
    kind = table["reason"].type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind)):  # a user's own
        return {f"{of}_other": table.num_rows}
    counts: dict[str, int] = {}
    for row in pc.value_counts(table["reason"]).to_pylist():
        name = f"{of}_{row['values'] if row['values'] in KNOWN_REASONS else 'other'}"
        counts[name] = counts.get(name, 0) + row["counts"]
    return counts


def _log_messages(job: ShardJob, commit: Commit, row: CommitRecord | None, ran: Sequence[Ran]) -> list[Segment]:
    """Log the messages that cannot be read again; return the segments that the commit needs."""
    segments = row.segments if row is not None else []
    if job.message_log is None or not ran:
        return segments
    came = [messages for one in ran if (messages := one.read().messages) is not None]
    whole = pa.concat_tables(came) if came else pa.schema([*MESSAGE_FIELDS, *job.message_fields]).empty_table()
    before = needed(segments, ran[-1].outcome.replay_from, job.message_log.streams)
    return job.message_log.append(job.shard, commit, before, whole)


def _record(
    job: ShardJob,
    commit: Commit,
    row: CommitRecord | None,
    newest: ShardInput,
    work: Workspace,
    ran: Sequence[Ran],
    segments: list[Segment],
) -> CommitRecord:
    replay_from = {(s, p): offset for s, p, offset in row.replay_from} if row is not None else {}
    rejected = row.rejected if row is not None else []
    count, digest = (row.message_count, row.message_digest) if row is not None else (0, 0)
    for one in ran:
        outcome = one.outcome
        replay_from, count, digest = dict(outcome.replay_from), outcome.message_count, outcome.message_digest
        rejected = sorted(
            {
                (s, p, offset)
                for s, p, offset in (*rejected, *outcome.rejected, *one.in_future)
                if (s, p) in replay_from and offset >= replay_from[(s, p)]
            }
        )
    if ran:
        named = set(ran[-1].outcome.rejected).intersection(rejected)
        rejected = carry(work, rejected, named, replay_from, commit.version)
    return CommitRecord(
        shard=job.shard,
        commit=commit,
        parent=row.commit if row is not None else None,
        ancestors=[row.commit, *row.ancestors][:MAX_ANCESTORS] if row is not None else [],
        time_ms=newest.time_ms,
        positions=[(s, p, position) for (s, p), position in sorted(newest.after.items())],
        bounds={int(region): key for region, key in sorted(work.bounds.items())},
        replay_from=[(s, p, offset) for (s, p), offset in sorted(replay_from.items())],
        rejected=rejected,
        message_count=count,
        message_digest=digest,
        incarnation=job.incarnation,
        segments=segments,
    )


CHECKED_EVERY = 8
"""Commits between two looks whether the changelog still has the lineage: a request to the broker, or a listing."""


def _log_base(job: ShardJob, store: RocksStore, row: CommitRecord | None, pointer: Pointer | None) -> str:
    """Append a complete base when the deltas have grown: of the committed state, so that it is never an orphan.

    Before the delta: the changelog knows how much there is up to the commit that it was last given. Somebody may have
    emptied or deleted the log, or named another one: then the state here is the only one, and a base is due at once.

    Returns:
        Why the changelog could not give the committed state back; "" when it can, or was not looked at.
    """
    if row is None:
        return ""
    lost, location = "", pointer.changelog if pointer is not None else ""
    if row.incarnation != job.incarnation or row.commit.version % CHECKED_EVERY == CHECKED_EVERY - 1:
        lost = job.changelog.lost(job.shard, row.commit, location)
    if lost or job.changelog.wants_base(job.shard, row.commit, location):
        kill_point("before_base", row.commit.version)
        job.changelog.append_base(row, store.scan(bytes([LOGGED_FROM]), None))
    return lost


def _upload(job: ShardJob, opened: Opened, record: CommitRecord, staged: Staged) -> int:
    """Publish the staged file, and begin a whole snapshot when one is due; give the bytes of the step.

    A failing upload costs a step of the fallback order, never a commit: changelog and source still have everything.
    """
    if job.snapshots is None or job.snapshot_every is None:
        return 0
    kill_point("upload", record.commit.version)
    row, every, scratch = opened.row, job.snapshot_every, opened.generation.path
    if row is not None and (is_due(row, every) or is_wanted(job.snapshots, row, every, scratch)):
        begin_upload(job.snapshots, opened.store, row, scratch)
    return upload_step(job.snapshots, record, staged)
