"""The planner: a pure function from what was found to what to do. It reads nothing and changes nothing.

What is committed is what the pointer names. Local databases, staged files and snapshots are disposable copies; the
changelog and the source are the truth. The table, first row that fits (the rows of section 5.2 of the design):

====================================================== ===========================================================
found                                                  plan
====================================================== ===========================================================
no pointer, no database or an empty or unreadable one  `Start`: an empty database in a new generation
no pointer, a database with a commit                   `Ahead`
a restoring pointer, whatever is found                 `Missing`: it queues until it is restored
database at the pointer                                `Use`
database at the parent, the pointer's staged file      `Advance` by that file
database newer than the pointer, in a task             `Ahead`: the task fails and touches nothing
database an ancestor; staged files or snapshots between `Advance` by all of them
a snapshot at an ancestor (or the pointer), and the     `Fetch` it, advance by them
files between
the changelog holds the commit, no messages to replay  `Rebuild` from the changelog alone
in a task, none of these                               `Missing`: the supervisor restores
the changelog does not hold the commit                 `Lost`
database an ancestor, the source has what came since   `Rebuild` with its messages, replay the later ones
the source lacks offsets to replay                     `Lost`
otherwise                                              `Rebuild` from the changelog and the source
====================================================== ===========================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from backend.batch import SourcePartition
from backend.errors import HistoryLost
from backend.texts import source_partition
from recovery.commit.pointer import At, Commit, CommitRecord, Pointer, RestoringPointer
from recovery.snapshots.manifest import Snapshot


@dataclass(frozen=True, slots=True)
class Nothing:
    """No database: no generation, or not on this host."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A database that cannot be opened or whose commit row cannot be decoded."""

    why: str


Database = Nothing | Unreadable | At


@dataclass(frozen=True, slots=True)
class Local:
    """What one executor has of a shard.

    Attributes:
        database: Of the current generation.
        staged: Commits whose staged file is here with the length and digest that the pointer names.
    """

    database: Database
    staged: frozenset[Commit] = frozenset()


@dataclass(frozen=True, slots=True)
class Remote:
    """What is known beyond this executor. Whoever did not look leaves the default.

    Attributes:
        offers: Snapshots.
        record: The changelog's record of the pointer's commit, when its lineage is complete down to a base.
        source: Per source partition the earliest offset there is, and the end (exclusive); None: not looked at.
        topics: Stream -> topic, for errors.
    """

    offers: tuple[Snapshot, ...] = ()
    record: CommitRecord | None = None
    source: Mapping[SourcePartition, tuple[int, int]] | None = None
    topics: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """One staged file to ingest.

    Attributes:
        commit: What it brings the state to.
        local: It lies in the generation's `staged` directory; otherwise it is fetched from the snapshots.
    """

    commit: Commit
    local: bool


@dataclass(frozen=True, slots=True)
class Start:
    """Make a new generation with an empty database."""


@dataclass(frozen=True, slots=True)
class Use:
    """Go on with the database as it is."""


@dataclass(frozen=True, slots=True)
class Advance:
    """Ingest files into the current database, in this order."""

    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Make a new generation from a snapshot, then ingest files, in this order.

    Attributes:
        snapshot: Commit of the snapshot; None for an empty database, when the steps reach back to the first commit.
        steps: What to apply to it.
        why: What was found instead of a usable database.
    """

    snapshot: Commit | None
    steps: tuple[Step, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Ahead:
    """Fail with `StateAhead` and touch nothing."""

    why: str


@dataclass(frozen=True, slots=True)
class Missing:
    """Fail with `StateUnavailable`: the supervisor restores; or the shard queues, and no database is made for that."""

    why: str


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Make a new generation from the changelog, and from the source where messages are kept.

    Attributes:
        record: The pointer's commit.
        ranges: Per source partition the offsets to replay, half-open; empty when no message is kept.
        why: What was found instead of a usable database.
        start: The messages of the local database stay: it is at this ancestor, and only what came since is replayed.
    """

    record: CommitRecord
    ranges: Mapping[SourcePartition, tuple[int, int]]
    why: str
    start: Commit | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """Stop with this error: what is committed cannot be brought back."""

    error: HistoryLost


Plan = Start | Use | Advance | Fetch | Ahead | Missing | Rebuild | Lost


_Steps = dict[Commit, tuple[Commit | None, bool]]
"""Steps that can be had: the commit that each leads to -> its parent, and whether the file is here."""


def plan(pointer: Pointer | None, local: Local, remote: Remote = Remote(), *, in_task: bool = True) -> Plan:
    """Decide how a shard gets to what its pointer names.

    Args:
        pointer: From Spark's state; None when Spark has committed nothing for the shard.
        local: What this executor has; on the supervisor's side, `Local(Nothing())` for a shard that no executor has.
        remote: What else is known.
        in_task: A task asks: it may not rebuild from the source, nor replace a database that is newer than the
            pointer. The supervisor, with no task running, may.

    Requires:
        `local` was looked at under the shard's LOCK (or with no task running); `remote.offers` lists only snapshots
        whose manifest is sound; a piece that turned out damaged is left out when asking again, which gives the next
        best plan.

    Ensures:
        Carrying out the plan leaves a database whose commit row is `pointer.commit`, or raises.
        `Use`, `Advance` and `Ahead` never replace a generation; `Start`, `Fetch` and `Rebuild` make a new one and leave
        the old one alone. `Rebuild` names every offset that the record wants replayed, or with a `start` those that
        that database cannot have, and the source has all of them. Nothing but the pointer's own lineage is ever
        applied: every step's parent is the commit before it.
    """
    database = local.database
    if pointer is None:
        if isinstance(database, At) and database.commit is not None:
            return Ahead(f"the database is at commit {database.commit.name}, Spark has committed nothing")
        return Start()
    if isinstance(pointer, RestoringPointer):
        return Missing(f"its input is queued since commit {pointer.since.commit.name}")
    if isinstance(database, At) and database.commit == pointer.commit:
        return Use()
    steps: _Steps = {offer.commit: (offer.parent, False) for offer in remote.offers if not offer.full}
    if pointer.commit in local.staged and not isinstance(database, Nothing):
        steps[pointer.commit] = (pointer.parent, True)
    if isinstance(database, At):
        if in_task and _is_newer(database, pointer.commit):
            return Ahead(_names(database, pointer))
        path = _path(pointer.commit, database.commit, steps)
        if path is not None:
            return Advance(path)
    why = _why(pointer, local)
    fetched = _fetch(pointer, steps, remote.offers, why)
    if fetched is not None:
        return fetched
    return _rebuild(pointer, local, remote, why, in_task)


def next_offsets(record: CommitRecord) -> dict[SourcePartition, int]:
    """Give the offset that comes next at a commit, per source partition."""
    return {(stream, partition): position.next_offset for stream, partition, position in record.positions}


def ranges_since(
    record: CommitRecord, positions: Mapping[SourcePartition, int]
) -> dict[SourcePartition, tuple[int, int]]:
    """Give what `replay_ranges` gives, from these positions on: a partition that came later is replayed whole."""
    whole = replay_ranges(record).items()
    since = {key: (max(start, positions.get(key, start)), end) for key, (start, end) in whole}
    return {key: (start, end) for key, (start, end) in since.items() if start < end}


def replay_ranges(record: CommitRecord) -> dict[SourcePartition, tuple[int, int]]:
    """Give the offsets that a full replay of a commit reads, half-open, per source partition; empty ranges left out."""
    ends = next_offsets(record)
    ranges = {(stream, partition): (start, ends[stream, partition]) for stream, partition, start in record.replay_from}
    return {key: (start, end) for key, (start, end) in ranges.items() if start < end}


def missing_offsets(
    ranges: Mapping[SourcePartition, tuple[int, int]],
    source: Mapping[SourcePartition, tuple[int, int]],
    topics: Mapping[int, str] = MappingProxyType({}),
) -> list[str]:
    """Say which offsets of `ranges` a source does not have, one sentence per source partition."""
    lost = []
    for (stream, partition), (start, end) in sorted(ranges.items()):
        label = source_partition(stream, partition, topics)
        if (stream, partition) not in source:
            lost.append(f"{label}: offsets {start} to {end - 1} wanted, the partition is gone")
            continue
        earliest, latest = source[stream, partition]
        if earliest > start:
            lost.append(f"{label}: offsets from {start} wanted, the earliest is {earliest}")
        if latest < end:
            lost.append(f"{label}: offsets to {end - 1} wanted, the source ends before {latest}")
    return lost


def _is_newer(database: At, commit: Commit) -> bool:
    """Versions rise along a lineage: a higher one is a descendant or foreign, and a task leaves it alone."""
    return database.commit is not None and database.commit.version > commit.version


def _path(target: Commit, start: Commit | None, steps: _Steps) -> tuple[Step, ...] | None:
    """Walk back from the target to `start`; None when a step is missing on the way."""
    found: list[Step] = []
    at: Commit | None = target
    while at != start:
        if at is None or at not in steps:
            return None
        parent, local = steps[at]
        if parent is not None and parent.version >= at.version:
            return None
        found.append(Step(at, local))
        at = parent
    return tuple(reversed(found))


def _fetch(pointer: Pointer, steps: _Steps, offers: Iterable[Snapshot], why: str) -> Fetch | None:
    """Choose the newest snapshot from which steps lead to the pointer: the fewest files to ingest."""
    full = sorted((offer.commit for offer in offers if offer.full), reverse=True)
    for commit in full:
        path = _path(pointer.commit, commit, steps)
        if path is not None:
            return Fetch(commit, path, why)
    path = _path(pointer.commit, None, steps)
    return Fetch(None, path, why) if path is not None else None


def _rebuild(pointer: Pointer, local: Local, remote: Remote, why: str, in_task: bool) -> Plan:
    record = remote.record
    if record is not None:
        ranges = replay_ranges(record)
        if not ranges and record.message_count == 0:
            return Rebuild(record, {}, why)
    if in_task:
        return Missing(why)
    where = f"shard {pointer.shard}, commit {pointer.commit.name}"
    if record is None:
        return Lost(
            HistoryLost(
                "the changelog does not hold the committed state",
                where=where,
                why=why,
                command="rewind verify <checkpoint>; rewind reset <checkpoint> accepts the loss and begins anew",
            )
        )
    database = local.database
    if isinstance(database, At) and database.commit in record.ancestors:
        since = ranges_since(record, database.positions)
        if not missing_offsets(since, remote.source or {}):
            return Rebuild(record, since, why, start=database.commit)
    lost = missing_offsets(ranges, remote.source or {}, remote.topics)
    if not ranges:
        lost.append(f"{record.message_count} messages are kept, and the commit names no offsets to replay them from")
    if lost:
        return Lost(
            HistoryLost(
                "the source no longer has the messages of windows that are still retained",
                where=where,
                why="; ".join(lost),
                command="rewind inspect <checkpoint>; rewind reset <checkpoint> accepts the loss and begins anew",
            )
        )
    return Rebuild(record, ranges, why)


def _why(pointer: Pointer, local: Local) -> str:
    """Say why the local copy cannot be used, for listeners and errors."""
    match local.database:
        case Nothing():
            return "no local state"
        case Unreadable(why=why):
            return f"the local database is unreadable: {why}"
        case At(commit=commit) if commit == pointer.parent:
            return f"the staged file of commit {pointer.commit.name} is not here, or does not match the pointer"
        case database:
            return _names(database, pointer)


def _names(database: At, pointer: Pointer) -> str:
    found = database.commit.name if database.commit is not None else "no commit"
    if _is_newer(database, pointer.commit):
        return f"the local database is ahead: at {found}, the pointer names {pointer.commit.name}"
    return f"the local database is of another time or lineage: at {found}, the pointer names {pointer.commit.name}"
