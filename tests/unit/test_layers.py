"""Layers of sorted rows are merged: the newest row of a key stays, wherever the layers overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.store.layers import Slice, merge_layers

LAYER = st.dictionaries(st.integers(0, 30), st.sampled_from([b"", b"x", None]), min_size=1, max_size=12)


def layer(*rows: tuple[bytes, bytes | None]) -> Slice:
    return [key for key, _ in rows], [value for _, value in rows]


@pytest.mark.parametrize(
    ("older", "newer", "merged"),
    [
        # behind, before, within, around, and with an end in common
        (layer((b"a", b"1")), layer((b"b", b"2")), layer((b"a", b"1"), (b"b", b"2"))),
        (layer((b"b", b"1")), layer((b"a", b"2")), layer((b"a", b"2"), (b"b", b"1"))),
        (
            layer((b"a", b"1"), (b"c", b"1"), (b"d", b"1")),
            layer((b"b", b"2"), (b"c", None)),
            layer((b"a", b"1"), (b"b", b"2"), (b"c", None), (b"d", b"1")),
        ),
        (
            layer((b"b", None), (b"c", b"1")),
            layer((b"a", b"2"), (b"b", b"2"), (b"d", b"2")),
            layer((b"a", b"2"), (b"b", b"2"), (b"c", b"1"), (b"d", b"2")),
        ),
        (
            layer((b"a", b"1"), (b"b", b"1")),
            layer((b"b", b"2"), (b"c", b"2")),
            layer((b"a", b"1"), (b"b", b"2"), (b"c", b"2")),
        ),
    ],
)
def test_of_two_layers_the_newer_row_stays(older: Slice, newer: Slice, merged: Slice) -> None:
    assert merge_layers([older, newer]) == merged


@given(st.lists(LAYER, max_size=5))
def test_layers_are_merged_as_a_dict_is_updated(layers: list[dict[int, bytes | None]]) -> None:
    expected: dict[int, bytes | None] = {}
    for one in layers:
        expected |= one
    slices = [layer(*((bytes([key]), value) for key, value in sorted(one.items()))) for one in layers]
    assert merge_layers(slices) == layer(*((bytes([key]), value) for key, value in sorted(expected.items())))
