"""Messages that wait for a first partner, where rows without one come out: each is shown once, when none can come.

One row per waiting message in `Region.REVISIONS`, in the changelog, because a replay cannot tell what was matched::

    region, side (1), at (8), stream (2), partition (4), offset (8)  ->  format (1), the message's key without region

It goes when the message is matched or shown; messages that were matched as they came never have one. `at` decides when
no partner can come (`open_from`), so that is one scan of what is due, whatever the retention was when it was written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backend.batch import NO_TIME
from backend.errors import UnknownFormat
from backend.joins.rows import Place, Rows, offsets_of
from backend.joins.sides import LEFT, Side
from backend.joins.spec import JoinSpec
from backend.joins.state import JoinLedger
from backend.keys import fixed_bytes
from backend.messages.keys import MESSAGES, clocked_keys, read_clocked
from backend.store.protocol import Region
from backend.store.reads import get_all, get_present
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import Mask

FORMAT = 1

_WAITING = bytes([Region.REVISIONS])
_FORMAT = bytes([FORMAT])


def open_from(spec: JoinSpec, side: int, ledger: JoinLedger) -> int:
    """Give the smallest `at` of a side that waits for which a partner may still come."""
    low = ledger.lows[side]
    if spec.by_number or not spec.ranged:
        return low
    other = max(spec.sides[1 - side].first_alive(ledger.clocks[1 - side]), ledger.closed[1 - side])
    reach = spec.after if side == LEFT else spec.before
    return low if other == NO_TIME else max(low, other - (reach or 0))


def wait(work: Workspace, rows: Rows, keys: Sequence[bytes]) -> None:
    """Let stored messages of a side wait; `keys` are theirs."""
    work.put_many(_keys(rows), [_FORMAT + key[1:] for key in keys])


def matched(work: Workspace, rows: Rows) -> int:
    """Let messages of a side wait no more; gives how many did."""
    waiting, _ = get_present(work, _keys(rows))
    work.delete_many(waiting)
    return len(waiting)


def show(
    work: Workspace, side: Side, first: int, gone: Sequence[Place], *, drain: bool
) -> tuple[list[bytes], list[bytes], Mask]:
    """Take the messages that are to be shown out of the waiting ones.

    Args:
        work: Where.
        side: The side.
        first: As `open_from` gives it.
        gone: What is out of retention by size.
        drain: Show all.

    Returns:
        Their full keys and their values; and which are due, the others are shown because the input ends.
    """
    head = _WAITING + bytes([side.number])
    end = _WAITING + bytes([side.number + 1]) if drain or side.newest is not None else head + fixed_bytes(first)
    keys, values = work.scan_arrays(head, end) if end > head else ([], [])
    at, stream, partition, offset = read_clocked(head, keys)
    due = (at < first) | (offset < offsets_of(gone, stream, partition))
    picked = range(len(keys)) if drain else np.flatnonzero(due).tolist()
    work.delete_many([keys[row] for row in picked])
    wanted = [MESSAGES + _plain(values[row]) for row in picked]
    found = get_all(work, wanted, "a message that waits for a partner is missing")
    return wanted, found, due[list(picked)]


def _plain(value: bytes) -> bytes:
    if value[:1] != _FORMAT:
        raise UnknownFormat("a waiting message has an unknown format", why=f"format {value[:1].hex()}")
    return value[1:]


def _keys(rows: Rows) -> list[bytes]:
    return clocked_keys(_WAITING + bytes([rows.side.number]), rows.at, rows.stream, rows.partition, rows.offset)
