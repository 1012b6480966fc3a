"""What a process knows of one partition of the changelog topic: an index of complete records, and the end's lineage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from backend.errors import ChangelogDamaged, UnknownFormat
from recovery.changelog.chunks import Assembler, Stored, decode_key
from recovery.changelog.protocol import ITSELF, UNKNOWN, Growth
from recovery.changelog.records import Kind, damaged, decode_header, missing
from recovery.commit.pointer import Commit

CACHE_BYTES = 256 * 1024 * 1024
"""Of records, kept per shard while reading."""
MAX_NODES = 256


class ShardIndex:
    """Complete records of a partition by commit and kind; the bytes of the newest, up to a bound.

    Attributes:
        next_offset: Where to read on.
        records: (commit, kind) -> copies, in order of offset.
        parents: append id -> parent of a delta; absent when its header cannot be read.
        foreign: Another query that has written here, "" for none; its records are no part of the index.

    Args:
        where: The partition, for errors.
        owner: The query whose changelog it is; "" takes everybody's records.
    """

    def __init__(self, where: str, owner: str = "") -> None:
        self.foreign = ""
        self._where = where
        self._owner = owner
        self.next_offset = 0
        self.records: dict[tuple[Commit, Kind], list[Stored]] = {}
        self.parents: dict[bytes, Commit | None] = {}
        self._assembler = Assembler()
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()
        self._cached = 0

    def take(self, key: bytes | None, value: bytes | None, offset: int) -> None:
        """Take a message of the partition; one that is not ours is passed over."""
        piece = decode_key(key, f"{self._where}@{offset}")
        if piece is not None and self._owner and piece.owner not in ("", self._owner):
            self.foreign = piece.owner
        elif piece is not None and value is not None:
            whole = self._assembler.add(piece, value, offset)
            if whole is not None:
                self._add(*whole)
        self.next_offset = offset + 1  # a read that breaks off goes on behind what was taken

    def stored(self) -> Iterator[Stored]:
        """Iterate over all complete records, copies included."""
        for copies in self.records.values():
            yield from copies

    def cached(self, stored: Stored) -> bytes | None:
        """Give a record's bytes if they were kept."""
        return self._cache.get(stored.append_id)

    def forget_bytes(self) -> bool:
        """Forget the bytes of records; return whether what is left is worth keeping: not with half of a record."""
        self._cache.clear()
        self._cached = 0
        return not self.foreign and self._assembler.open_from(above=-1) is None

    def begins(self, append_id: bytes, offset: int) -> bool:
        """Return whether a record of this append begins at an offset."""
        complete = any(stored.append_id == append_id and stored.first == offset for stored in self.stored())
        return complete or self._assembler.begins(append_id, offset)

    def drop_below(self, offset: int) -> None:
        """Forget records that begin below an offset: the log was cut there."""
        self.next_offset = max(self.next_offset, offset)
        for key, copies in list(self.records.items()):
            left = [stored for stored in copies if stored.first >= offset]
            for stored in copies[: len(copies) - len(left)]:
                self.parents.pop(stored.append_id, None)
                self._cached -= len(self._cache.pop(stored.append_id, b""))
            if left:
                self.records[key] = left
            else:
                del self.records[key]

    def cut_for(self, retained: Sequence[Commit]) -> int:
        """Give the offset below which nothing is needed.

        Needed are the lineages of the retained commits down to a base, and every record above the oldest retained
        version, also one whose end has not come yet: its attempt may still run. What a writer that died left
        unfinished does not hold the cut back for longer than that.

        Args:
            retained: Retained commits, sorted, at least one.

        Raises:
            ChangelogDamaged: A lineage cannot be followed.
        """
        needed: dict[Commit, int] = {}
        for commit in reversed(retained):
            at: Commit | None = commit
            while at is not None and at not in needed:
                base = self.records.get((at, Kind.BASE))
                found = base or self.records.get((at, Kind.DELTA))
                if not found:
                    raise missing(f"{self._where}, commit {at.name}")
                needed[at] = found[-1].first
                if base:
                    break
                at = self._parent(found[-1])
        oldest = retained[0].version
        late = [stored.first for stored in self.stored() if stored.commit.version > oldest]
        unfinished = self._assembler.open_from(above=oldest)
        return min([*needed.values(), *late, *([] if unfinished is None else [unfinished])])

    def _parent(self, stored: Stored) -> Commit | None:
        if stored.append_id not in self.parents:
            raise damaged(f"{self._where}@{stored.first}", "its header cannot be read")
        return self.parents[stored.append_id]

    def _add(self, stored: Stored, data: bytes) -> None:
        self.records.setdefault((stored.commit, stored.kind), []).append(stored)
        if stored.kind is Kind.DELTA:
            try:
                header = decode_header(lambda n: data[:n], f"{self._where}@{stored.first}")
                self.parents[stored.append_id] = header.parent
            except (ChangelogDamaged, UnknownFormat):
                self.parents.pop(stored.append_id, None)  # told when somebody needs it: an orphan may be anything
        self._cache[stored.append_id] = data
        self._cached += len(data)
        while self._cached > CACHE_BYTES and len(self._cache) > 1:
            self._cached -= len(self._cache.popitem(last=False)[1])


class Lineage:
    """The newest commits of a shard and how much was appended since their last bases."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Commit, tuple[Commit | None, int, Growth]] = OrderedDict()

    def knows(self, commit: Commit) -> bool:
        """Tell whether the commit was seen."""
        return commit in self._seen

    def add_delta(self, commit: Commit, parent: Commit | None, length: int, growth: Growth) -> None:
        """Note a delta, with what had grown up to it as far as was known when it was appended."""
        self._seen[commit] = (parent, length, growth)
        while len(self._seen) > MAX_NODES:
            self._seen.popitem(last=False)

    def add_growth(self, commit: Commit, growth: Growth) -> None:
        """Note what had grown up to a commit, and nothing else of it."""
        self.add_delta(commit, None, 0, growth)

    def add_base(self, commit: Commit, length: int, first: int = UNKNOWN) -> None:
        """Note a base, and the offset at which it begins."""
        self.add_growth(commit, Growth(0, 0, length, first))

    def learn(self, index: ShardIndex) -> None:
        """Note what was read from the end of the log."""
        for stored in sorted(index.stored(), key=lambda stored: stored.first):
            if stored.kind is Kind.BASE:
                self.add_base(stored.commit, stored.length, stored.first)
            else:
                parent = index.parents.get(stored.append_id)
                self.add_delta(stored.commit, parent, stored.length, placed(stored.growth, stored.first))

    def growth_after(self, parent: Commit | None, length: int) -> Growth:
        """Give the growth of a delta of so many bytes on a parent."""
        before = self.growth(parent) if parent is not None else Growth(begins=ITSELF)
        return before.with_delta(length)

    def growth(self, commit: Commit) -> Growth:
        """Give what was appended since the last base: a base may have come after its commit's children."""
        parent, length, known = self._seen.get(commit, (None, 0, Growth()))
        return self.growth(parent).with_delta(length) if parent is not None and self.knows(parent) else known


def placed(growth: Growth, first: int) -> Growth:
    """Give the growth of a record that was appended at an offset: where its lineage begins is known then."""
    return growth._replace(begins=first) if growth.begins == ITSELF else growth
