"""How the bytes of a value become fields: in Arrow, in the Python workers, for every source, stream and replay alike.

Nothing is dropped: a value that does not parse keeps its bytes in `raw` and a reason in `malformed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from backend.boundary import check_function, user_code
from backend.sources.json_columns import JsonColumns

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

FORMATS = ("json", "avro", "typed", "raw", "function")
PARSERS = {"json": 2}
"""Version of the parser of a format, 1 unless named: JSON was parsed by the JVM before."""

PLAIN_KEYS = ("string", "binary")
"""Types of a key that are its bytes. Of another one Spark's connector makes a column, null where they do not fit."""
TYPED_KEYS = 2
"""Version of what is made of such a null, for the manifest: the message was counted before (no entry)."""

Parser = Callable[[Any], Any]
"""`pyarrow.BinaryArray -> pyarrow.StructArray` of the same length; null marks a malformed value. It runs in the workers
and must be pure: a replay calls it again."""

RECORD = ("topic", "partition", "offset", "timestamp", "key", "value")
"""Columns of records as a source reads them. More columns behind `value` become fields."""
MALFORMED = "malformed"
"""One more, only where values are structs already: why one, which is null then, does not fit the declared types."""


@dataclass(frozen=True, slots=True)
class ValueFormat:
    """What the values of a source are.

    Attributes:
        name: `json`: an object per value, fields by name, missing ones null; `typed`: the column `value` already is a
            struct; `raw`: the bytes themselves, as the only field `value binary`; `avro`: bare Avro binary of one
            schema; `function`: whatever `function` makes of it.
        schema: The fields as Spark DDL, such as `"origin string, delay double"`; fixed for `raw`; an Avro record schema
            (JSON) for `avro`.
        function: Only with `function`.
    """

    name: str
    schema: str
    function: Parser | None = None

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: Of a bad option, naming it.
        """
        if self.name not in FORMATS:
            raise ValueError(f"format={self.name!r}: allowed are {', '.join(FORMATS)}")
        if self.name == "raw":
            if self.schema not in ("", RAW_SCHEMA):
                raise ValueError(f"value={self.schema!r}: with format='raw' the only field is {RAW_SCHEMA!r}")
        elif not isinstance(self.schema, str) or not self.schema.strip():
            raise ValueError(f"value={self.schema!r}: format={self.name!r} needs the fields as DDL, 'name type, ...'")
        if self.function is not None:
            check_function("format", self.function, ("values",))
        if (self.function is not None) != (self.name == "function"):
            raise ValueError(f"format={self.name!r}: a function must be given with format='function', and only then")

    def fields(self) -> StructType:
        """Return the parsed schema; needs an active Spark session."""
        from pyspark.sql.types import StructField, StructType

        if self.name == "avro":
            from backend.sources.avro import fields_of

            return fields_of(self.schema)
        parsed = parse_ddl(RAW_SCHEMA if self.name == "raw" else self.schema, f"value={self.schema!r}")
        if not isinstance(parsed, StructType) or not parsed.fields:
            raise ValueError(f"value={self.schema!r}: must be DDL of at least one field, 'name type, ...'")
        folded = [field.name.lower() for field in parsed.fields]
        twice = sorted({name for name in folded if folded.count(name) > 1})
        if twice:
            raise ValueError(
                f"value={self.schema!r}: the field {twice[0]!r} is named twice (Spark takes a and A for one)"
            )
        # what is parsed may always be missing, whatever the DDL says
        return StructType([StructField(field.name, field.dataType, True, field.metadata) for field in parsed.fields])

    def describe(self) -> dict[str, object]:
        """Return what the manifest keeps: a replay under another parser would not give the same messages."""
        found: dict[str, object] = {
            "format": self.name,
            "schema": " ".join(self.schema.split()),
            "parser": PARSERS.get(self.name, 1),
        }
        if self.function is not None:
            kind = self.function if hasattr(self.function, "__qualname__") else type(self.function)
            found["function"] = f"{kind.__module__}.{kind.__qualname__}"
        return found

    def parse(self, timezone: str, key: str = "") -> Parse:
        """Return what parses records where a task runs; needs an active Spark session.

        Args:
            timezone: The session's: of times that name none.
            key: A field that is the record's key, as DDL; "" for none. If it is neither `string` nor `binary`, the
                records have it as a column.
        """
        from pyspark.sql.pandas.types import to_arrow_type

        fields = self.fields()
        arrow_type = to_arrow_type(fields, timezone="UTC")
        what = {"json": f"a JSON object of {fields.simpleString()}", "avro": "Avro of the given schema"}
        return Parse(
            self.name, self._decoder(arrow_type, timezone), what.get(self.name, "what the function takes"), key
        )

    def _decoder(self, arrow_type: pa.DataType, timezone: str) -> Parser | None:
        if self.name == "json":
            return JsonColumns(pa.schema(list(arrow_type)), timezone)
        if self.name == "avro":
            from backend.sources.avro import AvroDecoder

            return AvroDecoder(self.schema, arrow_type)
        return None if self.function is None else _Checked(self.function, arrow_type)


@dataclass(frozen=True, slots=True)
class Parse:
    """Parses records: a plain object that Spark sends to the tasks.

    Attributes:
        format: As of `ValueFormat`.
        decode: Parses values; None where they are fields already, or the only one.
        what: What a value must be, for the errors.
        key: A field that is the record's key, as DDL; "" for none.
    """

    format: str
    decode: Parser | None
    what: str
    key: str = ""

    def __call__(self, records: pa.RecordBatch) -> pa.RecordBatch:
        """Parse `RECORD` and more columns into `backend.sources.COLUMNS`.

        A null value (a delete) has no fields and counts as malformed.
        """
        values = records.column("value")
        missing = values.is_null()
        if self.format == "raw":
            fields = pa.StructArray.from_arrays([values], ["value"])
        else:
            fields = values if self.decode is None else self.decode(values)
        reason = pa.nulls(len(values), pa.string())
        if values.null_count:
            reason = pc.if_else(missing, "the value is null", pa.scalar(None, pa.string()))
        if self.decode is not None and fields.null_count:
            text = f"the value is not {self.what}"
            reason = pc.if_else(pc.and_(fields.is_null(), pc.invert(missing)), text, reason)
        named = records.schema.names
        if self.format == "typed" and MALFORMED in named:
            known, named = records.column(MALFORMED), named[: named.index(MALFORMED)]
            reason = pc.coalesce(known, reason) if known.null_count < len(known) else reason
        more = {name: records.column(name) for name in named if name not in RECORD}
        if self.key:
            name, _, kind = self.key.partition(" ")
            keys = records.column("key")
            if kind in PLAIN_KEYS:  # one of another kind is a column that Spark made of the key
                more[name] = text_of(keys) if kind == "string" else keys
            if more[name].null_count > keys.null_count:
                text = pa.scalar(f"the key is not {'UTF-8' if kind == 'string' else kind}")
                misfits = pc.and_(more[name].is_null(), keys.is_valid())
                reason = pc.coalesce(reason, pc.if_else(misfits, text, pa.scalar(None, pa.string())))
        fields = _with_columns(fields, more, reason.is_valid())
        raw = pa.nulls(records.num_rows) if self.format == "typed" else values
        columns = [*(records.column(name) for name in RECORD[:-1]), fields, raw, reason]
        return pa.RecordBatch.from_arrays(columns, COLUMNS)


COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "fields", "raw", "malformed")
"""What `Parse` gives: `fields` holds the parsed value; `malformed` says why a value could not be parsed; `raw` holds
its bytes as received, of Arrow's type null where values are columns already."""


def _with_columns(fields: pa.StructArray, more: dict[str, pa.Array], bad: pa.BooleanArray) -> pa.StructArray:
    """Return fields with columns behind them, null where a value is bad."""
    if not more and fields.is_null().equals(bad):
        return fields
    flat = dict(zip((field.name for field in fields.type), fields.flatten(), strict=True)) | more
    return pa.StructArray.from_arrays(list(flat.values()), list(flat), mask=bad)


def text_of(values: pa.Array) -> pa.Array:
    """Return bytes as text; null where they are not UTF-8."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([_text(value) for value in values.to_pylist()], pa.string())


def _text(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


@dataclass(frozen=True, slots=True)
class _Checked:
    """A user's function, whose answers are checked."""

    function: Parser
    kind: pa.DataType

    def __call__(self, values: pa.Array) -> pa.Array:
        with user_code("the function of format"):
            parsed = self.function(values)
        if len(parsed) != len(values):
            raise ValueError(f"format: the function gave {len(parsed)} structs for {len(values)} values")
        return parsed if parsed.type == self.kind else parsed.cast(self.kind)


RAW_SCHEMA = "value binary"


def parse_ddl(text: str, option: str) -> DataType:
    """Parse Spark DDL; needs an active Spark session.

    Args:
        text: Of a type, or of fields.
        option: Option and value, for the error.

    Raises:
        ValueError: It is not DDL; says where.
    """
    from pyspark.errors import ParseException
    from pyspark.sql.types import _parse_datatype_string

    try:
        return _parse_datatype_string(text)
    except ParseException as error:
        said = " ".join(str(error).split("== SQL", 1)[0].split())
        raise ValueError(f"{option}: is not Spark DDL, such as 'name string, price double': {said}") from None


def record_schema(values: StructType | None = None) -> StructType:
    """Return the schema of `RECORD`.

    Args:
        values: Of values that are structs already, with `MALFORMED` behind them; None: they are bytes.
    """
    from pyspark.sql.types import StructType

    head = StructType().add("topic", "string").add("partition", "integer").add("offset", "long")
    head = head.add("timestamp", "timestamp").add("key", "binary")
    return head.add("value", "binary") if values is None else head.add("value", values).add(MALFORMED, "string")
