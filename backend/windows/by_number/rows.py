"""Rows of windows by number of messages: counters of group keys, and the order of messages of several sources."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backend.batch import EDGES, FIRST, OFFSET, PARTITION
from backend.keys import prefix_end
from backend.messages.key_first import PLACE_BYTES
from backend.rows import fixed_rows
from backend.store.protocol import Readable, Region

FORMAT = 2
_KINDS = {PARTITION: pa.int32(), OFFSET: pa.int64()}
EDGE_FIELDS = [pa.field(f"_{name}", _KINDS[source], nullable=False) for name, source in EDGES.items()]
"""Where what is stored begins and ends: columns as `EDGES`, with `_` before the name."""
LAST_FIELDS = EDGE_FIELDS[len(FIRST) :]
_SOURCE = PLACE_BYTES - 8
COUNTER = np.dtype(
    [
        ("format", "u1"),
        ("next", ">i8"),
        ("live", ">i8"),
        ("digest", ">u8"),
        ("stream", ">u2"),
        ("partition", ">i4"),
        ("mixed", "u1"),  # the live messages come from several source partitions
        ("newest", ">i8"),  # newest event time, and number on the shard of the newest message: retention
        ("last", ">i8"),
    ]
)
COUNTERS = bytes([Region.OPERATOR]) + b"n"
PLACES = bytes([Region.OPERATOR]) + b"m"
SENT = bytes([Region.OPERATOR]) + b"s"
MESSAGES = bytes([Region.MESSAGES])

SourceCounts = dict[bytes, int]
"""Source partition, as places begin with it -> messages of it."""


def pack_counts(counts: SourceCounts) -> bytes:
    """Write numbers of messages as places: the number stands where the offset would."""
    return b"".join(source + count.to_bytes(8, "big") for source, count in sorted(counts.items()))


def unpack_counts(places: bytes) -> SourceCounts:
    """Inverse of `pack_counts`."""
    return {place[:_SOURCE]: int.from_bytes(place[_SOURCE:], "big") for place in split_places(places)}


def newest(places: list[bytes], counts: SourceCounts) -> set[bytes]:
    """Give the places of live messages, as many of each source partition's newest; `places` are ascending."""
    found = set[bytes]()
    for source, count in counts.items():
        begin, end = (bisect_left(places, edge) for edge in (source, prefix_end(source) or b"\xff" * PLACE_BYTES))
        found.update(places[max(end - count, begin) : end])
    return found


def split_places(places: bytes) -> list[bytes]:
    """Take places that are written behind one another apart."""
    return [places[at : at + PLACE_BYTES] for at in range(0, len(places), PLACE_BYTES)]


def all_counters(state: Readable) -> tuple[list[bytes], npt.NDArray[np.void]]:
    """Read the counters of all group keys: their keys, and `COUNTER` rows."""
    keys, values = state.scan_arrays(COUNTERS, prefix_end(COUNTERS))
    return keys, read_counters(values)


def read_counters(values: Sequence[bytes]) -> npt.NDArray[np.void]:
    """Decode counters.

    Raises:
        UnknownFormat: Another release wrote one.
    """
    return fixed_rows(values, COUNTER, FORMAT, "a counter of tuple windows")
