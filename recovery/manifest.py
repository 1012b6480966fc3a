"""The manifest: what a checkpoint's state means, written before the first micro-batch and compared at every start.

File `<checkpoint>/rewind/manifest.json` (format 1). A changed job on an old checkpoint is told apart here: what can go
on (another policy, a longer retention) goes on and is recorded; what cannot (another window, another key) stops with
the difference spelled out.

`checksum` is the xxh3-128 of everything else in it, as JSON with sorted keys and without spaces: the file says under
which value Spark's state has each shard, and a digit that changed there would lose one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from backend.errors import UNDECODABLE, ManifestMismatch, StateCorrupted, UnknownFormat
from recovery.files import open_files

FORMAT = 1
NAME = "rewind/manifest.json"
MAX_SHARDS = 100_000

FREE = (
    "operator.policies",
    "operator.early",
    "operator.full",
    "operator.late",
    "operator.retention_ms",
    "operator.retention_messages",
    "operator.idle_after_ms",
    "operator.max_ahead_ms",
    "operator.free",
    "source.servers",
    "source.limits",
    "first_offsets",
    "topics",  # compared by their ids at the start
    "changelog",
    "release",
)
"""Entries that may change between starts. A longer retention never reopens what is below the stored bound."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's manifest.

    Attributes:
        shards: Number of shards; fixed at the first start.
        grouping: Grouping value per shard.
        entries: Everything else, JSON: `route`, `streams`, `operator`, `source`, `message_fields`, `session`, ...
    """

    shards: int
    grouping: tuple[int, ...]
    entries: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Give the file's content."""
        return {"format": FORMAT, "shards": self.shards, "grouping": list(self.grouping), **self.entries}


def read_manifest(checkpoint: str) -> Manifest | None:
    """Read a checkpoint's manifest, None when there is none.

    Raises:
        StateCorrupted: The file cannot be read.
        UnknownFormat: Another release wrote it.
    """
    where = f"{checkpoint}/{NAME}"
    try:
        data = json.loads(open_files(checkpoint).read(NAME))
        checksum = data.pop("checksum", None)
        found = _checksum(data)
        written = data.pop("format")
        if written != FORMAT:
            raise UnknownFormat(
                "the manifest has an unknown format",
                where=where,
                why=f"{written!r}, this release reads {FORMAT}",
                command="install the release that wrote it",
            )
        if checksum not in (None, found):  # the first manifests had none
            raise ValueError(f"checksum {found} found, {checksum} expected")
        shards, grouping = data.pop("shards"), data.pop("grouping")
        if type(shards) is not int or not 0 < shards <= MAX_SHARDS or len(set(grouping)) != shards:
            raise ValueError(f"{shards!r} shards with {len(grouping)} grouping values")
        return Manifest(shards, tuple(int(value) for value in grouping), data)
    except FileNotFoundError:
        return None
    except UNDECODABLE as error:
        raise StateCorrupted(
            "the manifest cannot be read", where=where, why=str(error), command=f"rewind verify {checkpoint}"
        ) from error


def write_manifest(checkpoint: str, manifest: Manifest) -> None:
    """Write the manifest atomically; durable on return."""
    content = _plain(manifest.to_json())
    whole = {**content, "checksum": _checksum(content)}
    open_files(checkpoint).write(NAME, [json.dumps(whole, indent=1, sort_keys=True).encode()])


def _checksum(content: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def settle(checkpoint: str, wanted: Manifest, *, used: bool) -> Manifest:
    """Decide whether a job may go on with a checkpoint, and record it.

    Args:
        checkpoint: Spark's checkpoint location.
        wanted: The job as it is now.
        used: Spark has committed micro-batches there.

    Returns:
        The manifest that holds: shards and grouping of the first start.

    Raises:
        ManifestMismatch: The state under the checkpoint cannot serve this job; the message lists every difference.
    """
    stored = read_manifest(checkpoint)
    if stored is None:
        if used:
            raise ManifestMismatch(
                "the checkpoint belongs to another query",
                where=checkpoint,
                why="Spark has committed micro-batches there, and there is no manifest",
                command="choose another checkpoint",
            )
        write_manifest(checkpoint, wanted)
        return wanted
    old = {**_plain(stored.entries), "shards": stored.shards}
    new = {**_plain(wanted.entries), "shards": wanted.shards}
    found = [(path, a, b) for path, a, b in differences(old, new) if not path.startswith(FREE)]
    if found:
        raise ManifestMismatch(
            "the job differs from the one that made this checkpoint",
            where=checkpoint,
            why="; ".join(f"{path}: was {a!r}, is {b!r}" for path, a, b in found),
            command="put the job back as it was, or choose another checkpoint (and let it read the source anew)",
        )
    settled = Manifest(
        stored.shards, stored.grouping, {**wanted.entries, "first_offsets": stored.entries.get("first_offsets")}
    )
    if _plain(settled.to_json()) != _plain(stored.to_json()):
        write_manifest(checkpoint, settled)
    return settled


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Give (path, old, new) of every leaf in which two JSON values differ.

    >>> list(differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3, "d": 4}}))
    [('a.c', 2, 3), ('a.d', None, 4)]
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif old != new:
        yield path, old, new


def _plain(value: Any) -> Any:
    """Give a value as JSON would give it back (tuples become lists)."""
    return json.loads(json.dumps(value))
