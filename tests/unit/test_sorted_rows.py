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
