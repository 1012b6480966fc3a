"""What a changelog is, whatever it is kept in: the contract that files and topics answer alike.

Records form a lineage: each delta names its parent, and only the ancestors of the commit that the pointer names count.
A record of an attempt that Spark did not commit is an orphan: it is read by nobody and cut by `prune`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import pyarrow as pa

from backend.chunks import one_chunk
from backend.errors import ChangelogDamaged, ManifestMismatch, RewindError
from backend.store.protocol import Changes
from recovery.changelog.records import Kind, LogRecord, merge
from recovery.commit.pointer import Commit, CommitRecord

MAX_CHAIN = 10_000
"""Most deltas that a reader follows before it calls the lineage damaged; a base stops it long before."""


MAX_DELTAS = 64
"""A base is wanted after so many deltas, however small, where it is short itself (`Growth.wants_base`)."""
MIN_BASE_BYTES = 256 * 1024
"""Deltas of fewer bytes in all never ask for a base by their size."""
READ_BYTES, MOST_DELTAS = 64 * 1024, 256
"""What reading one delta more costs, in bytes of a base; after so many of them a base is due, however long it is."""
CHEAP_BYTES = 1024 * 1024
"""A lineage of at most so many bytes is read to its end where a start checks it."""


@dataclass(frozen=True, slots=True)
class History:
    """Everything of a shard that is not replayed from the source, as of one commit.

    Attributes:
        record: The commit's record: positions, bounds, where to replay from, what to find then.
        keys: large_binary, strictly increasing, nothing below the bounds, no unlogged regions.
        values: large_binary, as long as `keys`, no nulls.
        notes: What was damaged and could be done without, one sentence each; empty when all was sound.
    """

    record: CommitRecord
    keys: pa.LargeBinaryArray
    values: pa.LargeBinaryArray
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.keys)

    def chunks(self, rows: int = 8192) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Iterate over keys and values as lists of at most `rows`."""
        for start in range(0, len(self.keys), rows):
            yield self.keys.slice(start, rows).to_pylist(), self.values.slice(start, rows).to_pylist()


@dataclass(frozen=True, slots=True)
class Entry:
    """One record in the changelog, without its rows.

    Attributes:
        kind: Delta or base.
        commit: Its commit.
        location: Where it is.
        length: Bytes.
    """

    kind: Kind
    commit: Commit
    location: str
    length: int


ITSELF = -1
"""`Growth.begins` of a record that is the first of its lineage: its offset is known once it is appended."""
UNKNOWN = -2


class Growth(NamedTuple):
    """What has been appended to a lineage since its last base, this record included.

    Attributes:
        deltas: How many.
        delta_bytes: Their bytes.
        base_bytes: Bytes of that base, 0 without one.
        begins: Offset at which that base begins, or the lineage's first delta; `ITSELF` or `UNKNOWN`.
    """

    deltas: int = 0
    delta_bytes: int = 0
    base_bytes: int = 0
    begins: int = UNKNOWN

    def with_delta(self, length: int) -> Growth:
        """Return the growth of a delta of so many bytes behind this."""
        return Growth(self.deltas + 1, self.delta_bytes + length, self.base_bytes, self.begins)

    def wants_base(self, max_deltas: int, min_base_bytes: int) -> bool:
        """Return whether a base is due: the deltas are longer to read than the base before them, or too many.

        Args:
            max_deltas: How many are, where a base is short.
            min_base_bytes: Fewer bytes of deltas than these ask for none.
        """
        if self.delta_bytes > max(self.base_bytes, min_base_bytes):
            return True
        as_long = self.deltas * READ_BYTES >= self.base_bytes or self.deltas >= MOST_DELTAS
        return self.deltas >= max_deltas and as_long

    def beside(self, place: str) -> str:
        """Return a record's place with its growth, for the pointer: whoever goes on from there looks at nothing."""
        return "+".join([place, *map(str, self)])


def place_and_growth(location: str) -> tuple[str, Growth | None]:
    """Return what `Growth.beside` put together; no growth where there is none, as in pointers of before.

    >>> place_and_growth(Growth(2, 70, 0, 9).beside("log-0@11"))
    ('log-0@11', Growth(deltas=2, delta_bytes=70, base_bytes=0, begins=9))
    >>> place_and_growth("log-0@11")
    ('log-0@11', None)
    """
    place, *numbers = location.split("+")
    known = len(numbers) == 4 and all(re.fullmatch("-?[0-9]{1,19}", number) for number in numbers)
    return place, Growth(*map(int, numbers)) if known else None


@dataclass(frozen=True, slots=True)
class Logged:
    """What appending a delta gave.

    Attributes:
        location: Where it is, and what has grown with it, for the pointer.
        length: Bytes, without what the medium adds.
    """

    location: str
    length: int


class Changelog(Protocol):
    """A log with bases, one lineage of records per shard; it belongs to one query."""

    def check(self, shards: int, *, new: bool) -> None:
        """Check that the place, where it is there, is fit for so many shards and this query's; writes nothing.

        Args:
            shards: Number of shards.
            new: The query has committed nothing: records that name no query (release 0.1 wrote such) are not its own.

        Raises:
            ValueError: The place is there and not fit for a changelog.
            ManifestMismatch: It is another query's.
        """

    def prepare(self, shards: int, *, new: bool = False) -> None:
        """Check the place, make it where there is none, and claim it; the driver calls it before a query starts.

        Args:
            shards: Number of shards.
            new: As for `check`; raises what it raises.
        """

    def lost(self, shard: int, commit: Commit, location: str = "", *, whole: bool = False) -> str:
        """Say why a commit's lineage is not there any more; "" when it is.

        Looks at names and positions, not at every byte: somebody emptied the log, or retention did, or it was deleted.

        Args:
            shard: The shard.
            commit: The committed commit.
            location: As `append` returned it, from the pointer.
            whole: At a start: see that the place is there at all, and read the lineage where that is cheap.

        Raises:
            ManifestMismatch: Another query writes there.
        """

    def append(self, record: CommitRecord, changes: Changes) -> Logged:
        """Append a commit's delta; durable on return."""

    def append_base(self, record: CommitRecord, rows: Iterable[tuple[bytes, bytes]]) -> str:
        """Append every row as of a commit; durable on return. Give its location.

        Args:
            record: The commit that the rows are complete for. Best one that Spark has committed: a base of an
                attempt that fails is an orphan too.
            rows: The whole store in key order; rows of unlogged regions are skipped.
        """

    def wants_base(self, shard: int, commit: Commit, location: str = "") -> bool:
        """Tell whether the deltas up to a commit have grown enough that a base should be appended for it.

        Never needed for correctness: it bounds what a restore reads.

        Args:
            shard: The shard.
            commit: The commit.
            location: As `append` returned it, from the pointer: a worker that goes on with another's shard then neither
                lists nor reads the log.
        """

    def read(self, shard: int, commit: Commit) -> History:
        """Read the rows as of a commit, following parents to a base or to the first commit.

        Raises:
            ChangelogDamaged: A record of the lineage is missing, torn, or does not match its checksum.
            UnknownFormat: A newer release wrote one.
        """

    def record(self, shard: int, commit: Commit) -> CommitRecord:
        """Read a commit's record, as of `History`: of its delta where there is a sound one, else of its base.

        Raises as `read`, of this one record.
        """

    def entries(self, shard: int) -> Sequence[Entry]:
        """List a shard's records in order of commit, orphans included."""

    def prune(self, shard: int, keep: Iterable[Commit], *, dry_run: bool = False) -> list[str]:
        """Delete what no retained commit needs; only the driver calls it, after a commit.

        A record is deleted only when its version is not above that of the oldest retained commit: what a running or
        a late attempt has just written stays.

        Args:
            shard: The shard.
            keep: Every commit that a pointer of a retained Spark checkpoint version names. Empty: nothing is deleted.
            dry_run: Only tell.

        Returns:
            Locations deleted, or to be deleted.

        Raises:
            ChangelogDamaged: The lineage of a retained commit cannot be followed; nothing is deleted then.
        """

    def verify(self, shard: int, commit: Commit | None = None) -> list[RewindError]:
        """Check every byte of a shard's records, and the lineage of `commit` when given; give what is wrong."""

    def rest(self) -> None:
        """Release clients, handles and bytes; what is known of the log may stay. The next use opens them again."""


def foreign(where: str, found: str, owner: str) -> ManifestMismatch:
    """Name a changelog of another query."""
    return ManifestMismatch(
        "the changelog belongs to another query",
        where=where,
        why=f"its records name {f'query {found}' if found else 'no query (as of release 0.1)'}, this one is {owner}",
        command="give this query a changelog of its own, changelog=...; or delete the old one where it is, if its query"
        " is gone (after rewind reset, say)",
    )


def verify_lineage(read: Callable[[], object], wrong: list[RewindError]) -> list[RewindError]:
    """Add to what is wrong with a shard's records what is wrong with a commit's lineage, once."""
    try:
        read()
    except RewindError as error:
        if not any(str(error) == str(known) for known in wrong):
            wrong.append(error)
    return wrong


def read_history(shard: int, commit: Commit, load: Callable[[Commit, list[str]], LogRecord]) -> History:
    """Follow a lineage and put it together: shared by every implementation of `Changelog.read`.

    Args:
        shard: The shard.
        commit: Where to begin.
        load: Gives a commit's record (its base where there is one, else its delta), and adds to `History.notes`;
            raises `ChangelogDamaged` when there is none.

    Raises:
        ChangelogDamaged: Versions do not fall along the parents, or the chain does not end.
    """
    chain, notes = list[LogRecord](), list[str]()
    at = commit
    for _ in range(MAX_CHAIN):
        link = load(at, notes)
        chain.append(link)
        parent = link.record.parent
        if link.kind is Kind.BASE or parent is None:
            rows = merge(chain)
            return History(chain[0].record, one_chunk(rows["key"]), one_chunk(rows["value"]), tuple(notes))
        if parent.version >= at.version:
            break
        at = parent
    raise ChangelogDamaged(
        "the lineage of a commit cannot be followed",
        where=f"shard {shard}, commit {at.name}",
        why=f"no base within {MAX_CHAIN} commits, or a parent that is not older than its child",
    )
