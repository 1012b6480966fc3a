"""What both kinds of event-time windows keep up: merged partials, messages, metadata, and the bounds.

Expiry is always a bound (backend.store): the regions are keyed start first, so raising it hides everything that is out
of retention at once, and nothing is deleted row by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from backend.aggregates import IncrementalPlan
from backend.batch import OFFSET, PARTITION, STREAM, TIME, Proof
from backend.messages import digest
from backend.operators import kept, panes
from backend.operators.arrays import IntArray, Mask, compress, dense, firsts, least
from backend.operators.grouping import GroupKeys, KeySpace, start_bytes, start_of
from backend.operators.kept import Kept
from backend.operators.panes import Panes
from backend.operators.partials import FIRST_CLOCK, PartialStore
from backend.operators.spec import WindowSpec
from backend.operators.turn import Turn, numbers
from backend.store import Region
from backend.workspace import Workspace


def store_partials(
    turn: Turn,
    store: PartialStore,
    plan: IncrementalPlan,
    space: KeySpace,
    content: pa.Table,
    place: tuple[IntArray, IntArray, IntArray],
    old: int,
    alive: Mask,
) -> tuple[IntArray, IntArray]:
    """Write the merged partials of touched groups.

    Args:
        turn: Where to.
        store: Its layout.
        plan: The incremental aggregates.
        space: The group keys.
        content: Partial columns and `FIRST_CLOCK`: stored rows first, then arrived ones.
        place: Pane, skip, key number of each row of `content`.
        old: Number of stored rows.
        alive: Per arrived row, whether its pane is in retention.

    Returns:
        Pane and skip of the groups that are new.
    """
    none = np.empty(0, np.int64)
    if not alive.any():
        return none, none
    rows = np.concatenate([np.arange(old), np.flatnonzero(alive) + old])
    pane, panes_ = compress(place[0][rows])
    skip, skips = compress(place[1][rows])
    size = max(len(space), 1)
    group, codes = dense((pane * len(skips) + skip) * size + place[2][rows], len(panes_) * len(skips) * size)
    touched, was = np.zeros(len(codes), np.bool_), np.zeros(len(codes), np.bool_)
    touched[group[old:]], was[group[:old]] = True, True
    needed = touched[group]
    group, codes, was = (np.cumsum(touched) - 1)[group[needed]], codes[touched], was[touched]
    table = _merged(plan, content.take(pa.array(rows[needed])), group, len(codes))
    at, skip = panes_[codes // (len(skips) * size)], skips[codes // size % len(skips)]
    store.put(turn.work, at, skip, space.keys.take(pa.array(codes % size)), table)
    return at[~was], skip[~was]


def _merged(plan: IncrementalPlan, content: pa.Table, group: IntArray, count: int) -> pa.Table:
    if len(group) == count:
        return content.take(pa.array(np.argsort(group)))
    clock = least(numbers(content, FIRST_CLOCK), group, count)
    merged = plan.merge(content.drop_columns([FIRST_CLOCK]), group, count)
    return merged.append_column(pa.field(FIRST_CLOCK, pa.int64(), nullable=False), pa.array(clock))


def store_messages(turn: Turn, store: Kept, pane: IntArray, skip: IntArray, stays: Mask, bound: int) -> list[int]:
    """Write the turn's messages that stay; gives the digest per pane, in order of pane.

    Args:
        turn: The messages; its ledger counts them.
        store: Their layout.
        pane: Pane of each message; in order of time.
        skip: Skip of each message.
        stays: Which are in retention after the turn.
        bound: The messages' bound after the turn: what was refused at or above it has to be remembered.
    """
    messages = turn.messages.filter(pa.array(stays))
    keys, values, of = store.rows(messages)
    turn.work.put_many(keys, values)
    skip = skip[stays]
    kept.put_marks(turn.work, kept.SKIPPED, messages.filter(pa.array(skip > 0)), skip[skip > 0])
    for refused in turn.refused:
        kept.put_marks(turn.work, kept.REFUSED, refused.filter(pa.array(numbers(refused, TIME) >= bound)))
    pane = pane[stays][of]  # ascending, because the keys begin with the time
    edges = np.flatnonzero(np.diff(pane, prepend=pane[:1] - 1, append=pane[-1:] + 1)).tolist()
    digests = [digest(keys[low:high], values[low:high]) for low, high in pairwise(edges)]
    turn.ledger.messages += len(keys)
    turn.ledger.digest = (turn.ledger.digest + sum(digests)) % 2**64
    return digests


def store_panes(
    turn: Turn, known: Panes, pane: IntArray, stays: Mask, digests: list[int] | None, fresh: tuple[IntArray, IntArray]
) -> None:
    """Write the metadata of touched panes.

    Args:
        turn: The messages.
        known: Their panes as committed, read already.
        pane: Pane of each message.
        stays: Which are in retention after the turn.
        digests: Digest per touched pane, in order of pane; None where no message is kept.
        fresh: Pane and skip of each new group.
    """
    number, panes_ = compress(pane[stays])
    if not len(panes_):
        return
    touched = [known.known.get(at) or known.fresh(at) for at in panes_.tolist()]
    turn.metrics["opened"] += sum(row.count == 0 for row in touched)
    counts = np.bincount(number, minlength=len(panes_)).tolist()
    new = np.bincount(np.searchsorted(panes_, fresh[0]), minlength=len(panes_)).tolist()
    for row, count, groups, added in zip(touched, counts, new, digests or [0] * len(touched), strict=True):
        row.count += count
        row.groups += groups
        row.digest = (row.digest + added) % 2**64
    skipping = fresh[1] > 0
    for at, skip in zip(np.searchsorted(panes_, fresh[0][skipping]), fresh[1][skipping].tolist(), strict=True):
        touched[at].skips = sorted({*touched[at].skips, skip})
    for at, found in _source_ranges(number, turn.messages, stays):
        panes.extend(touched[at], found)
    panes.write(turn.work, touched)


def _source_ranges(
    number: IntArray, messages: pa.Table, stays: Mask
) -> Iterable[tuple[int, list[tuple[int, int, int, int]]]]:
    """Give per pane number (stream, partition, first offset, last offset) of messages; they are in offset order."""
    stream, partition, offset = (numbers(messages, name)[stays] for name in (STREAM, PARTITION, OFFSET))
    source, _ = compress(stream * 2**32 + partition)
    sources = int(source.max(initial=0)) + 1
    spot, spots = dense(number * sources + source, (int(number.max(initial=0)) + 1) * sources)
    low = firsts(spot, len(spots))
    high = np.empty(len(spots), np.int64)
    high[spot] = np.arange(len(spot))
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    for at, first, last in zip((spots // sources).tolist(), low.tolist(), high.tolist(), strict=True):
        place = (int(stream[first]), int(partition[first]), int(offset[first]), int(offset[last]))
        found.setdefault(at, []).append(place)
    return found.items()


def gone_for_good(turn: Turn) -> int | None:
    """Give the start time up to which, exclusive, windows have expired; None while none has.

    It is what the retention of the time expired: one that was made longer since reopens nothing.
    """
    bound = turn.work.bounds.get(Region.REVISIONS)
    return start_of(bound) if bound is not None else None


def refuse_through(gone: IntArray | None, last: int, messages: int) -> IntArray:
    """Give per message the last window that is out of retention, which is at least this one."""
    return np.full(messages, last, np.int64) if gone is None else np.maximum(gone, last)


def expire(turn: Turn, gone: Panes | None, bounds: Mapping[Region, int]) -> None:
    """Move the bounds past what is out of retention; results of it were sent before.

    Args:
        turn: Its ledger forgets the messages.
        gone: The panes that go, read already; None where no message is kept.
        bounds: Region -> the first start time that stays.
    """
    if gone is not None:
        turn.ledger.messages -= sum(pane.count for pane in gone.known.values())
        turn.ledger.digest = (turn.ledger.digest - sum(pane.digest for pane in gone.known.values())) % 2**64
        kept.drop_marks(turn.work, bounds[Region.MESSAGES])
    for region, bound in bounds.items():
        turn.work.raise_bound(region, start_bytes(region, bound))


class Shared:
    """What kinds of windows that all group keys share do alike.

    Args:
        spec: The windows.
    """

    def __init__(self, spec: WindowSpec) -> None:
        self.spec = spec
        self.incremental, self.full = spec.plans()
        self.group_keys = GroupKeys(spec.key_fields)
        self.kept = Kept([spec.schema.field(name) for name in spec.input_fields()]) if spec.full else None
        self.result_schema = spec.result_schema()

    def step(self, turn: Turn) -> None:
        """Take one micro-batch that is not quiet."""
        raise NotImplementedError

    def fold(self, turn: Turn) -> None:
        """Take one micro-batch."""
        if not turn.quiet:
            self.step(turn)
        if self.kept is not None:
            note_replay(turn)

    def replay_rows(self, messages: pa.Table) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Give the message-store rows of accepted messages."""
        return self.kept.rows(messages)[:2] if self.kept is not None else ([], [])

    def proofs(self, work: Workspace) -> Iterable[Proof]:
        """Give what the message store must hold, pane by pane."""
        if self.kept is not None:
            yield from panes.proofs(work)


def note_replay(turn: Turn) -> None:
    """Say where a replay begins and what it leaves out; after the bounds have moved."""
    turn.replay_from = panes.start_offsets(panes.all_panes(turn.work))
    turn.rejected = kept.refused(turn.work)
