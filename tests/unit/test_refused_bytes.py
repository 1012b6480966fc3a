"""What the errors hold of a message where no JVM is: the Kafka client, the operator tester."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from backend import archive, count, tumbling
from backend.sources import kafka_fetch
from backend.sources.formats import Parse
from backend.sources.json_columns import JsonColumns
from backend.sources.kafka_fetch import RECORDS
from backend.sources.kafka_reader import Piece, read_records
from backend.spark.pack import packing
from backend.spark.pack.assembling import Packed, assemble
from backend.spark.pack.pack_input import PackInput, pack_input
from backend.spark.stream import stream
from recovery.testing import OperatorTester

DAY = 86_400_000
NOW = 1_793_000_000_000
FIELDS = StructType([StructField("user", StringType()), StructField("at", LongType())])


def records(monkeypatch: Any, values: list[bytes], stamps: list[int]) -> list[pa.RecordBatch]:
    """The client's records of a topic."""
    count = len(values)
    keys = [b"k%d" % offset for offset in range(count)]
    at = pa.array([stamp * 1_000 for stamp in stamps], RECORDS.field("timestamp").type)
    columns = [["t"] * count, [0] * count, range(count), at, keys, values]
    typed = [pa.array(column, field.type) for column, field in zip(columns, RECORDS, strict=True)]
    found = pa.RecordBatch.from_arrays(typed, schema=RECORDS)
    parts = [found.slice(0, 2), found.slice(2)]
    monkeypatch.setattr(kafka_fetch, "fetch", lambda *_: iter(parts))
    return list(read_records({}, Piece("t", 0, 0, len(values))))


def errors_of(batch: pa.RecordBatch, event_time: str | None, batch_time: int = NOW) -> list[dict[str, Any]]:
    """The errors that the pack stage makes of records."""
    kept = (pa.field("user", pa.string()),)
    what = PackInput({"t": 0}, event_time, ("user",), False, 1, ((kept[0], "user"),), widen=False)
    value = batch.column("value").type
    parse = (
        Parse("typed", None, "")
        if pa.types.is_struct(value)
        else Parse("json", JsonColumns(to_arrow_schema(FIELDS, timezone="UTC")), "")
    )
    packed = packing.pack(
        pack_input(parse(batch), what), packing.PackPlan((0,), kept, False, DAY, {0: "t"}), batch_time
    ).to_pylist()
    return assemble([Packed(row["header"], row["frame"], row["errors"]) for row in packed], {}).errors.to_pylist()


VALUES = [
    b'{"user": "ann", "at": %d}' % NOW,
    b'{"user":"bob",  "at": %d, "more": [1]}' % (NOW + DAY + 1),  # a day ahead of the clock
    b'{"user": "cem"}',
    b'{"user": "dan", "at": %d}' % (NOW - 200 * DAY),
    b'{"user": "eve", "at": %d}' % (NOW - 200 * DAY + 1),  # a day ahead of when it was written, 201 days ago
    b'{"user": "fay", "at": %d}' % 2**60,
]
STAMPS = [NOW, NOW, NOW, NOW - 201 * DAY, NOW - 201 * DAY, NOW]


def test_the_client_keeps_bytes_and_keys_of_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    [batch] = records(monkeypatch, VALUES, STAMPS)
    errors = errors_of(batch, "at")
    assert [(e["offset"], e["reason"], e["value"], e["key"]) for e in errors] == [
        (1, "in_future", VALUES[1], b"k1"),
        (2, "no_event_time", VALUES[2], b"k2"),
        (4, "in_future", VALUES[4], b"k4"),
        (5, "in_future", VALUES[5], b"k5"),
    ]
    assert [e["topic"] for e in errors] == ["t"] * 4
    assert [e["timestamp"] for e in errors] == [STAMPS[e["offset"]] for e in errors]


def test_fields_of_columns_are_kept_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of values that are columns already; a delete has no bytes."""
    [batch] = records(monkeypatch, VALUES[:3], STAMPS[:3])
    value = pa.StructArray.from_arrays(
        [pa.array(["ann", "bob", None]), pa.array([NOW, NOW + DAY + 1, 0])],
        ["user", "at"],
        mask=pa.array([False, False, True]),
    )
    errors = errors_of(batch.set_column(5, "value", value), "at")
    assert [(e["offset"], e["reason"], e["value"]) for e in errors] == [
        (1, "in_future", b'{"user":"bob","at":%d}' % (NOW + DAY + 1)),
        (2, "malformed", None),
    ]


def test_the_records_own_timestamp_as_event_time(monkeypatch: pytest.MonkeyPatch) -> None:
    [batch] = records(monkeypatch, VALUES[:3], [NOW + DAY, NOW + DAY + 1, -1])
    errors = errors_of(batch, None)
    assert [(e["offset"], e["reason"], e["value"], e["event_time"]) for e in errors] == [
        (1, "in_future", VALUES[1], NOW + DAY + 1)
    ]


def test_the_tester_judges_as_the_pack_stage_does(tmp_path: Any) -> None:
    job = (
        stream(archive("nowhere", format="raw"), event_time="at", key="user")
        .window(tumbling(10), retention=100, max_ahead=50)
        .aggregate(n=count())
    )
    tester = OperatorTester(job, pa.schema([("at", pa.int64()), ("user", pa.string())]), tmp_path, now_ms=1_000)
    rows = [
        {"at": 100, "user": "a", "_timestamp": 60},
        {"at": 200, "user": "a", "_timestamp": 60},  # 90 ms after what its timestamp allows: the clock stays
        {"at": 105, "user": "a", "_timestamp": -1},
        {"at": 1_051, "user": "a"},
        {"at": 110, "user": "b", "_timestamp": 60},  # the last millisecond: 60 + 50
    ]
    emitted = tester.batch(rows)
    assert [(e["offset"], e["reason"]) for e in emitted.errors.to_pylist()] == [(1, "in_future"), (3, "in_future")]
    assert [(r["window_start"], r["n"]) for r in emitted.results.to_pylist()] == [(100, 2)]
    assert tester.pointer is not None
    assert tester.pointer.positions[0][2].stream_time == 110
    tester.lose_disk()
    tester.restore()
    assert tester.batch().errors.num_rows == 0
