"""What a shard that queues leaves behind, checked in: the pointer in Spark's state and an entry of its queue.

`python -m tests.compat.test_queue_formats` writes them with the code at hand; those here are never written again. The
pointer has been written with what is known of its entries since they can be made again (`ENTRIES`). Entries have format
2 since combined rows are laid out as they are now (`COMBINED`); those of format 1 are read (`OLD`). Since format 3
(`NEWEST`) a field may have the name that the records' own timestamps had; since format 4 (`FIRSTS`) an entry says where
source partitions begin.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
import xxhash

from backend.aggregates import count
from backend.batch import ERROR_SCHEMA, MESSAGE_FIELDS, NO_TIME, Position
from backend.errors import UnknownFormat
from backend.spark.pack.assembling import Packed, assemble
from backend.spark.pack.packing import PackPlan, pack
from backend.windows.aligned.combining import Combining
from backend.windows.combined_rows import messages_of
from backend.windows.definitions import tumbling
from backend.windows.operator import WindowOperator
from backend.windows.spec import window_spec
from recovery.commit.option_sets import ByVersion
from recovery.commit.pointer import Commit, Pointer, RestoringPointer, decode, encode
from recovery.files import open_files
from recovery.queue.entries import Queue, content_of, entry_name, lost_of, read_queue
from recovery.share import ShardInput

HERE = Path(__file__).parent
POINTER, ENTRY = HERE / "restoring_pointer_format_3.bin", HERE / "queue_entry_format_1.bin"
ENTRIES, AGAIN = HERE / "restoring_pointer_format_3_entries.bin", HERE / "queue_entry_format_1_again.bin"
NEWEST, FIRSTS = HERE / "queue_entry_format_3.bin", HERE / "queue_entry_format_4.bin"
OLD, COMBINED = HERE / "queue_entry_format_1_combined.bin", HERE / "queue_entry_format_2.bin"
COMMIT, NEXT = Commit(4, "a" * 32), Commit(7, "b" * 32)
SINCE = Pointer(2, COMMIT, None, 11, "c" * 32, [(0, 1, Position(5, 40, 1_000))], {3: b"\x03x"}, "2/x.delta", 1_500)
AFTER = Position(8, 50, 2_000)
DIGEST = "219e9a0e37f897d6fa8da428464362c5"
QUEUED = RestoringPointer(
    shard=2,
    commit=NEXT,
    parent=COMMIT,
    staged_length=3_160,
    staged_digest=DIGEST,
    positions=[(0, 1, AFTER)],
    bounds={3: b"\x03x"},
    changelog="",
    next_due_ms=2_000,
    since=SINCE,
    queued=1,
    queued_bytes=3_160,
)


def given() -> ShardInput:
    row = {"_stream": 0, "_partition": 1, "_before": NO_TIME, "key": "a", "_offset": 7, "_time": 50}
    messages = pa.Table.from_pylist([row], pa.schema([*MESSAGE_FIELDS, pa.field("key", pa.string())]))
    bad = {"stream": 0, "partition": 1, "offset": 6, "reason": "malformed", "detail": "not JSON"}
    errors = pa.Table.from_pylist([bad], ERROR_SCHEMA)
    stamps = pa.chunked_array([pa.array([49])])
    return ShardInput(2_000, messages, {(0, 1): AFTER}, ((0, 1, 5),), True, errors=errors, timestamps=stamps)


KEY = pa.schema([pa.field("key", pa.string())])
PLACES = [(5, 41, 1_041), (6, 42, None), (7, 50, 1_050)]
"""Offset, event time and own timestamp of three messages, of which the first stands alone."""


def combined() -> ShardInput:
    spec = window_spec(tumbling(100), KEY, {"n": count()}, keys=["key"], retention=5, max_ahead=None)
    plan = PackPlan((0,), tuple(KEY), False, None, {0: "t"}, combining=Combining(spec, 0))
    records = [
        {"_stream": 0, "_partition": 1, "_offset": o, "_time": t, "_shard": 0, "_timestamp": s}
        | {"_key": None, "_raw": None, "_malformed": None, "key": "a"}
        for o, t, s in PLACES
    ]
    kinds = {"_stream": pa.int32(), "_partition": pa.int32(), "_shard": pa.int32(), "_key": pa.binary()}
    kinds |= {"_raw": pa.binary(), "_malformed": pa.string(), "key": pa.string()}
    schema = pa.schema([pa.field(name, kinds.get(name, pa.int64())) for name in records[0]])
    rows = [
        Packed(row["header"], row["frame"], row["errors"])
        for row in pack(pa.RecordBatch.from_pylist(records, schema), plan, 2_000).to_pylist()
    ]
    return assemble(rows, {}, combining=Combining(spec, 0))


def put(folder: Path, made: ShardInput | None = None) -> RestoringPointer:
    nobody: ByVersion[WindowOperator] = ByVersion(())
    return Queue(open_files(folder), nobody).put(SINCE, 7, made or given(), NEXT)


@pytest.mark.parametrize("file", [OLD, COMBINED])
def test_messages_come_out_of_combined_rows_as_they_were_queued(file: Path, tmp_path: Path) -> None:
    (tmp_path / "2").mkdir()
    shutil.copy(file, tmp_path / "2" / f"{NEXT.name}.entry")
    data = file.read_bytes()
    named = msgspec.structs.replace(QUEUED, staged_length=len(data), staged_digest=xxhash.xxh3_128_hexdigest(data))
    [entry] = read_queue(open_files(tmp_path), named)
    messages = entry.given().messages
    assert messages is not None
    assert messages["_count"].to_pylist() == [1, 2]
    told = messages_of(messages).to_pylist()
    assert [(m["offset"], m["event_time"], m["timestamp"]) for m in told] == PLACES
    assert {(m["stream"], m["partition"]) for m in told} == {(0, 1)}


def test_the_pointer_is_read_as_it_was() -> None:
    assert decode(POINTER.read_bytes()) == QUEUED
    assert decode(encode(QUEUED)) == QUEUED


def test_the_pointer_is_read_and_written_with_its_entries_as_it_was(tmp_path: Path) -> None:
    found = decode(ENTRIES.read_bytes())
    assert encode(found) == ENTRIES.read_bytes()
    assert isinstance(found, RestoringPointer)
    [known] = found.entries
    assert (known.commit, known.length, known.digest) == (NEXT, found.staged_length, found.staged_digest)
    assert (known.time_ms, known.came, known.drain, known.with_values, known.combined) == (
        2_000,
        True,
        True,
        True,
        False,
    )
    assert known.after == [(0, 1, AFTER)]
    assert known.content == content_of(given(), combined=False)


def test_an_entry_that_was_made_again_is_read_as_it_was(tmp_path: Path) -> None:
    pointer = decode(ENTRIES.read_bytes())
    assert isinstance(pointer, RestoringPointer)
    (tmp_path / "2").mkdir()
    shutil.copy(AGAIN, tmp_path / "2" / f"{NEXT.name}.entry")
    [entry] = read_queue(open_files(tmp_path), pointer)
    assert entry.given().messages == given().messages
    assert (entry.commit, entry.given().errors, entry.in_future) == (NEXT, given().errors, [(0, 1, 5)])


def test_the_entry_is_read_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "2").mkdir()
    shutil.copy(ENTRY, tmp_path / "2" / f"{NEXT.name}.entry")
    [entry] = read_queue(open_files(tmp_path), QUEUED)
    assert (entry.commit, entry.parent, entry.since, entry.came) == (NEXT, None, COMMIT, True)
    assert entry.positions == {(0, 1): Position(5, 40, 1_000)}
    given = entry.given()
    assert (given.time_ms, given.drain, given.in_future, given.after) == (2_000, True, ((0, 1, 5),), {(0, 1): AFTER})
    assert given.messages is not None
    assert given.messages.to_pylist() == [
        {"_stream": 0, "_partition": 1, "_offset": 7, "_time": 50, "_before": NO_TIME, "key": "a"}
    ]
    assert given.timestamps is not None
    assert given.timestamps.to_pylist() == [49]
    assert [(e["offset"], e["reason"], e["detail"]) for e in given.errors.to_pylist()] == [(6, "malformed", "not JSON")]


def test_what_is_written_today_is_read_back_the_same(tmp_path: Path) -> None:
    found = put(tmp_path)
    assert (found.commit, found.since, found.queued) == (NEXT, SINCE, 1)
    [entry] = read_queue(open_files(tmp_path), found)
    assert entry.given().errors.num_rows == 1


NAMED = ("_timestamp", "_own timestamp_", "_key")


@pytest.mark.parametrize("stamped", [True, False])
@pytest.mark.parametrize("name", NAMED)
def test_a_field_may_have_the_name_of_the_timestamps(name: str, stamped: bool, tmp_path: Path) -> None:
    known = given()
    assert known.messages is not None
    queued = replace(
        known,
        messages=known.messages.append_column(name, pa.array(["a field"])),
        timestamps=known.timestamps if stamped else None,
    )
    pointer = put(tmp_path, queued)
    [entry] = read_queue(open_files(tmp_path), pointer)
    assert (entry.given().messages, entry.given().timestamps) == (queued.messages, queued.timestamps)
    assert content_of(entry.given(), combined=False) == content_of(queued, combined=False)
    assert pointer.entries[0].content == content_of(queued, combined=False)


def test_an_entry_with_such_a_field_is_read_as_it_was(tmp_path: Path) -> None:
    data = NEWEST.read_bytes()
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / f"{NEXT.name}.entry").write_bytes(data)
    named = msgspec.structs.replace(QUEUED, staged_length=len(data), staged_digest=xxhash.xxh3_128_hexdigest(data))
    [entry] = read_queue(open_files(tmp_path), named)
    assert entry.given().messages is not None
    assert entry.given().messages.drop_columns(["_timestamp"]) == given().messages
    assert entry.given().messages["_timestamp"].to_pylist() == ["a field"]
    assert entry.given().timestamps == given().timestamps


def test_an_entry_with_first_offsets_is_read_as_it_was(tmp_path: Path) -> None:
    data = FIRSTS.read_bytes()
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / f"{NEXT.name}.entry").write_bytes(data)
    named = msgspec.structs.replace(QUEUED, staged_length=len(data), staged_digest=xxhash.xxh3_128_hexdigest(data))
    [entry] = read_queue(open_files(tmp_path), named)
    assert entry.given().firsts == {(0, 1): 5, (1, 0): 9}
    assert entry.given().messages == given().messages


def test_newer_formats_are_refused_by_name(tmp_path: Path) -> None:
    content = msgspec.msgpack.decode(POINTER.read_bytes()[:-8]) | {"format": 4}
    data = msgspec.msgpack.encode(content)
    with pytest.raises(UnknownFormat, match="format 4, this release reads 1 to 3"):
        decode(data + xxhash.xxh3_64_digest(data))
    newer = msgspec.msgpack.encode(msgspec.msgpack.decode(ENTRY.read_bytes()) | {"format": 5})
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / f"{NEXT.name}.entry").write_bytes(newer)
    named = msgspec.structs.replace(QUEUED, staged_length=len(newer), staged_digest=xxhash.xxh3_128_hexdigest(newer))
    with pytest.raises(UnknownFormat, match="format 5, this release reads 1 to 4"):
        read_queue(open_files(tmp_path), named)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        files, pointer = open_files(scratch), put(Path(scratch))
        ENTRIES.write_bytes(encode(pointer))
        POINTER.write_bytes(encode(msgspec.structs.replace(pointer, entries=[])))
        with_field = replace(given(), messages=given().messages.append_column("_timestamp", pa.array(["a field"])))
        put(Path(scratch, "newest"), with_field)
        NEWEST.write_bytes(open_files(f"{scratch}/newest").read(entry_name(2, NEXT)))
        put(Path(scratch, "firsts"), replace(given(), firsts={(0, 1): 5, (1, 0): 9}))
        FIRSTS.write_bytes(open_files(f"{scratch}/firsts").read(entry_name(2, NEXT)))
        put(Path(scratch, "combined"), combined())
        COMBINED.write_bytes(open_files(f"{scratch}/combined").read(entry_name(2, NEXT)))
        ENTRY.write_bytes(files.read(entry_name(2, NEXT)))
        files.delete([entry_name(2, NEXT)])
        [draft] = lost_of(files, pointer)
        assert draft.put(files, given())
        AGAIN.write_bytes(files.read(entry_name(2, NEXT)))
