"""How the bytes of a value become fields: one expression, shared by every source and by stream and replay alike.

JSON is parsed by the JVM (`from_json`): a Python loop per message would cost more than the state. A reader in Python
may parse what it would parse in the same way (`backend.sources.json_columns`). Avro and functions of one's own take
Arrow arrays in the Python workers. Nothing is dropped: a value that does not parse keeps its bytes in `raw` and a
reason in `malformed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backend.sources import COLUMNS
from backend.sources.avro import AvroDecoder, fields_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

FORMATS = ("json", "avro", "typed", "raw", "function")

Parser = Callable[[Any], Any]
"""`pyarrow.BinaryArray -> pyarrow.StructArray` of the same length; null marks a malformed value. It runs in the workers
and must be pure: a replay calls it again."""

_CORRUPT = "_rewind_corrupt"


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
        elif not self.schema.strip():
            raise ValueError(f"value={self.schema!r}: format={self.name!r} needs the fields as DDL, 'name type, ...'")
        if (self.function is not None) != (self.name == "function"):
            raise ValueError(f"format={self.name!r}: a function must be given with format='function', and only then")

    def fields(self) -> StructType:
        """Give the parsed schema; needs an active Spark session."""
        from pyspark.sql.types import StructField, StructType, _parse_datatype_string

        if self.name == "avro":
            return fields_of(self.schema)
        parsed = _parse_datatype_string(RAW_SCHEMA if self.name == "raw" else self.schema)
        if not isinstance(parsed, StructType) or not parsed.fields:
            raise ValueError(f"value={self.schema!r}: must be DDL of at least one field, 'name type, ...'")
        # what is parsed may always be missing, whatever the DDL says
        return StructType([StructField(field.name, field.dataType, True, field.metadata) for field in parsed.fields])

    def describe(self) -> dict[str, object]:
        """Give what the manifest keeps: a replay under another parser would not give the same messages."""
        told: dict[str, object] = {"format": self.name, "schema": " ".join(self.schema.split()), "parser": 1}
        if self.function is not None:
            kind = self.function if hasattr(self.function, "__qualname__") else type(self.function)
            told["function"] = f"{kind.__module__}.{kind.__qualname__}"
        return told

    def decoder(self, arrow_type: pa.DataType) -> Parser | None:
        """Give what parses in the Python workers, None when the JVM does it.

        Args:
            arrow_type: The struct that `fields()` is in Arrow.
        """
        return AvroDecoder(self.schema, arrow_type) if self.name == "avro" else self.function


RAW_SCHEMA = "value binary"


def record_schema(value: DataType) -> StructType:
    """Give the schema of records as `parse` takes them, for sources that are read in Python.

    Args:
        value: Spark's type of the column `value`.
    """
    from pyspark.sql.types import (
        BinaryType,
        IntegerType,
        LongType,
        StringType,
        StructField,
        StructType,
        TimestampType,
    )

    return StructType(
        [
            StructField("topic", StringType()),
            StructField("partition", IntegerType()),
            StructField("offset", LongType()),
            StructField("timestamp", TimestampType()),
            StructField("key", BinaryType()),
            StructField("value", value),
        ]
    )


def parse(
    rows: DataFrame, value: ValueFormat, extra: Sequence[Column] = (), *, beside: Sequence[str] = ()
) -> DataFrame:
    """Turn `topic, partition, offset, timestamp, key, value` into `COLUMNS`.

    Args:
        rows: The records.
        value: What their values are.
        extra: Named columns over `rows` that become fields too, behind the parsed ones.
        beside: Columns of `rows` to keep, in front.

    A null value (a delete) has no fields and counts as malformed. JSON follows `from_json` in PERMISSIVE mode: a field
    of the wrong type makes the whole value malformed, an array is malformed too (Spark would keep its first element
    and lose the others).
    """
    from pyspark.sql import functions as f

    fields = value.fields()
    if value.name == "json":
        text = f.col("value").cast("string")
        schema = type(fields)([*fields.fields]).add(_CORRUPT, "string")
        options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
        rows = rows.withColumn("_text", text).withColumn("_parsed", f.from_json(f.col("_text"), schema, options))
        parsed = f.struct(*[f.col("_parsed").getField(name).alias(name) for name in fields.names])
        broken = f.col("_parsed").isNull() | f.col("_parsed").getField(_CORRUPT).isNotNull()
        reason = (
            f.when(f.col("value").isNull(), f.lit("the value is null"))
            .when(f.ltrim(f.col("_text")).startswith("["), f.lit("the value is a JSON array, not an object"))
            .when(broken, f.lit(f"the value is not a JSON object of {fields.simpleString()}"))
        )
    elif value.name in ("avro", "function"):
        rows = rows.withColumn("_parsed", _decoded(value))
        parsed = f.col("_parsed")
        told = "Avro of the given schema" if value.name == "avro" else "what the function takes"
        reason = f.when(f.col("value").isNull(), f.lit("the value is null")).when(
            f.col("_parsed").isNull(), f.lit(f"the value is not {told}")
        )
    else:
        parsed = f.struct(f.col("value")) if value.name == "raw" else f.col("value")
        reason = f.when(f.col("value").isNull(), f.lit("the value is null"))
    if extra:
        parsed = f.struct(*[parsed.getField(name).alias(name) for name in fields.names], *extra)
    kept = f.lit(None).cast("binary") if value.name == "typed" else f.col("value")
    raw = f.when(f.col("malformed").isNotNull(), kept)
    return (
        rows.withColumn("malformed", reason)
        .withColumn("fields", f.when(f.col("malformed").isNull(), parsed))
        .withColumn("raw", raw)
        .select(*beside, *COLUMNS)
    )


def _decoded(value: ValueFormat) -> Column:
    """Give the expression that parses the column `value` in the Python workers."""
    import pyarrow as pa
    from pyspark.sql import functions as f
    from pyspark.sql.pandas.types import to_arrow_type

    fields = value.fields()
    arrow_type = to_arrow_type(fields, timezone="UTC")
    decode = value.decoder(arrow_type)
    if decode is None:
        raise ValueError(f"format={value.name!r}: is not parsed in the Python workers")

    def parse_values(values: pa.Array) -> pa.Array:
        parsed = decode(values)
        if len(parsed) != len(values):
            raise ValueError(f"format: the function gave {len(parsed)} structs for {len(values)} values")
        return parsed if parsed.type == arrow_type else parsed.cast(arrow_type)

    parse_values.__annotations__ = {"values": pa.Array, "return": pa.Array}  # Spark evaluates them in no module
    return f.arrow_udf(parse_values, fields)(f.col("value"))
