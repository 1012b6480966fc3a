"""JSON as columns against `from_json`: what is said without Spark is what Spark says."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from backend.sources.formats import ValueFormat, parse
from backend.sources.json_columns import JsonColumns, readable
from tests.unit.test_json_columns import GOOD, SPARKS

pytestmark = pytest.mark.spark

DDL = "s string, n bigint, d double, b boolean, i tinyint, h smallint, w int"
BYTES = b"{}[]\",:0123456789.eE+-ntfalsNIn\\u/ \t\r\n\x00\x0b\x7f\xc2\xa0\xff'"
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
    b'{"zz":' + b"[" * 850 + b"]" * 850 + b"}",
    b'{"zz":' + b"3" * 850 + b"}",
    b'{"' + b"name" * 7000 + b'":1}',
]


def values() -> list[bytes | None]:
    rng = random.Random(5)
    known = [*GOOD, *SPARKS, *MORE]
    found: list[bytes | None] = list(known)
    for _ in range(6000):
        value = bytearray(rng.choice(GOOD if rng.random() < 0.7 else known) or b"{}")[:300]
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(value) + 1)
            value[place : place + rng.randrange(2)] = bytes([rng.choice(BYTES)])
        found.append(bytes(value))
    return found


def test_what_is_said_without_spark_is_what_spark_says(spark: Any) -> None:
    value = ValueFormat("json", DDL)
    assert readable(value.fields())
    sent = values()
    rows = spark.createDataFrame(
        [("t", 0, number, None, None, one) for number, one in enumerate(sent)],
        "topic string, partition int, offset bigint, timestamp timestamp, key binary, value binary",
    )
    judged = {row.offset: row for row in parse(rows, value).collect()}
    columns = JsonColumns(to_arrow_schema(value.fields(), timezone="UTC"))
    taken = 0
    for number, one in enumerate(sent):
        _, found = columns.parse([one])
        if len(found):
            taken += 1
            theirs = judged[number]
            assert theirs.malformed is None, (one, theirs)
            assert repr(found.to_pylist()[0]) == repr(theirs.fields.asDict()), one  # -0.0 is not 0.0
    assert 500 < taken < len(sent)


def test_other_types_are_left_to_spark(spark: Any) -> None:
    for kind in ("timestamp", "date", "decimal(9,2)", "float", "array<int>", "struct<a: int>", "map<string,int>"):
        assert not readable(ValueFormat("json", f"a int, b {kind}").fields())
