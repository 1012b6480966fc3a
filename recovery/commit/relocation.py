"""A checkpoint that was copied or moved: the one absolute path that Spark keeps in it.

Spark writes the place of its state schema as an absolute path into `state/<operator>/_metadata/v2/<micro-batch>`
(measured with Spark 4.2). A query on a copy then reads the schema where the original was, and fails once the original
is gone: on the very day for which the copy was made. `settle_in` lets those paths name the copy's own files.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from shlex import quote
from typing import Any

from backend.errors import ManifestMismatch, PointerDamaged, RewindError, StateUnavailable
from backend.places import is_same, plain_path
from recovery.commit.manifest import CHANGELOG_DIRECTORY, Manifest, read_manifest
from recovery.files import Files, open_files

log = logging.getLogger("rewind.moved")

VERSION = "v2"
MAX_PLACES = 16
"""Of those where a checkpoint was before that its manifest names."""
_SCHEMA = re.compile(r"state/\d+/_stateSchema/.+")


def settle_in(checkpoint: str) -> int:
    """Let Spark's operator metadata name this checkpoint's own state schemas; no query may run on it.

    Args:
        checkpoint: Path or URI of Spark's checkpoint location.

    Returns:
        Number of metadata files rewritten: 0 where the checkpoint is at its place.
    """
    files = open_files(checkpoint)
    rewritten = 0
    for folder, name, metadata in _all_metadata(files):
        elsewhere = _elsewhere(files, metadata)
        if not elsewhere:
            continue
        for store in metadata["stateStoreInfo"]:
            paths = store.get("stateSchemaFilePaths", [])
            store["stateSchemaFilePaths"] = [elsewhere.get(path, path) for path in paths]
        # Hadoop's checksum of the old text goes first: a file without one is read, with a wrong one it is not
        files.delete([f"{folder}/.{name}.crc"])
        files.write(f"{folder}/{name}", [f"{VERSION}\n{json.dumps(metadata)}".encode()])
        rewritten += 1
    if rewritten:
        log.warning("%s was copied or moved: Spark's metadata now names the state schemas here", checkpoint)
    return rewritten


def check_alone(checkpoint: str, stored: Manifest | None, changelog: str) -> list[str]:
    """Check that a checkpoint that was copied does not share a changelog outside of it with an original of it.

    Both are the same query to the changelog, and each would cut what the other needs. Where it is outside, a place
    where the checkpoint was before, and where there is none of the query now, is forgotten: it was moved.

    Args:
        checkpoint: Path or URI of Spark's checkpoint location.
        stored: Its manifest; None before its first start.
        changelog: The changelog's URI as the manifest would have it.

    Returns:
        The places where the checkpoint was before, the newest `MAX_PLACES`; with a changelog outside, those where its
        query is yet or which do not answer: the next start looks again.

    Raises:
        ManifestMismatch: An original is still there, and the changelog is its own.
    """
    if stored is None:
        return []
    places = _places_before(checkpoint, stored)
    if changelog == CHANGELOG_DIRECTORY:
        return places
    known = [(place, _changelog_at(place, stored)) for place in places if not is_same(place, checkpoint)]
    for place, its in known:
        if its == changelog:
            raise ManifestMismatch(
                "the checkpoint is a copy, and would share its changelog with the original",
                where=checkpoint,
                why=f"the original is at {place}, and both name {changelog}: what one cuts off, the other needs",
                command="give the copy a changelog of its own, changelog=...; or delete the original if it is not to"
                " go on",
            )
    return [place for place, its in known if its is not None]


def originals(checkpoint: str, stored: Manifest) -> dict[str, bool]:
    """Return the places where the query of a checkpoint that was copied lies too (True), or which do not answer."""
    places = [place for place in _places_before(checkpoint, stored) if not is_same(place, checkpoint)]
    known = {place: _changelog_at(place, stored) for place in places}
    return {place: bool(its) for place, its in known.items() if its is not None}


def _places_before(checkpoint: str, stored: Manifest) -> list[str]:
    """Return the places by their names; none is looked at."""
    here = open_files(checkpoint).uri
    places = dict.fromkeys([*stored.entries.get("places", ()), stored.entries.get("place", here)])
    return [place for place in places if place != here][-MAX_PLACES:]


def _changelog_at(place: str, stored: Manifest) -> str | None:
    """Return the changelog of the query where it lies at a place, None where it does not; "" without an answer."""
    try:
        original = read_manifest(place)
    except (RewindError, OSError, ValueError):
        return ""
    if original is None or original.entries.get("query") != stored.entries.get("query"):
        return None
    return str(original.entries.get("changelog", CHANGELOG_DIRECTORY))


def check_settled(checkpoint: str) -> None:
    """Check that Spark can read the state here; for readers, which change nothing.

    Raises:
        StateUnavailable: The checkpoint was copied or moved, and Spark's metadata names files that are gone.
    """
    files = open_files(checkpoint)
    for _, _, metadata in _all_metadata(files):
        for path in _elsewhere(files, metadata):
            folder, _, name = path.rpartition("/")
            if name not in open_files(folder).list():
                raise StateUnavailable(
                    "the checkpoint was copied or moved, and not started since",
                    where=checkpoint,
                    why=f"Spark's metadata names {path}, which is gone",
                    command=f"rewind restore {quote(checkpoint)} <module:function>, or start the job: both mend it",
                )


def _all_metadata(files: Files) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Give folder, name and content of each operator metadata file that this release knows.

    Raises:
        PointerDamaged: One is cut short, damaged or gone.
    """
    for operator in files.folders("state"):
        folder = f"state/{operator}/_metadata/{VERSION}"
        for name in filter(str.isdigit, files.list(folder)):  # beside them lie Hadoop's checksum files
            try:
                metadata = _decoded(files.read(f"{folder}/{name}"))
            except FileNotFoundError:
                continue  # a query runs on, and has let go of it
            except ValueError as error:
                raise PointerDamaged(
                    "a file with which Spark finds its state is damaged",
                    where=f"{files.uri.rstrip('/')}/{folder}/{name}",
                    why=str(error),
                    command=f"with no query running, put this file and .{name}.crc beside it back from a copy of the"
                    " checkpoint of any age; leave the rest of the folder state as it is",
                ) from error
            if metadata is not None:
                yield folder, name, metadata


def _decoded(content: bytes) -> dict[str, Any] | None:
    """Read a metadata file; None for one of another version: Spark itself says what it thinks of it.

    Raises:
        ValueError: It is damaged.
    """
    version, line, text = content.decode().partition("\n")
    if version != VERSION and line:
        return None
    metadata: dict[str, Any] = json.loads(text)
    stores = metadata.get("stateStoreInfo") if isinstance(metadata, dict) else None
    if not isinstance(stores, list) or not all(isinstance(store, dict) for store in stores):
        raise ValueError("has no list of state stores")
    paths = [store.get("stateSchemaFilePaths", []) for store in stores]
    if not all(isinstance(one, list) and all(isinstance(path, str) for path in one) for one in paths):
        raise ValueError("has no list of schema files")
    return metadata


def _elsewhere(files: Files, metadata: dict[str, Any]) -> dict[str, str]:
    """Give the schema paths that are not of this checkpoint, and the same file's path here, if it is here."""
    found = {}
    for store in metadata["stateStoreInfo"]:
        for path in store.get("stateSchemaFilePaths", []):
            schema = _SCHEMA.search(path)
            if schema is None:
                continue
            here = f"{files.uri.rstrip('/')}/{schema[0]}"
            folder, _, name = schema[0].rpartition("/")
            if plain_path(path) != here and name in files.list(folder):
                found[path] = here
    return found
