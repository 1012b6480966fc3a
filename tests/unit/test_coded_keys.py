"""Keys that come out of an archive as dictionaries: the same rows, whatever the dictionary holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend.aggregates import count, last, sum_
from backend.chunks import decoded, is_coded, plain
from backend.sources import archive_files
from backend.sources.archive_files import WRITE_SCHEMA, read_range
from backend.sources.archive_index import Archive
from backend.sources.archive_reader import Piece
from backend.sources.formats import MALFORMED
from backend.spark.pack import frames
from backend.spark.pack.frames import from_ipc
from backend.spark.pack.narrow import widen
from backend.spark.pack.pack_input import PackInput, selecting
from backend.spark.pack.packing import PackPlan, packer
from backend.store import limits
from backend.store.limits import MAX_KEY_TEXT_BYTES
from backend.windows.aligned.combining import Combining
from backend.windows.definitions import tumbling
from backend.windows.spec import window_spec
from recovery.commit.option_sets import ByVersion

CODED = pa.dictionary(pa.int32(), pa.string())
ROWS = 3_000
VALUE = pa.struct([("key", pa.string()), ("x", pa.int64())])
FEW = [f"k{row % 7}" for row in range(ROWS)]
GONE = [None if row % 5 == 0 else one for row, one in enumerate(FEW)]


def schema_of(key: pa.DataType) -> pa.Schema:
    value = pa.field("value", pa.struct([("key", key), ("x", pa.int64())]))
    return WRITE_SCHEMA.set(5, value).append(pa.field(MALFORMED, pa.string()))


def table(keys: pa.Array, absent: pa.Array | None = None) -> pa.Table:
    x = pa.array(range(len(keys)), pa.int64())
    value = pa.StructArray.from_arrays([keys, x], ["key", "x"], mask=absent)
    times = pa.array([0] * len(keys), pa.timestamp("ms", tz="UTC"))
    columns = [["t"] * len(keys), [0] * len(keys), list(range(len(keys))), times, [None] * len(keys), value]
    return pa.table(columns, schema=WRITE_SCHEMA.set(5, pa.field("value", value.type)))


def read(place: Path, schema: pa.Schema, low: int, high: int) -> list[pa.RecordBatch]:
    slices, gaps = Archive(str(place)).partitions()["t", 0].cut(low, high)
    return list(read_range(str(place), Piece("t", 0, low, high, slices, gaps), schema))


FILES: dict[str, tuple[pa.Array, dict[str, Any], bool]] = {
    "few": (pa.array(FEW), {}, True),
    "few, some null": (pa.array(GONE), {}, True),
    "more than the writer's dictionary takes": (
        pa.array([f"{row // 5}" for row in range(ROWS)]),
        {"dictionary_pagesize_limit": 64, "data_page_size": 64, "write_batch_size": 32},
        True,
    ),
    "each another": (pa.array([f"a key, {row}" for row in range(ROWS)]), {}, False),
    "no dictionary": (pa.array(FEW), {"use_dictionary": False}, False),
    "another encoding": (
        pa.array(FEW),
        {"use_dictionary": False, "column_encoding": {"value.key": "DELTA_BYTE_ARRAY"}},
        False,
    ),
    "bytes": (pa.array(FEW).cast(pa.binary()), {}, False),
    "large": (pa.array(FEW).cast(pa.large_string()), {}, False),
    "a dictionary by its own schema": (pa.array(FEW).dictionary_encode(), {}, False),
    "small row groups": (pa.array(FEW), {"row_group_size": 200}, False),
    "a short row group at the end": (pa.array(FEW), {"row_group_size": 1_499}, True),
    "a large dictionary": (pa.array([f"{row // 5} {'x' * 90}" for row in range(ROWS)]), {}, False),
}


@pytest.mark.parametrize("absent", [False, True], ids=["", "values that are null"])
@pytest.mark.parametrize("name", FILES)
def test_an_archive_gives_the_same_texts_as_a_dictionary(
    name: str, absent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dictionary where each row group has a small one, texts elsewhere; from several row groups, and some of them."""
    keys, options, coded = FILES[name]
    monkeypatch.setattr(archive_files, "CODED_ROWS", 300)
    monkeypatch.setattr(archive_files, "BATCH_ROWS", 300)  # several batches of a row group
    monkeypatch.setattr(archive_files, "CODED_BYTES", 8)
    rows = table(keys, pa.array([row % 3 == 0 for row in range(ROWS)]) if absent else None)
    pq.write_table(rows, tmp_path / "a.parquet", **{"row_group_size": 1_000, **options})
    for low, high in ((0, ROWS), (950, 1_700)):
        found, wanted = (read(tmp_path, schema_of(key), low, high) for key in (CODED, pa.string()))
        assert [is_coded(batch.schema.field("value").type) for batch in found] == [coded] * len(found)
        texts = [batch.set_column(5, "value", decoded(batch.column("value"))) for batch in found]
        assert pa.Table.from_batches(texts).equals(pa.Table.from_batches(wanted))
        assert pa.Table.from_batches(texts)["offset"].to_pylist() == list(range(low, high))
        assert len(found) > 2


def test_of_several_files_each_gives_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_files, "CODED_ROWS", 700)
    whole = table(pa.array(FEW))
    for number, options in enumerate(({}, {"use_dictionary": False}, {"row_group_size": 400}, {})):
        pq.write_table(whole.slice(number * 750, 750), tmp_path / f"{number}.parquet", **options)
    found = read(tmp_path, schema_of(CODED), 10, ROWS)
    assert [is_coded(batch.schema.field("value").type) for batch in found] == [True, False, False, True]
    keys = [decoded(batch.column("value")).field("key") for batch in found]
    assert pa.concat_arrays(keys).to_pylist() == FEW[10:]


def test_a_dictionary_that_is_not_read_changes_nothing(tmp_path: Path) -> None:
    """Rows of several row groups come at once."""
    rows = table(pa.array(FEW))
    value = rows["value"].combine_chunks()
    more = pa.StructArray.from_arrays([*value.flatten(), pa.array(FEW).dictionary_encode()], ["key", "x", "odd"])
    pq.write_table(rows.set_column(5, "value", more), tmp_path / "a.parquet", row_group_size=500)
    assert [batch.num_rows for batch in read(tmp_path, schema_of(pa.string()), 0, ROWS)] == [ROWS]


LONG = "l" * (MAX_KEY_TEXT_BYTES + 1)


def records(keys: pa.Array, first: int, seed: int) -> pa.RecordBatch:
    """Lay out records with some that are bad, over two source partitions."""
    chance = random.Random(seed)
    n = len(keys)
    x = pa.array([chance.randrange(9) for _ in range(n)], pa.int64())
    absent = pa.array([chance.random() < 0.1 for _ in range(n)])
    fields = pa.StructArray.from_arrays([keys, x], ["key", "x"], mask=absent)
    reasons = ["the value is null" if gone else None for gone in absent.to_pylist()]
    times = sorted(chance.randrange(40) for _ in range(n))
    columns = {
        "topic": pa.array(["t"] * n),
        "partition": pa.array(sorted(chance.randrange(2) for _ in range(n)), pa.int32()),
        "offset": pa.array(range(first, first + n), pa.int64()),
        "timestamp": pa.array(times, pa.timestamp("ms", "UTC")),
        "key": pa.nulls(n, pa.binary()),
        "fields": fields,
        "raw": pa.nulls(n),
        "malformed": pa.array(reasons, pa.string()),
    }
    return pa.RecordBatch.from_pydict(columns)


def dictionary(keys: list[str | None], odd: bytes | None, seed: int) -> tuple[pa.Array, pa.Array]:
    """Return keys as texts and as a dictionary in any order, with texts twice and some that no row has.

    Args:
        keys: The keys.
        odd: Bytes that are no UTF-8, instead of the text "odd".
        seed: Of the order.
    """
    chance = random.Random(seed)
    texts = [*{key for key in keys if key is not None}] * 2 + ["none has it"]
    chance.shuffle(texts)
    places = [
        None if key is None else chance.choice([at for at, one in enumerate(texts) if one == key]) for key in keys
    ]

    def raw(values: list[str | None]) -> pa.Array:
        given = [None if one is None else odd if one == "odd" and odd else one.encode() for one in values]
        return pa.Array.from_buffers(pa.string(), len(given), pa.array(given, pa.binary()).buffers())

    return raw(keys), pa.DictionaryArray.from_arrays(pa.array(places, pa.int32()), raw([*texts]))


KEYS: dict[str, tuple[list[str | None], bytes | None]] = {
    "some": (["a", "b", None, "c"], None),
    "null": ([None], None),
    "many": ([f"k{number}" for number in range(500)], None),
    "no UTF-8": (["a", "odd", None], b"\xffq"),
    "too long": (["a", LONG, None], None),
}
AGGREGATES: dict[str, Callable[[], dict[str, Any]]] = {
    "sums": lambda: {"n": count(), "s": sum_("x")},
    "of the key": lambda: {"n": count(), "which": last("key")},
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("by_partition", [False, True], ids=["by key", "by partition"])
@pytest.mark.parametrize("fewer", [None, 0, 2])
@pytest.mark.parametrize("aggregates", AGGREGATES)
@pytest.mark.parametrize("kind", KEYS)
def test_a_key_that_is_a_dictionary_is_packed_as_its_texts_are(
    kind: str, aggregates: str, fewer: int | None, by_partition: bool, shards: int
) -> None:
    """Combined or not, routed by key or not, one batch or several gathered, of which one has texts."""
    schema = pa.schema(list(VALUE))
    spec = window_spec(tumbling(10), schema, AGGREGATES[aggregates](), keys=["key"], retention=5, max_ahead=None)
    fields = tuple((field, field.name) for field in schema)
    what = PackInput({"t": 0}, None, ("key",), by_partition, shards, fields, widen=False)
    combining = None if fewer is None else Combining(spec, fewer)
    plan = PackPlan(tuple(range(shards)), tuple(schema), by_partition, None, {0: "t"}, combining=combining)
    stage = selecting(lambda batch: batch, what, packer(ByVersion.always(plan), lambda: 77))
    texts, odd = KEYS[kind]
    for seed in range(2):
        keys = dictionary(random.Random(seed).choices(texts, k=60), odd, seed)
        given = [records(one, 60, seed) for one in keys]
        more = records(keys[0], 120, seed)
        for wanted, found in (
            ([given[0]], [given[1]]),
            ([given[0], more], [given[1], more]),
            ([more, given[0]], [more, given[1]]),
        ):
            apart = [wanted] if odd else [[one] for one in wanted]  # what has to be decoded is gathered as texts are
            expected = [_read(row) for own in apart for batch in stage(iter(own)) for row in batch.to_pylist()]
            assert [_read(row) for batch in stage(iter(found)) for row in batch.to_pylist()] == expected
            assert any(row[2] for row in expected)


def test_a_short_key_stays_a_dictionary_and_goes_alone() -> None:
    schema = pa.schema(list(VALUE))
    what = PackInput({"t": 0}, None, ("key",), False, 2, tuple((f, f.name) for f in schema), widen=False)
    texts, coded = dictionary(["a", "b", None] * 20, None, 0)
    _, long = dictionary(["a", LONG] * 20, None, 0)
    given = [records(keys, first, 0) for first, keys in enumerate((texts, coded, texts, texts, long))]
    found = list(selecting(lambda batch: batch, what, lambda batches: batches)(iter(given)))
    kinds = [batch.schema.field("key").type for batch in found]
    assert kinds == [pa.string(), CODED, pa.string(), pa.string()]
    assert [batch.num_rows for batch in found] == [60, 60, 120, 40]
    assert [frames.CODES_IN in batch.schema.names for batch in found] == [True, True, False, True]


def test_fields_beside_a_dictionary_are_judged_as_beside_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = pa.array(["a" * 50, "b"] * 3)
    notes = pa.array(["n" * 60] * 5 + ["n" * 95])
    for most in (100, 100_000):
        monkeypatch.setattr(limits, "MAX_FIELDS_BYTES", most)
        wanted = limits.large_rows([keys, notes], 6)
        assert limits.large_rows([keys.dictionary_encode(), notes], 6) == wanted
        assert [*wanted] == ([0, 2, 4, 5] if most == 100 else [])


def _read(row: dict[str, Any]) -> tuple[Any, ...]:
    frame, errors = row["frame"], row["errors"]
    return (
        row["shard"],
        row["header"],
        None if frame is None else widen(from_ipc(frame)).to_pylist(),
        None if errors is None else from_ipc(errors).to_pylist(),
    )


def test_plain_columns_stay_what_they_are() -> None:
    column = pa.array([{"a": 1}])
    assert decoded(column) is column
    assert plain(column.type) == column.type
    coded = pa.StructArray.from_arrays([pa.array(["a", "b"]).dictionary_encode()], ["a"], mask=pa.array([False, True]))
    assert decoded(coded).to_pylist() == [{"a": "a"}, None]
    assert plain(coded.type) == decoded(coded).type == pa.struct([("a", pa.string())])
