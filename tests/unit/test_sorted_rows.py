"""Rows of a store are sorted by key, as lists and as columns; of rows with one key the last one stays."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.messages.rows import sorted_rows
from backend.store.rows import StoreRows

ONE_LENGTH = st.binary(min_size=3, max_size=3) | st.sampled_from([b"a\0\0", b"a\0b", b"\0\0\0", b"\xff\0\xff"])


@given(st.lists(ONE_LENGTH, max_size=30) | st.lists(st.binary(min_size=1, max_size=4), max_size=30))
def test_rows_are_sorted_as_a_dict_of_them_is(keys: list[bytes]) -> None:
    values = [b"%d" % number for number in range(len(keys))]
    expected = dict(sorted(dict(zip(keys, values, strict=True)).items()))
    assert sorted_rows(keys, values) == (list(expected), list(expected.values()))


@given(
    st.lists(ONE_LENGTH, max_size=30) | st.lists(st.binary(max_size=4), max_size=30), st.integers(0, 30), st.binary()
)
def test_columns_are_what_lists_of_them_are(keys: list[bytes], start: int, key: bytes) -> None:
    values = [b"%d" % number for number in range(len(keys))]
    start = min(start, len(keys))
    rows = StoreRows.of(keys, values).part(start)  # begins in the middle of its buffers
    assert len(rows) == len(keys) - start
    assert rows.lists() == (keys[start:], values[start:])
    assert rows.nbytes == sum(map(len, keys[start:])) + sum(map(len, values[start:]))
    assert rows.increasing() == all(a < b for a, b in zip(keys[start:], keys[start + 1 :], strict=False))
    expected = dict(sorted(zip(keys[start:], values[start:], strict=True), key=lambda row: row[0]))
    whole = StoreRows.joined([rows.part(0, len(rows) // 2), rows.part(len(rows) // 2)]).sorted()
    assert whole.lists() == (list(expected), list(expected.values()))
    assert whole.find(key) == bisect_left(list(expected), key)


@pytest.mark.parametrize("cut", [0, 1])
def test_no_rows_are_sorted(cut: int) -> None:
    columns = StoreRows.of([b"a"], [b"b"]).part(cut, cut)
    assert columns.increasing()
    assert (len(columns.sorted()), columns.nbytes, columns.find(b"a")) == (0, 0, 0)
    assert StoreRows.of([], []).sorted().lists() == ([], [])


@given(st.lists(st.binary(max_size=40), max_size=60), st.integers(0, 60), st.integers(0, 60))
def test_what_is_kept_is_the_same_and_holds_little_else(keys: list[bytes], start: int, end: int) -> None:
    start, end = sorted((min(start, len(keys)), min(end, len(keys))))
    part = StoreRows.of(keys, keys[::-1]).part(start, end)
    own = part.detached()
    assert own.lists() == (keys[start:end], keys[::-1][start:end])
    behind = sum(buffer.size for texts in (own.keys, own.values) for buffer in texts.buffers() if buffer is not None)
    assert behind <= 2 * (part.nbytes + 16 * (len(part) + 1)) + 32, "validity bits of eight bytes at least"
