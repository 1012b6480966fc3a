"""All sessions of a micro-batch when all its messages came: followed ones, components in one piece, untouched ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.columns.rows import Rows
from backend.windows.merging.components import Components
from backend.windows.merging.found import Found
from backend.windows.merging.nodes import Nodes
from backend.windows.merging.one_by_one import Live, OneByOne, Terms
from backend.windows.merging.rows import LONG_AGO, NEVER

_NONE = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Finals(Rows):
    """Sessions as they are when all messages came; all as long as one another.

    Attributes:
        key: Number of the group key.
        first: First event time.
        last: Last event time.
        open: Not closed by any message so far.
        since: Since when an update waits, or `NEVER`.
        unsent: Messages since the last row, where the early policy counts them.
        node: What it is made of.
    """

    key: IntArray
    first: IntArray
    last: IntArray
    open: Mask
    since: IntArray
    unsent: IntArray
    node: IntArray


@dataclass(frozen=True, slots=True)
class Gathered:
    """The sessions, and how they came about.

    Attributes:
        finals: The sessions.
        nodes: What they, and the results on the way, are made of.
        one_by_one: Results on the way.
        shown_of: Session that a row that was sent belongs to.
        shown: That row: its number among the stored ones, then the results on the way.
    """

    finals: Finals
    nodes: Nodes
    one_by_one: OneByOne
    shown_of: IntArray
    shown: IntArray


def gather(found: Found, parts: Components, terms: Terms) -> Gathered:
    """Tell the components where the order decides, and put them together with all others."""
    sent, stored = found.sent, found.stored
    nodes = Nodes(len(stored), len(found.time))
    rows = (column.tolist() for column in (sent.first, sent.last, sent.revision))
    one_by_one = OneByOne(terms, nodes, zip(*rows, strict=True) if parts.ordered.any() else ())
    sequential = _tell(found, parts, one_by_one)
    whole, whole_of = _whole(found, parts, terms, nodes)
    nodes.close()
    untouched = ~parts.touched[parts.stored_part]
    key, nodes_of = found.stored_key, np.arange(len(stored))
    before = Finals(key, stored.first, stored.last, found.is_open, found.since, stored.unsent, nodes_of)
    finals = Finals.concat([_sequential(sequential), whole, before.where(untouched)])
    final_of = np.full(len(stored), -1, np.int64)
    final_of[whole_of >= 0] = len(sequential) + whole_of[whole_of >= 0]
    final_of[untouched] = len(sequential) + len(whole) + np.arange(int(untouched.sum()))
    owner = final_of[sent.owner]
    row = np.flatnonzero(owner >= 0)
    pairs = np.array(
        [(at, shown) for at, (_, live) in enumerate(sequential) for shown in live.shown], np.int64
    ).reshape(-1, 2)
    shown_of, shown = np.concatenate([owner[row], pairs[:, 0]]), np.concatenate([row, pairs[:, 1]])
    return Gathered(finals, nodes, one_by_one, shown_of, shown)


def _tell(found: Found, parts: Components, one_by_one: OneByOne) -> list[tuple[int, Live]]:
    """Tell the components where the order decides, message by message; gives (group key, session)."""
    mine = np.flatnonzero(parts.ordered[parts.part])
    if not len(mine):
        return []
    lives: dict[int, list[Live]] = {}
    for at in np.flatnonzero(parts.ordered[parts.stored_part]).tolist():
        lives.setdefault(int(parts.stored_part[at]), []).append(_live(found, at))
    mine = mine[np.argsort(parts.part[mine], kind="stable")]
    numbers, starts = np.unique(parts.part[mine], return_index=True)
    columns = (mine, found.time[mine], found.before[mine], found.clock[mine])
    messages = list(zip(*(column.tolist() for column in columns), strict=True))
    sequential = []
    for part, low, high in zip(numbers.tolist(), starts.tolist(), [*starts.tolist()[1:], len(mine)], strict=True):
        key = int(found.key[mine[low]])
        sequential.append((key, one_by_one.tell(key, lives.get(part, []), messages[low:high])))
    return sequential


def _live(found: Found, at: int) -> Live:
    stored, rows = found.stored, np.searchsorted(found.sent.owner, (at, at + 1)).tolist()
    first, last, since, unsent = (int(c[at]) for c in (stored.first, stored.last, found.since, stored.unsent))
    return Live(first, last, not found.is_open[at], since, unsent, list(range(*rows)), [at])


def _sequential(sequential: list[tuple[int, Live]]) -> Finals:
    names = ("first", "last", "closed", "since", "unsent")
    first, last, closed, since, unsent = (np.array([getattr(x, n) for _, x in sequential], np.int64) for n in names)
    key = np.array([key for key, _ in sequential], np.int64)
    node = np.array([live.nodes[0] for _, live in sequential], np.int64)
    return Finals(key, first, last, closed == 0, since, unsent, node)


def _whole(found: Found, parts: Components, terms: Terms, nodes: Nodes) -> tuple[Finals, IntArray]:
    """Give the components in one piece, and for each stored session the one it went into, -1 for none."""
    stored = found.stored
    pieces = np.flatnonzero(parts.touched & ~parts.ordered)
    number = np.full(parts.count, -1, np.int64)
    number[pieces] = np.arange(len(pieces))
    own, old_of = number[parts.part], number[parts.stored_part]
    has, old = np.flatnonzero(own >= 0), np.flatnonzero(old_of >= 0)
    mine, olds, total = own[has], old_of[old], len(pieces)
    key, since = np.zeros(total, np.int64), np.full(total, terms.now, np.int64)
    first, last = np.full(total, _NONE), np.full(total, -_NONE)
    key[mine] = found.key[has]
    np.minimum.at(first, mine, found.time[has])
    np.minimum.at(first, olds, stored.first[old])
    np.maximum.at(last, mine, found.time[has])
    np.maximum.at(last, olds, stored.last[old])
    waits = found.since[old] != NEVER
    np.minimum.at(since, olds[waits], found.since[old][waits])
    is_open: Mask = np.zeros(total, np.bool_)
    is_open[mine[found.time[has] + terms.gap + 1 > (found.before[has] if terms.exact else terms.clock)]] = True
    is_open[olds[found.is_open[old]]] = True
    off = np.where(is_open, not terms.policies.early, terms.policies.late_ms is None)
    since[off & (since != LONG_AGO)] = NEVER
    unsent = np.bincount(mine, minlength=total) if terms.counts else np.zeros(total, np.int64)
    np.add.at(unsent, olds, stored.unsent[old])
    node = nodes.leaf(has, mine, total) + np.arange(total)
    joined = np.zeros(total, np.bool_)
    joined[olds] = True
    join = np.cumsum(joined) - 1
    members = np.concatenate([join[olds], join[joined]])
    node[joined] = join[joined] + nodes.join(np.concatenate([old, node[joined]]), members, int(joined.sum()))
    return Finals(key, first, last, is_open, since, unsent, node), old_of
