"""The operator's own rows: formats that are not known and bytes that are not rows are named, never read."""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from backend.batch import NO_TIME
from backend.errors import StateCorrupted, UnknownFormat
from backend.store.memory import MemoryStore
from backend.store.protocol import Changes, Region
from backend.store.workspace import Workspace
from backend.windows import ledger, panes, revisions
from backend.windows.columns.grouping import join_keys, split_keys, start_bytes
from backend.windows.ledger import Ledger
from backend.windows.revisions import Revisions


def stored(rows: dict[bytes, bytes]) -> Workspace:
    store = MemoryStore()
    store.write(Changes(sorted(rows), [rows[key] for key in sorted(rows)]))
    return Workspace(store)


def test_a_ledger_comes_back():
    row = Ledger(clock=-5, messages=3, digest=2**64 - 1, due_ms=7, sent_open=True)
    assert ledger.read(stored({ledger.KEY: ledger.encode(row)})) == row
    assert ledger.read(stored({})).clock == NO_TIME


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (msgspec.msgpack.encode([2, "something", "else"]), UnknownFormat),
        (ledger.encode(Ledger(format=2)), UnknownFormat),
        (msgspec.msgpack.encode([1, "no clock"]), StateCorrupted),
        (b"", StateCorrupted),
        (b"\xc1", StateCorrupted),
        (ledger.encode(Ledger())[:-2], StateCorrupted),
    ],
)
def test_a_ledger_that_is_none_is_an_error(data, error):
    with pytest.raises(error, match="ledger"):
        ledger.read(stored({ledger.KEY: data}))


def test_a_pane_of_another_format_is_an_error():
    key = start_bytes(Region.WINDOWS, 0)
    with pytest.raises(UnknownFormat, match="window metadata"):
        list(panes.all_panes(stored({key: msgspec.msgpack.encode([9, 0, 10, 0, 0, 0, [], []])})))


def test_no_revisions_are_neither_asked_for_nor_copied():
    class Silent(MemoryStore):
        get_many = None

    none = revisions.get(Silent(), np.empty(0, np.int64), pa.array([], pa.binary()))
    assert (len(none), none.keys.type) == (0, pa.binary())
    one = np.ones(1, np.int64)
    rows = Revisions(one, pa.array([b"k"]), one, one > 0, one, one)
    assert Revisions.concat([none, rows, none]) is rows
    assert len(Revisions.concat([none, none])) == 0
    assert Revisions.concat([rows, none, rows]).keys.to_pylist() == [b"k", b"k"]


def test_revisions_come_back_and_other_formats_are_an_error():
    work = stored({})
    rows = Revisions(
        np.array([-10, 20]),
        pa.array([b"", b"k"]),
        np.array([revisions.UNKNOWN, 4]),
        np.array([True, False]),
        np.array([5, 0]),
        np.array([3, 0]),
    )
    revisions.put(work, rows)
    first, last = bytes([Region.REVISIONS]), bytes([Region.REVISIONS + 1])
    again = revisions.scan(work, first, last)
    assert again.starts.tolist() == [-10, 20]
    assert again.keys.to_pylist() == [b"", b"k"]
    assert again.next.tolist() == [revisions.UNKNOWN, 4]
    assert (again.pending.tolist(), again.since.tolist()) == ([True, False], [5, 0])
    assert again.unsent.tolist() == [3, 0]
    work.put(start_bytes(Region.REVISIONS, 5), bytes.fromhex("0100000007010000000000000009"))  # format 1, frozen
    [of_format_1] = np.flatnonzero(revisions.scan(work, first, last).starts == 5)
    again = revisions.scan(work, first, last)
    assert (again.next[of_format_1], again.since[of_format_1], again.unsent[of_format_1]) == (7, 9, 0)
    assert again.pending[of_format_1]
    work.put(start_bytes(Region.REVISIONS, 5), b"\x03" + bytes(13))
    with pytest.raises(UnknownFormat, match="revisions"):
        revisions.scan(work, first, last)


@pytest.mark.parametrize("skip_bytes", [0, 2, 8])
def test_keys_sort_by_start_and_come_apart_again(skip_bytes):
    starts = np.array([-(2**62), -1, 0, 1, 2**62])
    skips = np.array([0, 1, 255, 256, 65_535]) if skip_bytes else None
    groups = pa.array([b"", b"\x00", b"\xff", b"ab", b"a" * 300])
    keys = join_keys(Region.AGGREGATES, starts, groups, skips, skip_bytes=skip_bytes)
    assert keys == sorted(keys)
    assert [key[:9] for key in keys] == [start_bytes(Region.AGGREGATES, start) for start in starts.tolist()]
    again = split_keys(keys, skip_bytes=skip_bytes)
    assert again[0].tolist() == starts.tolist()
    assert again[1].tolist() == (skips.tolist() if skips is not None else [0] * 5)
    assert again[2].to_pylist() == groups.to_pylist()
