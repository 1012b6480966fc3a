"""`KafkaChangelog`: one topic, one partition per shard, the same log with bases as in files.

Records (`recovery.changelog.records`) travel as pieces (`recovery.changelog.chunks`). Each process that
works on a shard has an idempotent producer with a transaction per record: `acks=all`, durable on return. The guarantee
does not rest on that: readers read uncommitted and count only what the lineage of the pointer's commit names and whose
checksum matches. So orphans, aborted transactions and control records may lie anywhere, a zombie may write, and a
writer that died in the middle of a transaction does not hide what others committed before.

A reader goes once over a partition, in bulk, from the cut to the end offset that it asked for at the start, and keeps
an index; the next read goes on from there. Bytes of records are kept up to a bound and read again where they were not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from backend.errors import ChangelogDamaged, ChangelogUnavailable, RewindError, UnknownFormat
from backend.kafka_client.admin import admin_client
from backend.kafka_client.refusals import answer
from backend.kafka_client.settings import KafkaSettings
from backend.kafka_client.settling import SETTLE_S, while_it_settles
from backend.store.protocol import Changes
from recovery.changelog.chunks import Assembler, ChunkKey, Stored, decode_key, is_claim, owner_in
from recovery.changelog.kafka.index import Lineage, ShardIndex, placed
from recovery.changelog.kafka.reader import PartitionReader
from recovery.changelog.kafka.topic import TIMEOUT_S, claim_topic, create_topic, partitions_of, unavailable
from recovery.changelog.kafka.writer import PartitionWriter
from recovery.changelog.protocol import (
    CHEAP_BYTES,
    ITSELF,
    MAX_DELTAS,
    MIN_BASE_BYTES,
    Entry,
    History,
    Logged,
    foreign,
    place_and_growth,
    read_history,
    verify_lineage,
)
from recovery.changelog.records import Kind, LogRecord, check_commit, decode, encode_base, encode_delta, missing
from recovery.commit.pointer import Commit, CommitRecord

T = TypeVar("T")
_TRIES = 3
TAIL_OFFSETS = 64


class KafkaChangelog:
    """A `recovery.changelog.protocol.Changelog` in a Kafka topic.

    Pickles as its settings; clients are made where they are used, and again after `rest`.

    Args:
        settings: The cluster.
        topic: The topic; `prepare` makes it.
        owner: The query whose changelog it is; "" for readers, who take what is there.
    """

    max_deltas, min_base_bytes = MAX_DELTAS, MIN_BASE_BYTES

    def __init__(self, settings: KafkaSettings, topic: str, owner: str = "") -> None:
        self._settings = settings
        self._topic = topic
        self._owner = owner
        self._guard = threading.RLock()
        self._writer = PartitionWriter(settings, topic, owner, find=self._find)
        self._reader: PartitionReader | None = None
        self._indexes: dict[int, ShardIndex] = {}
        self._lineages: dict[int, Lineage] = {}
        self._unknown_s = SETTLE_S

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._settings, self._topic, self._owner)

    def __repr__(self) -> str:
        return f"KafkaChangelog({self._settings.servers}/{self._topic})"

    def check(self, shards: int, *, new: bool) -> None:
        """Check a topic that is there: its settings, its partitions, its owner."""
        self._is_there(shards, new=new)

    def _is_there(self, shards: int, *, new: bool) -> bool:
        if partitions_of(self._settings, self._topic, shards, unknown_s=0 if new else SETTLE_S) is None:
            return False
        with self._guard:
            owner, records = self._found_owner(shards)
        if owner not in ("", self._owner) or (new and records and not owner and self._owner):
            raise foreign(f"{self._settings.servers}/{self._topic}", owner, self._owner)
        return True

    def prepare(self, shards: int, *, new: bool = False) -> None:
        """Create the topic with one partition per shard, or check the one that is there, and claim it.

        Two queries that claim an empty topic at the same time find both claims, in one order: the first one holds.
        """
        if not self._is_there(shards, new=new):  # who may not create topics finds one made for it
            create_topic(self._settings, self._topic, shards)
        with self._guard:
            owner, _ = self._found_owner(shards)
            if not owner and self._owner:
                claim_topic(self._settings, self._topic, self._owner)
                owner, _ = self._found_owner(shards)
        if self._owner and owner != self._owner:
            raise foreign(f"{self._settings.servers}/{self._topic}", owner, self._owner)

    def lost(self, shard: int, commit: Commit, location: str = "", *, whole: bool = False) -> str:
        """Read the message at the commit's location, and the one where its lineage begins.

        In a topic that was made again since, the lineage goes on where it had come to: something else is there.
        """
        with self._guard:
            if whole and shard >= self._known_partitions():
                return f"there is no partition {self._topic}-{shard}"
            reader = self._partitions()
            low, high = reader.watermarks(shard)
            at = self._offset_in(location)
            found = self._key_at(shard, at) if at is not None and low <= at < high else None
            if found is not None and found.commit == commit and at is not None:
                begins = placed(found.growth, at).begins
                whole = whole and found.growth.delta_bytes + found.growth.base_bytes <= CHEAP_BYTES
                if not whole and low <= begins <= at and _is_first(self._key_at(shard, begins)):
                    return ""
            else:
                found, whole = None, False
            self._lineages.pop(shard, None)  # what this process knows may be of a log that is gone
            self._indexes.pop(shard, None)
            if found is None and (commit, Kind.BASE) in self._tail(shard, low, high).records:
                return ""
            try:  # the whole partition is read: something is suspicious, or there is little to read
                index = self._refreshed(shard)
                index.cut_for([commit])
                if whole:
                    read_history(shard, commit, partial(self._load, shard, index))
            except (ChangelogDamaged, UnknownFormat) as error:
                return f"{self._topic}-{shard} holds offsets {low} to {high - 1}: {error.what}, {error.where}"
            return ""

    def _known_partitions(self) -> int:
        """Return how many partitions the topic has: 0 where it is not there, which is waited for once."""
        found = partitions_of(self._settings, self._topic, 0, unknown_s=self._unknown_s)
        self._unknown_s = SETTLE_S if found is not None else 0.0
        return found or 0

    def append(self, record: CommitRecord, changes: Changes) -> Logged:
        """Append a commit's delta in a transaction of its own; acknowledged by all in-sync replicas on return.

        Raises:
            ChangelogUnavailable: It was not acknowledged. It may be in the log: an orphan then.
        """
        data = encode_delta(record, changes)
        with self._guard:
            lineage = self._lineage(record.shard, record.parent)
            growth = lineage.growth_after(record.parent, len(data))
            first = self._writer.append(record.shard, record.commit, growth, data)
            growth = placed(growth, first)
            lineage.add_delta(record.commit, record.parent, len(data), growth)
        return Logged(growth.beside(self._location(record.shard, first)), len(data))

    def append_base(self, record: CommitRecord, rows: Iterable[tuple[bytes, bytes]]) -> str:
        """Append every row as of a commit, piece by piece in bounded memory.

        Its producer has a name of its own, so that it does not fence the shard's.
        """
        with self._guard:
            first, length = self._writer.append_alone(record.shard, record.commit, encode_base(record, rows))
            self._lineage(record.shard, record.commit).add_base(record.commit, length, first)
        return self._location(record.shard, first)

    def wants_base(self, shard: int, commit: Commit, location: str = "") -> bool:
        """Compare the deltas since the last base with that base; looks at the end of the log at most."""
        known = place_and_growth(location)[1]
        with self._guard:
            if known is not None and not self._lineages.setdefault(shard, Lineage()).knows(commit):
                self._lineages[shard].add_growth(commit, known)
            growth = self._lineage(shard, commit).growth(commit)
        return growth.wants_base(self.max_deltas, self.min_base_bytes)

    def read(self, shard: int, commit: Commit) -> History:
        """Read the rows as of a commit.

        A damaged base does not end it while the deltas before it are still there; `History.notes` tells.
        """
        return self._indexed(shard, lambda index: read_history(shard, commit, partial(self._load, shard, index)))

    def record(self, shard: int, commit: Commit) -> CommitRecord:
        """Read a commit's delta, or its base."""
        kinds = (Kind.DELTA, Kind.BASE)
        return self._indexed(shard, lambda index: self._load(shard, index, commit, [], kinds).record)

    def entries(self, shard: int) -> Sequence[Entry]:
        """List a shard's complete records; one of several copies."""
        with self._guard:
            newest = [copies[-1] for copies in self._refreshed(shard).records.values()]
        found = [Entry(s.kind, s.commit, self._location(shard, s.first), s.length) for s in newest]
        return sorted(found, key=lambda entry: (entry.commit, entry.kind.value))

    def prune(self, shard: int, keep: Iterable[Commit], *, dry_run: bool = False) -> list[str]:
        """Cut the partition below the oldest record that a retained commit needs.

        A log is cut at one end: orphans and needless records behind the cut stay until it moves on.
        """
        retained = sorted(set(keep))
        if not retained:
            return []

        def cut(index: ShardIndex) -> list[str]:
            if index.foreign:
                raise foreign(self._where(shard), index.foreign, self._owner)
            edge = index.cut_for(retained)
            doomed = [self._location(shard, s.first) for s in index.stored() if s.first < edge]
            if doomed and not dry_run:
                piece = self._key_at(shard, edge)
                if piece is None or not index.begins(piece.append_id, edge):
                    raise self._gone(shard, edge)
                self._delete_below(shard, edge)
                index.drop_below(edge)
            return doomed

        return self._indexed(shard, cut)

    def verify(self, shard: int, commit: Commit | None = None) -> list[RewindError]:
        """Read every message of a shard again, check every complete record, then the lineage."""
        wrong: list[RewindError] = []
        assembler = Assembler()

        def begin(low: int, high: int) -> None:
            nonlocal assembler
            assembler = Assembler()
            wrong.clear()
            self._partitions().read(shard, low, high, check)

        def check(key: bytes | None, value: bytes | None, offset: int) -> None:
            where = self._location(shard, offset)
            try:
                piece = decode_key(key, where)
                if is_claim(key):
                    return
                if piece is None or value is None:
                    wrong.append(_foreign(where))
                    return
                whole = assembler.add(piece, value, offset)
                if whole is not None:
                    self._decoded(shard, *whole)
            except (ChangelogDamaged, UnknownFormat) as error:
                wrong.append(error)

        with self._guard:
            self._whole(shard, begin)
        return wrong if commit is None else verify_lineage(lambda: self.read(shard, commit), wrong)

    def rest(self) -> None:
        """Release clients and bytes; where the records lie stays known, so that the next pruning reads what is new."""
        with self._guard:
            self._writer.close()
            self._indexes = {shard: index for shard, index in self._indexes.items() if index.forget_bytes()}
            self._lineages.clear()
            if self._reader is not None:
                self._reader.close()
                self._reader = None

    # -------------------------------------------------------------------------------------------------------- inside

    def _delete_below(self, shard: int, offset: int) -> None:
        client = admin_client(self._settings)
        edge = TopicPartition(self._topic, shard, offset)

        def delete() -> None:
            [deleted] = client.delete_records([edge], request_timeout=TIMEOUT_S).values()
            if answer(client, deleted, TIMEOUT_S).low_watermark < offset:  # its broker died: the client says no more
                raise KafkaException(KafkaError(KafkaError._TRANSPORT, "an answer without an offset"))

        try:
            while_it_settles(delete)
        except (KafkaException, TimeoutError) as error:
            raise unavailable(self._settings, self._topic, error) from None

    def _lineage(self, shard: int, commit: Commit | None) -> Lineage:
        """Give what is known of the end of a shard's log; looks there when a commit is not known."""
        lineage = self._lineages.setdefault(shard, Lineage())
        if commit is not None and not lineage.knows(commit):
            self._tail(shard, *self._partitions().watermarks(shard))
        return lineage

    def _tail(self, shard: int, low: int, high: int) -> ShardIndex:
        """Read the end of a shard's log, and add it to what is known of that.

        Raises:
            ManifestMismatch: Another query writes there.
        """
        tail = self._new_index(shard)
        self._partitions().read(shard, max(low, high - TAIL_OFFSETS), high, tail.take)
        if tail.foreign:
            raise foreign(self._where(shard), tail.foreign, self._owner)
        self._lineages.setdefault(shard, Lineage()).learn(tail)
        return tail

    def _found_owner(self, shards: int) -> tuple[str, bool]:
        """Look who owns the topic, "" for nobody, and whether there are messages: at both ends of the partitions.

        A partition is cut from its beginning, and every message names the owner. Messages of format 1 do not; then the
        newest tell.
        """
        reader = self._partitions()
        records = False
        for shard in range(shards):
            low, high = reader.watermarks(shard)
            records = records or low < high
            for start, end in ((low, min(high, low + TAIL_OFFSETS)), (max(low, high - TAIL_OFFSETS), high)):
                keys = self._keys(shard, start, end)
                owners = filter(None, [owner_in(key, f"{self._topic}@{offset}") for offset, key in keys.items()])
                if owner := next(owners, ""):
                    return owner, True
        return "", records

    def _find(self, shard: int, append_id: bytes, pieces: int) -> int:
        """Look at the end of a partition for the offset of an append's first piece.

        Raises:
            ChangelogUnavailable: It is not there.
        """
        low, high = self._partitions().watermarks(shard)
        for offset, key in self._keys(shard, max(low, high - pieces - TAIL_OFFSETS), high).items():
            piece = decode_key(key, self._location(shard, offset))
            if piece is not None and piece.append_id == append_id and piece.index == 0:
                return offset
        why = RuntimeError("the client says that a record was written, not where, and it is not at the end")
        raise unavailable(self._settings, self._topic, why)

    def _key_at(self, shard: int, offset: int) -> ChunkKey | None:
        """Read the key of the message at an offset; None when none of ours is there."""
        return decode_key(self._keys(shard, offset, offset + 1).get(offset), self._location(shard, offset))

    def _keys(self, shard: int, start: int, end: int) -> dict[int, bytes | None]:
        """Read the keys of the messages in `[start, end)`, by offset."""
        found: dict[int, bytes | None] = {}

        def take(key: bytes | None, _value: bytes | None, offset: int) -> None:
            found[offset] = key

        self._partitions().read(shard, start, end, take)
        return found

    def _offset_in(self, location: str) -> int | None:
        """Give the offset of a location in this topic; None for one elsewhere, as of a changelog before this one."""
        place, _, offset = place_and_growth(location)[0].rpartition("@")
        return int(offset) if place.rpartition("-")[0] == self._topic and offset.isdecimal() else None

    def _partitions(self) -> PartitionReader:
        if self._reader is None:
            self._reader = PartitionReader(self._settings, self._topic)
        return self._reader

    def _indexed(self, shard: int, use: Callable[[ShardIndex], T]) -> T:
        """Use a shard's index, brought to the end of the partition.

        One that was known before and does not fit is made anew: it may be of a topic that was made again since.
        """
        with self._guard:
            known = shard in self._indexes
            try:
                return use(self._refreshed(shard))
            except ChangelogDamaged:
                if not known:
                    raise
                self._indexes.pop(shard, None)
                return use(self._refreshed(shard))

    def _refreshed(self, shard: int) -> ShardIndex:
        """Bring a shard's index to the end of the partition; of the others the records' bytes are forgotten."""
        for other in self._indexes.keys() - {shard}:
            if not self._indexes[other].forget_bytes():
                del self._indexes[other]

        def take(low: int, high: int) -> None:
            index = self._indexes.get(shard)
            if index is None or index.next_offset > high:  # a topic that was made again starts over
                index = self._indexes[shard] = self._new_index(shard)
            index.drop_below(low)
            self._partitions().read(shard, index.next_offset, high, index.take)
            index.next_offset = high

        self._whole(shard, take)
        return self._indexes[shard]

    def _new_index(self, shard: int) -> ShardIndex:
        return ShardIndex(self._where(shard), self._owner)

    def _whole(self, shard: int, read: Callable[[int, int], None]) -> None:
        """Read a partition between its ends; once more where it was cut behind its first offset meanwhile."""
        reader = self._partitions()
        low, high = reader.watermarks(shard)
        for left in reversed(range(_TRIES)):
            try:
                read(low, high)
                return
            except ChangelogUnavailable:
                before, (low, high) = low, reader.watermarks(shard)
                if low <= before or not left:
                    raise

    def _load(
        self,
        shard: int,
        index: ShardIndex,
        commit: Commit,
        notes: list[str],
        kinds: Sequence[Kind] = (Kind.BASE, Kind.DELTA),
    ) -> LogRecord:
        """Decode a commit's base where there is a sound one, else its delta; newest copy first."""
        damage: RewindError | None = None
        for kind in kinds:
            for stored in reversed(index.records.get((commit, kind), [])):
                try:
                    data = index.cached(stored) or self._fetch(shard, stored)
                    record = self._decoded(shard, stored, data)
                except (ChangelogDamaged, UnknownFormat) as error:
                    damage = error
                    continue
                if damage is not None:
                    notes.append(f"went on without a copy: {damage}")
                return record
        raise damage if damage is not None else missing(f"{self._where(shard)}, commit {commit.name}")

    def _fetch(self, shard: int, stored: Stored) -> bytes:
        """Read a record's pieces again."""
        assembler = Assembler()
        found: list[bytes] = []

        def take(key: bytes | None, value: bytes | None, offset: int) -> None:
            piece = decode_key(key, self._location(shard, offset))
            if piece is not None and piece.append_id == stored.append_id and value is not None:
                whole = assembler.add(piece, value, offset)
                if whole is not None:
                    found.append(whole[1])

        self._partitions().read(shard, stored.first, stored.last + 1, take)
        if not found:
            raise self._gone(shard, stored.first)
        return found[0]

    def _gone(self, shard: int, offset: int) -> ChangelogDamaged:
        where = self._location(shard, offset)
        return ChangelogDamaged("a changelog record is no longer there", where=where)

    def _decoded(self, shard: int, stored: Stored, data: bytes) -> LogRecord:
        where = self._location(shard, stored.first)
        record = decode(data, where)
        check_commit(record.record, shard, stored.commit, where)
        return record

    def _where(self, shard: int) -> str:
        return f"{self._settings.servers}/{self._topic}-{shard}"

    def _location(self, shard: int, offset: int) -> str:
        return f"{self._topic}-{shard}@{offset}"


def _is_first(piece: ChunkKey | None) -> bool:
    """Return whether a message is where a lineage begins."""
    if piece is None or piece.index:
        return False
    return piece.kind is Kind.BASE or piece.growth.begins == ITSELF  # a base of format 1 does not say it


def _foreign(where: str) -> ChangelogDamaged:
    return ChangelogDamaged(
        "a message in the changelog topic is not part of a changelog",
        where=where,
        why="something else writes to the topic",
        command="let nothing else write there; restores read past it",
    )
