"""Entries: the input of the micro-batches that a shard could not run because its state was missing.

A task whose state is gone puts its share of the micro-batch, assembled, into an entry, and commits a pointer that names
it (`RestoringPointer`). Once the state is restored, a task *adopts* it: it runs the entries one by one, as if each were
its own micro-batch. An entry is one immutable file on the checkpoint's filesystem, named by its commit and durable
before the pointer is set::

    <checkpoint>/rewind/queue/<shard>/<version, 20 digits>_<uuid>.entry     MessagePack of an `Entry` (format 4)

Its length and digest are in the pointer; each entry names the one before it in the same way. So a queue is followed
from the pointer back by commits, never by a listing: what a lost attempt left behind is read by nobody.

The pointer also knows of each entry what it takes to make it again out of the source when its file is lost
(`recovery.restore.read_again`): one that was made again may be other bytes, but has the content that was queued.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import msgspec
import pyarrow as pa
import xxhash

from backend.batch import (
    ERROR_SCHEMA,
    OFFSET,
    OWN_TIMESTAMP,
    PARTITION,
    STREAM,
    TIME,
    Operator,
    Position,
    Positions,
    SourcePartition,
)
from backend.errors import UNDECODABLE, StateCorrupted, StateUnavailable, StorageFailed, unknown_format
from backend.rows import RowCodec
from backend.windows.combined_rows import is_combined, messages_of
from recovery.commit.option_sets import ByVersion
from recovery.commit.pointer import Commit, EntryProof, Pointer, RestoringPointer, is_old
from recovery.files import Files
from recovery.queue.seals import Decision
from recovery.share import ShardInput

FORMAT = 4
_READ = (1, 2, 3, 4)
"""1 has other combined rows (backend.windows.combined_rows); up to 2 the records' own timestamps are a column of a name
that a field may have, too; up to 3 nothing says where source partitions begin."""
DIRECTORY = "rewind/queue"
_OLD_TIMESTAMP = "_timestamp"
_SEAL_BYTES = 16
MOST_POSITIONS = 10_000
"""Positions that a pointer has of all entries of a queue: it is written with each micro-batch."""


class Link(msgspec.Struct, frozen=True, array_like=True):
    """Names an entry: by its commit, and by length and hex xxh3-128 of its file."""

    commit: Commit
    length: int
    digest: str


class Entry(msgspec.Struct, frozen=True):
    """One micro-batch of one shard, as it is run later.

    Attributes:
        format: Format version.
        shard: The shard.
        commit: The commit that queued it.
        parent: The entry before it; None for the first one.
        since: The commit that the queue begins after.
        time_ms: Batch time.
        came: As in `ShardInput`.
        drain: As in `ShardInput`.
        with_values: As in `ShardInput`.
        before: (stream, partition, position) as committed before it, sorted.
        after: The same behind it.
        in_future: As in `ShardInput`.
        messages: Arrow IPC stream, with the records' own timestamps in the last column where they are known.
        errors: Arrow IPC stream of the bad input.
        firsts: (stream, partition, offset): as in `ShardInput`, sorted.
    """

    shard: int
    commit: Commit
    parent: Link | None
    since: Commit
    time_ms: int
    came: bool
    drain: bool
    with_values: bool
    before: list[tuple[int, int, Position]]
    after: list[tuple[int, int, Position]]
    in_future: list[tuple[int, int, int]] = []
    messages: bytes | None = None
    errors: bytes | None = None
    firsts: list[tuple[int, int, int]] = []
    format: int = FORMAT

    def having(self, given: ShardInput) -> Entry:
        """Return the entry with what a micro-batch brought."""
        return msgspec.structs.replace(
            self,
            in_future=list(given.in_future),
            messages=_to_ipc(given.messages, given.timestamps),
            errors=_to_ipc(given.errors),
            firsts=_firsts(given),
        )

    def given(self) -> ShardInput:
        """Decode the shard's share of the micro-batch."""
        messages = _from_ipc(self.messages) if self.messages is not None else None
        timestamps = None
        name = OWN_TIMESTAMP if self.format > 2 else _OLD_TIMESTAMP
        if messages is not None and messages.column_names[-1] == name:
            timestamps, messages = messages.column(name), messages.drop_columns([name])
        return ShardInput(
            self.time_ms,
            messages,
            _positions(self.after),
            tuple(self.in_future),
            self.drain,
            came=self.came,
            errors=ERROR_SCHEMA.empty_table() if self.errors is None else _from_ipc(self.errors),
            timestamps=timestamps,
            with_values=self.with_values,
            firsts={(stream, partition): offset for stream, partition, offset in self.firsts},
        )

    @property
    def positions(self) -> Positions:
        """Positions as committed before it."""
        return _positions(self.before)

    @property
    def brought(self) -> set[int]:
        """Streams that brought messages."""
        seen = {(stream, partition): position.next_offset for stream, partition, position in self.before}
        return {stream for stream, partition, at in self.after if seen.get((stream, partition), 0) != at.next_offset}


@dataclass(frozen=True, slots=True)
class Queue:
    """The queue of a shard, as its tasks use it.

    Attributes:
        files: `<checkpoint>/rewind/queue`.
        operators: The operator by version: an entry runs under the options of its own micro-batch.
        begins: Whether a shard whose state is missing may begin to queue; one that queues goes on in any case.
        planned: The micro-batch that Spark had planned and not committed when the query was started, -1 for none. It
            may have been published.
        sealed: What was decided of each shard in that micro-batch.
    """

    files: Files
    operators: ByVersion[Operator]
    begins: bool = False
    planned: int = -1
    sealed: dict[int, Decision] = field(default_factory=dict)

    def may_begin(self, version: int) -> bool:
        """Return whether a shard may begin to queue: not in a micro-batch that may be out with its results."""
        return self.begins and version != self.planned

    def decided(self, shard: int, version: int) -> Decision | None:
        """Return what was decided of a shard when this micro-batch ran before; None when nothing binds it."""
        return self.sealed.get(shard) if version == self.planned else None

    def put(self, pointer: Pointer, version: int, given: ShardInput, commit: Commit) -> RestoringPointer:
        """Write an entry; durable on return.

        Args:
            pointer: The committed one.
            version: The micro-batch.
            given: The shard's share of it.
            commit: The commit that queues it.

        Returns:
            The pointer that names it.
        """
        before = pointer if isinstance(pointer, RestoringPointer) else None
        since = before.since if before is not None else pointer
        entry = Entry(
            shard=pointer.shard,
            commit=commit,
            parent=_link(before) if before is not None else None,
            since=since.commit,
            time_ms=given.time_ms,
            came=given.came,
            drain=given.drain,
            with_values=given.with_values,
            before=pointer.positions,
            after=_sorted(given.after),
        ).having(given)
        data = msgspec.msgpack.encode(entry)
        digest = xxhash.xxh3_128_hexdigest(data)
        self.files.write(entry_name(pointer.shard, commit), [data])
        proof = _proof(entry, given, len(data), digest)
        return RestoringPointer(
            shard=pointer.shard,
            commit=commit,
            parent=pointer.commit,
            staged_length=len(data),
            staged_digest=digest,
            positions=entry.after,
            bounds=since.bounds,
            changelog="",
            next_due_ms=given.time_ms,  # every micro-batch of a shard that queues has an entry
            drained=pointer.drained,
            since=since,
            queued=(before.queued if before is not None else 0) + 1,
            queued_bytes=(before.queued_bytes if before is not None else 0) + len(data),
            entries=_bounded(before, proof),
        )


def read_queue(files: Files, pointer: RestoringPointer) -> list[Entry]:
    """Read the entries of a pointer's queue, oldest first.

    Raises:
        StateUnavailable: An entry is missing, or a disk does not give it.
        StateCorrupted: An entry is not the one that was queued.
        UnknownFormat: Another release wrote one.
    """
    found: list[Entry] = []
    link: Link | None = _link(pointer)
    drafts = {draft.entry.commit: draft for draft in drafts_of(pointer)}
    while link is not None:
        entry = _read(files, pointer.shard, link, drafts.get(link.commit))
        if entry.since != pointer.since.commit or len(found) == pointer.queued:
            raise _damaged(files, pointer.shard, link.commit, "it is of another queue")
        found.append(entry)
        link = entry.parent
    if len(found) != pointer.queued:
        why = f"{len(found)} entries, {pointer.queued} were queued"
        raise _damaged(files, pointer.shard, found[-1].commit, why)
    return found[::-1]


@dataclass(frozen=True, slots=True)
class Draft:
    """An entry as its pointer knows it: all but the messages and the errors.

    Attributes:
        entry: Without them.
        proof: What they are compared with.
    """

    entry: Entry
    proof: EntryProof

    @property
    def link(self) -> Link:
        """Names the entry as it was queued."""
        return Link(self.proof.commit, self.proof.length, self.proof.digest)

    def put(self, files: Files, given: ShardInput) -> bool:
        """Write the entry again, durable; return False, and write nothing, if other content was queued.

        The file is the entry and its xxh3-128, 16 bytes: the pointer has the digest of other bytes.
        """
        older = replace(given, firsts={})  # up to format 3 the content says nothing of them
        if not any(content_of(one, self.proof.combined) == self.proof.content for one in (given, older)):
            return False
        entry = self.entry.having(given)
        data = msgspec.msgpack.encode(entry)
        files.write(entry_name(entry.shard, entry.commit), [data, xxhash.xxh3_128_digest(data)])
        return True

    def is_of(self, data: bytes) -> bool:
        """Return whether a file is what `put` wrote."""
        content = data[:-_SEAL_BYTES]
        if xxhash.xxh3_128_digest(content) != data[-_SEAL_BYTES:]:
            return False
        try:
            entry = msgspec.msgpack.decode(content, type=Entry)
        except UNDECODABLE:  # of another release
            return False
        known = msgspec.structs.replace(entry, format=FORMAT, messages=None, errors=None, in_future=[], firsts=[])
        return known == self.entry


def drafts_of(pointer: RestoringPointer) -> Iterator[Draft]:
    """Return what a pointer knows of the entries of its queue, oldest first; nothing where it knows of none."""
    before, parent = _positions(pointer.since.positions), None
    for proof in pointer.entries:
        after = before | _positions(proof.after)
        entry = Entry(
            shard=pointer.shard,
            commit=proof.commit,
            parent=parent,
            since=pointer.since.commit,
            time_ms=proof.time_ms,
            came=proof.came,
            drain=proof.drain,
            with_values=proof.with_values,
            before=_sorted(before),
            after=_sorted(after),
        )
        draft = Draft(entry, proof)
        yield draft
        before, parent = after, draft.link


def lost_of(files: Files, pointer: RestoringPointer) -> list[Draft]:
    """Return what is known of the entries that are missing or damaged."""
    lost = []
    for draft in drafts_of(pointer):
        try:
            _read(files, pointer.shard, draft.link, draft)
        except (StateUnavailable, StateCorrupted):
            lost.append(draft)
    return lost


def content_of(given: ShardInput, combined: bool) -> str:
    """Return the hex xxh3-128 of what a micro-batch brought, the same however it is written down.

    Args:
        given: The shard's share of it.
        combined: Of messages only place and times count: how combined rows were cut says nothing.
    """
    seen = xxhash.xxh3_128()
    for table in (_messages_of(given, combined), given.errors):
        names = [_OLD_TIMESTAMP if name == OWN_TIMESTAMP else name for name in table.column_names]  # pointers have it
        kinds = map(str, table.schema.types)
        seen.update(repr([*zip(names, kinds, strict=True), table.num_rows]).encode())
        RowCodec(table.schema).feed(table.combine_chunks(), seen.update)
    if given.firsts:
        seen.update(repr(_firsts(given)).encode())
    return seen.hexdigest()


def _messages_of(given: ShardInput, combined: bool) -> pa.Table:
    messages = given.messages
    if messages is None or not messages.num_rows:
        return pa.table({})
    if is_combined(messages):
        return messages_of(messages)
    stamps = given.timestamps if given.timestamps is not None else pa.nulls(messages.num_rows, pa.int64())
    if not combined:
        return messages.append_column(pa.field(OWN_TIMESTAMP, pa.int64()), stamps)
    names = {"stream": STREAM, "partition": PARTITION, "offset": OFFSET, "timestamp": None, "event_time": TIME}
    schema = pa.schema([ERROR_SCHEMA.field(name) for name in names])
    columns = [messages.column(name) if name is not None else stamps for name in names.values()]
    return pa.table([column.cast(f.type) for column, f in zip(columns, schema, strict=True)], schema=schema)


def _proof(entry: Entry, given: ShardInput, length: int, digest: str) -> EntryProof:
    combined = given.messages is not None and is_combined(given.messages)
    before = set(entry.before)
    return EntryProof(
        entry.commit,
        length,
        digest,
        entry.time_ms,
        entry.came,
        entry.drain,
        entry.with_values,
        combined,
        [row for row in entry.after if row not in before],
        content_of(given, combined),
    )


def _bounded(before: RestoringPointer | None, proof: EntryProof) -> list[EntryProof]:
    """Return what a pointer says of its entries: of all, or of the oldest where more would be too much."""
    if before is None:
        return [proof] if len(proof.after) <= MOST_POSITIONS else []
    known = [*before.entries, proof]
    complete = len(before.entries) == before.queued
    return known if complete and sum(len(one.after) for one in known) <= MOST_POSITIONS else before.entries


COMMAND = "put the file back, or rewind reset <checkpoint>, which accepts the loss and begins anew"


def _read(files: Files, shard: int, link: Link, draft: Draft | None) -> Entry:
    where = f"{files.uri}/{entry_name(shard, link.commit)}"
    try:
        data = files.read(entry_name(shard, link.commit))
    except FileNotFoundError as error:
        raise StateUnavailable(
            "an entry of a shard's queue is missing",
            where=where,
            why="the committed pointer names it",
            command=COMMAND,
        ) from error
    except StorageFailed as error:
        if not error.unreadable:
            raise
        raise StateUnavailable(
            "an entry of a shard's queue cannot be read", where=where, why=error.why, command=COMMAND
        ) from error
    if (len(data), xxhash.xxh3_128_hexdigest(data)) != (link.length, link.digest):
        if draft is None or not draft.is_of(data):
            raise _damaged(files, shard, link.commit, f"{len(data)} bytes that do not match the digest")
        data = data[:-_SEAL_BYTES]
    try:
        written = msgspec.msgpack.decode(data, type=dict).get("format")
        if written in _READ:
            return msgspec.msgpack.decode(data, type=Entry)
    except UNDECODABLE as error:
        raise _damaged(files, shard, link.commit, str(error)) from error
    what = "an entry of a shard's queue has an unknown format"
    raise unknown_format(what, f"format {written!r}", f"1 to {FORMAT}", where)


def _damaged(files: Files, shard: int, commit: Commit, why: str) -> StateCorrupted:
    where = f"{files.uri}/{entry_name(shard, commit)}"
    return StateCorrupted("an entry of a queue is not the one that was queued", where=where, why=why, command=COMMAND)


def _link(pointer: RestoringPointer) -> Link:
    return Link(pointer.commit, pointer.staged_length, pointer.staged_digest)


def entry_name(shard: int, commit: Commit) -> str:
    """Return the name of an entry's file below the queue's directory."""
    return f"{shard}/{commit.name}.entry"


def entries_behind(files: Files, shard: int, version: int) -> dict[int, int]:
    """Return the micro-batches that lie in a shard's queue behind a version, with the bytes of each; for people.

    By name: a lost attempt's entry counts like the one that is committed.
    """
    found = {int(name[:20]): length for name, length in files.list(str(shard)).items() if name[:20].isdecimal()}
    return {queued: length for queued, length in sorted(found.items()) if queued > version}


def prune_entries(files: Files, shard: int, oldest: Commit) -> list[str]:
    """Delete the entries that no retained commit needs; only the driver calls it, after a commit.

    Args:
        files: `<checkpoint>/rewind/queue`.
        shard: The shard.
        oldest: The newest commit with a state of its own at or before the oldest version that Spark retains: queues
            that are retained begin after it.

    Returns:
        The names deleted.
    """
    there = (*files.list(str(shard)), *files.list(str(shard), temporary=True))  # a task that died left a draft
    gone = [f"{shard}/{name}" for name in there if is_old(name, oldest.version)]
    files.delete(gone)
    return gone


def _positions(rows: Iterable[tuple[int, int, Position]]) -> dict[SourcePartition, Position]:
    return {(stream, partition): position for stream, partition, position in rows}


def _sorted(positions: Positions) -> list[tuple[int, int, Position]]:
    return [(stream, partition, position) for (stream, partition), position in sorted(positions.items())]


def _firsts(given: ShardInput) -> list[tuple[int, int, int]]:
    return [(stream, partition, offset) for (stream, partition), offset in sorted(given.firsts.items())]


def _to_ipc(table: pa.Table | None, timestamps: pa.ChunkedArray | None = None) -> bytes | None:
    if table is None or not table.num_rows:
        return None
    if timestamps is not None:
        table = table.append_column(pa.field(OWN_TIMESTAMP, pa.int64()), timestamps)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _from_ipc(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return reader.read_all()
