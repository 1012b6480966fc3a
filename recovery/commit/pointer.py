"""The pointer: what Spark's state holds per shard, and therefore what is committed.

Spark commits the pointer atomically with the source offsets, so it names the state exactly: the commit, the staged file
that makes it, and where the changelog has it. It is a few hundred bytes (format 2)::

    +----------------------------+--------------------------+
    | MessagePack of a `Pointer` | xxh3-64 of it, 8 bytes   |
    +----------------------------+--------------------------+

Format 1 was the same without the checksum, and is read. Format 3 is a `RestoringPointer`: the shard has queued its
input since a commit whose state is being restored (`recovery.queue`). Releases that know no queue refuse it by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import xxhash

from backend.batch import Position, SourcePartition
from backend.errors import UNDECODABLE, PointerDamaged, StateCorrupted, unknown_format
from backend.store.protocol import Readable, Region

FORMAT = 1
"""Of the commit record."""
POINTER_FORMAT = 2
RESTORING_FORMAT = 3
_SEAL_BYTES = 8

COMMIT_KEY = bytes([Region.COMMIT]) + b"commit"
"""Key of the commit row: its value is `encode_record` of the commit that the database is at; written last."""


class Commit(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One commit of one shard: made once per shard and task attempt.

    Attributes:
        version: Spark's batch id.
        uuid: Hex uuid4; attempt numbers repeat across re-runs, this does not.
    """

    version: int
    uuid: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]  # it becomes part of file names

    @property
    def name(self) -> str:
        """Name used in file names: `<version, 20 digits>_<uuid>`."""
        return f"{self.version:020d}_{self.uuid}"

    @classmethod
    def of_name(cls, name: str) -> Commit:
        """Inverse of `name`."""
        version, _, uuid = name.partition("_")
        return cls(int(version), uuid)


def is_old(name: str, oldest: int) -> bool:
    """Tell whether a file is named by a commit (`Commit.name`) of a version, or of one before; drafts are, too.

    >>> is_old(f"{Commit(7, 'ab').name}.delta", 7), is_old(f"{Commit(7, 'ab').name}.delta", 6), is_old("idle.json", 7)
    (True, False, False)
    """
    return name[:20].isdecimal() and int(name[:20]) <= oldest


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A segment of the message log (`recovery.changelog.message_log`).

    Attributes:
        commit: Names it; the newest commit whose messages are in it.
        tier: How often its messages have been merged.
        length: Bytes.
    """

    commit: Commit
    tier: int
    length: int


class CommitRecord(msgspec.Struct, frozen=True):
    """What a commit says of a shard: in the database as the commit row, and in the changelog.

    Attributes:
        format: Format version of this record.
        shard: The shard.
        commit: This commit.
        parent: The commit it was made on, None for the first.
        ancestors: The newest ancestors, parent first, at most `MAX_ANCESTORS`.
        time_ms: Batch time.
        positions: (stream, partition, position), sorted.
        bounds: Region -> full key: everything of the region below it is expired.
        replay_from: (stream, partition, smallest start offset over all retained windows), sorted.
        rejected: (stream, partition, offset) that a replay leaves out.
        message_count: Live messages.
        message_digest: Their digest.
        incarnation: Which start of the query made it: a later start has a larger number.
        segments: Of the message log, what has messages that are kept, oldest first.
    """

    shard: int
    commit: Commit
    parent: Commit | None
    time_ms: int
    positions: list[tuple[int, int, Position]]
    bounds: dict[int, bytes]
    ancestors: list[Commit] = []
    replay_from: list[tuple[int, int, int]] = []
    rejected: list[tuple[int, int, int]] = []
    message_count: int = 0
    message_digest: int = 0
    incarnation: int = msgspec.field(default=0, name="launch")
    format: int = FORMAT
    segments: list[Segment] = []


MAX_ANCESTORS = 32


class Pointer(msgspec.Struct, frozen=True):
    """What Spark's ValueState holds for a shard.

    Attributes:
        format: Format version of the pointer.
        shard: The shard.
        commit: The committed commit.
        parent: Its parent.
        staged_length: Bytes of the staged file that turns the parent's state into this commit's.
        staged_digest: Hex xxh3-128 of that file.
        positions: (stream, partition, position), sorted.
        bounds: As in the commit record.
        changelog: Where the changelog has this commit: a file's name, or a topic position.
        next_due_ms: When the operator wants to run again without input.
        drained: Version of the last micro-batch that drained, -1 if none did.
    """

    shard: int
    commit: Commit
    parent: Commit | None
    staged_length: int
    staged_digest: str
    positions: list[tuple[int, int, Position]]
    bounds: dict[int, bytes]
    changelog: str
    next_due_ms: int | None = None
    drained: int = -1
    format: int = POINTER_FORMAT


class EntryProof(msgspec.Struct, frozen=True, array_like=True):
    """What is known of an entry without its file, so that a lost one is made again from the source, and proven.

    Attributes:
        commit: The commit that queued it.
        length: Bytes of its file.
        digest: Hex xxh3-128 of its file.
        time_ms: As in `recovery.queue.entries.Entry`.
        came: The same.
        drain: The same.
        with_values: The same.
        combined: Its messages are combined rows.
        after: (stream, partition, position) of the source partitions whose position it changed, sorted.
        content: Hex xxh3-128 of its messages, errors and first offsets, however they are written down.
    """

    commit: Commit
    length: int
    digest: str
    time_ms: int
    came: bool
    drain: bool
    with_values: bool
    combined: bool
    after: list[tuple[int, int, Position]]
    content: str


class RestoringPointer(Pointer, frozen=True, kw_only=True):
    """The pointer of a commit that queued its micro-batch: `staged_length` and `staged_digest` are the entry's.

    Attributes:
        since: The pointer of the commit that is restored; the queue begins after it.
        queued: Entries in the queue, this commit's among them.
        queued_bytes: Bytes of them.
        entries: What is known of each, oldest first; not of the newest where that would be too much for a pointer.
    """

    since: Pointer
    queued: int
    queued_bytes: int
    entries: list[EntryProof] = []
    format: int = RESTORING_FORMAT


def state_of(pointer: Pointer) -> Pointer:
    """Return the pointer whose commit a shard's state is at: of a shard that queues, the one that it queues since."""
    return pointer.since if isinstance(pointer, RestoringPointer) else pointer


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Pointer)
_restoring_decoder = msgspec.msgpack.Decoder(RestoringPointer)
_record_decoder = msgspec.msgpack.Decoder(CommitRecord)


def encode(pointer: Pointer) -> bytes:
    """Encode a pointer for Spark's state."""
    content = _encoder.encode(pointer)
    return content if pointer.format == FORMAT else content + xxhash.xxh3_64_digest(content)


def decode(data: bytes) -> Pointer:
    """Decode a pointer.

    Raises:
        UnknownFormat: A newer release wrote it.
        PointerDamaged: The bytes are not a pointer.
    """
    content = data[:-_SEAL_BYTES]
    sealed = len(data) > _SEAL_BYTES and xxhash.xxh3_64_digest(content) == data[-_SEAL_BYTES:]
    try:
        version = msgspec.msgpack.decode(content if sealed else data, type=dict).get("format")
        if sealed and version == RESTORING_FORMAT:
            return _restoring_decoder.decode(content)
        if version == (POINTER_FORMAT if sealed else FORMAT):
            return _decoder.decode(content if sealed else data)
    except UNDECODABLE as error:
        why = str(error) if sealed else f"{len(data)} bytes that do not match their checksum"
        raise PointerDamaged(
            "the pointer in Spark's state cannot be decoded", why=why, command="rewind verify <checkpoint>"
        ) from error
    what = "the pointer in Spark's state has an unknown format"
    raise unknown_format(what, f"format {version!r}", f"{FORMAT} to {RESTORING_FORMAT}")


def encode_record(record: CommitRecord) -> bytes:
    """Encode a commit record: the value of the commit row, and the header of a changelog record."""
    return _encoder.encode(record)


def decode_record(data: bytes, *, where: str = "the commit row") -> CommitRecord:
    """Decode a commit record.

    Args:
        data: What `encode_record` gave.
        where: The file or database that holds it, for the error.

    Raises:
        UnknownFormat: A newer release wrote it.
        StateCorrupted: The bytes are not a commit record.
    """
    try:
        version = msgspec.msgpack.decode(data, type=dict).get("format")
        if version == FORMAT:
            return _record_decoder.decode(data)
    except UNDECODABLE as error:
        raise StateCorrupted("a commit record cannot be decoded", where=where, why=str(error)) from error
    raise unknown_format("a commit record has an unknown format", f"format {version!r}", FORMAT, where)


def read_commit_row(store: Readable, where: str = "the commit row") -> CommitRecord | None:
    """Read the commit that a database is at.

    Args:
        store: The database.
        where: Names it in errors.
    """
    data = store.get(COMMIT_KEY)
    return decode_record(data, where=where) if data is not None else None


@dataclass(frozen=True, slots=True)
class At:
    """A sound database.

    Attributes:
        commit: Its commit row's commit; None when it has no commit row: nothing was ever confirmed.
        positions: Next offset per source partition at that commit; empty where nobody looked.
    """

    commit: Commit | None
    positions: Mapping[SourcePartition, int] = field(default_factory=dict)
