"""Rows of the message store are sorted by key; of rows with one key the last one stays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend.messages.rows import sorted_rows

ONE_LENGTH = st.binary(min_size=3, max_size=3) | st.sampled_from([b"a\0\0", b"a\0b", b"\0\0\0", b"\xff\0\xff"])


@given(st.lists(ONE_LENGTH, max_size=30) | st.lists(st.binary(min_size=1, max_size=4), max_size=30))
def test_rows_are_sorted_as_a_dict_of_them_is(keys: list[bytes]) -> None:
    values = [b"%d" % number for number in range(len(keys))]
    expected = dict(sorted(dict(zip(keys, values, strict=True)).items()))
    assert sorted_rows(keys, values) == (list(expected), list(expected.values()))
