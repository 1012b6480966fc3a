"""The manifest of a snapshot: which files it has, where they are, and what each must be.

JSON (format 1): `{"checksum": "<xxh3-128 of body>", "body": {...}}`, the body a `Snapshot`. A manifest is written last
and read with suspicion: one whose checksum, name, shard or file names are not what they must be is refused, so that
nothing outside of the snapshot is ever read or written for it.
"""

from __future__ import annotations

from pathlib import PurePosixPath

import msgspec
import xxhash

from backend.errors import UNDECODABLE, StateCorrupted, unknown_format
from recovery.commit.pointer import Commit

FORMAT = 1
SHARED = "shared"


class PackedFile(msgspec.Struct, frozen=True):
    """One file of a snapshot.

    Attributes:
        name: Plain name in the database's directory.
        length: Bytes.
        digest: Hex xxh3-128.
    """

    name: str
    length: int
    digest: str

    @property
    def shared(self) -> str | None:
        """Name by content; None for a file that belongs to one snapshot alone."""
        return f"{self.digest}_{self.length}.sst" if self.name.endswith(".sst") else None


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot's manifest.

    Attributes:
        format: Format version of the snapshot.
        shard: The shard.
        commit: What it brings the state to.
        parent: The commit before it; a step is applied to that.
        folder: Folder of a full snapshot's small files; empty for a step.
        files: The database's files, or the one staged file.
    """

    shard: int
    commit: Commit
    parent: Commit | None
    folder: str
    files: list[PackedFile]
    format: int = FORMAT

    @property
    def full(self) -> bool:
        """Whether it is a whole database."""
        return bool(self.folder)

    @property
    def length(self) -> int:
        """Bytes of all its files."""
        return sum(file.length for file in self.files)


class _Envelope(msgspec.Struct, frozen=True):
    checksum: str
    body: msgspec.Raw


def encode_manifest(snapshot: Snapshot) -> bytes:
    """Encode a manifest, checksum first."""
    body = msgspec.json.encode(snapshot)
    return msgspec.json.encode(_Envelope(xxhash.xxh3_128_hexdigest(body), msgspec.Raw(body)))


def decode_manifest(data: bytes, shard: int, name: str, where: str) -> Snapshot:
    """Decode a manifest and check everything about it that can be checked without its files.

    Args:
        data: The file's bytes.
        shard: The shard in whose folder it is.
        name: Its name.
        where: Its whole location, for errors.

    Raises:
        StateCorrupted: It does not match its checksum, or is not what its name says.
        UnknownFormat: A newer release wrote it.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        body = bytes(envelope.body)
        if xxhash.xxh3_128_hexdigest(body) != envelope.checksum:
            raise damaged(where, "the manifest does not match its checksum")
        version = msgspec.json.decode(body, type=dict).get("format")
        if version != FORMAT:
            raise unknown_format("a snapshot has an unknown format", f"format {version!r}", FORMAT, where)
        snapshot = msgspec.json.decode(body, type=Snapshot)
    except UNDECODABLE as error:
        raise damaged(where, f"the manifest cannot be decoded: {error}") from error
    _check_manifest(snapshot, shard, name, where)
    return snapshot


def manifest_name(commit: Commit, *, full: bool) -> str:
    """Give the name of a snapshot's manifest in its shard's folder."""
    return f"{commit.name}.{'full' if full else 'step'}.json"


def where_of(snapshot: Snapshot, file: PackedFile) -> str:
    """Give where a snapshot's file is, below the base directory."""
    if not snapshot.full:
        return f"{snapshot.shard}/{snapshot.commit.name}.step.sst"
    if file.shared is not None:
        return f"{snapshot.shard}/{SHARED}/{file.shared}"
    return f"{snapshot.shard}/{snapshot.folder}/{file.name}"


def _check_manifest(snapshot: Snapshot, shard: int, name: str, where: str) -> None:
    """Refuse a manifest that is not what its name says, or whose names would leave their directory."""
    if snapshot.shard != shard or manifest_name(snapshot.commit, full=snapshot.full) != name:
        raise damaged(where, f"it is of commit {snapshot.commit.name} of shard {snapshot.shard}")
    folder = PurePosixPath(snapshot.folder)
    if snapshot.full and (len(folder.parts) != 2 or not all(_plain(part) for part in folder.parts)):
        raise damaged(where, f"{snapshot.folder!r} is not a folder of this snapshot")
    for file in snapshot.files:
        if not _plain(file.name) or not _plain(file.digest):
            raise damaged(where, f"{file.name!r} is not a plain file name")
    if not snapshot.files:
        raise damaged(where, "it names no files")


def _plain(name: str) -> bool:
    return name not in {"", ".", ".."} and not set(name) & set("/\\\0:")


def damaged(where: str, why: str) -> StateCorrupted:
    """Make the error of a snapshot that cannot be used."""
    return StateCorrupted("a snapshot cannot be used", where=where, why=why)


def differs(where: str, file: PackedFile, found: tuple[int, str]) -> StateCorrupted:
    """Make the error of a file that is not the manifest's."""
    return damaged(where, f"{found[0]} bytes with digest {found[1]}, {file.length} with {file.digest} expected")
