"""The manifest: what a checkpoint's state means, written before the first micro-batch and compared at every start.

File `<checkpoint>/rewind/manifest.json` (format 2). A changed job on an old checkpoint is told apart here: what can go
on (another policy, a longer retention: `option_sets.FREE`) goes on and is recorded; what cannot (another window, or
another key) stops with the difference spelled out.

`sets` has the options by the first version that they hold from, rising: `[{"since": 0, "options": {path: value}}]`
(`recovery.commit.option_sets`). Format 1 had none; its entries are the options of all that was planned.

`checksum` is the xxh3-128 of everything else in it, as JSON with sorted keys and without spaces: the file says under
which value Spark's state has each shard, and a digit that changed there would lose one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from backend.errors import UNDECODABLE, ManifestMismatch, StateCorrupted, unknown_format
from backend.stores.values import without_modules
from recovery.commit.option_sets import OptionSet, following, is_free, options_of, versions_in
from recovery.commit.reset_mark import check_whole
from recovery.commit.spark_files import METADATA, read_spark_file
from recovery.files import open_files

FORMAT = 2
NAME = "rewind/manifest.json"
MAX_SHARDS = 100_000
FIRST_HASH = "xxhash64"
"""Of keys to shards, in manifests that do not name it."""
CHANGELOG_DIRECTORY = "rewind/changelog"
"""The entry for a changelog beside the checkpoint: it is copied and moved with it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's manifest.

    Attributes:
        shards: Number of shards; fixed at the first start.
        grouping: Grouping value per shard.
        entries: Everything else, JSON: `route`, `streams`, `operator`, `inputs`, `message_fields`, `session`, ...
        sets: Options by the first version that they hold from, rising; none in a manifest of format 1.
    """

    shards: int
    grouping: tuple[int, ...]
    entries: Mapping[str, Any]
    sets: tuple[OptionSet, ...] = ()

    @property
    def topics(self) -> dict[int, str]:
        """Topic by the number of its stream."""
        return {number: topic for _, topic, number in self.entries.get("streams", ())}

    @property
    def dataframes(self) -> frozenset[int]:
        """Streams that nobody can read again."""
        sources = [side["source"] for side in self.entries.get("inputs", ())]
        names = {source["name"] for source in sources if source["kind"] == "dataframe"}
        return frozenset(number for number, topic in self.topics.items() if topic in names)

    def to_json(self) -> dict[str, Any]:
        """Give the file's content."""
        sets = [{"since": one.since, "options": one.options} for one in self.sets]
        fixed = {"format": FORMAT, "shards": self.shards, "grouping": list(self.grouping), "sets": sets}
        return {**fixed, **self.entries}


def read_manifest(checkpoint: str) -> Manifest | None:
    """Read a checkpoint's manifest, None when there is none.

    Raises:
        StateCorrupted: The file cannot be read.
        UnknownFormat: Another release wrote it.
        ResetInterrupted: A reset deleted part of the checkpoint.
    """
    check_whole(checkpoint)
    where = f"{checkpoint}/{NAME}"
    try:
        data = json.loads(open_files(checkpoint).read(NAME))
        if not isinstance(data, dict):
            raise ValueError("it is no JSON object")
        checksum = data.pop("checksum", None)
        found = _checksum(data)
        written = data.pop("format")
        if written not in (FORMAT, 1):
            raise unknown_format("the manifest has an unknown format", repr(written), FORMAT, where)
        if checksum not in (None, found):  # the first manifests had none
            raise ValueError(f"checksum {found} found, {checksum} expected")
        shards, grouping = data.pop("shards"), data.pop("grouping")
        if type(shards) is not int or not 0 < shards <= MAX_SHARDS or len(set(grouping)) != shards:
            raise ValueError(f"{shards!r} shards with {len(grouping)} grouping values")
        sets = tuple(OptionSet(int(one["since"]), dict(one["options"])) for one in data.pop("sets", ()))
        if [one.since for one in sets] != sorted({one.since for one in sets}):
            raise ValueError(f"option sets since {[one.since for one in sets]}")
        return Manifest(shards, tuple(int(value) for value in grouping), data, sets)
    except FileNotFoundError:
        return None
    except UNDECODABLE as error:
        raise StateCorrupted(
            "the manifest cannot be read",
            where=where,
            why=str(error),
            command="put the file back from a copy of the checkpoint; without one, delete the directory and"
            " start with a new one",
        ) from error


def query_id(checkpoint: str) -> str:
    """Read Spark's query id: the name of its local state.

    Raises:
        StateCorrupted: Spark's metadata cannot be read.
        PointerDamaged: Its checksum is another one.
    """
    try:
        return str(json.loads(read_spark_file(checkpoint, METADATA))["id"])
    except (*UNDECODABLE, FileNotFoundError) as error:
        raise StateCorrupted(
            "Spark's metadata of the checkpoint cannot be read",
            where=f"{checkpoint}/{METADATA}",
            why=str(error),
            command="put the file back from a copy of the checkpoint",
        ) from error


def changelog_uri(checkpoint: str, entry: str | None) -> str:
    """Return the URI of a checkpoint's changelog, as `open_changelog` takes it, out of the manifest's entry."""
    beside = entry is None or entry == CHANGELOG_DIRECTORY
    return f"{checkpoint.rstrip('/')}/{CHANGELOG_DIRECTORY}" if beside else str(entry)


def write_manifest(checkpoint: str, manifest: Manifest) -> None:
    """Write the manifest atomically; durable on return."""
    content = _plain(manifest.to_json())
    whole = {**content, "checksum": _checksum(content)}
    open_files(checkpoint).write(NAME, [json.dumps(whole, indent=1, sort_keys=True).encode()])


def _checksum(content: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def settle(checkpoint: str, wanted: Manifest, *, used: bool) -> Manifest:
    """Decide whether a job may go on with a checkpoint, and under which manifest; `record` writes it.

    Args:
        checkpoint: Spark's checkpoint location.
        wanted: The job as it is now, with the first offsets of the query that has begun.
        used: Spark has committed micro-batches there.

    Returns:
        The manifest that holds: shards and grouping of the first start, option sets by version.

    Raises:
        ManifestMismatch: The state under the checkpoint cannot serve this job; the message lists every difference.
    """
    stored = read_manifest(checkpoint)
    options = options_of(_plain(wanted.entries))
    if stored is None:
        if used:
            raise ManifestMismatch(
                "the checkpoint belongs to another query",
                where=checkpoint,
                why="Spark has committed micro-batches there, and there is no manifest",
                command="choose another checkpoint",
            )
        return replace(wanted, sets=following((), options, ()))
    check_same(checkpoint, stored, wanted)
    before = stored.sets or (OptionSet(0, options_of(stored.entries)),)
    return Manifest(
        stored.shards,
        stored.grouping,
        wanted.entries,
        following(before, options, versions_in(checkpoint, "offsets")),
    )


def record(checkpoint: str, settled: Manifest) -> Manifest:
    """Write what `settle` gave, if it is not what is there; returns it. For starts that nothing refuses any more."""
    stored = read_manifest(checkpoint)
    if stored is None or _plain(settled.to_json()) != _plain(stored.to_json()):
        write_manifest(checkpoint, settled)
    return settled


def check_same(checkpoint: str, stored: Manifest, wanted: Manifest) -> None:
    """Check that a job may work on a checkpoint's state: in what both manifests say, only free entries differ.

    Raises:
        ManifestMismatch: The message lists every other difference.
    """
    old = {"hash": FIRST_HASH, **_plain(stored.entries), "shards": stored.shards}
    new = {"hash": FIRST_HASH, **_plain(wanted.entries), "shards": wanted.shards}
    operator = new.get("operator")
    for side in (old, new):
        for store in ((side.get("operator") or {}).get("stores") or {}).values():
            store["value_type"] = without_modules(store["value_type"])  # which were written down before
    if isinstance(operator, dict) and "columns" not in (old.get("operator") or {}):  # of before it was written down
        new["operator"] = {name: value for name, value in operator.items() if name != "columns"}
    found = [(path, a, b) for path, a, b in differences(old, new) if not is_free(path)]
    if found:
        raise ManifestMismatch(
            "the job differs from the one that made this checkpoint",
            where=checkpoint,
            why="; ".join(f"{path}: was {a!r}, is {b!r}" for path, a, b in found),
            command="put the job back as it was, or choose another checkpoint (and let it read the source anew)",
        )


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
