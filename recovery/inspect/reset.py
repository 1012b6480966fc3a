"""Begin anew: delete a job's checkpoint and local state, or its local state alone; its outputs only if asked for.

What is deleted is listed first, path by path. Nothing is while a query runs: the command holds the checkpoint's lease,
and every shard's lock on this host. A reset that is interrupted can be called again: a mark goes in first
(`recovery.commit.reset_mark`), with which the checkpoint is none any more, and goes out last,
after the manifest.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from backend.errors import ManifestMismatch, PointerDamaged, RewindError, StateCorrupted, StoreLocked, UnknownFormat
from backend.places import is_same
from backend.sinks.directory import VersionedDirectory
from backend.texts import source_partition, visible
from recovery.commit import lease, manifest
from recovery.commit import reset_mark as half_reset
from recovery.commit.outputs import all_outputs, text_of
from recovery.commit.relocation import originals
from recovery.files import Files, LocalFiles, open_files
from recovery.inspect.checkpoint_view import Checkpoint

_OURS = "rewind"
_SPARKS = ("commits", "offsets", "sources", "state")
"""Made by Spark in a checkpoint: a link in such a place leads to what it made, any other one to somebody else's."""


@dataclass(frozen=True, slots=True)
class Reset:
    """What a reset deletes.

    Attributes:
        location: The checkpoint.
        home: Its local state on this host; None where the checkpoint does not say which it is.
        outputs: Directories of results and errors whose micro-batches go too, and which query each is of, "" where that
            is not known any more; what else lies in them stays.
        stays: What a reader might expect to go, and stays, and what that means for the next start.
        offsets: Source offsets that are consumed already and will be read again, or are lost: one sentence each.
        local_only: Only the local state goes.
    """

    location: str
    home: Path | None
    outputs: Mapping[str, str]
    stays: tuple[str, ...]
    offsets: tuple[str, ...] = ()
    local_only: bool = False

    @property
    def paths(self) -> list[tuple[str, int | None]]:
        """Everything that is deleted, with its bytes where they are known."""
        trees = {str(self.home): [self.home]} if self.home is not None else {}
        trees |= {output: VersionedDirectory(output).parts()[0] for output in self.outputs}
        found: list[tuple[str, int | None]] = [
            (name, sum(file.stat().st_size for tree in own for file in tree.rglob("*") if file.is_file()))
            for name, own in trees.items()
            if Path(name).is_dir()
        ]
        return found if self.local_only else [*found, (self.location, None)]


def plan_reset(
    location: str, local_dir: Path | None = None, *, local_only: bool = False, outputs: bool = False
) -> Reset:
    """List what a reset would delete; touches nothing.

    Args:
        location: Spark's checkpoint location.
        local_dir: Where this host keeps local state; the default of `start()` unless given.
        local_only: Only the local state.
        outputs: Results and errors too, where they are directories that hold this query's output.

    Raises:
        StateUnavailable: Not a checkpoint of Rewind, and no reset of it was interrupted.
        ValueError: `outputs` where there are none to be deleted.
    """
    location = location.rstrip("/") or location[:1]
    mark = half_reset.read_mark(location)
    if mark is not None:
        home = _home(local_dir, mark.query_id)
        notes = [] if home is not None else ["local state: the checkpoint does not say any more which it is"]
        directories = {}
        for output in mark.outputs:
            owner = VersionedDirectory(output).owner
            if owner in ("", mark.owners.get(output)):
                directories[output] = mark.owners.get(output, "")
            else:
                notes.append(f"{output}: query {owner} writes there")
        return Reset(location, home, directories, (*notes, *_others(directories)))
    opened = Checkpoint(location, local_dir)
    location = opened.location
    home = _home(local_dir, _query_id(opened))
    if local_only:
        stays = ("results and errors", f"{location}: the next start restores from it", *_none(home))
        return Reset(location, home, {}, stays, local_only=True)
    others = originals(location, opened.manifest)
    offsets = tuple(_offsets(opened)) if home is not None else ()
    directories, notes = _outputs(opened, others, delete=outputs)
    notes += _others(directories)
    if opened.changelog_uri != manifest.changelog_uri(location, None):
        notes.append(
            f"{opened.changelog_uri}: it names this query, and a new one is refused there: delete it where it is"
        )
    if home is None:
        notes.append("local state: the checkpoint does not say which it is")
    elif others:
        notes.append(f"local state: {home}: it may be that of {_said(others)}; where it is not, delete it by hand")
        home = None
    else:
        notes += _none(home)
    return Reset(location, home, directories, tuple(notes), offsets)


def carry_out(plan: Reset) -> None:
    """Delete what `plan_reset` lists; called again after an interruption, it goes on.

    Raises:
        CheckpointInUse: A query or another command holds the checkpoint; nothing was deleted.
        CheckpointTaken: The same, at the same moment.
        ManifestMismatch: An output has become another query's since it was listed; nothing was deleted.
        StoreLocked: A task works on a shard on this host; nothing was deleted.
    """
    files = open_files(plan.location)
    taken = lease.take(plan.location, "rewind reset")
    gone = False
    try:
        with _locks(plan.home):
            taken.check()  # a start at the same moment may have it
            if not plan.local_only:
                query_id = plan.home.name if plan.home is not None else None
                _check_owners(plan)
                half_reset.write_mark(plan.location, half_reset.Mark(query_id, tuple(plan.outputs), plan.outputs))
            if plan.home is not None:
                LocalFiles(plan.home.parent).delete_folder(plan.home.name)
            for output in plan.outputs:
                VersionedDirectory(output).delete()
            if not plan.local_only:
                _delete_checkpoint(files)
                gone = True
    finally:
        taken.release(forget=gone)
    # the empty folders: a new query may begin there at any time; remote ones, which go with all in them, stay
    if gone and isinstance(files, LocalFiles) and not files.list(lease.DIRECTORY):
        _remove_empty(files.root)


def _remove_empty(root: Path) -> None:
    """Remove the folders in which nothing lies, from the innermost on."""
    for folder, _, _ in os.walk(root, topdown=False):
        with suppress(OSError):
            Path(folder).rmdir()


def _check_owners(plan: Reset) -> None:
    for output, owner in plan.outputs.items():
        now = VersionedDirectory(output).owner
        if now not in ("", owner):
            raise ManifestMismatch(
                "an output has become another query's since the reset listed it",
                where=output,
                why=f"query {now} writes there; listed was {owner or 'nobody'}",
                command=f"rewind reset {quote(plan.location)} again: it leaves what is another's",
            )


def _delete_checkpoint(files: Files) -> None:
    """Delete everything but the lease: Spark's files, then ours, then the manifest, then the mark."""
    for folder in files.folders():
        if folder != _OURS:
            files.delete_folder(folder, follow=folder in _SPARKS)
    files.delete([*files.list(), *files.list(temporary=True)])
    stays = lease.DIRECTORY.rpartition("/")[2]
    for folder in files.folders(_OURS):
        if folder != stays:
            files.delete_folder(f"{_OURS}/{folder}")
    last = (manifest.NAME, half_reset.NAME)
    ours = [f"{_OURS}/{name}" for name in (*files.list(_OURS), *files.list(_OURS, temporary=True))]
    files.delete(name for name in ours if name not in last)
    for name in last:
        files.delete([name])


def _said(others: Mapping[str, bool]) -> str:
    """Say which other checkpoint it may be."""
    place, there = next(iter(others.items()))
    return f"the same query's checkpoint at {place}" + ("" if there else ", which does not answer")


def _outputs(opened: Checkpoint, others: Mapping[str, bool], *, delete: bool) -> tuple[dict[str, str], list[str]]:
    """Return the directories to delete, with whose they are, and what is said of outputs that stay.

    Args:
        opened: The checkpoint.
        others: Where the same query has a checkpoint, too, or may have: what it writes to there stays.
        delete: Whether directories are to be deleted.
    """
    found: dict[str, str] = {}
    notes: list[str] = []
    of = str(opened.manifest.entries.get("query", ""))
    try:
        written = all_outputs(opened.location, of)
    except (StateCorrupted, UnknownFormat) as error:
        if delete:
            raise
        written = []
        notes.append(f"outputs, and which they are is not known ({error.what}, {error.where}): they refuse a new query")
    for query, known in written:
        if known.get("kind") == "parquet" and "://" not in known["results"]:
            places = [(known[holds], holds) for holds in ("results", "errors")]
            own = {place: query for place, holds in places if VersionedDirectory(place, holds).is_of(query)}
            shared = {place: at for place in own for at in others if _writes_to(at, of, place)}
            for place, at in shared.items():
                notes.append(
                    f"{place}: it may be the output of {_said({at: others[at]})}; where not, delete it by hand"
                )
            found |= {place: query for place, query in own.items() if place not in shared}
        elif known.get("kind") == "kafka" and known.get("commits"):
            topics = f"{known['results']}, {known['errors']}, {known['commits']}"
            notes.append(f"topics {topics}: they refuse a new query: give that one others, or delete all three")
        elif known.get("results"):
            notes.append(f"{text_of(known)}: refuse a new query: give that one others, or delete both where they are")
    if delete and found:
        return found, notes
    if delete:
        known_as = [known for _, known in written]
        said = "; ".join(notes) or f"the checkpoint names no directories of its own output (its outputs: {known_as})"
        raise ValueError(f"--outputs: {said}")
    if found:
        notes.append(
            f"{', '.join(found)}: they hold this query's output, and refuse a new query's: give that one other"
            f" directories, or call rewind reset {quote(opened.location)} --outputs instead of this, which deletes"
            " them: without the checkpoint only you can, by hand"
        )
    unknown = "results and errors: directories and topics of this query refuse a new one: give that one others"
    return {}, notes or [unknown]


def _writes_to(checkpoint: str, query: str, place: str) -> bool:
    """Return whether a query has written to a directory from another checkpoint; where it does not say, it may have."""
    try:
        written = all_outputs(checkpoint, query)
    except (RewindError, OSError, ValueError):
        return True
    return any(
        is_same(place, known[holds]) for _, known in written for holds in ("results", "errors") if known.get(holds)
    )


def _offsets(opened: Checkpoint) -> Iterator[str]:
    topics = opened.manifest.topics
    for shard in opened.shards:
        for stream, partition, position in opened.view(shard).positions:
            yield (
                f"{source_partition(stream, partition, topics)}, shard {shard}: offsets below {position.next_offset}"
                " are read again as far as the source still has them, and lost where it has not"
            )


def _query_id(opened: Checkpoint) -> str | None:
    try:
        return opened.query_id
    except (StateCorrupted, PointerDamaged):  # never started, or damaged
        return None


def _home(local_dir: Path | None, query_id: str | None) -> Path | None:
    return None if query_id is None else (local_dir or Path(tempfile.gettempdir()) / "rewind") / query_id


def _none(home: Path | None) -> list[str]:
    """Say where no local state was found: it may lie elsewhere."""
    return [] if home is None or home.is_dir() else [f"local state: there is none of this query: {home} (--local-dir)"]


def _others(outputs: Iterable[str]) -> list[str]:
    """Say of directories that are to be deleted what in them is not the query's, and so stays."""
    found = {output: VersionedDirectory(output).parts()[1] for output in outputs}
    return [
        f"{output}: {visible(', '.join(names[:5]))}{f' and {len(names) - 5} more' if len(names) > 5 else ''}:"
        " not written by the query"
        for output, names in found.items()
        if names
    ]


@contextmanager
def _locks(home: Path | None) -> Iterator[None]:
    """Hold the lock of every shard on this host, or say who does."""
    with ExitStack() as stack:
        for lock in sorted(home.glob("*/LOCK")) if home is not None else ():
            handle = os.open(lock, os.O_RDWR)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(handle, 100, 0).decode(errors="replace") or "an unknown process"
                raise StoreLocked(
                    "the job is running",
                    where=str(lock.parent),
                    why=f"locked by {holder}",
                    command="stop the query, then run the command again",
                ) from error
        yield
