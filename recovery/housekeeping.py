"""What the driver tidies up after commits: changelog records and packages that no retained commit needs.

Only the driver prunes, and only what lies behind every checkpoint version that Spark keeps
(`spark.sql.streaming.minBatchesToRetain`), so that a rolled-back checkpoint still finds its state.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from recovery.changelog.protocol import Changelog
from recovery.package import Snapshots
from recovery.pointer import Commit

log = logging.getLogger("rewind.housekeeping")

EVERY_COMMITS = 25


class Housekeeping:
    """Knows which commits Spark has committed since the query was started, and prunes behind them.

    Args:
        changelog: Opens the changelog; called when something is pruned.
        snapshots: The packages.
        keep_versions: Checkpoint versions that Spark keeps.
        every: Commits between two prunings.
    """

    def __init__(
        self,
        changelog: Callable[[], Changelog],
        snapshots: Snapshots,
        keep_versions: int,
        every: int = EVERY_COMMITS,
    ) -> None:
        self._changelog, self._snapshots = changelog, snapshots
        self._keep, self._every = keep_versions, every
        self._made: dict[int, deque[Commit]] = {}
        self._next = every

    def made(self, shard: int, commit: Commit) -> None:
        """Note a commit that was published; a later one of the same version replaces it (Spark ran it again)."""
        commits = self._made.setdefault(shard, deque())
        while commits and commits[-1].version >= commit.version:
            commits.pop()
        commits.append(commit)

    def maintain(self, committed: int) -> list[str]:
        """Prune behind `committed - keep_versions`, now and then; give the locations that were deleted.

        A failure is logged and tried again later: nothing depends on pruning.
        """
        if committed < self._next:
            return []
        self._next = committed + self._every
        deleted: list[str] = []
        for shard, commits in self._made.items():
            oldest = committed - self._keep
            while len(commits) > 1 and commits[1].version <= oldest:
                commits.popleft()
            if commits[0].version > oldest:
                continue  # the version that Spark still keeps was made before this start: keep everything
            keep = [commit for commit in commits if commit.version <= committed]
            try:
                changelog = self._changelog()
                try:
                    deleted += changelog.prune(shard, keep)
                finally:
                    changelog.close()
                deleted += self._snapshots.prune(shard, keep)
            except Exception as error:  # filesystems raise kinds of their own
                log.warning(
                    "pruning shard %d failed, it is tried again after %d commits: %s", shard, self._every, error
                )
        return deleted
