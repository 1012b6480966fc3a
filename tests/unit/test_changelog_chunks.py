"""Records in pieces: their keys, their cuts, and what a reader makes of pieces that are missing, mixed or foreign."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.errors import UnknownFormat
from backend.store.protocol import Changes
from recovery.changelog.chunks import (
    Assembler,
    ChunkKey,
    claim_key,
    cut,
    decode_key,
    owner_in,
)
from recovery.changelog.kafka.index import Lineage, ShardIndex, placed
from recovery.changelog.protocol import ITSELF, UNKNOWN, Growth
from recovery.changelog.records import Kind, encode_base, encode_delta
from recovery.commit.pointer import Commit, CommitRecord

OWNER = "fedcba9876543210" * 2
COMMIT = Commit(7, "0123456789abcdef" * 2)


def key(index: int, *, last: bool = False, append_id: bytes = b"12345678") -> ChunkKey:
    return ChunkKey(Kind.DELTA, COMMIT, append_id, index, last, Growth(1, 2, 3, 4), OWNER)


def test_the_key_has_the_documented_bytes():
    data = key(5, last=True).encode()
    assert data == (
        b"RWKL" + b"\x00\x02" + b"D" + b"\x01" + b"\x00\x00\x00\x05" + b"12345678" + b"\x00" * 7 + b"\x07"
        + bytes.fromhex("0123456789abcdef" * 2) + struct.pack(">IQQ", 1, 2, 3)
        + b"\x00" * 7 + b"\x04" + bytes.fromhex("fedcba9876543210" * 2)
    )  # fmt: skip
    assert len(data) == 88
    assert decode_key(data, "t@0") == key(5, last=True)


def test_a_key_of_format_1_is_read_and_is_nobodys():
    data = b"RWKL" + b"\x00\x01" + key(5, last=True).encode()[6:64]
    assert decode_key(data, "t@0") == ChunkKey(Kind.DELTA, COMMIT, b"12345678", 5, True, Growth(1, 2, 3, UNKNOWN), "")
    assert owner_in(data, "t@0") == ""


def test_a_claim_has_the_documented_bytes_and_is_no_piece():
    data = claim_key(OWNER)
    assert data == b"RWKO" + b"\x00\x01" + bytes.fromhex(OWNER)
    assert owner_in(data, "t@0") == owner_in(key(0).encode(), "t@0") == OWNER
    assert decode_key(data, "t@0") is None
    assert owner_in(b"somebody else's", "t@0") == owner_in(None, "t@0") == ""
    with pytest.raises(UnknownFormat, match="format 2"):
        owner_in(b"RWKO\x00\x02" + data[6:], "t@0")


def test_records_of_another_query_are_seen_and_are_no_part_of_an_index():
    index = ShardIndex("t-0", owner="a" * 32)
    take = index.take
    take(ChunkKey(Kind.DELTA, COMMIT, b"12345678", 0, True, Growth(), OWNER).encode(), b"", 0)
    assert index.foreign == OWNER
    assert list(index.stored()) == []


def test_where_a_lineage_begins_goes_along_with_it():
    commits = [Commit(v, "a" * 32) for v in range(5)]
    lineage = Lineage()
    first = lineage.growth_after(None, 10)
    assert first == Growth(1, 10, 0, ITSELF)
    lineage.add_delta(commits[0], None, 10, placed(first, 40))
    lineage.add_delta(commits[1], commits[0], 10, lineage.growth_after(commits[0], 10))
    assert lineage.growth_after(commits[1], 5) == Growth(3, 25, 0, 40)
    lineage.add_base(commits[1], 500, 90)
    assert lineage.growth_after(commits[1], 5) == Growth(1, 5, 500, 90)
    assert lineage.growth_after(commits[4], 5) == Growth(1, 5, 0, UNKNOWN), "nothing is known of its parent"


def test_foreign_keys_are_not_ours_and_newer_ones_are_named():
    good = key(0).encode()
    for foreign in (None, b"", b"user", good[:40], good[:6] + b"X" + good[7:]):
        assert decode_key(foreign, "t@0") is None
    with pytest.raises(UnknownFormat, match="t@3"):
        decode_key(b"RWKL\x00\x03" + good[6:], "t@3")


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
    assert assembler.open_from(above=-1) is None


def test_pieces_of_two_appends_do_not_mix():
    assembler = Assembler()
    assembler.add(key(0, append_id=b"a" * 8), b"1", 10)
    assembler.add(key(0, append_id=b"b" * 8), b"x", 11)
    assert assembler.open_from(above=-1) == 10
    _, one = assembler.add(key(1, last=True, append_id=b"a" * 8), b"2", 12)
    _, two = assembler.add(key(1, last=True, append_id=b"b" * 8), b"y", 13)
    assert (one, two) == (b"12", b"xy")


def test_writers_that_died_take_no_room_for_ever():
    assembler = Assembler()
    for number in range(100):
        assembler.add(key(0, append_id=number.to_bytes(8, "big")), b"x" * 10, number)
    assert assembler.open_from(above=-1) == 100 - 64


def test_what_a_dead_writer_left_unfinished_holds_the_cut_back_only_while_its_attempt_may_run():
    def commit_record(version: int) -> CommitRecord:
        parent = commits[version - 1] if version else None
        return CommitRecord(0, commits[version], parent, 0, [], {}, [], [], [], 0, 0)

    commits = [Commit(v, "a" * 32) for v in range(6)]
    index = ShardIndex("t-0")
    take = index.take

    def append(kind: Kind, commit: Commit, data: bytes, *, last: bool = True) -> None:
        append_id = len(offsets).to_bytes(8, "big")
        take(ChunkKey(kind, commit, append_id, 0, last, Growth()).encode(), data, len(offsets))
        offsets.append(f"{kind.name} {commit.version}")

    offsets: list[str] = []
    for version in range(6):
        if version in (1, 4):
            append(Kind.DELTA, Commit(version, "b" * 32), b"half", last=False)  # offsets 1 and 6
        append(Kind.DELTA, commits[version], encode_delta(commit_record(version), Changes([], [])))
        if version == 3:
            append(Kind.BASE, commits[3], b"".join(encode_base(commit_record(3), ())))
    assert offsets[5:8] == ["BASE 3", "DELTA 4", "DELTA 4"]
    assert index.cut_for([commits[5]]) == 5, "the base of 3: nothing before it is needed"
    assert index.cut_for([commits[3], commits[5]]) == 5
    assert index.cut_for([commits[2], commits[5]]) == 0, "the deltas from the beginning are needed"
    append(Kind.BASE, commits[5], b"".join(encode_base(commit_record(5), ())))
    assert index.cut_for([commits[5]]) == 9
    append(Kind.DELTA, Commit(6, "b" * 32), b"half", last=False)
    append(Kind.BASE, commits[5], b"".join(encode_base(commit_record(5), ())))
    assert index.cut_for([commits[5]]) == 10, "what is above the oldest retained version may still be written"


def test_growth_counts_from_the_newest_base_even_if_it_came_after_its_children():
    commits = [Commit(v, "a" * 32) for v in range(6)]
    lineage = Lineage()
    parent = None
    for commit in commits[:4]:
        growth = lineage.growth_after(parent, 10)
        lineage.add_delta(commit, parent, 10, growth)
        parent = commit
    assert lineage.growth(commits[3]) == Growth(4, 40, 0, ITSELF)
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


def test_a_read_that_broke_off_goes_on_behind_what_was_taken():
    """Taken twice a record would lie in the index twice, and its bytes count twice against the bound."""
    index = ShardIndex("t-0")
    record = CommitRecord(0, COMMIT, None, 0, [], {})
    parts = list(cut([encode_delta(record, Changes([b"\x03a"], [b"1"]))], 40))
    pieces = [(key(number, last=last).encode(), part) for number, (part, last) in enumerate(parts)]
    for start in (0, 0):  # the broker went after the first read
        for offset, (one, value) in list(enumerate(pieces))[max(start, index.next_offset) :]:
            index.take(one, value, offset)
    assert index.next_offset == len(pieces)
    assert len(list(index.stored())) == 1
    with pytest.raises(UnknownFormat):
        index.take(b"RWKL\x00\x09" + bytes(82), b"", len(pieces))
    assert index.next_offset == len(pieces), "what cannot be read is not passed over"
