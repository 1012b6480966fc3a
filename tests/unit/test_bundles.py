"""What a bundle's rows become before the pack stage: by hand, as `Job.pack_input` says it in the JVM."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from backend.errors import FrameDamaged, SourceDamaged
from backend.limits import MAX_KEY_TEXT_BYTES
from backend.spark import frames
from backend.spark.bundles import BundleInput, bundle, can_bundle, pack_input, unbundled, unmixed

VALUE = pa.struct([("key", pa.string()), ("at", pa.timestamp("us", "UTC")), ("x", pa.int64())])
FIELDS = (pa.field("x", pa.int64()), pa.field("left.gone", pa.string()))
INPUT = BundleInput({"a": 3, "b": 5}, "at", ("key",), False, 4, ((FIELDS[0], "x"), (FIELDS[1], None)), widen=False)


def rows(values: list[dict[str, object] | None], topics: list[str] | None = None) -> pa.RecordBatch:
    count = len(values)
    columns = {
        "topic": pa.array(topics or ["a"] * count),
        "partition": pa.array(range(count), pa.int32()),
        "offset": pa.array(range(100, 100 + count), pa.int64()),
        "timestamp": pa.array([1_500] * count, pa.timestamp("us", "UTC")),
        "key": pa.array([b"record"] * count),
        "value": pa.array(values, VALUE),
    }
    return pa.RecordBatch.from_pydict(columns)


def at(micros: int) -> datetime:
    return datetime.fromtimestamp(micros / 1e6, UTC)


def test_columns_by_hand() -> None:
    found = pack_input(
        rows([{"key": "p", "at": at(-1), "x": 7}, None, {"key": "q", "at": None, "x": 8}], ["a", "b", "a"]), INPUT, 77
    ).to_pydict()
    assert found["_stream"] == [3, 5, 3]
    assert found["_partition"] == [0, 1, 2]
    assert found["_offset"] == [100, 101, 102]
    assert found["_time"] == [-1, None, None]  # rounded down, as unix_millis does
    assert found["_malformed"] == [None, "the value is null", None]
    assert found["_key"] == [None, b"record", b"record"]  # only of bad rows
    assert found["_raw"] == [None, None, None]
    assert found["_timestamp"] == [1, 1, 1]
    assert found["_batch_ms"] == [77] * 3
    assert found["x"] == [7, None, 8]
    assert found[frames.column_name("left.gone")] == [None] * 3
    # Spark: SELECT pmod(xxhash64('p'), 4), pmod(42, 4), pmod(xxhash64('q'), 4); the Spark test compares many
    assert found["_shard"][1] == 42 % 4


def test_a_field_under_a_null_value_is_null() -> None:
    """The children of a null struct may hold anything."""
    x = pa.array([1, 2])
    value = pa.StructArray.from_arrays([pa.array(["a", "b"]), pa.array([0, 0], VALUE[1].type), x], fields=list(VALUE))
    masked = pa.StructArray.from_buffers(
        value.type, 2, [pa.py_buffer(b"\x01")], children=[value.field(number) for number in range(3)]
    )
    batch = rows([None, None])
    batch = batch.set_column(5, "value", masked)
    found = pack_input(batch, INPUT, 0).to_pydict()
    assert found["x"] == [1, None]
    assert found["_malformed"] == [None, "the value is null"]


def test_a_key_that_is_too_long_is_malformed_and_kept() -> None:
    longest, longer = "x" * MAX_KEY_TEXT_BYTES, "ä" * (MAX_KEY_TEXT_BYTES // 2) + "x"
    batch = rows([{"key": longest, "at": at(0), "x": 1}, {"key": longer, "at": at(0), "x": 2}])
    found = pack_input(batch, INPUT, 0).to_pydict()
    assert found["_malformed"] == [None, f"the key has {MAX_KEY_TEXT_BYTES + 1} bytes, at most 30000 are allowed"]
    assert found["_key"] == [None, b"record"]
    assert json.loads(found["_raw"][1])["key"] == longer


def test_routed_by_source_partition() -> None:
    by_partition = BundleInput({"a": 3}, None, (), True, 4, (), widen=False)
    found = pack_input(rows([{"key": "p", "at": None, "x": 7}] * 3), by_partition, 0).to_pydict()
    assert found["_shard"] == [(3 + partition) % 4 for partition in range(3)]
    assert found["_time"] == [1, 1, 1]  # the record's own


def test_a_new_topic_is_named() -> None:
    with pytest.raises(SourceDamaged, match=r"topics=\[") as caught:
        pack_input(rows([None], ["c"]), INPUT, 0)
    assert "c" in str(caught.value)


def test_bundles_in_front_of_a_stage() -> None:
    """Two bundles in one Arrow batch, one of them empty: a stage sees each bundle's rows with their batch time."""
    bundles = [bundle(rows([{"key": "p", "at": at(0), "x": number}])).column(0)[0].as_py() for number in (1, 2)]
    bundles.insert(1, bundle(rows([])).column(0)[0].as_py())
    batch = pa.RecordBatch.from_pydict({"bundle": pa.array(bundles), "_batch_ms": pa.array([10, 20, 30])})
    stage = unbundled(INPUT, lambda batches: batches)
    assert [found.select(["x", "_batch_ms"]).to_pylist() for found in stage(iter([batch]))] == [
        [{"x": 1, "_batch_ms": 10}],
        [{"x": 2, "_batch_ms": 30}],
    ]


def mixed(*parts: tuple[int, list[int]] | list[int]) -> pa.RecordBatch:
    """An Arrow batch as Spark makes it of a mixed source, with offsets in `x`: numbers are rows that Spark judged, a
    tuple is a bundle of such, and the number of rows that belong between them.
    """
    batches = []
    for number, part in enumerate(parts):
        brings, xs = part if isinstance(part, tuple) else (0, part)
        own = rows([{"key": "p", "at": at(0), "x": x} for x in xs])
        own = own.set_column(3 - 1, "offset", pa.array(xs, pa.int64()))
        if isinstance(part, tuple):
            columns = {kind.name: pa.nulls(1, kind.type) for kind in pack_input(own, INPUT, 0).schema}
            columns |= {"_batch_ms": pa.array([10 + number]), "_offset": pa.array([brings])}
            batches.append(pa.table({"bundle": bundle(own).column(0), **columns}))
        else:
            judged = pack_input(own, INPUT, 10 + number)
            columns = dict(zip(judged.schema.names, judged.columns, strict=True))
            batches.append(pa.table({"bundle": pa.nulls(len(xs), pa.binary()), **columns}))
    [batch] = pa.concat_tables(batches).combine_chunks().to_batches()
    return batch


def seen(most: int, *batches: pa.RecordBatch) -> list[list[tuple[int, int]]]:
    found = unmixed(INPUT, lambda rows: rows, most)(iter(batches))
    return [list(zip(*(one.column(name).to_pylist() for name in ("x", "_batch_ms")), strict=True)) for one in found]


def test_bundles_and_rows_come_in_their_order_with_their_batch_time() -> None:
    batch = mixed((0, [1, 2]), [3], (0, [4]), (0, [5, 6]), [7, 8])
    order = [(1, 10), (2, 10), (3, 11), (4, 12), (5, 13), (6, 13), (7, 14), (8, 14)]
    assert seen(100, batch) == [order]
    assert seen(3, batch) == [order[:3], order[3:6], order[6:]]
    assert seen(100, mixed([1, 2])) == [[(1, 10), (2, 10)]]
    assert seen(100, mixed((0, [1, 2]))) == [[(1, 10), (2, 10)]]
    assert seen(100, mixed([1]).slice(0, 0)) == []


def test_rows_between_those_of_a_bundle_are_never_apart_from_it() -> None:
    """However Spark cuts its Arrow batches: lateness goes by the order of offsets."""
    batch = mixed((3, [1, 3, 5]), [2, 4, 6], (1, [7, 9]), [8], [10])
    whole = [[1, 3, 5, 2, 4, 6], [7, 9, 8], [10]]
    for cut in range(1, batch.num_rows):
        found = [[x for x, _ in part] for part in seen(1, batch.slice(0, cut), batch.slice(cut))]
        assert found[0] == whole[0]
        assert found[1][:3] == whole[1]
    with pytest.raises(FrameDamaged, match="2 are missing"):
        seen(1, batch.slice(0, 2))


def test_a_topic_that_is_a_dictionary() -> None:
    batch = rows([{"key": "p", "at": at(0), "x": 1}] * 3, ["a", "b", "a"])
    coded = batch.set_column(0, "topic", batch.column("topic").dictionary_encode())
    assert pack_input(coded, INPUT, 0).equals(pack_input(batch, INPUT, 0))


@pytest.mark.parametrize(
    ("kind", "event_time", "key"),
    [
        (pa.timestamp("us"), True, False),  # without a time zone the session's counts
        (pa.date32(), True, False),
        (pa.decimal128(9, 2), False, True),
        (pa.list_(pa.int64()), False, True),
    ],
)
def test_what_needs_the_jvm(kind: pa.DataType, event_time: bool, key: bool) -> None:
    value = pa.struct([("it", kind), ("at", pa.int64())])
    assert not can_bundle(value, "it" if event_time else "at", ("it",) if key else ())
    assert can_bundle(value, "at", ("at",))
    assert can_bundle(value, None, ())
