"""Which stored messages a micro-batch can meet: one range scan, or one seek per distinct key, for both sides at once.

Keys that begin with event time are read as the union of the ranges that the new messages reach; keys that begin with
the equal fields (or the session key) by one scan per distinct key. Where that would be more scans than the store is
worth, or the layout has neither (`<offset>`: small windows by number), everything stored is read, once.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from backend.batch import MAX_TIME, MIN_TIME
from backend.joins.rows import JoinRows, Rows
from backend.joins.sides import LEFT
from backend.joins.spec import JoinSpec
from backend.messages.keys import MESSAGES, clock_range
from backend.messages.layout import Part
from backend.store.protocol import Region, region_range
from backend.store.reads import scan_ranges
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray, few, runs

MAX_SCANS = 64
"""Ranges of event time that are read apart; smaller gaps between them are read, too."""
SEEK_ROWS = 8
"""One seek per key costs about as much as reading so many rows."""


def reach(spec: JoinSpec, side: int, time: IntArray) -> tuple[IntArray, IntArray]:
    """Give the event times of the other side that messages of one side can meet, both ends included."""
    before, after = spec.before or 0, spec.after or 0
    return (time - before, time + after) if side == LEFT else (time - after, time + before)


def load(codec: JoinRows, work: Workspace, new: tuple[Rows, Rows], stored: int) -> tuple[Rows, Rows]:
    """Read the stored messages that new ones may meet, and perhaps others.

    Args:
        codec: The join's rows.
        work: The state before the micro-batch.
        new: Left and right messages at hand.
        stored: How many messages are stored.

    Returns:
        Left and right, each sorted by (stream, partition, offset).
    """
    spec, layout = codec.spec, codec.layout
    asking = tuple(rows.where(rows.known) for rows in new)
    ranges: list[tuple[bytes, bytes]] = []
    if stored and any(len(rows) for rows in asking):
        edges = [reach(spec, side, rows.time) for side, rows in enumerate(asking)]
        low, high = (np.concatenate([edge[at] for edge in edges]) for at in (0, 1))
        if layout.parts[0] is Part.TIME:
            spans = zip(*(edge.tolist() for edge in few(*runs(low, high), MAX_SCANS)), strict=True)
            ranges = [clock_range(MESSAGES, first, last + 1) for first, last in spans]
        elif layout.parts[0] is Part.OFFSET:
            ranges = [region_range(Region.MESSAGES)]
        else:
            ranges = _key_ranges(codec, asking, low, high, stored)
    keys, values, _ = scan_ranges(work, ranges)
    return codec.split(keys, values)


def _key_ranges(
    codec: JoinRows, asking: tuple[Rows, ...], low: IntArray, high: IntArray, stored: int
) -> list[tuple[bytes, bytes]]:
    """Give one range per distinct key, cut to the event times that can be met where they follow the key."""
    parts = [codec.prefixes(rows) for rows in asking if len(rows)]
    coded = pa.concat_arrays([part.cast(pa.binary()) for part in parts]).dictionary_encode()
    if len(coded.dictionary) * SEEK_ROWS > stored:
        return [region_range(Region.MESSAGES)]
    prefixes = coded.dictionary.to_pylist()
    if not (codec.layout.timed and codec.spec.ranged):
        return [clock_range(MESSAGES + prefix, None, None) for prefix in sorted(prefixes)]
    number = coded.indices.to_numpy()
    first, last = np.full(len(prefixes), MAX_TIME, np.int64), np.full(len(prefixes), MIN_TIME, np.int64)
    np.minimum.at(first, number, low)
    np.maximum.at(last, number, high)
    spans = zip(prefixes, first.tolist(), last.tolist(), strict=True)
    return sorted(clock_range(MESSAGES + prefix, start, end + 1) for prefix, start, end in spans)
