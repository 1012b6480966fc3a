"""Avro values: the Avro schema as Spark's fields, and bytes into an Arrow struct.

Values are bare Avro binary of one known schema (no container file, no schema registry's prefix). Decoding is a loop in
Python, by fastavro: no columnar decoder of single values exists. It costs several times what JSON in the JVM costs.
"""

from __future__ import annotations

import io
import json
import struct
from functools import cache
from typing import Any

import fastavro
import pyarrow as pa
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType, _parse_datatype_string

_PRIMITIVES = {
    "boolean": "boolean",
    "int": "int",
    "long": "bigint",
    "float": "float",
    "double": "double",
    "bytes": "binary",
    "string": "string",
    "enum": "string",
    "fixed": "binary",
}
_LOGICAL = {
    ("int", "date"): "date",
    ("long", "timestamp-millis"): "timestamp",
    ("long", "timestamp-micros"): "timestamp",
}
_NAMED = "__named_schemas"
"""Where fastavro has the named types of a schema, for those that are named again."""
_BAD_VALUE = (EOFError, ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error)


def fields_of(schema: str) -> StructType:
    """Give Spark's fields for an Avro record schema (JSON). All are nullable: what is parsed may be missing.

    Raises:
        ValueError: It is not a record, or has a type without a counterpart (a union of several types, a decimal).
    """
    try:
        parsed = json.loads(schema)
    except json.JSONDecodeError as error:
        raise ValueError(f"value={schema!r}: with format='avro' it must be an Avro schema in JSON ({error})") from None
    try:
        found = _type(parsed, {}, "")
    except (KeyError, TypeError) as error:
        raise ValueError(f"value={schema!r}: is no Avro schema ({type(error).__name__}: {error})") from None
    if not isinstance(found, StructType) or not found.fields:
        raise ValueError(f"value={schema!r}: the Avro schema must be a record of at least one field")
    try:
        fastavro.parse_schema(parsed)
    except Exception as error:  # of many kinds, some of them Python's own
        raise ValueError(f"value={schema!r}: is no Avro schema ({type(error).__name__}: {error})") from None
    return found


def _type(schema: Any, named: dict[str, DataType], space: str) -> DataType:
    """Give Spark's type; `named` has the types so far by full name, `space` is the namespace that names are in."""
    if isinstance(schema, list):  # a union: only "null or one type" has a counterpart
        others = [branch for branch in schema if branch not in ("null", {"type": "null"})]
        if len(others) != 1:
            raise ValueError(f"value: the Avro union {json.dumps(schema)} has no counterpart; only [null, type] has")
        return _type(others[0], named, space)
    if isinstance(schema, str):
        schema = {"type": schema}
    kind = schema["type"]
    name = schema.get("name")
    if isinstance(name, str):
        name = name if "." in name else ".".join(filter(None, (schema.get("namespace", space), name)))
        space = name.rpartition(".")[0]
    if kind == "record":
        found: DataType = StructType(
            [StructField(field["name"], _type(field["type"], named, space), True) for field in schema["fields"]]
        )
    elif kind == "array":
        found = ArrayType(_type(schema["items"], named, space))
    elif kind == "map":
        found = MapType(StringType(), _type(schema["values"], named, space))
    elif isinstance(kind, dict | list):
        found = _type(kind, named, space)
    elif isinstance(kind, str) and (known := named.get(f"{space}.{kind}" if space else kind, named.get(kind))):
        found = known
    else:
        logical = schema.get("logicalType")
        type_name = _LOGICAL.get((kind, logical)) if logical else _PRIMITIVES.get(kind)
        if type_name is None:
            raise ValueError(f"value: the Avro type {json.dumps(schema)} has no counterpart")
        found = _parse_datatype_string(type_name)
    if isinstance(name, str):
        named[name] = found
    return found


def _by_index(schema: Any) -> Any:
    """Return a schema that fastavro parsed with the branches of unions and the symbols of enums by their index.

    Of a list fastavro takes one of the last for a negative index, which only damaged bytes have.
    """
    if isinstance(schema, list):
        return {"type": "union", **{number: _by_index(branch) for number, branch in enumerate(schema)}}
    if not isinstance(schema, dict):
        return schema
    kind = schema["type"]
    made = {**schema, "type": _by_index(kind)}
    if kind == "enum":
        made["symbols"] = dict(enumerate(schema["symbols"]))
    elif kind == "record":
        made["fields"] = [{**field, "type": _by_index(field["type"])} for field in schema["fields"]]
    elif kind in ("array", "map"):
        inner = "items" if kind == "array" else "values"
        made[inner] = _by_index(schema[inner])
    if _NAMED in schema:
        made[_NAMED] = {name: _by_index(named) for name, named in schema[_NAMED].items()}
    return made


@cache
def _reads_by_index() -> bool:
    """Return whether the installed fastavro takes such schemas: nothing promises that it will."""
    schema = {"type": "record", "name": "r", "fields": [{"name": "a", "type": ["null", "string"]}]}
    try:
        found = fastavro.schemaless_reader(io.BytesIO(b"\x02\x02x"), _by_index(fastavro.parse_schema(schema)), None)
        return bool(found == {"a": "x"})
    except (*_BAD_VALUE, AttributeError):
        return False


class AvroDecoder:
    """Decode an array of Avro values; a function for `ValueFormat`, sent to the workers as its schema.

    Args:
        schema: Of the record, JSON.
        arrow_type: The struct type to give.
    """

    def __init__(self, schema: str, arrow_type: pa.DataType) -> None:
        self._schema = schema
        self._type = arrow_type

    def __call__(self, values: pa.Array) -> pa.Array:
        """Give a struct per value, null where the bytes are not exactly one record of the schema."""
        parsed = fastavro.parse_schema(json.loads(self._schema))
        schema = _by_index(parsed) if _reads_by_index() else parsed
        records: list[Any] = []
        for value in values.to_pylist():
            record = None
            if value is not None:
                data = io.BytesIO(value)
                try:
                    record = fastavro.schemaless_reader(data, schema, None)
                except _BAD_VALUE:
                    record = None
                if data.tell() != len(value):  # bytes behind the record: another schema wrote it
                    record = None
            records.append(record)
        try:
            return pa.array(records, self._type)
        except (pa.ArrowException, OverflowError):  # a writer's wider type: in one row, or in some
            return pa.array([self._fitting(record) for record in records], self._type)

    def _fitting(self, record: Any) -> Any:
        try:
            return pa.scalar(record, self._type).as_py()
        except (pa.ArrowException, OverflowError):
            return None
