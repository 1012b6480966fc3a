"""How the bytes of a value become fields: one expression, shared by every source and by stream and replay alike.

Parsing is the JVM's (`from_json`): a Python loop per message would cost more than the state. Nothing is dropped: a
value that does not parse keeps its bytes in `raw` and a reason in `malformed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.sources import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

FORMATS = ("json", "typed", "raw")
_CORRUPT = "_rewind_corrupt"


@dataclass(frozen=True, slots=True)
class ValueFormat:
    """What the values of a source are.

    Attributes:
        name: `json`: an object per value, fields by name, missing ones null; `typed`: the column `value` already is a
            struct; `raw`: the bytes themselves, as the only field `value binary`.
        schema: The fields as Spark DDL, such as `"origin string, delay double"`; fixed for `raw`.
    """

    name: str
    schema: str

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

    def fields(self) -> StructType:
        """Give the parsed schema; needs an active Spark session."""
        from pyspark.sql.types import StructField, StructType, _parse_datatype_string

        parsed = _parse_datatype_string(RAW_SCHEMA if self.name == "raw" else self.schema)
        if not isinstance(parsed, StructType) or not parsed.fields:
            raise ValueError(f"value={self.schema!r}: must be DDL of at least one field, 'name type, ...'")
        # what is parsed may always be missing, whatever the DDL says
        return StructType([StructField(field.name, field.dataType, True, field.metadata) for field in parsed.fields])

    def describe(self) -> dict[str, object]:
        """Give what the manifest keeps: a replay under another parser would not give the same messages."""
        return {"format": self.name, "schema": " ".join(self.schema.split()), "parser": 1}


RAW_SCHEMA = "value binary"


def parse(rows: DataFrame, value: ValueFormat) -> DataFrame:
    """Turn `topic, partition, offset, timestamp, key, value` into `COLUMNS`.

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
    else:
        parsed = f.struct(f.col("value")) if value.name == "raw" else f.col("value")
        reason = f.when(f.col("value").isNull(), f.lit("the value is null"))
    kept = f.lit(None).cast("binary") if value.name == "typed" else f.col("value")
    raw = f.when(f.col("malformed").isNotNull(), kept)
    return (
        rows.withColumn("malformed", reason)
        .withColumn("fields", f.when(f.col("malformed").isNull(), parsed))
        .withColumn("raw", raw)
        .select(*COLUMNS)
    )
