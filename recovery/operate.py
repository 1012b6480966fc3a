"""Run the operator on a shard's state, and make one commit of what came of it: open, operate, stage, log, point.

Nothing here decides whether a micro-batch is run: that is `recovery.attempt`.
"""

from __future__ import annotations

import time
import uuid
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
    Positions,
)
from backend.errors import StateCorrupted, StorageFailed
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
    Segment,
    encode_record,
    state_of,
)
from recovery.commit.shard_directory import ShardDirectory
from recovery.jobs import ShardJob
from recovery.killpoints import kill_point
from recovery.queue.seals import DECISION, Decision
from recovery.restore.open_shard import Opened, OpenShard
from recovery.share import ShardInput
from recovery.snapshots.uploads import begin_upload, is_due, is_wanted, upload_step


@dataclass(frozen=True, slots=True)
class Share:
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


class _Watch:
    """Milliseconds per step of an attempt."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.ms[f"{name}_ms"] = round((time.perf_counter() - started) * 1000, 3)


def run(
    job: ShardJob,
    pointer: Pointer | None,
    version: int,
    shares: Sequence[Share],
    most_bytes: int | None = None,
) -> Done:
    """Run micro-batches on the state that a pointer names, and make one commit of them; `most_bytes`: `OpenShard`."""
    watch = _Watch()
    at = state_of(pointer) if pointer is not None else None
    directory = ShardDirectory(job.local_dir, job.query_id, job.shard)
    with directory.lock(job.lock_wait_s):
        kill_point("open", version)
        shard = OpenShard(directory, job.where, job.snapshots, job.incarnation, most_bytes)
        fetched = job.snapshots.fetched_bytes if job.snapshots is not None else 0
        try:
            with watch.step("open"):
                opened = shard.at(at)
            with opened.store:
                done = _operate(job, directory, opened, at, version, shares, watch)
                fetched = job.snapshots.fetched_bytes - fetched if job.snapshots is not None else 0
                with watch.step("settle"):
                    opened.store.settle()
        except StateCorrupted:
            directory.condemn()
            raise
    ingest_ms, moved = round(shard.tries.ingest_s * 1000, 3), shard.tries.recorder.metrics()
    done.metrics |= {"ingest_ms": ingest_ms, "fetched_bytes": fetched, **watch.ms, **moved}
    return done


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
    shares: Sequence[Share],
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
