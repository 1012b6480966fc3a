"""JSON as columns against Spark's `from_json`: what a value is taken for here is what Spark takes it for."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from backend.sources.avro import fields_of
from backend.sources.formats import ValueFormat
from backend.sources.json_columns import JsonColumns
from tests.unit.test_json_columns import GOOD, ODD

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

PLAIN = "s string, n bigint, d double, b boolean, i tinyint, h smallint, w int"
RICH = (
    "at timestamp, day date, plain timestamp_ntz, m decimal(9,2), wide decimal(38,10), x float, raw binary,"
    " inner struct<a: int, t: timestamp, c: string>, many array<int>, days array<date>, named map<string, double>,"
    " s string"
)
BYTES = b"{}[]\",:0123456789.eE+-ntfalsNIn\\u/ \t\r\n\x00\x0b\x7f\xc2\xa0\xff'TZ"
MORE = [
    b'{"w":-2147483648,"h":32767}',
    b'{"w":2147483648}',
    b'{"d":5e-324,"n":-9223372036854775808}',
    b'{"d":4.9e-325}',
    b'{"d":0.30000000000000004}',
    b'{"d":1E5,"i":0}',
    b'{"d":1.7976931348623157e308}',
    b'{"d":-0.0}',
    b'{"d":9007199254740993}',
    b'{"d":9223372036854775807}',
    b'{"d":-0e0}',
    b'{"n":-0}',
    b'{"S":"other case"}',
    b'{"zz":{"s":"inner","n":[1,2,{"d":null}]},"s":"outer"}',
    b'{"s":""}',
    b'{"s":"\x7f"}',
    b'{"":1}',
    b'{"s":"a"} {"s":"b"}',
    b'{"s":"a"}}',
    b'{"s":"a"}]',
    b'{"zz":"' + b"q" * 2000 + b'","n":1}',
    b'{"zz":' + b"[" * 450 + b"]" * 450 + b"}",
    b'{"zz":' + b"3" * 850 + b"}",
    b'{"s":1.50}',
    b'{"s":[1, {"a": null}]}',
    b'{"s":true}',
    b'{"s":"x","s":"y"}',
    b'{"d":""}',
    b'{"b":null,"d":"Infinity"}',
    b'{"d":"-INF"}',
    b'{"d":"nan"}',
]
TIMES = [
    "2013-01-05T05:15:00Z", "2013-01-05 05:15:00", "2013-01-05T05:15:00.123456", "2013-01-05T05:15:00.1+01:00",
    "2013-01-05", "2013-01", "2013", "2013-1-5", "2013-1-5 1:2:3", "2013-01-05T05:15", "2013-01-05T05:15Z",
    "2013-02-30", "2013-13-01", "2013-01-05T25:00:00", "2013-01-05T05:15:60", " 2013-01-05 ", "2013-01-05T",
    "2013-01-05 x", "2013-01-05T05:15:00.1234567891", "2013-01-05T05:15:00 Europe/Berlin", "2013-01-05T05:15:00+0100",
    "2013-01-05T05:15:00+1", "2013-01-05T05:15:00 UTC", "2013-01-05T05:15:00UTC+1", "2013-01-05T05:15:00-18:00",
    "2013-01-05T05:15:00+18:01", "2013-03-31T02:30:00", "2013-10-27T02:30:00", "0001-01-01", "1899-12-31T23:59:59",
    "9999-12-31T23:59:59.999999Z", "today", "", "T05:15:00", "05:15:00", "1357362900", "2013-01-05T05:15:00.",
]  # fmt: skip
RICHES = [
    *(json.dumps({"at": one}).encode() for one in TIMES),
    *(json.dumps({"day": one}).encode() for one in TIMES),
    *(json.dumps({"plain": one}).encode() for one in TIMES),
    *(json.dumps({"inner": {"t": one}, "days": [one]}).encode() for one in TIMES[:12]),
    b'{"at":1357362900}', b'{"at":-1}', b'{"at":1.5}', b'{"day":15000}', b'{"at":true}',
    b'{"m":1234567.89}', b'{"m":1.005}', b'{"m":-1.005}', b'{"m":9999999.995}', b'{"m":9999999.994}', b'{"m":10000000}',
    b'{"m":"12.5"}', b'{"m":"1e3"}', b'{"m":1e3}', b'{"m":1E-5}', b'{"m":"x"}', b'{"m":0}', b'{"m":-0}', b'{"m":""}',
    b'{"wide":1234567890123456789012345678.0123456789}', b'{"wide":1e28}', b'{"wide":0.00000000005}',
    b'{"x":0.1}', b'{"x":1e39}', b'{"x":16777217}', b'{"x":"NaN"}', b'{"x":1e-50}', b'{"x":-0.0}',
    b'{"raw":"aGVsbG8="}', b'{"raw":"a"}', b'{"raw":1}', b'{"raw":""}',
    b'{"inner":{}}', b'{"inner":{"a":1,"c":"x","q":2}}', b'{"inner":{"a":"1"}}', b'{"inner":[]}', b'{"inner":null}',
    b'{"inner":{"c":{"k":[1.0, "v"]}}}', b'{"many":[1,2,null]}', b'{"many":[]}', b'{"many":[1.5]}', b'{"many":{}}',
    b'{"many":1}', b'{"many":[[1]]}', b'{"named":{"a":1,"b":2.5,"c":null}}', b'{"named":{}}', b'{"named":[]}',
    b'{"named":{"a":"x"}}', b'{"days":["2013-01-05",null,"2013-1-6"]}',
    b'{"at":"2013-01-05T05:15:00Z","day":"2013-01-05","m":1.25,"x":1.5,"inner":{"a":1,"t":"2013-01-05 01:02:03"},'
    b'"many":[1,2],"days":["2013-01-05"],"s":"all"}',
]  # fmt: skip


def values(good: list[bytes], known: list[bytes | None], count: int) -> list[bytes | None]:
    """Known values, and others made of them with some bytes changed."""
    rng = random.Random(5)
    found: list[bytes | None] = list(known)
    for _ in range(count):
        value = bytearray(rng.choice(good if rng.random() < 0.7 else known) or b"{}")[:300]
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(value) + 1)
            value[place : place + rng.randrange(2)] = bytes([rng.choice(BYTES)])
        found.append(bytes(value))
    return found


def from_json(spark: Any, fields: StructType, sent: list[bytes | None]) -> list[dict[str, Any] | None]:
    """What Spark makes of values: None for malformed ones; times as the numbers that Arrow has for them."""
    schema = StructType([*fields.fields]).add("_corrupt", "string")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "_corrupt"}
    rows = spark.createDataFrame([(number, one) for number, one in enumerate(sent)], "number int, value binary")
    text = f.col("value").cast("string")
    rows = rows.select("number", "value", f.from_json(text, schema, options).alias("found"))
    broken = f.col("found").isNull() | f.col("found._corrupt").isNotNull() | f.ltrim(text).startswith("[")
    good = rows.where(~f.coalesce(broken, f.lit(True))).select("number", "found.*").drop("_corrupt").toArrow()
    found: list[dict[str, Any] | None] = [None] * len(sent)
    for row in plain(pa.chunked_array(good.to_struct_array())):
        found[row.pop("number")] = row
    return found


def plain(rows: pa.ChunkedArray | pa.Array) -> list[Any]:
    """Rows with times as numbers: Python has no date for some."""

    def kind(of: pa.DataType) -> pa.DataType:
        if pa.types.is_struct(of):
            return pa.struct([(field.name, kind(field.type)) for field in of])
        if pa.types.is_list(of):
            return pa.list_(kind(of.value_type))
        if pa.types.is_timestamp(of):
            return pa.int64()
        return pa.int32() if pa.types.is_date32(of) else of

    return list(rows.cast(kind(rows.type)).to_pylist())


def standard(value: bytes | None) -> bool:
    """Whether a value is one JSON object to Python's own parser."""

    def refused(text: str) -> Any:
        raise ValueError(text)

    try:
        text = (value or b"").decode()
        found = json.loads(text, parse_constant=refused)
        text.encode()
        json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is no text
        return isinstance(found, dict)
    except (ValueError, RecursionError):
        return False


def known_difference(value: bytes | None, mine: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Where Spark is not followed: an i too large that it wraps around, today, years that Python does not have, more
    than 500 levels; numbers in a text, which it spells anew.
    """
    found = json.loads(value or b"")
    if mine is None and other is not None:
        i = found.get("i")
        text = (value or b"").decode()
        odd_times = re.findall(r'" *(T?\d\d?:\d[^"]*|[+-]?\d{5,}[^"]*|[+-]\d+-[^"]*|0000[^"]*)"', text)
        return bool(odd_times) or text.count("[") > 500 or (type(i) is int and not -128 <= i < 128)
    text = found.get("s")
    return mine is not None and other is not None and type(text) is not str and mine | {"s": 0} == other | {"s": 0}


@pytest.mark.parametrize("timezone", ["UTC", "Europe/Berlin"])
@pytest.mark.parametrize(("ddl", "good", "known"), [(PLAIN, GOOD, [*GOOD, *ODD, *MORE]), (RICH, RICHES, RICHES)])
def test_a_value_is_what_from_json_says(
    spark: Any, ddl: str, good: list[bytes], known: list[bytes | None], timezone: str
) -> None:
    fields = ValueFormat("json", ddl).fields()
    sent = values(good, known, 3_000)
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", timezone)
    try:
        theirs = from_json(spark, fields, sent)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    columns = JsonColumns(to_arrow_schema(fields, timezone="UTC"), timezone)
    each = [plain(columns(pa.array([one], pa.binary())))[0] for one in sent]
    assert repr(plain(columns(pa.array(sent, pa.binary())))) == repr(each), "beside others it is the same"
    wrong = [
        f"{one!r}: {mine}, {other}"
        for one, mine, other in zip(sent, each, theirs, strict=True)
        if repr(mine) != repr(other) and (mine is not None or standard(one)) and not known_difference(one, mine, other)
    ]
    assert not wrong, "\n".join(wrong[:50])
    assert 300 < sum(mine is not None for mine in each) < len(sent)


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ({"namespace": "x", "fields": [{"name": "a", "type": {"type": "enum", "name": "E", "symbols": ["q"]}},
                                       {"name": "b", "type": "x.E"}, {"name": "c", "type": "E"}]},
         "struct<a:string,b:string,c:string>"),
        ({"namespace": "x", "fields": [{"name": "a", "type": {"type": "fixed", "name": "y.F", "size": 2}},
                                       {"name": "b", "type": ["null", "y.F"]}]}, "struct<a:binary,b:binary>"),
        ({"fields": [{"name": "u", "type": [{"type": "null"}, "int"]}]}, "struct<u:int>"),
        ({"namespace": "x", "fields": [{"name": "r", "type": {"type": "record", "name": "z.I", "fields": [
            {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["q"]}}, {"name": "f", "type": "z.E"}]}},
            {"name": "g", "type": {"type": "map", "values": "z.E"}}]},
         "struct<r:struct<e:string,f:string>,g:map<string,string>>"),
    ],
)  # fmt: skip
def test_an_avro_schema_names_its_types_as_avro_does(spark, schema: dict[str, Any], wanted: str) -> None:
    """By hand, and taken by fastavro: a name stands in the namespace around it, and may be called by its full name."""
    whole = {"type": "record", "name": "O", **schema}
    fastavro.parse_schema(json.loads(json.dumps(whole)))
    assert fields_of(json.dumps(whole)).simpleString() == wanted
