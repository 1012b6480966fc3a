"""Components: messages and stored sessions of a group key that are connected, and where the order decides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backend.windows.arrivals import LOWEST
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.merging.found import Found
from backend.windows.merging.one_by_one import Terms


@dataclass(frozen=True, slots=True)
class Components:
    """Sets of messages and stored sessions of one group key each, at distances of at most the gap.

    Attributes:
        count: Number of components.
        part: Component of each message.
        stored_part: Component of each stored session.
        touched: Per component, whether it has a message.
        ordered: Per component, whether the order of its messages decides what is sent of it.
    """

    count: int
    part: IntArray
    stored_part: IntArray
    touched: Mask
    ordered: Mask


def connect(found: Found, terms: Terms) -> Components:
    """Number the components: by sorting, and a running maximum of last times."""
    stored = found.stored
    key = np.concatenate([found.stored_key, found.key])
    first = np.concatenate([stored.first, found.time])
    last = np.concatenate([stored.last, found.time])
    order = np.lexsort((first, key))
    key, first = key[order], first[order]
    opens = np.ones(len(order), np.bool_)
    if len(order):
        reach = running_maximum(last[order], key)
        opens[1:] = (key[1:] != key[:-1]) | (first[1:] > reach[:-1] + terms.gap)
    component = np.empty(len(order), np.int64)
    component[order] = np.cumsum(opens) - 1
    count = int(opens.sum())
    stored_part, part = component[: len(stored)], component[len(stored) :]
    touched = np.zeros(count, np.bool_)
    touched[part] = True
    ordered = touched & _order_decides(found, terms, count, part, stored_part)
    return Components(count, part, stored_part, touched, ordered)


def _order_decides(found: Found, terms: Terms, count: int, part: IntArray, stored_part: IntArray) -> Mask:
    """Tell for each component whether the order of its messages decides what is sent of it.

    It does where sessions close message by message, and one of its sessions closes before a later message of it comes.
    """
    decides: Mask = np.zeros(count, np.bool_)
    if not terms.exact:
        return decides
    stored, is_open = found.stored, found.is_open
    fresh = found.time + terms.gap + 1 > found.before
    # the open session of a component ends with its newest fresh message: does the clock pass it before the next comes?
    old = np.flatnonzero(is_open)
    part = np.concatenate([stored_part[old], part])
    row = np.concatenate([np.full(len(old), -1, np.int64), np.arange(len(found.time))])
    end = np.concatenate([stored.last[old], np.where(fresh, found.time, LOWEST)])
    clock = np.concatenate([np.full(len(old), LOWEST, np.int64), found.clock])
    order = np.lexsort((row, part))
    part, end, clock = part[order], end[order], clock[order]
    reach = running_maximum(end, part)
    passed = (part[1:] == part[:-1]) & (reach[:-1] > LOWEST) & (clock[1:] > reach[:-1] + terms.gap)
    decides[part[1:][passed]] = True
    return decides


def running_maximum(values: IntArray, groups: IntArray) -> IntArray:
    """Give the running maximum within each group; `groups` ascends.

    >>> running_maximum(np.array([3, 1, 5, 2]), np.array([0, 0, 1, 1])).tolist()
    [3, 3, 5, 5]
    """
    distinct, rank = np.unique(values, return_inverse=True)
    reach = np.maximum.accumulate(groups * len(distinct) + rank)
    highest: IntArray = distinct[reach - groups * len(distinct)]
    return highest
