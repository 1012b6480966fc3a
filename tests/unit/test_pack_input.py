"""What parsed rows become before the pack stage, by hand; the Spark test has what Spark says."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

import pyarrow as pa
import pytest

from backend import readable
from backend.errors import SourceDamaged
from backend.spark.pack import frames
from backend.spark.pack import pack_input as pack_input_module
from backend.spark.pack.pack_input import PackInput, TextShards, millis, pack_input, selecting
from backend.store import limits
from backend.store.limits import MAX_KEY_TEXT_BYTES

VALUE = pa.struct([("key", pa.string()), ("at", pa.timestamp("us", "UTC")), ("x", pa.int64())])
INPUT = PackInput({"a": 3, "b": 5}, "at", ("key",), False, 4, ((pa.field("x", pa.int64()), "x"),), widen=False)


def rows(values: list[dict[str, object] | None], topics: list[str] | None = None) -> pa.RecordBatch:
    count = len(values)
    columns = {
        "topic": pa.array(topics or ["a"] * count),
        "partition": pa.array(range(count), pa.int32()),
        "offset": pa.array(range(100, 100 + count), pa.int64()),
        "timestamp": pa.array([1_500] * count, pa.timestamp("us", "UTC")),
        "key": pa.array([b"record"] * count),
        "fields": pa.array(values, VALUE),
        "raw": pa.nulls(count),
        "malformed": pa.array([None if value else "the value is null" for value in values], pa.string()),
    }
    return pa.RecordBatch.from_pydict(columns)


def at(micros: int) -> datetime:
    return datetime.fromtimestamp(micros / 1e6, UTC)


def test_columns_by_hand() -> None:
    found = pack_input(
        rows([{"key": "p", "at": at(-1), "x": 7}, None, {"key": "q", "at": None, "x": 8}], ["a", "b", "a"]), INPUT
    ).to_pydict()
    assert found["_stream"] == [3, 5, 3]
    assert found["_partition"] == [0, 1, 2]
    assert found["_offset"] == [100, 101, 102]
    assert found["_time"] == [-1, None, None]  # rounded down, as unix_millis does
    assert found["_malformed"] == [None, "the value is null", None]
    assert found["_timestamp"] == [1, 1, 1]
    assert found["x"] == [7, None, 8]
    # Spark: SELECT pmod(xxhash64('p'), 4), pmod(42, 4), pmod(xxhash64('q'), 4); the Spark test compares many
    assert found["_shard"][1] == 42 % 4


def test_bytes_as_received_go_along_and_else_the_fields() -> None:
    values: list[dict[str, object] | None] = [{"key": "p", "at": at(10_000), "x": 1}, None]
    found = pack_input(rows(values), INPUT).to_pydict()
    assert found["_raw"] == values
    assert found["_key"] == [b"record"] * 2
    received = pa.array([b" {2}", None])
    found = pack_input(rows(values).set_column(6, "raw", received), INPUT).to_pydict()
    assert found["_raw"] == [b" {2}", None]


def test_a_field_under_a_null_value_is_null() -> None:
    """The children of a null struct may hold anything."""
    x = pa.array([1, 2])
    value = pa.StructArray.from_arrays([pa.array(["a", "b"]), pa.array([0, 0], VALUE[1].type), x], fields=list(VALUE))
    masked = pa.StructArray.from_buffers(
        value.type, 2, [pa.py_buffer(b"\x01")], children=[value.field(number) for number in range(3)]
    )
    batch = rows([None, None])
    batch = batch.set_column(5, "fields", masked)
    found = pack_input(batch, INPUT).to_pydict()
    assert found["x"] == [1, None]


def test_a_key_that_is_too_long_is_malformed_and_kept() -> None:
    longest, longer = "x" * MAX_KEY_TEXT_BYTES, "ä" * (MAX_KEY_TEXT_BYTES // 2) + "x"
    batch = rows([{"key": longest, "at": at(0), "x": 1}, {"key": longer, "at": at(0), "x": 2}])
    found = pack_input(batch, INPUT).to_pydict()
    assert found["_malformed"] == [None, f"the key has {MAX_KEY_TEXT_BYTES + 1} bytes, at most 30000 are allowed"]
    assert found["_shard"][1] == 42 % 4, "where null goes: it is not hashed"


def test_fields_that_no_row_of_state_takes_are_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of many rows, whatever the type; fields that the operator does not read do not count."""
    monkeypatch.setattr(limits, "MAX_FIELDS_BYTES", 10_000)
    kind = pa.struct([*VALUE, pa.field("note", pa.string()), pa.field("more", pa.list_(pa.int64()))])
    values = [{"key": "p", "at": at(0), "x": 1, "note": "n" * 9, "more": [1]} for _ in range(1_000)]
    values[3] |= {"note": "n" * 10_001}
    values[500] |= {"more": list(range(1_300))}
    values[999] |= {"note": "n" * 6_000, "more": list(range(700))}
    batch = rows([None] * 1_000).set_column(5, "fields", pa.array(values, kind))
    batch = batch.set_column(7, "malformed", pa.nulls(1_000, pa.string()))
    read = replace(INPUT, fields=tuple((kind.field(name), name) for name in ("note", "more")))
    found = pack_input(batch, read).column("_malformed").to_pylist()
    assert {row: why for row, why in enumerate(found) if why} == dict.fromkeys(
        (3, 500, 999), "the fields have more than 10000 bytes"
    )
    assert not any(pack_input(batch, INPUT).column("_malformed").to_pylist())


@pytest.mark.parametrize("nested", [False, True])
def test_a_text_that_is_no_utf_8_is_malformed_and_what_can_be_read_of_it_is_kept(nested: bool) -> None:
    """Parquet files, a function of the user's and Spark may bring any bytes as texts; reading one raises anywhere."""
    received = [b"p", b"\xffq", None, b"r"]
    keys = pa.Array.from_buffers(pa.string(), 4, pa.array(received, pa.binary()).buffers())
    x = pa.array([1, 2, 3, 4])
    more = pa.ListArray.from_arrays(
        pa.array([0, 1, 2, 3, 4], pa.int32()), keys if nested else keys.fill_null("s").take(pa.array([0, 2, 0, 2]))
    )
    own = pa.array(["p", "q", None, "r"]) if nested else keys
    batch = rows([{"key": "", "at": at(0), "x": 1}] * 4)
    value = pa.StructArray.from_arrays([own, batch.column("fields").field(1), x, more], ["key", "at", "x", "more"])
    found = pack_input(batch.set_column(5, "fields", value), INPUT)
    found.validate(full=True)
    assert found.column("_malformed").to_pylist() == [
        None,
        "a field cannot be read: Invalid UTF8 sequence at string index 0",
        None,
        None,
    ]
    assert found.column("x").to_pylist() == [1, 2, 3, 4]
    kept = found.column("_raw").to_pylist()
    assert [one["key"] for one in kept] == ["p", "q" if nested else "\ufffdq", None, "r"]
    assert (kept[1]["more"] is None) == nested


def test_routed_by_source_partition() -> None:
    by_partition = PackInput({"a": 3}, None, (), True, 4, (), widen=False)
    found = pack_input(rows([{"key": "p", "at": None, "x": 7}] * 3), by_partition).to_pydict()
    assert found["_shard"] == [(3 + partition) % 4 for partition in range(3)]
    assert found["_time"] == [1, 1, 1]  # the record's own


def test_equal_keys_have_equal_numbers_where_rows_are_routed_by_one_text() -> None:
    values: list[dict[str, object] | None] = [{"key": k, "at": at(0), "x": 1} for k in ("p", None, "q", "p", None)]
    numbers = pack_input(rows(values), INPUT)[frames.CODES_IN].to_pylist()
    assert numbers[0] == numbers[3]
    assert numbers[1] == numbers[4]
    assert len(set(numbers)) == 3
    for other in ({"key": ("x",)}, {"key": ("key", "x")}, {"key": ()}, {"shards": 1}, {"by_partition": True}):
        assert frames.CODES_IN not in pack_input(rows(values), replace(INPUT, **other)).schema.names


def test_numbers_of_keys_are_of_one_batch() -> None:
    batches = [rows([{"key": key, "at": at(0), "x": 1}]) for key in ("p", "q")]
    [whole] = selecting(lambda batch: batch, INPUT, lambda found: found)(iter(batches))
    assert frames.CODES_IN not in whole.schema.names
    [alone] = selecting(lambda batch: batch, INPUT, lambda found: found)(iter(batches[:1]))
    assert alone[frames.CODES_IN].to_pylist() == [0]


CODED = pa.dictionary(pa.int32(), pa.string())


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["p", None, "q"], CODED),
        ([f"key-{number}" for number in range(4_000)], pa.string()),
        (["p", "q" * (MAX_KEY_TEXT_BYTES + 1)], pa.string()),
    ],
)
def test_a_key_that_comes_again_is_a_dictionary_for_a_stage_that_takes_it(
    texts: list[str | None], kind: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In large batches, which are not gathered; with what is made of it as before, refused rows too."""
    monkeypatch.setattr(pack_input_module, "CODED_ROWS", 4_000)
    what = replace(INPUT, coded=True, fields=(*INPUT.fields, (pa.field("key", pa.string()), "key")))
    given = rows([{"key": texts[row % len(texts)], "at": at(row), "x": row} for row in range(4_000)])
    found, plain = pack_input(given, what), pack_input(given, replace(what, coded=False))
    assert found.schema.field("key").type == kind
    assert plain.schema.field("key").type == pa.string()
    apart = [name for name in plain.schema.names if name != frames.CODES_IN]  # which number is whose may differ
    assert found.select(apart).to_pylist() == plain.select(apart).to_pylist()
    numbers = dict(zip(found[frames.CODES_IN].to_pylist(), found["key"].to_pylist(), strict=True))
    assert len(numbers) == len({row["key"] for row in plain.select(["key"]).to_pylist()})
    for other in (given.slice(1), given):  # too few rows; or not routed by one text
        asked = what if other is not given else replace(what, by_partition=True)
        assert pack_input(other, asked).schema.field("key").type == pa.string()


def test_shards_of_texts_that_were_asked_for_before() -> None:
    """Of the same texts, of some, of others, with null among them: what each asked for alone gets."""
    known = TextShards(7)
    for texts in (["a", "b"], ["a", "b"], ["b", None, "c"], [], ["c", "d", None, "a"], [None]):
        one_by_one = [TextShards(7).of(pa.array([text], pa.string()))[0] for text in texts]
        assert known.of(pa.array(texts, pa.string())).tolist() == one_by_one


def test_a_new_topic_is_named() -> None:
    with pytest.raises(SourceDamaged, match=r"topics=\[") as caught:
        pack_input(rows([None], ["c"]), INPUT)
    assert "c" in str(caught.value)


def test_what_is_gathered_for_a_stage_keeps_its_order() -> None:
    """Small batches become one; a batch without rows is passed over."""
    batches = [rows([{"key": "p", "at": at(0), "x": number}] * count) for number, count in ((1, 1), (2, 0), (3, 2))]
    whole = selecting(lambda batch: batch, INPUT, lambda found: found)(iter(batches))
    assert [part.select(["x"]).to_pylist() for part in whole] == [[{"x": x} for x in (1, 3, 3)]]


def test_a_stage_gets_parts_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_input_module, "GATHERED_ROWS", 3)
    batches = [rows([{"key": "p", "at": at(0), "x": number}]) for number in range(7)]
    parts = selecting(lambda batch: batch, INPUT, lambda found: found)(iter(batches))
    assert [part.column("x").to_pylist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_topic_that_is_a_dictionary() -> None:
    batch = rows([{"key": "p", "at": at(0), "x": 1}] * 3, ["a", "b", "a"])
    coded = batch.set_column(0, "topic", batch.column("topic").dictionary_encode())
    assert pack_input(coded, INPUT).equals(pack_input(batch, INPUT))


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.date32(), date(2013, 7, 5), datetime(2013, 7, 4, 22, tzinfo=UTC)),
        (pa.timestamp("us"), datetime(2013, 7, 5, 1), datetime(2013, 7, 4, 23, tzinfo=UTC)),
        (pa.timestamp("us"), datetime(2013, 3, 31, 2, 30), datetime(2013, 3, 31, 1, 30, tzinfo=UTC)),
        (pa.timestamp("us"), datetime(2013, 10, 27, 2, 30), datetime(2013, 10, 27, 0, 30, tzinfo=UTC)),
        (pa.timestamp("us", "UTC"), datetime(2013, 7, 5, 1, tzinfo=UTC), datetime(2013, 7, 5, 1, tzinfo=UTC)),
        (pa.int32(), 5, datetime(1970, 1, 1, 0, 0, 0, 5_000, UTC)),
        (pa.int64(), None, None),
    ],
)
def test_event_times_of_every_type_in_berlin(kind: pa.DataType, value: object, expected: datetime | None) -> None:
    """Without a zone the session's counts: in the gap of spring as far behind it, of two in autumn the first."""
    found = millis(pa.array([value, None, value], kind), "Europe/Berlin").to_pylist()
    wanted = None if expected is None else (expected - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    assert found == [wanted, None, wanted]


def test_a_date_that_no_timestamp_says_is_an_event_time_all_the_same() -> None:
    """Days from 1970 of 32 bits go to the year 5,881,580; beyond 294,246 they begin at midnight of UTC."""
    days = pa.array([2**31 - 1, 15_891, None, -(2**31)], pa.int32()).cast(pa.date32())
    berlin = int(datetime(2013, 7, 4, 22, tzinfo=UTC).timestamp() * 1000)
    assert millis(days, "Europe/Berlin").to_pylist() == [(2**31 - 1) * 86_400_000, berlin, None, -(2**31) * 86_400_000]
    edge = 106_751_991  # the last whole day in microseconds
    near = pa.array([edge + more for more in (-3, -2, -1, 0, 1)], pa.int32()).cast(pa.date32())
    assert millis(near, "UTC").to_pylist() == [(edge + more) * 86_400_000 for more in (-3, -2, -1, 0, 1)]


@pytest.mark.parametrize(
    ("zone", "winter", "summer", "last", "first"),
    [
        ("Europe/Berlin", 1, 2, 9_223_372_033_254_775, -9_223_372_036_854_776),
        ("-12:00", -12, -12, 9_223_372_036_854_775, -9_223_371_993_654_776),
        ("+05:00", 5, 5, 9_223_372_018_854_775, -9_223_372_036_854_776),
        ("UTC", 0, 0, 9_223_372_036_854_775, -9_223_372_036_854_776),
    ],
)
def test_local_times_beyond_pythons_dates_have_the_zones_rules(
    zone: str, winter: int, summer: int, last: int, first: int
) -> None:
    """The calendar begins anew every four hundred years; in the days of 10,000 a message must not end a job."""
    day, cycle = 86_400_000, 146_097 * 86_400_000
    january = int(datetime(2000, 1, 1, tzinfo=UTC).timestamp() * 1000)
    days = [(january + 20 * cycle) // day, (january + 20 * cycle) // day + 182, (january + 25 * cycle) // day]
    found = millis(pa.array(days, pa.int32()).cast(pa.date32()), zone).to_pylist()
    hours = [winter, summer, winter]
    assert found == [one * day - hour * 3_600_000 for one, hour in zip(days, hours, strict=True)]
    ends = pa.array([2**63 - 1, -(2**63), None], pa.timestamp("us"))
    assert millis(ends, zone).to_pylist() == [last, first, None]


def test_what_cannot_be_read_is_found_by_halving(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, bad = 4_096, {7, 2_048, 4_095}
    raw = pa.array([b"\xff" if at in bad else b"fine" for at in range(rows)], pa.binary())
    fields = pa.StructArray.from_arrays([pa.Array.from_buffers(pa.string(), rows, raw.buffers())], ["s"])
    looks: list[int] = []
    fault = readable._fault
    monkeypatch.setattr(readable, "_fault", lambda values: (looks.append(len(values)), fault(values))[1])
    found, malformed = readable.readable(fields, pa.nulls(rows, pa.string()))
    assert {at for at, one in enumerate(malformed.to_pylist()) if one is not None} == bad
    assert found[7].as_py() == {"s": "\ufffd"}
    assert len(looks) < 3 * 2 * 13 + 3, "two looks a level for each that is bad"
