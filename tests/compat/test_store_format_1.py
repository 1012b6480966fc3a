"""A store that release 0.1 wrote, checked in: what is on people's disks must stay readable.

`store_format_1.zip` holds a database with one commit confirmed (`db/`) and the staged file of the next (`next.sst`).
`python -m tests.compat.test_store_format_1 <path>` writes such a file with the code at hand; the one here is never
written again.
"""

from __future__ import annotations

import datetime as dt
import sys
import tempfile
import zipfile
from pathlib import Path

import pyarrow as pa

from backend.keys import encode, encode_columns
from backend.messages.layout import MessageLayout, Part
from backend.messages.rows import digest, expire_messages
from backend.rocks import RocksOptions, RocksStore
from backend.rows import RowCodec
from backend.store.bounds import stored_bounds
from backend.store.protocol import Staged
from backend.store.staging import file_digest
from backend.store.workspace import Workspace
from tests.support.message_store import add_messages, read_messages

HERE = Path(__file__).parent
LAYOUT = MessageLayout((Part.EQUAL, Part.TIME, Part.OFFSET))
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("value", pa.float64()),
        ("name", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
        ("ok", pa.bool_()),
        ("tags", pa.list_(pa.string())),
    ]
)
MOMENT = dt.datetime(2021, 3, 28, 0, 59, 59, 999999, tzinfo=dt.UTC)
MICROSECONDS = 1_616_893_199_999_999  # 2021-03-28T00:59:59.999999Z
FIRST = [
    (0, -1, 0, -3, 1, 1.5, "user_1", MOMENT, True, ["a", None]),
    (0, -1, 1, 5, 2, None, "user_12", None, False, []),
    (1, 3, 7, 2**41, 1, -0.5, "\0\x01", MOMENT, None, None),
]
DIGEST = 1967572392643633613
NEXT = [(0, -1, 2, 6, 2, 0.0, None, MOMENT, True, ["é"])]


def table(rows: list[tuple[object, ...]]) -> pa.Table:
    stamps = [("_stream", pa.uint16()), ("_partition", pa.int32()), ("_offset", pa.int64()), ("_time", pa.int64())]
    schema = pa.schema([*stamps, *SCHEMA])
    columns = zip(zip(*rows, strict=True), schema, strict=True)
    return pa.Table.from_arrays([pa.array(column, field.type) for column, field in columns], schema=schema)


def change(store: RocksStore, rows: list[tuple[object, ...]], before: int) -> Workspace:
    work = Workspace(store, stored_bounds(store))
    expire_messages(work, LAYOUT, before)
    messages = table(rows)
    add_messages(work, LAYOUT, RowCodec(SCHEMA), messages, equal=encode_columns([messages["id"]]))
    work.put(b"\x07clock" + encode(("a\0b", before, None, 1.5)), b"%d" % before)
    return work


def write(path: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        with RocksStore.open(home / "db", options=RocksOptions(compression="none")) as store:
            first = store.stage(change(store, FIRST, -3).changes(), home / "first.sst")
            store.confirm(first)
            store.stage(change(store, NEXT, 5).changes(), home / "next.sst")
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in [home / "next.sst", *sorted((home / "db").iterdir())]:
                if not file.name.startswith(("LOG", "LOCK", "OPTIONS")):
                    archive.write(file, file.relative_to(home))


def rows_of(store: RocksStore) -> list[tuple[object, ...]]:
    found = read_messages(Workspace(store, stored_bounds(store)), LAYOUT, RowCodec(SCHEMA))
    return sorted(zip(*(column.to_pylist() for column in found.columns), strict=True), key=lambda row: row[:3])


def test_a_store_of_format_1_is_read_and_goes_on(tmp_path: Path) -> None:
    with zipfile.ZipFile(HERE / "store_format_1.zip") as archive:
        archive.extractall(tmp_path)
    with RocksStore.open(tmp_path / "db", create=False) as store:
        assert rows_of(store) == FIRST
        assert stored_bounds(store) == {2: bytes.fromhex("027ffffffffffffffd")}
        clock = "07636c6f636b50306100ff620001207ffffffffffffffd0528bff800000000000000"
        assert store.get(bytes.fromhex(clock)) == b"-3"
        keys, values = store.scan_arrays(b"\x01", b"\x02")
        assert digest(keys, values) == DIGEST
        # the first message by hand: id, time, stream, partition, offset
        assert keys[0].hex() == "012080000000000000017ffffffffffffffd00007fffffff8000000000000000"
        # format, nulls, id, value, at, ok, length of the name, name, tags as MessagePack
        numbers = "0100000000000000000000000000f83f" + MICROSECONDS.to_bytes(8, "little").hex() + "01"
        assert values[0].hex() == "0100" + numbers + "06000000" + b"user_1".hex() + "92a161c0"
        staged = tmp_path / "next.sst"
        store.confirm(Staged(staged, *file_digest(staged), 0))
        assert rows_of(store) == [FIRST[1], NEXT[0], FIRST[2]]
        assert stored_bounds(store) == {2: bytes.fromhex("028000000000000005")}


def test_the_code_at_hand_writes_the_same_rows(tmp_path: Path) -> None:
    with zipfile.ZipFile(HERE / "store_format_1.zip") as archive:
        archive.extractall(tmp_path)
    with RocksStore.open(tmp_path / "new") as fresh, RocksStore.open(tmp_path / "db") as old:
        fresh.write(change(fresh, FIRST, -3).changes())
        assert fresh.scan_arrays(b"", None) == old.scan_arrays(b"", None)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write(target)
    print(f"{target.stat().st_size} bytes")
