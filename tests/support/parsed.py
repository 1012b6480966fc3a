"""The messages of a source as a DataFrame: its records, parsed as a job parses them."""

from __future__ import annotations

from typing import Any

from backend.sources import Source
from backend.sources.formats import parsed


def replayed(spark: Any, source: Source, ranges: Any) -> Any:
    """`backend.sources.formats.COLUMNS` of half-open offset ranges."""
    return parsed(source.batch(spark, ranges), source.parse("UTC"), source.fields())


def streamed(spark: Any, source: Source) -> Any:
    """The same of the stream."""
    return parsed(source.stream(spark), source.parse("UTC"), source.fields())
