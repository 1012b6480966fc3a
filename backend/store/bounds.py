"""Bounds and the format inside a store: rows of `Region.COMMIT` that are written with every set of changes.

Layout (format 1)::

    0x00 "bound" <region, 1 byte>  ->  full key: everything of the region below it is expired
    0x00 "format"                  ->  decimal format version of the store

A bound only hides. The space is reclaimed by the janitor, `reclaim`, which may run any number of times.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.errors import unknown_format
from backend.store.layers import merge_layers, sorted_rows
from backend.store.protocol import FORMAT, Changes, Readable, Store, region_range

FORMAT_KEY = b"\x00format"
FORMAT_VALUE = str(FORMAT).encode()
_BOUND = b"\x00bound"


def rows_of(changes: Changes) -> tuple[list[bytes], list[bytes | None]]:
    """Give the rows that applying changes writes, bounds included, sorted by key; never empty.

    A file without rows cannot be ingested, so changes without any repeat the format row.
    """
    bounds: dict[bytes, bytes | None] = {_BOUND + bytes([region]): key for region, key in changes.bounds.items()}
    if not changes.keys and not bounds:
        bounds = {FORMAT_KEY: FORMAT_VALUE}
    return merge_layers([rows for rows in ((changes.keys, changes.values), sorted_rows(bounds)) if rows[0]])


def stored_bounds(store: Readable) -> dict[int, bytes]:
    """Read the bounds that a store holds: region -> full key."""
    return {key[len(_BOUND)]: bound for key, bound in store.scan(_BOUND, _BOUND + b"\xff")}


def reclaim(store: Store, bounds: Mapping[int, bytes]) -> list[int]:
    """Delete what bounds hide, the janitor's work; give the regions where there was something.

    Looks at one row per region before it deletes, so that a clean store is not written to.
    """
    cleaned = []
    for region, bound in sorted(bounds.items()):
        start, _ = region_range(region)
        if next(store.scan(start, bound), None) is not None:
            store.delete_range(start, bound)
            cleaned.append(region)
    return cleaned


def check_format(found: bytes | None, where: str) -> None:
    """Compare a store's format row with what this release reads.

    Raises:
        UnknownFormat: The row is missing or another version.
    """
    if found != FORMAT_VALUE:
        why = "no format row" if found is None else f"format {found.decode(errors='replace')}"
        raise unknown_format("the store has an unknown format", why, FORMAT, where)
