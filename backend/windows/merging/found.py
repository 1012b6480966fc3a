"""Sessions that a micro-batch concerns: found by the index over last times, so what does nothing costs nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import BEFORE, TIME
from backend.keys import fixed_bytes
from backend.store.reads import get_present
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.columns.grouping import GroupKeys, KeySpace
from backend.windows.merging import rows
from backend.windows.merging.one_by_one import Terms
from backend.windows.merging.rows import LONG_AGO, NEVER, SessionRows, Stored
from backend.windows.micro_batch import Execution, numbers

TOTAL = bytes([rows.EARLY_WAITS[0]]) + b"T"
"""Key of the number of sessions."""

_SCAN_SHARE = 16
"""The index is scanned as a whole when at least one in so many sessions may be touched."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Rows of REVISIONS, as read, in order of their owner.

    Attributes:
        keys: Their keys.
        first: First event times.
        last: Last event times.
        revision: Revisions.
        owner: Stored session that each lies in.
        values: The aggregates.
    """

    keys: list[bytes]
    first: IntArray
    last: IntArray
    revision: IntArray
    owner: IntArray
    values: pa.Table


@dataclass(frozen=True, slots=True)
class Found:
    """The messages of a micro-batch, and the stored sessions that it concerns.

    Attributes:
        messages: The messages that are taken.
        refused: The messages that are out of retention.
        time: Their event times.
        before: Clock before each; `LOWEST` where there is none.
        clock: Clock with each, where sessions close message by message; else as `before`.
        key: Number of the group key of each.
        space: The group keys.
        stored: Stored sessions.
        stored_key: Number of the group key of each.
        is_open: Not closed before the micro-batch.
        since: Batch time of the oldest unsent update of each, `LONG_AGO` where its policy was turned off, or `NEVER`.
        sent: Rows that were sent of them.
    """

    messages: pa.Table
    refused: pa.Table
    time: IntArray
    before: IntArray
    clock: IntArray
    key: IntArray
    space: KeySpace
    stored: Stored
    stored_key: IntArray
    is_open: Mask
    since: IntArray
    sent: Sent

    def codes(self, key: IntArray) -> pa.Array:
        """Give the codes of group keys."""
        return self.space.keys.take(pa.array(key))


def find(
    execution: Execution, terms: Terms, each: IntArray | None, keys: GroupKeys, session_rows: SessionRows
) -> Found:
    """Refuse what is out of retention; read what the other messages concern.

    Args:
        execution: The messages.
        terms: What sessions go by.
        each: Per message the stream time that retention by number of messages goes by; None without it.
        keys: Encodes the group key.
        session_rows: Reads sessions.
    """
    before = np.maximum(numbers(execution.messages, BEFORE), terms.clock)
    time = numbers(execution.messages, TIME)
    refused = (time + terms.keep <= before) | (time < terms.first_taken)
    if each is not None:
        refused |= time + terms.gap + 1 <= each
    out = execution.messages.filter(pa.array(refused))
    execution.refuse(
        refused,
        "out_of_retention",
        f"a session of it alone ended {terms.retention} ms or more before stream time"
        f"{'' if each is None else ', or more than the retained messages ago'}, or is where sessions are gone",
    )
    messages, before = execution.messages, before[~refused]
    time = numbers(messages, TIME)
    key, codes = keys.encode(messages)
    found = dict.fromkeys(touched(execution.work, terms, time, key, codes))
    found.update(dict.fromkeys(_due(execution, terms)))
    stored = session_rows.read(execution.work, sorted(found))
    space = KeySpace([codes, rows.codes_of(stored.idents)])
    is_open = stored.last + terms.gap + 1 > terms.clock
    # what waits for a policy that is off waited for it when it was on
    off = np.where(is_open, not terms.policies.early, terms.policies.late_ms is None)
    since = np.where(off & (stored.since != NEVER), LONG_AGO, stored.since)
    return Found(
        messages,
        out,
        time,
        before,
        np.maximum(before, time) if terms.exact else before,
        space.numbers[0][key] if len(key) else key,
        space,
        stored,
        space.numbers[1],
        is_open,
        since,
        _read_sent(execution.work, session_rows, stored),
    )


def _due(execution: Execution, terms: Terms) -> list[bytes]:
    """Find the sessions that close, go, or wait to be sent."""
    work, gap = execution.work, terms.gap
    found: list[bytes] = []
    if terms.clock_after > terms.clock:
        found += rows.scan_index(work, terms.clock - gap, terms.clock_after - gap)
    if terms.bound_after > terms.bound:
        found += rows.scan_index(work, None, terms.bound_after)
    if terms.drain or terms.full_off:
        found += rows.scan_index(work, terms.clock_after - gap, None)
    for tag, delay in terms.delays:
        if terms.drain or execution.policies_changed:
            found += rows.scan_waiting(work, tag, None)
        elif delay is not None:
            found += rows.scan_waiting(work, tag, terms.now - delay)
    return found


def touched(work: Workspace, terms: Terms, time: IntArray, key: IntArray, codes: pa.Array) -> list[bytes]:
    """Find the sessions of group keys that event times may be near: by the index, or key by key; some are not.

    Args:
        work: The state.
        terms: The gap.
        time: Event times.
        key: Group key of each: its number in `codes`.
        codes: Distinct group keys.
    """
    if not len(time):
        return []
    low, high = np.full(len(codes), 2**63 - 1, np.int64), np.full(len(codes), -(2**63), np.int64)
    np.minimum.at(low, key, time - terms.gap)
    np.maximum.at(high, key, time + terms.gap)
    total = int.from_bytes(work.get(TOTAL) or b"", "big")
    found: list[bytes] = []
    alone = np.ones(len(codes), np.bool_)
    if len(codes) * _SCAN_SHARE >= total:
        # open sessions and what a little disorder touches; a message far back looks for itself
        reach = max(int(low.min()), terms.clock - 2 * terms.gap)
        alone = low < reach
        near = rows.scan_index(work, reach, None)
        known = pc.is_in(rows.codes_of(near), value_set=codes).to_numpy(zero_copy_only=False)
        found = [near[at] for at in np.flatnonzero(known).tolist()]
    names = codes.to_pylist()
    for at in np.flatnonzero(alone).tolist():  # one range per group key
        start = rows.WINDOWS + names[at]
        lowest, end = (start + fixed_bytes(int(time)) for time in (low[at], high[at] + 1))
        for row, _ in work.scan(start, end, reverse=True):
            found.append(row[1:])
            if row < lowest:  # sessions of a group key are apart: no older one reaches further
                break
    return found


def _read_sent(work: Workspace, session_rows: SessionRows, stored: Stored) -> Sent:
    """Read the rows that were sent of stored sessions."""
    one = {rows.SHOWN + stored.idents[at]: at for at in np.flatnonzero(stored.shown == 1).tolist()}
    keys, values = get_present(work, list(one))
    owner = [one.pop(key) for key in keys]
    # merged sessions: what was sent of their parts lies within them
    several = [*one.values(), *np.flatnonzero(stored.shown > 1).tolist()]
    for at in several:
        found = work.scan_arrays(*rows.key_range(rows.SHOWN, stored.idents[at], int(stored.last[at])))
        keys += found[0]
        values += found[1]
        owner += [at] * len(found[0])
    order = sorted(range(len(owner)), key=owner.__getitem__)
    keys = [keys[at] for at in order]
    table = session_rows.decode_shown([values[at] for at in order])
    return Sent(
        keys,
        rows.firsts_of(keys),
        numbers(table, "_last"),
        numbers(table, "_revision"),
        np.array(sorted(owner), np.int64),
        table.drop_columns(["_last", "_revision"]),
    )
