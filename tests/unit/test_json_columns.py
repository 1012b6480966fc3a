"""JSON as columns: what is taken is what Python's own parser finds, and what Spark may see otherwise is not taken."""

from __future__ import annotations

import json
import random
from typing import Any

import pyarrow as pa
import pytest

from backend.limits import MAX_KEY_TEXT_BYTES
from backend.sources.json_columns import JsonColumns

SCHEMA = pa.schema([("s", pa.string()), ("n", pa.int64()), ("d", pa.float64()), ("b", pa.bool_()), ("i", pa.int8())])


def said(values: list[bytes | None]) -> list[dict[str, Any] | None]:
    """What is said of each value; None where Spark has to."""
    taken, found = JsonColumns(SCHEMA).parse(values)
    assert len(taken) == len(values)
    rows = iter(found.to_pylist())
    told = [next(rows) if one else None for one in taken]
    assert next(rows, "none left") == "none left"
    return told


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

SPARKS = [
    None,
    b"",
    b"x",
    b"[]",
    b'[{"n":1}]',
    b'{"n":1',
    b'"n"',
    b'{"n":1}}',
    b'{"n":1}{"n":2}',
    b'{"n":1},{"n":2}',
    b'{"n":1.0}',
    b'{"n":1e3}',
    b'{"n":"1"}',
    b'{"n":9223372036854775808}',
    b'{"i":128}',
    b'{"s":1}',
    b'{"s":{"a":1}}',
    b'{"b":1}',
    b'{"b":"true"}',
    b'{"d":"NaN"}',
    b'{"d":NaN}',
    b'{"d":-Infinity}',
    b'{"zz":[1, NaN]}',
    b'{"d":-0}',
    b'{"d":1e400}',
    b'{"s":"a","s":"b"}',
    b'{"s":"\\ud800"}',
    b'{"s":"\xff"}',
    b'{"zz":"\xff"}',
    b'{"s":"a\nb"}',
    b"{'s':'a'}",
    b'{"n":01}',
    b'{"n":1}//',
    b'{"n":1}\x0b',
    b'\xef\xbb\xbf{"n":1}',
    b'{"zz":' + b"[" * 950 + b"]" * 950 + b"}",
    b'{"zz":' + b"1" * 950 + b"}",
    b'{"d":0.' + b"1" * 950 + b"}",
    b'{"s":"' + b"x" * MAX_KEY_TEXT_BYTES + b'"}',
]


@pytest.mark.parametrize("value", GOOD)
def test_standard_json_of_plain_fields_is_taken(value: bytes) -> None:
    assert said([value]) == [fields(value)]


@pytest.mark.parametrize("value", SPARKS)
def test_what_spark_may_see_otherwise_is_left_to_it(value: bytes | None) -> None:
    good = b'{"n":7}'
    assert said([value]) == [None]
    assert said([good, value, good]) == [fields(good), None, fields(good)]
    among = said([good] * 500 + [value] + [good] * 500)
    assert among == [fields(good)] * 500 + [None] + [fields(good)] * 500


def test_blanks_around_values_are_nothing() -> None:
    values = [b' {"n":1}', b'{"n":2}\n', b'\t{"n":3}\r\n']
    assert said(list(values)) == [fields(value) for value in values]


def test_two_objects_in_one_value_do_not_shift_the_others() -> None:
    """A value that swallows its neighbour and one that is two objects: as many rows as values, but other ones."""
    values = [b'{"s":"}', b'{"}', b'{"n":1}{"n":2}', b'{"n":3}']
    found = said(list(values))
    assert found[:3] == [None, None, None]
    assert found[3] in (None, fields(values[3]))


@pytest.mark.parametrize(
    "bad", [b"bad", None, b'{"s":"\xff"}', b'{"n":"text"}', b'{"n":1.5}', b'{"i":128}', b'{"d":NaN}', b'{"b":[]}']
)
def test_the_others_are_taken_however_many_are_bad(bad: bytes | None) -> None:
    values = [bad if n % 3 == 0 else b'{"n":%d}' % n for n in range(3000)]
    assert said(values) == [None if n % 3 == 0 else fields(b'{"n":%d}' % n) for n in range(3000)]


def test_where_nobody_finds_the_bad_one_all_are_left_to_spark() -> None:
    """A field twice, which Python takes and pyarrow does not, more often than it names one: nothing is taken."""
    values = [b'{"n":1,"n":2}' if n % 3 == 0 else b'{"n":%d}' % n for n in range(300)]
    assert said(list(values)) == [None] * 300


@pytest.mark.parametrize("seed", range(20))
def test_no_mixture_is_taken_for_another(seed: int) -> None:
    rng = random.Random(seed)
    kinds = GOOD if rng.random() < 0.2 else GOOD * 20 + SPARKS
    values = [rng.choice(kinds) for _ in range(rng.randrange(1, 400))]
    good = {json.dumps(fields(value)) for value in GOOD}
    for value, row in zip(values, said(values), strict=True):
        if row is not None:
            assert value in GOOD
            assert row == fields(value)
            assert json.dumps(row) in good


def test_bytes_changed_at_random_are_what_python_says_or_nothing() -> None:
    rng = random.Random(11)
    taken = 0
    for _ in range(4000):
        value = bytearray(rng.choice(GOOD[1:]))
        for _ in range(rng.randrange(1, 3)):
            value[rng.randrange(len(value))] = rng.choice(b'{}[]",:0123456789.eE+-ntf\\u \n\x00\xff')
        [row] = said([bytes(value)])
        if row is not None:
            taken += 1
            assert row == fields(bytes(value)), bytes(value)
    assert taken > 200


def test_a_schema_without_doubles_takes_minus_zero() -> None:
    taken, found = JsonColumns(pa.schema([("n", pa.int64())])).parse([b'{"n":-0}', b'{"n":5,"x":-0}'])
    assert taken.all()
    assert found.to_pylist() == [{"n": 0}, {"n": 5}]
