"""The archive source: Parquet files of a topic, replayable like the topic.

Spark's own file source orders files by modification time and knows no offsets, so this one owns its offsets
(`backend.sources.archive_reader`): rows come in offset order per partition, a micro-batch has a bounded number of
offsets per partition, and offsets that are missing, come twice or step back are an error before anything is counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from backend.errors import HistoryLost
from backend.sources import OffsetRange, TopicPartition
from backend.sources.archive_index import Archive
from backend.sources.formats import ValueFormat, parse

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from backend.sources.archive_reader import Piece

DEFAULT_MAX_OFFSETS = 100_000
DEFAULT_OFFSETS_PER_TASK = 500_000


@dataclass(frozen=True, slots=True)
class ArchiveSource:
    """What `archive` makes; see there."""

    path: str
    value: ValueFormat
    max_offsets_per_batch: int
    max_offsets_per_task: int
    only: tuple[str, ...] = ()

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics, sorted."""
        return self.only or tuple(sorted({topic for topic, _ in Archive(self.path).partitions()}))

    def stream(self, spark: SparkSession) -> DataFrame:
        """Give the streaming DataFrame; a query that starts anew begins at the earliest offsets."""
        return parse(self._stream(spark, self._options(None)), self.value)

    def batch(self, spark: SparkSession, ranges: Mapping[TopicPartition, OffsetRange]) -> DataFrame:
        """Give exactly the messages of half-open offset ranges, each range in order within its tasks.

        Raises:
            HistoryLost: A range reaches outside of what the archive holds.
            SourceGap: Offsets are missing within it.
        """
        from backend.sources.archive_reader import RewindArchive

        self._check_held(spark, ranges)
        spark.dataSource.register(RewindArchive)
        return parse(spark.read.format(RewindArchive.name()).options(**self._options(ranges)).load(), self.value)

    def offsets(self, spark: SparkSession | None = None) -> dict[TopicPartition, OffsetRange]:
        """Give per source partition the earliest offset and the one after the latest; Spark is not needed for it."""
        found = Archive(self.path).partitions()
        return {key: index.range for key, index in found.items() if not self.only or key[0] in self.only}

    def fields(self) -> StructType:
        """Give the schema of the parsed values; needs an active Spark session."""
        return self.value.fields()

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry; the path is not part of it, an archive may move."""
        return {"kind": "archive", "topics": list(self.topics), "value": self.value.describe()}

    @property
    def bundled(self) -> bool:
        """Tell whether the values are columns already."""
        return self.value.name == "typed"

    def stream_bundles(self, spark: SparkSession, names: Collection[str]) -> DataFrame:
        """Give the streaming DataFrame of bundles."""
        return self._stream(spark, self._options(None) | {"bundled": json.dumps(sorted(names))})

    def pieces(
        self, spark: SparkSession, ranges: Mapping[TopicPartition, OffsetRange], names: Collection[str]
    ) -> tuple[Sequence[Piece], Callable[[Piece], Iterator[pa.RecordBatch]]]:
        """Give what `batch` gives, piece by piece; raises as it does."""
        from backend.sources.archive_reader import ArchiveBatchReader, read_piece

        self._check_held(spark, ranges)
        reader = ArchiveBatchReader(self._options(ranges) | {"bundled": json.dumps(sorted(names))})
        return reader.planned(), partial(read_piece, self.path, reader.arrow_schema)

    def _check_held(self, spark: SparkSession, ranges: Mapping[TopicPartition, OffsetRange]) -> None:
        here = self.offsets(spark)
        for (topic, partition), (start, end) in sorted(ranges.items()):
            earliest, latest = here.get((topic, partition), (0, 0))
            if start < end and (start < earliest or end > latest):
                raise HistoryLost(
                    "the archive does not hold the offsets that a replay needs",
                    where=f"{self.path}, {topic}-{partition}",
                    why=f"needed are {start} to {end - 1}, there are {earliest} to {latest - 1}",
                    command="put the files back, or accept the loss and begin anew: rewind reset",
                )

    def _stream(self, spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
        from backend.sources.archive_reader import RewindArchive

        spark.dataSource.register(RewindArchive)
        return spark.readStream.format(RewindArchive.name()).options(**options).load()

    def _options(self, ranges: Mapping[TopicPartition, OffsetRange] | None) -> dict[str, str]:
        """Give the reader's options; without ranges it reads on and on."""
        from backend.sources.archive_reader import row_schema

        wanted = [[*key, *bounds] for key, bounds in sorted((ranges or {}).items())]
        return {
            "path": self.path,
            "schema_json": row_schema(self.value).json(),
            "topics": json.dumps(self.only),
            "max_offsets_per_batch": str(self.max_offsets_per_batch),
            "max_offsets_per_task": str(self.max_offsets_per_task),
            "ranges": json.dumps(wanted),
        }


def archive(
    path: str | Path,
    *,
    value: str = "",
    format: str = "json",
    topics: Sequence[str] = (),
    max_offsets_per_batch: int = DEFAULT_MAX_OFFSETS,
    max_offsets_per_task: int = DEFAULT_OFFSETS_PER_TASK,
) -> ArchiveSource:
    """Read a directory of Parquet files of `topic, partition, offset, timestamp, key, value` as a stream.

    Args:
        path: Local path or fsspec URI; every executor must see the same files.
        value: The fields of a value as Spark DDL, such as `"origin string, delay double, scheduled timestamp"`.
        format: `json`, `typed` (the column `value` is a struct already) or `raw` (no `value` option then).
        topics: Read these only; empty reads all.
        max_offsets_per_batch: Bound on the offsets of *each* source partition in one micro-batch.
        max_offsets_per_task: A longer range of one partition is read by several tasks.

    Raises:
        ValueError: Of a bad option.
    """
    bounds = {"max_offsets_per_batch": max_offsets_per_batch, "max_offsets_per_task": max_offsets_per_task}
    for name, bound in bounds.items():
        if isinstance(bound, bool) or not isinstance(bound, int) or bound < 1:
            raise ValueError(f"{name}={bound!r}: must be an integer of at least 1")
    if isinstance(topics, str):
        raise ValueError(f"topics={topics!r}: must be a list of names")
    return ArchiveSource(
        str(path), ValueFormat(format, value), max_offsets_per_batch, max_offsets_per_task, tuple(sorted(topics))
    )
