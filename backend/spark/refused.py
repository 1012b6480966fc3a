"""The messages behind rows of the errors output, read again from their source by topic, partition and offset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from backend.sources import OffsetRange, TopicPartition, is_direct
from backend.spark.reading import replayed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from backend.sources import Source

DEFAULT_LIMIT = 100_000
APART = 1_000
"""Offsets that are at most so far apart are read in one go."""


def fetch_refused(spark: SparkSession, source: Source, errors: DataFrame, *, limit: int = DEFAULT_LIMIT) -> DataFrame:
    """Read the messages of an errors output again: `topic, partition, offset, timestamp, key, value` as the source has.

    A value is the bytes as received; of an archive with `format="typed"` it is the whole struct.

    Args:
        spark: The session.
        source: What the job read, such as `archive(...)` or `kafka(...)`; of a join one side. Rows of other topics are
            passed over.
        errors: With the columns `topic, partition, offset`, such as a part of `spark.read.parquet("out/errors")`.
        limit: At most so many messages are read.

    Returns:
        One row for each message, in no order; of a compacted topic, for each that is left. It reads when it is used.

    Raises:
        ValueError: The source cannot be read by offsets, or `errors` has more messages than `limit`, or lacks a column.
        HistoryLost: The source no longer has them.
    """
    if not is_direct(source):
        raise ValueError(f"source={type(source).__name__}: must be archive(...) or kafka(...)")
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"limit={limit!r}: must be an integer of at least 1")
    names = ["topic", "partition", "offset"]
    missing = [name for name in names if name not in errors.columns]
    if missing:
        raise ValueError(f"errors: lacks {', '.join(missing)}; needed are {', '.join(names)}")
    chosen = errors.select(*names).where(errors["topic"].isin(list(source.topics))).distinct().limit(limit + 1)
    places = [(row[0], row[1], row[2]) for row in chosen.collect()]
    if len(places) > limit:
        raise ValueError(f"limit={limit}: errors has more messages than that; take a part of it, or raise the limit")
    wanted = by_partition(places)
    pieces, read, schema = source.pieces(spark, {key: runs(offsets) for key, offsets in wanted.items()})
    if not pieces:
        return spark.createDataFrame([], schema)
    return replayed(spark, pieces, partial(_chosen, read, wanted), schema, iter)


def by_partition(places: Iterable[tuple[str, int, int]]) -> dict[TopicPartition, list[int]]:
    """Return the offsets by source partition, rising.

    >>> by_partition([("t", 1, 9), ("t", 0, 3), ("t", 1, 2)])
    {('t', 0): [3], ('t', 1): [2, 9]}
    """
    return {key: [place[2] for place in group] for key, group in groupby(sorted(places), lambda place: place[:2])}


def runs(offsets: Sequence[int], apart: int = APART) -> list[OffsetRange]:
    """Return half-open ranges over rising offsets; those that are near are put together.

    >>> runs([3, 5, 9, 10], apart=2)
    [(3, 6), (9, 11)]
    """
    found: list[OffsetRange] = []
    for offset in offsets:
        if found and offset - found[-1][1] < apart:
            found[-1] = found[-1][0], offset + 1
        else:
            found.append((offset, offset + 1))
    return found


def _chosen(
    read: Callable[[Any], Iterator[pa.RecordBatch]], wanted: Mapping[TopicPartition, Sequence[int]], piece: Any
) -> Iterator[pa.RecordBatch]:
    """Read a piece and keep the wanted offsets."""
    offsets = np.asarray(wanted[piece.topic, piece.partition], np.int64)
    for rows in read(piece):
        yield rows.filter(pa.array(np.isin(np.asarray(rows.column("offset"), np.int64), offsets)))
