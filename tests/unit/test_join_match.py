"""Sorting and searching against loops: pieces of any size, codes of any number, times near and far."""

from __future__ import annotations

import numpy as np
import pytest

from backend.joins.match import Candidates


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
@pytest.mark.parametrize("scale", [1, 2**55], ids=["near", "far"])
def test_pairs_are_those_of_two_loops(chunk, scale):
    draw = np.random.default_rng(5)
    code, other = draw.integers(-1, 4, 60), draw.integers(-1, 4, 80)
    time, times = draw.integers(-9, 10, 60) * scale, draw.integers(-9, 10, 80) * scale
    low, high = time - 2 * scale, time + 3 * scale
    expected = [
        (i, j)
        for i in range(60)
        for j in range(80)
        if code[i] >= 0 and code[i] == other[j] and low[i] <= times[j] <= high[i]
    ]
    pieces = list(Candidates(other, times, chunk=chunk).meet(code, low, high))
    found = [(int(i), int(j)) for asked, met in pieces for i, j in zip(asked, met, strict=True)]
    assert sorted(found) == expected
    assert [i for i, _ in found] == sorted(i for i, _ in found)
    runs = [sum(1 for i, _ in expected if i == row) for row in range(60)]
    assert max(len(asked) for asked, _ in pieces) <= max(chunk, *runs)


def test_without_times_only_codes_count():
    pieces = Candidates(np.array([2, 0, 2, -1]), None).meet(np.array([2, 1, -1, 0]))
    assert [(asked.tolist(), met.tolist()) for asked, met in pieces] == [([0, 0, 3], [0, 2, 1])]


def test_nothing_meets_nothing():
    none = np.empty(0, np.int64)
    assert list(Candidates(none, none).meet(np.array([1]), np.array([0]), np.array([9]))) == []


def test_a_code_beyond_those_of_the_candidates_meets_none_also_where_their_times_are_far_apart():
    """Its place, 16 * (2**60 + 2), has more than 64 bits, whose rest is the place of code 0."""
    candidates = Candidates(np.array([0, 0]), np.array([0, 2**60]))
    assert list(candidates.meet(np.array([16]), np.array([0]), np.array([2**60]))) == []
