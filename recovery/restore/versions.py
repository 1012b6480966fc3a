"""Back in time: which versions a checkpoint can be taken back to.

An operator takes a checkpoint back by removing the newest entries of `commits/` and `offsets/`: then Spark goes on from
the newest one left, and the shards with it, by snapshots or by changelog and source. What retention or pruning took
cannot be had any more; then the error says what can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from backend.batch import SourcePartition
from backend.errors import ChangelogDamaged, HistoryLost, RewindError
from recovery.changelog import Changelog
from recovery.changelog.rejected import with_rows
from recovery.commit.pointer import Commit, CommitRecord, Pointer
from recovery.restore.planner import missing_offsets, replay_ranges

MAX_LOOKED = 16
"""So many of the newest versions are looked at: each is read out of the changelog."""
COMMAND = "put back the entries of commits/ and offsets/ up to one of these versions, or rewind reset <checkpoint>"

Source = Mapping[SourcePartition, tuple[int, int]]


def committed_record(changelog: Changelog, pointer: Pointer, shards: Iterable[int], source: Source) -> CommitRecord:
    """Read what the changelog says of a pointer's commit.

    Args:
        changelog: Has it, or had.
        pointer: The shard's.
        shards: All shards that have committed, for the versions to be had.
        source: What the sources hold.

    Raises:
        HistoryLost: It is older than everything that the changelog still has; names the versions to be had.
        ChangelogDamaged: It is damaged.
    """
    try:
        return with_rows(changelog.read(pointer.shard, pointer.commit))
    except ChangelogDamaged as error:
        entries = changelog.entries(pointer.shard)
        if not entries or min(entry.commit.version for entry in entries) <= pointer.commit.version:
            raise
        raise HistoryLost(
            f"the state as of micro-batch {pointer.commit.version} is gone",
            where=f"shard {pointer.shard}",
            why=f"the changelog begins later; {_text(versions_to_be_had(changelog, shards, source))}",
            command=COMMAND,
        ) from error


def with_versions(error: HistoryLost, changelog: Changelog, shards: Iterable[int], source: Source) -> HistoryLost:
    """Add the versions to be had to the error of history that is lost."""
    found = versions_to_be_had(changelog, shards, source)
    if not found:
        return error
    return HistoryLost(error.what, where=error.where, why=f"{error.why}; {_text(found)}", command=COMMAND)


def versions_to_be_had(changelog: Changelog, shards: Iterable[int], source: Source) -> list[int]:
    """Give the newest versions to which every shard can be restored from changelog and source, in order.

    A version that only snapshots lead to is not among them. Records of attempts that Spark did not commit may stand in
    for those that it did: both can be restored, or neither.
    """
    logged = {shard: [entry.commit for entry in changelog.entries(shard)] for shard in shards}
    versions = sorted({commit.version for commits in logged.values() for commit in commits})[-MAX_LOOKED:]
    found = []
    for version in versions:
        newest = {shard: [c for c in commits if c.version <= version][-1:] for shard, commits in logged.items()}
        if all(
            commits and _restorable(changelog, shard, commits[0], source) for shard, commits in sorted(newest.items())
        ):
            found.append(version)
    return found


def _restorable(changelog: Changelog, shard: int, commit: Commit, source: Source) -> bool:
    try:
        record = changelog.read(shard, commit).record
    except RewindError:
        return False
    ranges = replay_ranges(record)
    return not missing_offsets(ranges, source) and bool(ranges or not record.message_count)


def _text(versions: list[int]) -> str:
    return f"versions to be had: {', '.join(map(str, versions)) or 'none'}"
