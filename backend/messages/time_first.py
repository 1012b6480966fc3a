"""The message store of full-state aggregates: every accepted message of every retained window, once (SAMZA-552, R.4).

Key: `<timestamp>_<offset>` (backend.messages has the bytes). Value: the fields that the aggregates and the group key
read, as a row of `backend.rows`.

A message that is too late for some of its windows only (hopping windows) leaves a second row in `Region.OPERATOR`: tag
`x`, the same key without its region, and as value its skip (8 bytes; backend.windows.columns.pane_rows). A
message refused although a replay would find its place retained (several source partitions) leaves one with tag `r`.
Both go when the bound passes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from backend.keys import prefix_end
from backend.messages.keys import MESSAGES, clock_range, message_keys, places_of
from backend.messages.layout import TIME_FIRST
from backend.messages.rows import MessageCodec, digest
from backend.store.protocol import Region
from backend.store.reads import get_all, scan_ranges
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray, runs
from backend.windows.columns.grouping import start_bytes
from backend.windows.micro_batch import Execution
from backend.windows.panes import Pane

SKIPPED = bytes([Region.OPERATOR]) + b"x"
REFUSED = bytes([Region.OPERATOR]) + b"r"


class MessagesByTime(MessageCodec):
    """Reads and writes the messages in retention.

    Args:
        fields: The messages' fields to keep, in order.
    """

    def __init__(self, fields: Sequence[pa.Field]) -> None:
        super().__init__(TIME_FIRST, fields)

    def read(self, work: Workspace, starts: IntArray, ends: IntArray) -> tuple[pa.Table, IntArray]:
        """Read the messages of half-open ranges of event time, each once, in order of key; and their skips."""
        edges = zip(*(edge.tolist() for edge in runs(starts, ends - 1)), strict=True)
        ranges = [clock_range(MESSAGES, low, high + 1) for low, high in edges]
        keys, values, _ = scan_ranges(work, ranges)
        marked, skips, _ = scan_ranges(work, [(_mark(SKIPPED, start), _mark(SKIPPED, end)) for start, end in ranges])
        return self.decode(keys, values), _skips(keys, dict(zip(marked, skips, strict=True)))


def _skips(keys: Sequence[bytes], marked: dict[bytes, bytes]) -> IntArray:
    if not marked:
        return np.zeros(len(keys), np.int64)
    return np.array([int.from_bytes(marked.get(_mark(SKIPPED, key), b""), "big") for key in keys], np.int64)


def put_marks(work: Workspace, tag: bytes, messages: pa.Table, skips: IntArray | None = None) -> None:
    """Remember messages that a reader of the store must treat apart."""
    if not messages.num_rows:
        return
    marks = [_mark(tag, key) for key in message_keys(TIME_FIRST, messages)]
    work.put_many(marks, [b""] * len(marks) if skips is None else [skip.to_bytes(8, "big") for skip in skips.tolist()])


def refused(work: Workspace) -> list[tuple[int, int, int]]:
    """Give the places (stream, partition, offset) of refused messages that are not below the bound."""
    marks, _ = work.scan_arrays(REFUSED, prefix_end(REFUSED))
    return sorted(zip(*(part.tolist() for part in places_of(marks)), strict=True))


def take_out(execution: Execution, keys: Sequence[bytes], panes: Sequence[Pane]) -> None:
    """Take accepted messages out again; a replay leaves them out.

    Args:
        execution: Its ledger forgets them.
        keys: Their keys in the store.
        panes: The pane of each, which forgets it.
    """
    values = get_all(execution.work, keys, "a message that was accepted is not in the store")
    for key, pane, value in zip(keys, panes, values, strict=True):
        lost = digest([key], [value])
        pane.count, pane.digest = pane.count - 1, (pane.digest - lost) % 2**64
        execution.ledger.count_stored(-1, -lost)
    execution.work.delete_many([*keys, *(_mark(SKIPPED, key) for key in keys)])
    execution.work.put_many([_mark(REFUSED, key) for key in keys], [b""] * len(keys))


def drop_marks(work: Workspace, bound: int) -> None:
    """Forget what was remembered of messages before a time."""
    for tag in (SKIPPED, REFUSED):
        marks, _ = work.scan_arrays(tag, _mark(tag, start_bytes(Region.MESSAGES, bound)))
        if marks:
            work.delete_many(marks)


def _mark(tag: bytes, key: bytes) -> bytes:
    return tag + key[1:]
