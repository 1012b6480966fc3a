"""What the driver tidies up after commits: changelog records and snapshots that no retained commit needs.

Only the driver prunes, and only what lies behind every checkpoint version that Spark keeps
(`spark.sql.streaming.minBatchesToRetain`), so that a rolled-back checkpoint still finds its state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from backend.errors import UNDECODABLE
from recovery.changelog.message_log import MessageLog
from recovery.changelog.protocol import Changelog
from recovery.commit.pointer import Commit
from recovery.failures import PASSING
from recovery.files import open_files
from recovery.jobs import queue_files
from recovery.queue.entries import prune_entries
from recovery.queue.seals import prune_seals
from recovery.snapshots.publisher import Snapshots

log = logging.getLogger("rewind.housekeeping")

EVERY_COMMITS = 25
APART_S = 20.0
"""Between two prunings, unless as many commits as Spark keeps have come: there are never twice as many files."""
MARKS = "rewind/pruning.json"
_FORMAT = 1


class _Marks(msgspec.Struct, frozen=True):
    """The file `MARKS`: by shard, a commit of each pruning, oldest first, from the last one that is behind all kept."""

    format: int
    commits: dict[str, list[str]]


class Housekeeping:
    """Knows which commits Spark has committed since the query was started, and prunes behind them.

    Two threads call it: commits are noted by the one that publishes, the supervisor prunes. A query may be started so
    often that no start sees as many commits as Spark keeps: so one of each pruning is written down.

    Args:
        changelog: Opens the changelog; called when something is pruned.
        snapshots: The snapshots.
        keep_versions: Checkpoint versions that Spark keeps.
        every: Commits between two prunings.
        checkpoint: Spark's checkpoint location, where shards queue their input; None: none does, and nothing is known
            of starts before.
        message_log: The logged messages; None where there are none.
        committed: The newest version that Spark had committed when the query was started. What was written down of
            later ones is of a history that was taken back: it is forgotten before this one makes its first commit.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        changelog: Callable[[], Changelog],
        snapshots: Snapshots,
        keep_versions: int,
        every: int = EVERY_COMMITS,
        checkpoint: str | None = None,
        message_log: MessageLog | None = None,
        committed: int = -1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changelog, self._snapshots, self._message_log = changelog, snapshots, message_log
        self._keep, self._every, self._checkpoint = keep_versions, every, checkpoint
        self._made: dict[int, deque[Commit]] = {}
        written = self._read()
        self._marks = {shard: [mark for mark in marks if mark.version <= committed] for shard, marks in written.items()}
        if self._marks != written:
            self._write()
        self._lock = threading.Lock()
        self._next, self._clock, self._pruned_s = every, clock, float("-inf")

    def made(self, shard: int, commit: Commit) -> None:
        """Note a commit that was published; a later one of the same version replaces it (Spark ran it again).

        Not one that queued: the commit that a shard queues since is its newest with a state, and is kept as long as one
        of its queue's is.
        """
        with self._lock:
            commits = self._made.setdefault(shard, deque())
            while commits and commits[-1].version >= commit.version:
                commits.pop()
            commits.append(commit)

    def newest(self, committed: int) -> dict[int, Commit]:
        """Return the newest commit of each shard, of those noted, that Spark has committed.

        Args:
            committed: The newest committed version.
        """
        with self._lock:
            found = {
                shard: next((commit for commit in reversed(commits) if commit.version <= committed), None)
                for shard, commits in self._made.items()
            }
        return {shard: commit for shard, commit in found.items() if commit is not None}

    def _retained(self, committed: int, oldest: int) -> dict[int, list[Commit]]:
        """Forget what lies before the newest commit that is not after `oldest`; return, by shard, what is committed."""
        found = {}
        with self._lock:
            for shard, commits in self._made.items():
                while len(commits) > 1 and commits[1].version <= oldest:
                    commits.popleft()
                if mine := [commit for commit in commits if commit.version <= committed]:
                    found[shard] = mine
        return found

    def maintain(self, committed: int) -> list[str]:
        """Prune behind `committed - keep_versions`, now and then; give the locations that were deleted.

        A failure is logged and tried again later: nothing depends on pruning.
        """
        now = self._clock()
        many = self._next + max(0, self._keep - self._every)
        if committed < self._next or (committed < many and now - self._pruned_s < APART_S):
            return []
        self._next, self._pruned_s = committed + self._every, now
        deleted: list[str] = []
        oldest = committed - self._keep
        marks = self._marks
        for shard, keep in self._retained(committed, oldest).items():
            known = [mark for mark in marks.get(shard, ()) if mark != keep[-1]]
            before = [mark for mark in known if mark.version <= oldest][-1:]
            marks[shard] = [*before, *(mark for mark in known if mark.version > oldest), keep[-1]]
            if keep[0].version > oldest:
                if not before:
                    continue  # nothing is known from before the version that Spark still keeps: keep everything
                keep.insert(0, before[0])
            try:
                changelog = self._changelog()
                try:
                    # read before it is pruned: a commit that has a base needs its delta, which is smaller, no more
                    oldest_record = None if self._message_log is None else changelog.record(shard, keep[0])
                    deleted += changelog.prune(shard, keep)
                    if self._message_log is not None and oldest_record is not None:
                        deleted += self._message_log.prune(oldest_record)
                finally:
                    changelog.rest()
                deleted += self._snapshots.prune(shard, keep)
                if self._checkpoint is not None:
                    deleted += prune_entries(queue_files(self._checkpoint), shard, keep[0])
                    prune_seals(self._checkpoint, oldest)
            except Exception as error:  # filesystems raise kinds of their own
                log.warning("pruning shard %d failed, it is tried again when the next is due: %s", shard, error)
                if isinstance(error, PASSING) and not getattr(error, "unreadable", False):
                    break  # the others would wait for the same, if it is not one file
        self._write()
        return deleted

    def _read(self) -> dict[int, list[Commit]]:
        """Read them; none where the file is not there, torn or another release's: nothing is pruned too early then."""
        if self._checkpoint is None:
            return {}
        try:
            found = msgspec.json.decode(open_files(self._checkpoint).read(MARKS), type=_Marks)
            commits = {int(shard): [Commit.of_name(name) for name in names] for shard, names in found.commits.items()}
        except (*UNDECODABLE, FileNotFoundError):
            return {}
        return commits if found.format == _FORMAT else {}

    def _write(self) -> None:
        if self._checkpoint is None or not self._marks:
            return
        commits = {str(shard): [mark.name for mark in marks] for shard, marks in sorted(self._marks.items())}
        open_files(self._checkpoint).write(MARKS, [msgspec.json.encode(_Marks(_FORMAT, commits))])
