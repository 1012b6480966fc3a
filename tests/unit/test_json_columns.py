"""JSON as columns, by hand and beside Python's own parser; the Spark test has what `from_json` says."""

from __future__ import annotations

import io
import json
import math
import random
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from backend.sources import json_columns
from backend.sources.avro import AvroDecoder, fields_of
from backend.sources.formats import Parse
from backend.sources.json_columns import JsonColumns

SCHEMA = pa.schema([("s", pa.string()), ("n", pa.int64()), ("d", pa.float64()), ("b", pa.bool_()), ("i", pa.int8())])


def said(values: list[bytes | None], schema: pa.Schema = SCHEMA, timezone: str = "UTC") -> list[dict[str, Any] | None]:
    """What the values are; None for malformed ones."""
    found = JsonColumns(schema, timezone)(pa.array(values, pa.binary()))
    assert len(found) == len(values)
    return list(found.to_pylist())


def fields(value: bytes) -> dict[str, Any]:
    found = json.loads(value)
    row = {name: found.get(name) for name in SCHEMA.names}
    return row | {"d": row["d"] if row["d"] is None else float(row["d"])}


GOOD = [
    b"{}",
    b'{"s":"a","n":-5,"d":0.1,"b":true,"i":-128}',
    b'{"i":127,"n":9223372036854775807}',
    b'{ "s" :\t"\xc3\xa4\xf0\x9f\x98\x80" , "other" : [ 1 , { "s" : "inner" } ] }',
    b'{"s":null,"n":null,"d":null}',
    b'{"d":123456789012345678901234567890}',
    b'{"d":2.2250738585072011e-308}',
    b'{"s":"\\u0041\\ud83d\\ude00\\n\\u0000\\/"}',
    b'{"\\u0073":"by another name"}',
    b'{"s":"no NaN, \\"Inf\\" or 2013-01-01"}',
    b'{"s":"}{"}',
    b'{"zz":{"n":"x"},"n":1}',
    b'{\n  "n": 1,\r\n  "s": "\\n"\n}\n',
]

NOTHING: dict[str, Any] = dict.fromkeys(SCHEMA.names)
ODD: dict[bytes | None, dict[str, Any] | None] = {
    **dict.fromkeys(
        [
            None, b"", b"x", b"[]", b'[{"n":1}]', b'{"n":1', b'"n"', b'{"n":1}}', b'{"n":1}{"n":2}', b'{"n":1},{"n":2}',
            b'{"n":1.0}', b'{"n":1e3}', b'{"n":"1"}', b'{"n":9223372036854775808}', b'{"i":128}', b'{"b":1}',
            b'{"b":"true"}', b'{"d":NaN}', b'{"d":-Infinity}', b'{"zz":[1, NaN]}', b'{"s":"\\ud800"}', b'{"s":"\xff"}',
            b'{"zz":"\xff"}', b'{"s":"a\nb"}', b"{'s':'a'}", b'{"n":01}', b'{"n":1}//', b'{"n":1}\x0b',
            b'\xef\xbb\xbf{"n":1}', b'{"zz":' + b"[" * 550 + b"]" * 550 + b"}", b"null", b"{}{}", b'{"s":"',
        ]
    ),
    b'{"s":1}': {"s": "1"},
    b'{"s":1.50}': {"s": "1.50"},
    b'{"s":{"a": 1, "b":[true,null]}}': {"s": '{"a":1,"b":[true,null]}'},
    b'{"d":"NaN"}': {"d": math.nan},
    b'{"d":"-Infinity"}': {"d": -math.inf},
    b'{"d":-0}': {"d": -0.0},
    b'{"d":1e400}': {"d": math.inf},
    b'{"s":"a","s":"b"}': {"s": "b"},
    b'{"zz":' + b"1" * 950 + b"}": {},
    b'{"zz":' + b"[" * 450 + b"]" * 450 + b"}": {},
    b'{"d":0.' + b"1" * 950 + b"}": {"d": 0.1111111111111111},
    b'{"s":"' + b"x" * 40_000 + b'"}': {"s": "x" * 40_000},
}  # fmt: skip
"""What pyarrow does not take, or takes otherwise, and what it is: fields that are not null."""


@pytest.mark.parametrize("value", GOOD)
def test_standard_json_of_plain_fields_is_taken(value: bytes) -> None:
    assert said([value]) == [fields(value)]


@pytest.mark.parametrize("value", ODD)
def test_what_is_odd_is_what_it_is_alone_and_among_others(value: bytes | None) -> None:
    known = ODD[value]
    expected = repr(known if known is None else NOTHING | known)  # NaN is not NaN, -0.0 is 0.0
    good = b'{"n":7}'
    assert repr(said([value])) == f"[{expected}]"
    among = said([good] * 500 + [value] + [good] * 500)
    assert among[:500] == among[501:] == [fields(good)] * 500
    assert repr(among[500]) == expected


def test_blanks_around_values_are_nothing() -> None:
    values = [b' {"n":1}', b'{"n":2}\n', b'\t{"n":3}\r\n']
    assert said(list(values)) == [fields(value) for value in values]


def test_two_objects_in_one_value_do_not_shift_the_others() -> None:
    """A value that swallows its neighbour and one that is two objects: as many rows as values, but other ones."""
    values = [b'{"s":"}', b'{"}', b'{"n":1}{"n":2}', b'{"n":3}']
    assert said(list(values)) == [None, None, None, fields(values[3])]


@pytest.mark.parametrize(
    "bad", [b"bad", None, b'{"s":"\xff"}', b'{"n":"text"}', b'{"n":1.5}', b'{"i":128}', b'{"d":NaN}', b'{"b":[]}']
)
def test_the_others_are_taken_however_many_are_bad(bad: bytes | None) -> None:
    values = [bad if n % 3 == 0 else b'{"n":%d}' % n for n in range(3000)]
    assert said(values) == [None if n % 3 == 0 else fields(b'{"n":%d}' % n) for n in range(3000)]


@pytest.mark.parametrize("seed", range(20))
def test_a_value_does_not_depend_on_those_beside_it(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [*GOOD * (1 if rng.random() < 0.2 else 20), *ODD]
    values = [rng.choice(kinds) for _ in range(rng.randrange(1, 400))]
    assert repr(said(values)) == repr([said([value])[0] for value in values])


@pytest.mark.slow
def test_bytes_changed_at_random_are_what_python_says() -> None:
    """Where Python finds an object whose fields have their types; where it finds no object, nothing."""
    rng = random.Random(11)
    taken = 0
    for _ in range(4000):
        value = bytearray(rng.choice(GOOD[1:]))
        for _ in range(rng.randrange(1, 3)):
            value[rng.randrange(len(value))] = rng.choice(b'{}[]",:0123456789.eE+-ntf\\u \n\x00\xff')
        [row] = said([bytes(value)])
        try:
            known = json.loads(bytes(value).decode())
        except ValueError:
            known = None
        if not isinstance(known, dict):
            assert row is None, bytes(value)
        elif row is not None and type(known.get("s")) in (str, type(None)) and type(known.get("d")) is not str:
            taken += 1
            assert row == fields(bytes(value)), bytes(value)
    assert taken > 200


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.int64(), "-0", 0),
        (pa.float64(), "-0", -0.0),
        (pa.float32(), "-0", -0.0),
        (pa.list_(pa.float64()), "[-0,-0.0,0]", [-0.0, -0.0, 0.0]),
        (pa.decimal128(5, 2), "-0", Decimal("0.00")),
        (pa.string(), "-0", "-0"),
    ],
)
def test_minus_zero_is_what_it_is_alone_and_among_others(kind: pa.DataType, value: str, expected: Any) -> None:
    schema, text = pa.schema([("it", kind)]), b'{"it":%b,"other":-0}' % value.encode()
    for count in (1, 100):
        assert repr(said([text] * count, schema)) == repr([{"it": expected}] * count)


def test_texts_that_are_no_times_are_malformed_also_as_the_first_ones() -> None:
    schema = pa.schema([("it", pa.timestamp("us", "UTC"))])
    good = b'{"it":"2013-07-05T05:15:00.5Z"}'
    for bad in (b'"\\udc00"', b'"\\ud800"', "2013-07-05T05:15:0é5Z".encode(), "2013-07-05T05:15:0٢.5Z".encode()):
        odd = b'{"it":%b}' % (bad if bad[:1] == b'"' else b'"%b"' % bad)
        assert [row is None for row in said([odd] + [good] * 50, schema)] == [True] + [False] * 50
        assert [row is None for row in said([good] * 50 + [odd], schema)] == [False] * 50 + [True]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.timestamp("us", "UTC"), '"2013-07-05T05:15:00.5"', datetime(2013, 7, 5, 3, 15, 0, 500_000, UTC)),
        (pa.timestamp("us", "UTC"), '"2013-07-05 05:15:00Z"', datetime(2013, 7, 5, 5, 15, tzinfo=UTC)),
        (pa.timestamp("us", "UTC"), '"2013-07-05"', datetime(2013, 7, 4, 22, tzinfo=UTC)),
        (pa.timestamp("us", "UTC"), '"2013-03-31T02:30:00"', datetime(2013, 3, 31, 1, 30, tzinfo=UTC)),  # in the gap
        (pa.timestamp("us", "UTC"), '"2013-10-27T02:30:00"', datetime(2013, 10, 27, 0, 30, tzinfo=UTC)),  # the first
        (pa.timestamp("us", "UTC"), "1357362900", datetime(2013, 1, 5, 5, 15, tzinfo=UTC)),
        (pa.timestamp("us"), '"2013-07-05T05:15:00"', datetime(2013, 7, 5, 5, 15)),
        (pa.date32(), '"2013-07-05"', date(2013, 7, 5)),
        (pa.date32(), '"2013-7-5"', date(2013, 7, 5)),
        (pa.decimal128(5, 2), "1.005", Decimal("1.01")),
        (pa.decimal128(5, 2), "-999.994", Decimal("-999.99")),
        (
            pa.timestamp("us", "UTC"),
            '"2050-07-01T00:00:00"',
            datetime(2050, 6, 30, 22, tzinfo=UTC),
        ),  # as clocks will go
        (pa.timestamp("us", "UTC"), '"2050-01-01T00:00:00"', datetime(2049, 12, 31, 23, tzinfo=UTC)),
        (pa.timestamp("us", "UTC"), "253402300799", datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)),
        (pa.decimal128(5, 2), "0e5", Decimal("0.00")),
        (pa.float32(), "1.5", 1.5),
        (pa.float32(), "16777217.0000000001", 16777218.0),  # of 64 bits the nearest is half-way between two of 32
        (pa.float32(), "16777217", 16777216.0),
        (pa.binary(), '"aGk="', b"hi"),
        (pa.list_(pa.int32()), "[1,null]", [1, None]),
        (pa.map_(pa.string(), pa.int32()), '{"a":1}', [("a", 1)]),
        (pa.struct([("day", pa.date32())]), '{"day":"2013-07-05"}', {"day": date(2013, 7, 5)}),
    ],
)
def test_other_types_by_hand(kind: pa.DataType, value: str, expected: Any) -> None:
    """Session time zone Europe/Berlin; alone, and where a block of it is read at once."""
    schema = pa.schema([("it", kind)])
    text = b'{"it":%b}' % value.encode()
    assert said([text], schema, "Europe/Berlin") == [{"it": expected}]
    assert said([text] * 100, schema, "Europe/Berlin") == [{"it": expected}] * 100
    for bad in (b'{"it":"nothing of this kind!"}', b'{"it":true}', b'{"it":[[]]}'):
        assert said([text, bad, text], schema, "Europe/Berlin") == [{"it": expected}, None, {"it": expected}]


@pytest.mark.parametrize(
    "plain", ["2013-07-05T05:15:00.5Z", "2013-07-05 05:15:00+01:30", "2013-07-05T05:15:00", "2013-07-05"]
)
def test_one_text_of_another_shape_among_many_of_its_length_is_what_it_is_alone(plain: str) -> None:
    schema = pa.schema([("it", pa.date32() if len(plain) == 10 else pa.timestamp("us", "UTC"))])
    good = b'{"it":"%b"}' % plain.encode()
    taken = 0
    for at in range(len(plain)):
        for other in ("0", "1", "2", "9", ":", "-", "+", "T", "Z", " ", ".", "/", "a", "\\n"):
            odd = b'{"it":"%b"}' % (plain[:at] + other + plain[at + 1 :]).encode()
            alone = said([odd], schema)
            assert said([good] * 40 + [odd] + [good] * 40, schema)[40:41] == alone, odd
            assert said([odd] + [good] * 40, schema)[:1] == alone, odd
            taken += alone != [None] and odd != good
    assert taken > 20


def test_a_type_that_json_does_not_have_is_said() -> None:
    with pytest.raises(ValueError, match="JSON has no counterpart of duration"):
        JsonColumns(pa.schema([("it", pa.duration("us"))]))
    with pytest.raises(ValueError, match=r"timeZone='Mars/Base'"):
        JsonColumns(SCHEMA, "Mars/Base")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.timestamp("us", "UTC"), "253402300800"),
        (pa.timestamp("us", "UTC"), "9300000000000"),  # more microseconds than 64 bits can say
        (pa.timestamp("us", "UTC"), "-62135596801"),
        (pa.decimal128(5, 2), "1000"),
        (pa.decimal128(5, 2), "32767"),
    ],
)
def test_what_its_type_cannot_hold_is_malformed_alone_and_among_others(kind: pa.DataType, value: str) -> None:
    schema = pa.schema([("it", kind), ("n", pa.int64())])
    bad, good = b'{"it":%b,"n":1}' % value.encode(), b'{"it":1,"n":2}'
    for values in ([bad], [good, bad, good], [good] * 50 + [bad] + [good] * 50):
        found = JsonColumns(schema)(pa.array(values))
        found.validate(full=True)
        assert [row is None for row in found.to_pylist()] == [one is bad for one in values]


def test_a_value_that_a_function_does_not_take_is_malformed_beside_a_null_one_that_it_takes() -> None:
    kind = pa.struct([("a", pa.string())])

    def texts(values: pa.Array) -> pa.Array:
        found = [b"" if value is None else value for value in values.to_pylist()]
        return pa.array([None if b"\xff" in one else {"a": one.decode()} for one in found], kind)

    records = pa.RecordBatch.from_pydict(
        {
            "topic": ["t"] * 3, "partition": pa.array([0] * 3, pa.int32()), "offset": [0, 1, 2],
            "timestamp": pa.nulls(3, pa.timestamp("us", "UTC")), "key": pa.nulls(3, pa.binary()),
            "value": pa.array([None, b"\xff", b"ok"], pa.binary()),
        }
    )  # fmt: skip
    found = Parse("function", texts, "what the function takes")(records)
    assert found.column("malformed").to_pylist() == [
        "the value is null", "the value is not what the function takes", None,
    ]  # fmt: skip
    assert found.column("fields").to_pylist() == [None, None, {"a": "ok"}]


def test_an_avro_value_of_a_wider_type_is_malformed_and_not_those_beside_it() -> None:
    def schema(kind: str) -> dict[str, Any]:
        return {"type": "record", "name": "r", "fields": [{"name": "a", "type": kind}]}

    def written(kind: str, value: int) -> bytes:
        buffer = io.BytesIO()
        fastavro.schemaless_writer(buffer, fastavro.parse_schema(schema(kind)), {"a": value})
        return buffer.getvalue()

    values = pa.array([written("int", 1), written("long", 2**40), written("int", 2)])
    decode = AvroDecoder(json.dumps(schema("int")), pa.struct([("a", pa.int32())]))
    assert decode(values).to_pylist() == [{"a": 1}, None, {"a": 2}]


NAMED_TWICE = {
    "type": "record",
    "name": "r",
    "fields": [
        {"name": "u", "type": ["null", "string"]},
        {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["A", "B"]}},
        {"name": "f", "type": {"type": "array", "items": ["null", "E"]}},
    ],
}


def test_damaged_avro_is_malformed_and_no_other_branch_or_symbol() -> None:
    """Lists take -1 for their last one."""
    kind = pa.struct([("u", pa.string()), ("e", pa.string()), ("f", pa.list_(pa.string()))])
    good = {"00 00 00": (None, "A", []), "02 02 61 02 04 00 02 02 00": ("a", "B", [None, "B"])}
    bad = [
        "01 02 61 00 00", "03 00 00", "04 00 00", "00 01 00", "00 03 00", "00 04 00", "00 00 02 02 01 00",
        "00 00 02 01 02 00",
    ]  # fmt: skip
    found = AvroDecoder(json.dumps(NAMED_TWICE), kind)(pa.array([bytes.fromhex(one) for one in [*good, *bad]]))
    assert found.to_pylist() == [dict(zip("uef", one, strict=True)) for one in good.values()] + [None] * len(bad)


@pytest.mark.parametrize(
    ("key", "kept", "why"),
    [
        ("user bigint", [None, 7, None], "the key is not bigint"),
        ("user string", ["abc", "7", None], None),
    ],
)
def test_a_key_that_is_not_of_its_type_is_malformed(key: str, kept: list[Any], why: str | None) -> None:
    records = pa.RecordBatch.from_pydict(
        {
            "topic": ["t"] * 4, "partition": pa.array([0] * 4, pa.int32()), "offset": [0, 1, 2, 3],
            "timestamp": pa.nulls(4, pa.timestamp("us", "UTC")), "key": [b"abc", b"7", None, b"abc"],
            "value": [b'{"n": 1}'] * 3 + [None], "user": [*kept, kept[0]],
        }
    )  # fmt: skip
    decode = JsonColumns(pa.schema([("n", pa.int64())]), "UTC")
    found = Parse("json", decode, "", key)(records)
    assert found.column("malformed").to_pylist() == [why, None, None, "the value is null"]
    good = [{"n": 1, "user": one} for one in kept]
    assert found.column("fields").to_pylist() == [None if why else good[0], *good[1:], None]


def test_large_binary_is_parsed_as_binary_is() -> None:
    values = [b'{"s":"a","n":1}', b'{"s":2}', b"x", None] * json_columns.FEW_ROWS
    for given in (values[:1] * len(values), values):
        assert JsonColumns(SCHEMA)(pa.array(given, pa.large_binary())).to_pylist() == said(given)


@pytest.mark.parametrize("schema", ['{"a":1}', "5", "null", '{"type":"record","name":"r"}'])
def test_what_is_no_avro_schema_is_said(schema: str) -> None:
    with pytest.raises(ValueError, match="value="):
        fields_of(schema)


@pytest.mark.parametrize("deep", [b'{"a":', b"["])
def test_a_text_of_something_nested_is_its_json_however_deep_the_caller_stands(deep: bytes) -> None:
    closed = {b'{"a":': b"}", b"[": b"]"}[deep]
    inner = deep * 400 + b"1" + closed * 400
    value = b'{"s":' + inner + b"}"

    def stand(frames: int) -> list[dict[str, Any] | None]:
        return stand(frames - 1) if frames else said([b'{"s":1,"n":x}', value, b"{}"])

    for frames in (0, 300):
        _, found, _ = stand(frames)
        assert found is not None
        assert found["s"] == inner.decode()


def test_the_json_of_something_nested_is_spelled_as_json_is() -> None:
    value = '{"a":[1,"x\\n",{"b":{},"c":[],"":null}],"\\u00e4":-0.50}'
    [found] = said([b'{"s":' + value.encode() + b"}"])
    assert found is not None
    assert found["s"] == value.replace("\\u00e4", "\u00e4")


def test_a_text_that_does_not_end_is_looked_at_once() -> None:
    text = '"' + '\\"' * 5_000
    assert len(json_columns._STRING.findall(text)) == 1
    assert json_columns._depth("[[" + text + "[") == 2


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.date32(), '"\u0662\u0660\u0661\u0663-01-05"'),
        (pa.decimal128(5, 2), '"\u0661\u0662"'),
        (pa.timestamp("us", "UTC"), '"2013-01-05T10:11:1\u0662"'),
        (pa.timestamp("us", "UTC"), '"2013-01-05T10:11:12 localtime"'),
        (pa.timestamp("us", "UTC"), '"2013-01-05T10:11:12 posixrules"'),
        (pa.timestamp("us", "UTC"), '"2013-01-05T10:11:12 right/Europe/Berlin"'),
    ],
)
def test_other_digits_and_a_hosts_own_zone_are_malformed(kind: pa.DataType, value: str) -> None:
    assert said([f'{{"it":{value}}}'.encode()], pa.schema([("it", kind)])) == [None]
