"""Check everything that is stored for a checkpoint: bytes, lineage, indexes, counts, digests.

Each check gives findings; `rewind verify` prints them and exits with 0 only if none is a problem. A local database or a
snapshot that is behind, or damaged, is a *note* when the changelog is sound: it is a disposable copy, found out before
it is used. Damage to the changelog or the manifest is a *problem*: it is the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

import xxhash

from backend.errors import PointerDamaged, RewindError, StateCorrupted, StateUnavailable
from backend.messages.key_first import PLACE_BYTES
from backend.messages.keys import TIME_BYTES
from backend.rocks import RocksStore
from backend.sources.archive_seen import DIRECTORY as ARCHIVES
from backend.sources.archive_seen import Memory
from backend.store.protocol import Readable, Region, region_range
from backend.store.workspace import Workspace
from recovery.changelog import History
from recovery.commit.option_sets import versions_in
from recovery.commit.outputs import read_outputs
from recovery.commit.pointer import Commit, CommitRecord, RestoringPointer, read_commit_row
from recovery.commit.spark_files import check_state, damaged_spark_files
from recovery.inspect.checkpoint_view import Checkpoint, LocalCopy, Undecided, logged_differences, read_beside
from recovery.jobs import message_log, queue_files
from recovery.queue.entries import entry_name, lost_of, read_queue
from recovery.restore.prove import check_messages

PROBLEM, NOTE, SOUND = "problem", "note", "sound"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        level: `problem`, `note` or `sound`.
        check: Which check.
        where: Shard, file or directory.
        what: What was found, one sentence.
        command: What to run next; empty when nothing is needed.
    """

    level: str
    check: str
    where: str
    what: str
    command: str = ""


def verify_checkpoint(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Run every check that needs neither Spark nor the job."""
    logs = list(_sparks_logs(checkpoint))
    yield from logs
    yield from _beside(checkpoint)
    copies: dict[int, LocalCopy | None] = dict.fromkeys(checkpoint.shards)
    try:
        copies = {shard: checkpoint.local(shard) for shard in checkpoint.shards}
    except (StateCorrupted, PointerDamaged) as error:  # Spark's metadata would name the directory
        if error.where not in [found.where for found in logs]:
            yield _of(error, PROBLEM, "Spark's logs")
    if not any(copies.values()):
        yield _note("local state", str(checkpoint.local_dir), "there is none of this query: not checked (--local-dir)")
    for shard, local in copies.items():
        commit, history, known = None, None, True
        try:
            commit = checkpoint.committed(shard)
        except RewindError as error:
            yield _unknown(checkpoint, error)
            known = False
        yield from _queue(checkpoint, shard, commit)
        with suppress(RewindError):  # which the check of the changelog names
            history = checkpoint.changelog.read(shard, commit) if commit is not None else None
        yield from _changelog(checkpoint, shard, commit, history)
        if history is not None:
            yield from _messages(checkpoint, history.record)
            yield from (_note("changelog", f"shard {shard}", note) for note in history.notes)
        elif commit is not None:
            continue
        yield from _snapshots(checkpoint, shard)
        if local is not None:
            yield from _local(checkpoint, local, shard, commit, history)
            if known:
                yield from _ahead(checkpoint, local, shard, commit)


def _unknown(checkpoint: Checkpoint, error: RewindError) -> Finding:
    """Say why a shard's commit is not known: that attempts ran again is no damage."""
    if not isinstance(error, Undecided):
        return _of(error, PROBLEM, "lineage")
    command = f"rewind verify {quote(checkpoint.location)} --spark"
    return Finding(NOTE, "lineage", error.where, f"{error.what}: {error.why}", command)


def _beside(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Look at what else a start goes on from: where the query writes to, and what it read of archives."""
    try:
        read_outputs(checkpoint.location)
    except RewindError as error:
        yield _of(error, PROBLEM, "outputs")
    for name in sorted(checkpoint.files.list(ARCHIVES)):
        number, _, end = name.partition(".")
        if number.isdecimal() and end == "json":
            try:
                _ = Memory(checkpoint.location, int(number)).seen
            except RewindError as error:
                yield _of(error, PROBLEM, "archive")


def _sparks_logs(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Look at what Spark itself goes on from: the newest entry of `commits/`, and what `offsets/` says of it."""
    files, versions = checkpoint.files, checkpoint.versions()
    planned = versions_in(checkpoint.location, "offsets")
    command = f"put it back from a copy of the checkpoint; or rewind reset {quote(checkpoint.location)}"

    def problem(name: str, what: str) -> Finding:
        return Finding(PROBLEM, "Spark's logs", f"{checkpoint.location}/{name}", what, command)

    for damaged in damaged_spark_files(checkpoint.location, every=True):
        yield _of(damaged, PROBLEM, "Spark's logs")
    try:
        check_state(checkpoint.location, len(checkpoint.shards))
    except PointerDamaged as error:
        yield _of(error, PROBLEM, "Spark's state")
    if not versions:
        logged = [entry.commit.version for shard in checkpoint.shards for entry in checkpoint.changelog.entries(shard)]
        newest = max([*planned, *logged], default=0)
        if newest > 0:  # the first micro-batch may be planned and logged, and not committed
            yield problem("commits", f"it names no micro-batch, and there are traces up to micro-batch {newest}")
        return
    last = versions[-1]
    if last not in planned:
        yield problem(f"offsets/{last}", "it is gone, and the micro-batch is committed")
    for log in ("commits", *(["offsets"] if last in planned else [])):
        first = files.read(f"{log}/{last}").decode(errors="replace").partition("\n")[0]
        if not (first.startswith("v") and first[1:].isdecimal()):
            yield problem(f"{log}/{last}", f"it begins with {first[:40]!r}, not with a version such as v1")


def _changelog(checkpoint: Checkpoint, shard: int, commit: Commit | None, history: History | None) -> Iterator[Finding]:
    wrong = checkpoint.changelog.verify(shard, commit)
    needed = [history.record.commit, *history.record.ancestors] if history is not None else None
    for error in wrong:
        orphan = needed is not None and not any(one.name in error.where for one in needed)
        yield _of(error, NOTE if orphan else PROBLEM, "changelog")
    if not wrong:
        count = len(checkpoint.changelog.entries(shard))
        if count or not checkpoint.versions():
            yield Finding(SOUND, "changelog", f"shard {shard}", f"{count} records match their checksums")
        else:
            text = "it has no record: right only of a shard that never had a message (--spark says whether it has one)"
            yield _note("changelog", f"shard {shard}", text)


def _messages(checkpoint: Checkpoint, record: CommitRecord) -> Iterator[Finding]:
    """Read what the commit needs of the message log: nobody can read those messages again."""
    wrong = message_log(checkpoint.location, frozenset()).verify(record)
    yield from (_of(error, PROBLEM, "message log") for error in wrong)
    if record.segments and not wrong:
        length = sum(segment.length for segment in record.segments)
        text = f"{len(record.segments)} segments, {length:,} bytes, match their checksums"
        yield Finding(SOUND, "message log", f"shard {record.shard}", text)


def _queue(checkpoint: Checkpoint, shard: int, commit: Commit | None) -> Iterator[Finding]:
    """Look at what a shard has queued while its state is restored: only Spark's state says which entries count."""
    if checkpoint.queues is None:
        waiting = checkpoint.queued(shard, commit.version) if commit is not None else {}
        if waiting:
            text = f"{len(waiting)} micro-batches are queued: not checked"
            yield Finding(NOTE, "queue", f"shard {shard}", text, f"rewind verify {quote(checkpoint.location)} --spark")
    elif shard in checkpoint.queues:
        try:
            yield _entries(checkpoint, checkpoint.queues[shard])
        except RewindError as error:
            yield _of(error, PROBLEM, "queue")


def _entries(checkpoint: Checkpoint, pointer: RestoringPointer) -> Finding:
    """Read a shard's queue. An entry that the next start makes again out of the source is no problem."""
    files = queue_files(checkpoint.location)
    try:
        read_queue(files, pointer)
    except (StateUnavailable, StateCorrupted) as error:
        lost = [draft.entry for draft in lost_of(files, pointer)]
        known = any(error.where.endswith(f"/{entry_name(entry.shard, entry.commit)}") for entry in lost)
        if not known or any(checkpoint.manifest.dataframes.intersection(entry.brought) for entry in lost):
            raise
        note = _of(error, NOTE, "queue")
        again = "the next start reads its messages again, if the source still has them"
        return replace(note, what=f"{note.what}; {again}", command="")
    text = f"{pointer.queued} micro-batches are queued, their entries match their digests"
    return Finding(SOUND, "queue", f"shard {pointer.shard}", text)


def _snapshots(checkpoint: Checkpoint, shard: int) -> Iterator[Finding]:
    wrong = checkpoint.snapshots.verify(shard)
    for error in wrong:
        yield _of(error, NOTE, "snapshot")
    offers = checkpoint.snapshots.offers(shard)
    if offers and not wrong:
        yield Finding(SOUND, "snapshot", f"shard {shard}", f"{len(offers)} snapshots match their digests")


def _local(
    checkpoint: Checkpoint, local: LocalCopy, shard: int, commit: Commit | None, history: History | None
) -> Iterator[Finding]:
    where = f"shard {shard}, {local.path}"
    record = history.record if history is not None else None

    def logged(here: Commit) -> History | None:
        try:
            return history if here == commit and history is not None else checkpoint.changelog.read(shard, here)
        except RewindError:  # of a failed attempt, too old, or damaged, which the check of the changelog names
            return None

    if local.problem is not None:
        yield _of(local.problem, NOTE, "local state")
        return
    copies = f"{checkpoint.snapshots.files.uri}/{shard}, the copies of it, if there are any"
    again = (
        f"stop the query, move {local.path.parent} aside, and {copies}; then start it again: no start finds this out"
    )
    try:
        found, findings = read_beside(lambda: _database(local.path / "db", where, logged, again))
    except RewindError as error:
        yield _of(error, NOTE, "local state")
        return
    yield from findings
    here = found.commit if found is not None else None
    if commit is None or here == commit or (record is not None and here == record.parent):
        return
    if record is not None and here in record.ancestors:
        yield _note("lineage", where, f"behind: at {_name(here)}, committed is {commit.name}")
    else:
        yield _note("lineage", where, f"not of the committed lineage: at {_name(here)}, committed is {commit.name}")


def _database(
    database: Path, where: str, logged: Callable[[Commit], History | None], again: str
) -> tuple[CommitRecord | None, list[Finding]]:
    """Read a whole database; return what it is at, and what there is to say.

    Args:
        database: Its directory.
        where: Names it.
        logged: Gives what the changelog has as of a commit, None where it cannot be had.
        again: What to do where it has other rows.

    Raises:
        RewindError: It cannot be read.
    """
    history, wrong = None, list[str]()
    with RocksStore.open(database, read_only=True) as store:
        store.check_files()
        found = read_commit_row(store, where)
        rows = sum(1 for _ in store.scan(b"", None))
        findings = list(check_index(Workspace(store, found.bounds if found is not None else {}), where))
        if found is not None:
            history = logged(found.commit)
            wrong = check_messages(store, found, []) + (logged_differences(store, history) if history else [])
            findings += [Finding(PROBLEM, "local state", where, what, again) for what in wrong]
    compared = ", logged rows compared with the changelog" if history is not None and not wrong else ""
    sound = Finding(SOUND, "local state", where, f"{rows} rows, every block matches its checksum{compared}")
    return found, [*findings, sound]


def _ahead(checkpoint: Checkpoint, local: LocalCopy, shard: int, commit: Commit | None) -> Iterator[Finding]:
    """Compare with what is staged here: each committed micro-batch that was staged has a record in the changelog.

    One that is queued may have been staged by an attempt that failed: without Spark nobody knows.
    """
    if checkpoint.queues is not None:  # Spark says which commit it is, and that one's record was checked
        return
    last, known = max(checkpoint.versions(), default=-1), -1 if commit is None else commit.version
    queued = checkpoint.queued(shard, known)
    logged = {entry.commit for entry in checkpoint.changelog.entries(shard)}  # those beyond it have been taken back
    beyond = [
        staged
        for staged in local.staged
        if known < staged.version <= last and staged.version not in queued and staged not in logged
    ]
    if beyond:
        text = f"it ends at micro-batch {known}, and {beyond[-1].name}, which is committed, was staged here"
        again = f"rewind verify {quote(checkpoint.location)} --spark says which"
        command = f"put its newest records back from a copy; {again}"
        yield Finding(PROBLEM, "changelog", f"shard {shard}", text, command)


def check_index(view: Readable, where: str, *, whole: bool = False) -> Iterator[Finding]:
    """Compare the index of key-first messages with the messages.

    An index row has the message's key behind its time or offset; of windows that each key has for itself only the place
    (`backend.messages.key_first`), with which the message's key ends: those are compared by number and sum of hashes.

    Args:
        view: The database.
        where: Names it.
        whole: Each message is known to have an index row.
    """
    missing = indexed = places = balance = 0
    for key, _ in view.scan(*region_range(Region.MESSAGE_INDEX)):
        indexed += 1
        if len(key) == 1 + PLACE_BYTES:
            places += 1
            balance += xxhash.xxh3_64_intdigest(key[1:])
            continue
        targets = [bytes([Region.MESSAGES]) + key[1 + width :] for width in (TIME_BYTES, PLACE_BYTES)]
        missing += all(view.get(target) is None for target in targets)
    if places or whole:
        messages = 0
        for key, _ in view.scan(*region_range(Region.MESSAGES)):
            messages += 1
            balance -= xxhash.xxh3_64_intdigest(key[-PLACE_BYTES:]) if places else 0
        missing += abs(indexed - messages) or int(balance != 0)
    if missing:
        text = f"{missing} index rows without their message, or messages without their row among {indexed}"
        yield Finding(PROBLEM, "index", where, text, "rewind restore <checkpoint> <module:function>")
    elif indexed:
        yield Finding(SOUND, "index", where, f"{indexed} index rows have their message")


def _of(error: RewindError, level: str, check: str) -> Finding:
    why = f": {error.why}" if error.why else ""
    command = error.command if "rewind verify" not in error.command else ""  # it is what runs
    if level == PROBLEM and not command:
        command = "put it back from a copy of the checkpoint"
    return Finding(level, check, error.where, f"[{error.code}] {error.what}{why}", command)


def _note(check: str, where: str, text: str) -> Finding:
    return Finding(NOTE, check, where, text)


def _name(commit: Commit | None) -> str:
    return commit.name if commit is not None else "no commit"
