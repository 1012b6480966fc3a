"""Entries that are lost from a shard's queue are made again from the source, or named as lost; by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from backend.batch import NO_TIME, MicroBatch, Position
from backend.errors import HistoryLost, StateCorrupted
from backend.spark.pack.assembling import Packed, assemble
from backend.spark.pack.packing import PackPlan, pack
from backend.store.memory import MemoryStore
from backend.store.workspace import Workspace
from backend.windows.combined_rows import is_combined
from backend.windows.operator import WindowOperator
from recovery.commit.manifest import Manifest, write_manifest
from recovery.commit.option_sets import ByVersion, OptionSet
from recovery.commit.pointer import Commit, Pointer, RestoringPointer, decode, encode
from recovery.files import Files, open_files
from recovery.queue import entries
from recovery.queue.entries import Queue, entry_name, lost_of, read_queue
from recovery.restore import read_again
from recovery.restore.read_again import make_again, mend_queue
from recovery.share import ShardInput
from tests.unit.test_combining import SCHEMA, assembled, rows, spec

SINCE = Pointer(0, Commit(4, "a" * 32), None, 0, "", [(0, 0, Position(10, 3, 0))], {}, "")
TIMES = ((10, 1, "a", 1), (11, 2, "a", 2), (12, 2, "b", 4), (13, 700, "b", 8), (14, 4, "a", 16))
BY_NUMBER = SimpleNamespace(counts_offsets=True)
MAX_AHEAD = 100
"""The batch time of `rows` is 50, so offset 13 is too far ahead."""


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return open_files(tmp_path / "checkpoint/rewind/queue")


def job(**more: Any) -> Any:
    known = {"ranked": frozenset(), "topics": {0: "t"}, "message_fields": tuple(SCHEMA), "looking_once": lambda: None,
             "operator": None}  # fmt: skip
    return SimpleNamespace(**known | more)


def packed(*batches: pa.RecordBatch) -> list[Packed]:
    plan = PackPlan((0,), tuple(SCHEMA), False, MAX_AHEAD, {0: "t"})
    found = [row for batch in batches for row in pack(batch, plan, 50).to_pylist()]
    return [Packed(row["header"], row["frame"], row["errors"]) for row in found]


def malformed(batch: pa.RecordBatch, at: int) -> pa.RecordBatch:
    texts = [("not JSON" if n == at else None) for n in range(batch.num_rows)]
    return batch.set_column(batch.schema.get_field_index("_malformed"), "_malformed", pa.array(texts, pa.string()))


def source(*given: tuple[int, int, str, int], bad: int = -1) -> Callable[..., list[Packed]]:
    """Read rows of a source again, in two Arrow batches where there are many."""

    def read(draft: object, ranges: Any) -> list[Packed]:
        [(low, high)] = ranges.values()
        mine = [row for row in given if low <= row[0] < high]
        at = next((n for n, row in enumerate(mine) if row[0] == bad), -1)
        batch = malformed(rows(*mine), at)
        return packed(batch.slice(0, 2), batch.slice(2)) if batch.num_rows > 2 else packed(batch)

    return read


def queued(files: Files) -> tuple[RestoringPointer, list[ShardInput]]:
    """Queue offsets 10 to 12, nothing, and 13 to 14, of which 11 is malformed and 13 too far ahead."""
    queue = Queue(files, ByVersion(()))
    before = {(0, 0): Position(10, 3, 0)}
    first = assemble(packed(malformed(rows(*TIMES[:3]), 1)), before, fields=tuple(SCHEMA), topics={0: "t"})
    idle = ShardInput(60, None, first.after, came=False)
    last = assemble(packed(rows(*TIMES[3:])), first.after, fields=tuple(SCHEMA), topics={0: "t"})
    pointer: Pointer = SINCE
    for version, given in enumerate((first, idle, last), start=5):
        pointer = queue.put(pointer, version, given, Commit(version, f"{version}" * 32))
    assert isinstance(pointer, RestoringPointer)
    assert last.in_future == ((0, 0, 13),)
    return pointer, [first, idle, last]


def lose(files: Files, pointer: RestoringPointer, *versions: int) -> None:
    files.delete([entry_name(0, one.commit) for one in pointer.entries if one.commit.version in versions])


def flip(files: Files, name: str, at: int) -> None:
    data = bytearray(files.read(name))
    data[at] ^= 1
    files.delete([name])
    files.write(name, [bytes(data)])


def told(given: ShardInput) -> Any:
    messages = given.messages.to_pylist() if given.messages is not None else None
    stamps = given.timestamps.to_pylist() if given.timestamps is not None else None
    return (messages, stamps, given.errors.to_pylist(), dict(given.after), given.in_future,
            given.time_ms, given.came, given.drain, given.with_values, given.firsts)  # fmt: skip


def test_what_is_made_again_is_what_was_queued(files: Files) -> None:
    pointer, given = queued(files)
    before = read_queue(files, pointer)
    lose(files, pointer, 5, 6)
    flip(files, entry_name(0, pointer.commit), 200)
    held = {(0, 0): (0, 20)}
    assert make_again(files, pointer, job(), held, source(*TIMES, bad=11)) == 3
    found = read_queue(files, decode(encode(pointer)))  # type: ignore[arg-type]
    assert [told(one.given()) for one in found] == [told(one) for one in given]
    assert [told(one.given()) for one in found] == [told(one.given()) for one in before]
    assert [(e.parent, e.since, e.before) for e in found] == [(e.parent, e.since, e.before) for e in before]
    assert [e["offset"] for e in found[0].given().errors.to_pylist()] == [11]
    assert make_again(files, pointer, job(), held, source()) == 0


def test_only_what_is_lost_is_read_again(files: Files) -> None:
    pointer, _ = queued(files)
    lose(files, pointer, 6, 7)
    asked = []

    def read(draft: Any, ranges: Any) -> list[Packed]:
        asked.append((draft.entry.commit.version, dict(ranges)))
        return source(*TIMES)(draft, ranges)

    make_again(files, pointer, job(), {(0, 0): (0, 20)}, read)
    assert asked == [(7, {(0, 0): (13, 15)})]  # the one without input needs no source


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param((*TIMES[:2], (12, 2, "b", 5), *TIMES[3:]), id="another value"),
        pytest.param((*TIMES[:2], (12, 3, "b", 4), *TIMES[3:]), id="another event time"),
        pytest.param((*TIMES[:2], *TIMES[3:]), id="compacted"),
        pytest.param(((10, 1, "a", 1), (10, 1, "a", 1), *TIMES[1:2], *TIMES[3:]), id="another count"),
    ],
)
def test_a_source_that_gives_other_messages_is_refused(files: Files, changed: Any) -> None:
    pointer, _ = queued(files)
    lose(files, pointer, 5)
    with pytest.raises(HistoryLost, match="gives other messages than those that were queued"):
        make_again(files, pointer, job(), {(0, 0): (0, 20)}, source(*changed, bad=11))
    assert [draft.entry.commit.version for draft in lost_of(files, pointer)] == [5]  # nothing was written


def test_a_message_that_was_bad_and_is_not_any_more_is_refused(files: Files) -> None:
    pointer, _ = queued(files)
    lose(files, pointer, 5)
    with pytest.raises(HistoryLost, match="gives other messages"):
        make_again(files, pointer, job(), {(0, 0): (0, 20)}, source(*TIMES))


@pytest.mark.parametrize("held", [{(0, 0): (13, 20)}, {(0, 0): (0, 12)}, {}])
def test_offsets_that_are_gone_are_named(files: Files, held: Any) -> None:
    pointer, _ = queued(files)
    lose(files, pointer, 5)
    with pytest.raises(HistoryLost, match=r"t partition 0 has offsets \d+ to \d+, 10 to 13 are needed"):
        make_again(files, pointer, job(), held, source(*TIMES, bad=11))


def test_a_dataframe_is_not_read_again(files: Files) -> None:
    pointer, _ = queued(files)
    lose(files, pointer, 5)
    with pytest.raises(HistoryLost, match="t is a DataFrame, which cannot be read again"):
        make_again(files, pointer, job(ranked=frozenset({0})), {(0, 0): (0, 20)}, source(*TIMES, bad=11))


def test_an_entry_that_was_made_again_and_is_damaged_is_lost_again(files: Files) -> None:
    pointer, _ = queued(files)
    lose(files, pointer, 5)
    held = {(0, 0): (0, 20)}
    make_again(files, pointer, job(), held, source(*TIMES, bad=11))
    name = entry_name(0, pointer.entries[0].commit)
    for at in range(0, len(files.read(name)), 40):  # bytes of names, of values, and of the checksum
        flip(files, name, at)
        with pytest.raises(StateCorrupted, match="not the one that was queued"):
            read_queue(files, pointer)
        flip(files, name, at)
    read_queue(files, pointer)


def test_an_entry_that_was_made_again_stands_for_no_other(files: Files) -> None:
    pointer, _ = queued(files)
    lose(files, pointer, 5, 7)
    make_again(files, pointer, job(), {(0, 0): (0, 20)}, source(*TIMES, bad=11))
    first, _, last = (entry_name(0, one.commit) for one in pointer.entries)
    files.write(first, [files.read(last)])
    with pytest.raises(StateCorrupted, match="not the one that was queued"):
        read_queue(files, pointer)


def test_combined_messages_are_made_again_one_by_one_and_count_the_same(files: Files) -> None:
    alike = rows(*((n, 5 + n % 2, "a", n) for n in range(10, 16)))
    before = {(0, 0): Position(10, 3, 0)}
    given = assembled(spec(), alike, before=before)
    assert given.messages is not None
    assert is_combined(given.messages)
    pointer = Queue(files, ByVersion(())).put(SINCE, 5, given, Commit(5, "5" * 32))
    lose(files, pointer, 5)

    def read(draft: object, ranges: object) -> list[Packed]:
        return packed(alike.slice(0, 2), alike.slice(2))

    make_again(files, pointer, job(), {(0, 0): (10, 16)}, read)
    [entry] = read_queue(files, pointer)
    again = entry.given()
    assert again.messages is not None
    assert again.messages.column("_offset").to_pylist() == [10, 11, 12, 13, 14, 15]
    assert (again.with_values, again.after) == (False, given.after)
    rows_of = [
        WindowOperator(spec())
        .process(MicroBatch(5, 50, share.messages, before, share.after, True), Workspace(MemoryStore(), {}))
        .results.to_pylist()
        for share in (given, again)
    ]
    assert rows_of[0] == rows_of[1]
    assert [(row["n"], row["s"]) for row in rows_of[0]] == [(6, 10 + 11 + 12 + 13 + 14 + 15)]
    lose(files, pointer, 5)
    moved = rows(*((n, 5 + n % 3, "a", n) for n in range(10, 16)))
    with pytest.raises(HistoryLost, match="gives other messages"):
        make_again(files, pointer, job(), {(0, 0): (10, 16)}, lambda *_: packed(moved))


def test_a_source_partition_that_brought_nothing_before_is_read_from_where_the_query_began(files: Files) -> None:
    """It lay there with messages at the start, which `starting="latest"` passed over."""
    before = {(0, 0): Position(0, NO_TIME, 0)}
    since = msgspec.structs.replace(SINCE, positions=[(0, 0, before[0, 0])])
    mine = ((10, 5, "a", 1), (11, 6, "b", 2))
    given = assemble(packed(rows(*mine)), before, fields=tuple(SCHEMA), topics={0: "t"}, by_offset=True)
    pointer = Queue(files, ByVersion(())).put(since, 5, given, Commit(5, "5" * 32))
    read, held = source((8, 900, "z", 0), *mine), {(0, 0): (7, 20)}
    lose(files, pointer, 5)
    with pytest.raises(HistoryLost, match="gives other messages"):
        make_again(files, pointer, job(operator=BY_NUMBER), held, read)
    assert make_again(files, pointer, job(operator=BY_NUMBER), held, read, {(0, 0): 10}) == 1
    [entry] = read_queue(files, pointer)
    assert told(entry.given()) == told(given)
    assert given.firsts == {(0, 0): 10}


def test_an_entry_is_lost_whose_source_partition_begins_elsewhere_by_now(files: Files) -> None:
    """Its shard got no row: what it was told of the source partition is all that it has. Up to format 3 it was not."""
    before = {(0, 0): Position(0, NO_TIME, 0)}
    since = msgspec.structs.replace(SINCE, positions=[(0, 0, before[0, 0])])
    queue, other = Queue(files, ByVersion(())), PackPlan((0, 1), tuple(SCHEMA), False, MAX_AHEAD, {0: "t"})

    def of_the_other(low: int) -> list[Packed]:
        found = pack(rows(*((n, 5, "a", 1) for n in range(low, 12))), other, 50).to_pylist()
        return [Packed(row["header"], row["frame"], row["errors"]) for row in found if row["shard"] == 1]

    given = assemble(of_the_other(10), before, fields=tuple(SCHEMA), topics={0: "t"}, by_offset=True)
    assert (given.messages, given.firsts) == (None, {(0, 0): 10})
    pointer = queue.put(since, 5, given, Commit(5, "5" * 32))
    [entry] = read_queue(files, pointer)
    assert told(entry.given()) == told(given)
    lose(files, pointer, 5)
    with pytest.raises(HistoryLost, match="gives other messages"):
        make_again(files, pointer, job(operator=BY_NUMBER), {(0, 0): (11, 20)}, lambda *_: of_the_other(11))
    assert make_again(files, pointer, job(operator=BY_NUMBER), {(0, 0): (10, 20)}, lambda *_: of_the_other(10)) == 1
    pointer = queue.put(since, 5, replace(given, firsts={}), Commit(5, "6" * 32))
    lose(files, pointer, 5)
    assert make_again(files, pointer, job(operator=BY_NUMBER), {(0, 0): (10, 20)}, lambda *_: of_the_other(10)) == 1
    window = assemble(of_the_other(10), before, fields=tuple(SCHEMA), topics={0: "t"})
    pointer = queue.put(since, 5, window, Commit(5, "7" * 32))
    lose(files, pointer, 5)
    assert make_again(files, pointer, job(), {(0, 0): (11, 20)}, lambda *_: of_the_other(11)) == 1, "it counts nothing"


def test_a_pointer_knows_of_the_oldest_entries_where_all_are_too_much(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "MOST_POSITIONS", 2)
    queue, pointer, known = Queue(files, ByVersion(())), SINCE, []
    for version in range(5, 10):
        after = {(0, 0): Position(version + 10, 3, 0)}
        pointer = queue.put(pointer, version, ShardInput(50, None, after), Commit(version, f"{version}" * 32))
        known.append(len(pointer.entries))
    assert known == [1, 2, 2, 2, 2]
    assert isinstance(pointer, RestoringPointer)
    checkpoint = files.uri.removesuffix("/rewind/queue")
    write_manifest(checkpoint, Manifest(1, (0,), {}, (OptionSet(0, {"max_ahead_ms": None}),)))
    monkeypatch.setattr(read_again, "_read", lambda *_: [])
    of = job(offsets=lambda _: {(0, 0): (0, 30)}, began=lambda _: {})
    lose(files, pointer, 6)
    assert mend_queue(None, of, checkpoint, pointer) == 1  # type: ignore[arg-type]
    files.delete([entry_name(0, pointer.commit)])
    with pytest.raises(HistoryLost, match="an entry of a shard's queue is missing"):
        mend_queue(None, of, checkpoint, pointer)  # type: ignore[arg-type]


def test_each_micro_batch_is_judged_by_its_own_max_ahead(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = files.uri.removesuffix("/rewind/queue")
    sets = (OptionSet(0, {"max_ahead_ms": None}), OptionSet(6, {"max_ahead_ms": MAX_AHEAD}))
    write_manifest(checkpoint, Manifest(1, (0,), {}, sets))
    pointer, _ = queued(files)
    lose(files, pointer, 5, 7)
    asked = []

    def read(_: object, __: object, ___: object, draft: Any, ranges: Any, max_ahead_ms: Any, rows: int) -> list[Packed]:
        asked.append((draft.entry.commit.version, max_ahead_ms))
        return source(*TIMES, bad=11)(draft, ranges)

    monkeypatch.setattr(read_again, "_read", read)
    of = job(offsets=lambda _: {(0, 0): (0, 20)}, began=lambda _: {})
    assert mend_queue(None, of, checkpoint, pointer) == 2  # type: ignore[arg-type]
    assert asked == [(5, None), (7, MAX_AHEAD)]
