"""The messages of a source as a DataFrame: its records, parsed as a job parses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from backend.boundary import crossing
from backend.sources import Source
from backend.sources.archive_reader import row_schema
from backend.sources.formats import COLUMNS, record_schema
from backend.spark import reading


def replayed(spark: Any, source: Source, ranges: Any) -> Any:
    """`backend.sources.formats.COLUMNS` of half-open offset ranges."""
    return _parsed(records_of(spark, source, ranges), source)


def streamed(spark: Any, source: Source) -> Any:
    """The same of the stream."""
    return _parsed(stream_of(spark, source), source)


def records_of(spark: Any, source: Any, ranges: Any) -> Any:
    """The records of half-open offset ranges, by whom a job lets read them."""
    if source.direct:
        pieces, read, schema = source.pieces(spark, {key: [bounds] for key, bounds in ranges.items()})
        return reading.replayed(spark, pieces, read, schema, iter)
    return source.batch(spark, ranges)


def stream_of(spark: Any, source: Any) -> Any:
    """The records of the stream, by whom a job lets read them."""
    if source.direct:
        return reading.streamed(spark, source.stream_reader(), row_schema(source.value), iter)
    return source.stream(spark)


def _parsed(rows: Any, source: Source) -> Any:
    parse = source.parse("UTC")
    head = record_schema().fields[:-1]
    tail = [("fields", source.fields()), ("raw", BinaryType()), ("malformed", StringType())]
    schema = StructType([*head, *(StructField(*one) for one in tail)])

    def parse_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            found = parse(batch)
            raw = found.column("raw").cast(pa.binary())
            yield found.set_column(COLUMNS.index("raw"), "raw", raw)

    return rows.mapInArrow(crossing(parse_batches), schema)
