"""Hypothesis strategies: disorderly streams of messages, and how they are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from tests.oracle.windows import Message

KEYS = ("a", "b", "ab", None)
STEPS = (0, 0, 1, 1, 2, 3, 5, 7, 10, 12, 25, 60, -1, -2, -3, -5, -8, -11, -20, -40, -100)
"""How far event time moves from the newest so far: mostly on, often back, sometimes far back or far on."""
PAUSES = (0, 1_000, 4_000, 9_999, 10_000, 59_999, 60_000)


def share(part: float) -> settings:
    """Give settings with a part of the profile's examples, so that the profile still decides how long a hunt is."""
    return settings(max_examples=max(1, round(settings().max_examples * part)))


@dataclass(frozen=True)
class Feed:
    """A stream cut into micro-batches; `walls` are their batch times."""

    messages: tuple[Message, ...]
    batches: tuple[tuple[Message, ...], ...]
    walls: tuple[int, ...]
    partitions: int


_VALUES = (None, *range(-4, 5), 2**62)
_WEIGHTS = (None, *(n / 8 for n in range(-16, 17)))
_GAPS = (1, 1, 1, 2, 5)  # offsets may have gaps: transactions, compaction
_CHOICES = (STEPS, (0, 1, 2), KEYS, _VALUES, _WEIGHTS, _GAPS)
_COMBINATIONS = prod(len(choices) for choices in _CHOICES)


def _row(number: int) -> list[Any]:
    """Read a row's choices from one number: a single draw, and a smaller number is a simpler row."""
    row = []
    for choices in _CHOICES:
        number, index = divmod(number, len(choices))
        row.append(choices[index])
    return row


_ROWS = st.integers(0, _COMBINATIONS - 1).map(_row)


@st.composite
def feeds(draw: st.DrawFn, *, partitions: int = 1, max_size: int = 28, duplicates: bool = True) -> Feed:
    """Give a stream: out of order, with gaps in offsets, repeated deliveries, empty micro-batches."""
    newest = draw(st.sampled_from((0, -30, 1_357_000_000_000)))
    oldest = newest
    offsets = [draw(st.sampled_from((0, 5, 2**40)))] * partitions
    messages = []
    for step, partition, key, value, weight, gap in draw(st.lists(_ROWS, max_size=max_size)):
        source = partition % partitions
        offsets[source] += gap
        fields = {"key": key, "value": value, "weight": weight}
        messages.append(Message(offsets[source], newest + step, fields, source))
        newest = max(newest, newest + step)
    cuts = draw(cut_points(len(messages)))
    batches = cut(messages, cuts)
    if duplicates and messages:
        for number, back in draw(st.lists(st.tuples(st.integers(0, len(batches) - 1), st.integers(0, 30)), max_size=3)):
            # a repeated delivery of something already delivered, in this micro-batch or before
            seen = [m for batch in batches[: number + 1] for m in batch]
            if seen:
                batches[number] = (*batches[number], seen[-1 - back % len(seen)])
    pauses = draw(st.lists(st.sampled_from(PAUSES), min_size=len(batches), max_size=len(batches)))
    start = max(0, draw(st.sampled_from((newest, oldest))))  # far-future times are told by the wall clock
    walls = tuple(start + sum(pauses[: n + 1]) for n in range(len(batches)))
    return Feed(tuple(messages), tuple(batches), walls, partitions)


def cut_points(length: int) -> st.SearchStrategy[list[int]]:
    """Give where to cut; two equal points make an empty micro-batch."""
    return st.lists(st.integers(0, length), max_size=6).map(sorted)


def cut(messages: Sequence[Message], points: Sequence[int]) -> list[tuple[Message, ...]]:
    """Cut a stream at some points."""
    edges = [0, *points, len(messages)]
    return [tuple(messages[low:high]) for low, high in pairwise(edges)]
