"""What the driver tidies up after commits: changelog records and snapshots that no retained commit needs.

Only the driver prunes, and only what lies behind every checkpoint version that Spark keeps
(`spark.sql.streaming.minBatchesToRetain`), so that a rolled-back checkpoint still finds its state.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from recovery.changelog.message_log import MessageLog
from recovery.changelog.protocol import Changelog
from recovery.commit.pointer import Commit
from recovery.jobs import queue_files
from recovery.queue.entries import prune_entries
from recovery.queue.seals import prune_seals
from recovery.snapshots.publisher import Snapshots

log = logging.getLogger("rewind.housekeeping")

EVERY_COMMITS = 25


class Housekeeping:
    """Knows which commits Spark has committed since the query was started, and prunes behind them.

    Two threads call it: commits are noted by the one that publishes, the supervisor prunes.

    Args:
        changelog: Opens the changelog; called when something is pruned.
        snapshots: The snapshots.
        keep_versions: Checkpoint versions that Spark keeps.
        every: Commits between two prunings.
        checkpoint: Spark's checkpoint location, where shards queue their input; None where none does.
        message_log: The logged messages; None where there are none.
    """

    def __init__(
        self,
        changelog: Callable[[], Changelog],
        snapshots: Snapshots,
        keep_versions: int,
        every: int = EVERY_COMMITS,
        checkpoint: str | None = None,
        message_log: MessageLog | None = None,
    ) -> None:
        self._changelog, self._snapshots, self._message_log = changelog, snapshots, message_log
        self._keep, self._every, self._checkpoint = keep_versions, every, checkpoint
        self._made: dict[int, deque[Commit]] = {}
        self._lock = threading.Lock()
        self._next = every

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
        if committed < self._next:
            return []
        self._next = committed + self._every
        deleted: list[str] = []
        oldest = committed - self._keep
        for shard, keep in self._retained(committed, oldest).items():
            if keep[0].version > oldest:
                continue  # the version that Spark still keeps was made before this start: keep everything
            try:
                changelog = self._changelog()
                try:
                    deleted += changelog.prune(shard, keep)
                    if self._message_log is not None:
                        deleted += self._message_log.prune(changelog.read(shard, keep[0]).record)
                finally:
                    changelog.close()
                deleted += self._snapshots.prune(shard, keep)
                if self._checkpoint is not None:
                    deleted += prune_entries(queue_files(self._checkpoint), shard, keep[0])
                    prune_seals(self._checkpoint, oldest)
            except Exception as error:  # filesystems raise kinds of their own
                log.warning(
                    "pruning shard %d failed, it is tried again after %d commits: %s", shard, self._every, error
                )
        return deleted
