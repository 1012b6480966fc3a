"""The pointer: what Spark's state holds per shard, and therefore what is committed.

Spark commits the pointer atomically with the source offsets, so it names the state exactly: the commit, the staged file
that makes it, and where the changelog has it. It is a few hundred bytes (format 2)::

    +----------------------------+--------------------------+
    | MessagePack of a `Pointer` | xxh3-64 of it, 8 bytes   |
    +----------------------------+--------------------------+

Format 1 was the same without the checksum, and is read.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import xxhash

from backend.batch import Position
from backend.errors import UNDECODABLE, PointerDamaged, StateCorrupted, UnknownFormat
from backend.store import Region

FORMAT = 1
"""Of the commit record."""
POINTER_FORMAT = 2
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
        launch: Which start of the query made it: a later start has a larger number.
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
    launch: int = 0
    format: int = FORMAT


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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Pointer)
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
        if version == (POINTER_FORMAT if sealed else FORMAT):
            return _decoder.decode(content if sealed else data)
    except UNDECODABLE as error:
        why = str(error) if sealed else f"{len(data)} bytes that do not match their checksum"
        raise PointerDamaged(
            "the pointer in Spark's state cannot be decoded", why=why, command="rewind verify <checkpoint>"
        ) from error
    raise UnknownFormat(
        "the pointer in Spark's state has an unknown format",
        why=f"format {version!r}, this release reads {FORMAT} and {POINTER_FORMAT}",
        command="install the release that wrote it",
    )


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
        raise StateCorrupted(
            "a commit record cannot be decoded", where=where, why=str(error), command="rewind verify <checkpoint>"
        ) from error
    raise UnknownFormat(
        "a commit record has an unknown format",
        where=where,
        why=f"format {version!r}, this release reads {FORMAT}",
        command="install the release that wrote it",
    )
