"""Records in pieces: their keys, their cuts, and what a reader makes of pieces that are missing, mixed or foreign."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.errors import UnknownFormat
from recovery.changelog.chunks import KEY_BYTES, Assembler, ChunkKey, Growth, cut, decode_key
from recovery.changelog.kafka_index import Lineage
from recovery.changelog.records import Kind
from recovery.pointer import Commit

COMMIT = Commit(7, "0123456789abcdef" * 2)


def key(index: int, *, last: bool = False, append_id: bytes = b"12345678") -> ChunkKey:
    return ChunkKey(Kind.DELTA, COMMIT, append_id, index, last, Growth(1, 2, 3))


def test_the_key_has_the_documented_bytes():
    data = key(5, last=True).encode()
    assert data == (
        b"RWKL" + b"\x00\x01" + b"D" + b"\x01" + b"\x00\x00\x00\x05" + b"12345678" + b"\x00" * 7 + b"\x07"
        + bytes.fromhex("0123456789abcdef" * 2) + struct.pack(">IQQ", 1, 2, 3)
    )  # fmt: skip
    assert KEY_BYTES == len(data) == 64
    assert decode_key(data, "t@0") == key(5, last=True)


def test_foreign_keys_are_not_ours_and_newer_ones_are_named():
    good = key(0).encode()
    for foreign in (None, b"", b"user", good[:40], good[:6] + b"X" + good[7:]):
        assert decode_key(foreign, "t@0") is None
    with pytest.raises(UnknownFormat, match="t@3"):
        decode_key(b"RWKL\x00\x02" + good[6:], "t@3")


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 16))
def test_pieces_are_bounded_and_put_together_again(stream, size):
    pieces = list(cut(stream, size))
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(piece) == size for piece, _ in pieces[:-1])
    assembler = Assembler()
    done = [assembler.add(key(i, last=last), piece, 100 + i) for i, (piece, last) in enumerate(pieces)]
    assert done[:-1] == [None] * (len(pieces) - 1)
    stored, data = done[-1]
    assert data == b"".join(stream)
    assert (stored.first, stored.last, stored.length) == (100, 100 + len(pieces) - 1, len(data))


def test_a_piece_that_is_missing_leaves_no_record():
    assembler = Assembler()
    assert assembler.add(key(0), b"a", 0) is None
    assert assembler.add(key(2, last=True), b"c", 1) is None
    assert assembler.add(key(1, last=True), b"b", 2) is None
    assert assembler.open_from is None


def test_pieces_of_two_appends_do_not_mix():
    assembler = Assembler()
    assembler.add(key(0, append_id=b"a" * 8), b"1", 10)
    assembler.add(key(0, append_id=b"b" * 8), b"x", 11)
    assert assembler.open_from == 10
    _, one = assembler.add(key(1, last=True, append_id=b"a" * 8), b"2", 12)
    _, two = assembler.add(key(1, last=True, append_id=b"b" * 8), b"y", 13)
    assert (one, two) == (b"12", b"xy")


def test_writers_that_died_take_no_room_for_ever():
    assembler = Assembler()
    for number in range(100):
        assembler.add(key(0, append_id=number.to_bytes(8, "big")), b"x" * 10, number)
    assert assembler.open_from == 100 - 64


def test_growth_counts_from_the_newest_base_even_if_it_came_after_its_children():
    commits = [Commit(v, "a" * 32) for v in range(6)]
    lineage = Lineage()
    parent = None
    for commit in commits[:4]:
        growth = lineage.growth_after(parent, 10)
        lineage.add_delta(commit, parent, 10, growth)
        parent = commit
    assert lineage.growth(commits[3]) == Growth(4, 40, 0)
    lineage.add_base(commits[2], 500)
    assert lineage.growth(commits[2]) == Growth(0, 0, 500)
    assert lineage.growth(commits[3]) == Growth(1, 10, 500)
    assert lineage.growth_after(commits[3], 7) == Growth(2, 17, 500)


def test_growth_goes_on_from_what_a_record_says_of_those_before_it():
    one, two = Commit(1, "a" * 32), Commit(2, "a" * 32)
    lineage = Lineage()
    lineage.add_delta(one, Commit(0, "a" * 32), 10, Growth(30, 300, 99))  # its parent was not seen
    lineage.add_delta(two, one, 5, Growth())
    assert lineage.growth(one) == Growth(30, 300, 99)
    assert lineage.growth(two) == Growth(31, 305, 99)
