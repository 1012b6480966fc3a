"""The archive source: Parquet files of a topic, replayable like the topic.

Spark's own file source orders files by modification time and knows no offsets, so this one owns its offsets
(`backend.sources.archive_reader`): rows come in offset order per partition, a micro-batch has a bounded number of
offsets per partition, and offsets that are missing, come twice or step back are an error before anything is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from backend.errors import HistoryLost
from backend.sources import OffsetRange, TopicPartition
from backend.sources.archive_footer import BYTES, STRUCT
from backend.sources.archive_index import Archive, PartitionIndex
from backend.sources.archive_seen import Memory, check_seen, check_topics
from backend.sources.formats import Parse, ValueFormat
from recovery.files import check_place

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from backend.sources.archive_reader import ArchiveStreamReader, Piece

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
    known: tuple[str, ...] = ()
    memory: tuple[str, int] = ("", 0)
    results: bool = False
    looked: dict[TopicPartition, PartitionIndex] | None = field(default=None, compare=False, repr=False)
    """What `pieces` found the first time, of a source that looks once; None: it looks each time."""

    def looking_once(self) -> ArchiveSource:
        """Return this source for one replay in many jobs: `pieces` lists the archive, and reads footers, once."""
        return replace(self, looked={})

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics, sorted: those asked for, else those that the checkpoint knows, else what is there now.

        Raises:
            ValueError: None were asked for, and there is no message yet that would tell.
        """
        topics = self.only or self.known or tuple(sorted({topic for topic, _ in self.open().partitions()}))
        if not topics:
            raise ValueError(f"archive({self.path!r}): holds no messages yet, so say what it will hold: topics=[...]")
        return topics

    def remembering(self, topics: Sequence[str], checkpoint: str, number: int) -> ArchiveSource:
        """Return this source as a checkpoint knows it.

        Args:
            topics: Those of the manifest; empty at the first start, which takes what is there.
            checkpoint: Where what was read is remembered; "" for a reader that reads no stream.
            number: Of the source, in the order of the plan.

        Raises:
            SourceInvalid: The archive holds other topics than the checkpoint knows, or a file that is none of its.
        """
        source = replace(self, known=() if self.only else tuple(sorted(topics)), memory=(checkpoint, number))
        if not source.only and not source.known:
            source = replace(source, known=source.topics)
        source.offsets()
        return source

    def check_positions(self, positions: Mapping[TopicPartition, int]) -> None:
        """See that the archive still is what the query has read of it.

        Args:
            positions: The next offset to read, by source partition.

        Raises:
            SourceWentBack: Files came, or were replaced, below the positions.
        """
        archive = self.open()
        archive.partitions()
        seen = Memory(*self.memory).seen
        check_seen(archive, seen, seen.firsts, positions)

    def open(self) -> Archive:
        """Return the archive, of which nothing is read yet."""
        from backend.sources.results_files import ResultsArchive

        kind = STRUCT if self.value.name == "typed" else BYTES
        return (ResultsArchive if self.results else Archive)(self.path, kind, self.only)

    def look(self, archive: Archive) -> dict[TopicPartition, PartitionIndex]:
        """Return what is there: one listing, and the footers of files not seen before.

        Args:
            archive: What `open` gave; it knows the files that it saw before.

        Raises:
            SourceInvalid: A file is of another topic than the query knows.
        """
        found = archive.partitions()
        if self.known:
            check_topics(archive, self.known)
        return found

    def offsets(self, spark: SparkSession | None = None) -> dict[TopicPartition, OffsetRange]:
        """Give per source partition the earliest offset and the one after the latest; Spark is not needed for it."""
        return {key: index.range for key, index in self.look(self.open()).items()}

    def fields(self) -> StructType:
        """Give the schema of the parsed values; needs an active Spark session."""
        return self.value.fields()

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry; the path is not part of it, an archive may move."""
        kind = "results" if self.results else "archive"
        return {"kind": kind, "topics": list(self.topics), "value": self.value.describe()}

    @property
    def direct(self) -> bool:
        """Always."""
        return True

    def parse(self, timezone: str) -> Parse:
        """Return what parses the records; needs an active Spark session."""
        return self.value.parse(timezone)

    def stream_reader(
        self, names: Collection[str] | None = None, first: Mapping[TopicPartition, int] | None = None
    ) -> ArchiveStreamReader:
        """Return what plans and reads the stream."""
        from backend.sources.archive_reader import ArchiveStreamReader

        return ArchiveStreamReader(self, names)

    def pieces(
        self,
        spark: SparkSession,
        ranges: Mapping[TopicPartition, Sequence[OffsetRange]],
        names: Collection[str] | None = None,
    ) -> tuple[Sequence[Piece], Callable[[Piece], Iterator[pa.RecordBatch]], StructType]:
        """Return pieces of offset ranges, what reads one, and the schema.

        Raises:
            HistoryLost: A range reaches outside of what the archive holds.
            SourceGap: Offsets are missing within it.
        """
        from backend.sources.archive_reader import read_piece

        reader = self.stream_reader(names)
        index = self.looked or reader.index()
        if self.looked is not None:
            self.looked.update(index)
        found = []
        for key, own in sorted(ranges.items()):
            self._check_available(index, key, (own[0][0], own[-1][1]))
            found += [piece for bounds in own for piece in reader.plan(index, key, *bounds)]
        return found, partial(read_piece, self.path, reader.arrow_schema), reader.schema

    def _check_available(
        self, index: Mapping[TopicPartition, PartitionIndex], key: TopicPartition, bounds: OffsetRange
    ) -> None:
        earliest, latest = index[key].range if key in index else (0, 0)
        if bounds[0] < bounds[1] and (bounds[0] < earliest or bounds[1] > latest):
            raise HistoryLost(
                "the archive does not hold the offsets that a replay needs",
                where=f"{self.path}, {key[0]}-{key[1]}",
                why=f"needed are {bounds[0]} to {bounds[1] - 1}, there are {earliest} to {latest - 1}",
                command="put the files back; or rewind reset <checkpoint> accepts the loss and begins anew",
            )


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
    if not isinstance(topics, list | tuple) or not all(isinstance(name, str) and name for name in topics):
        raise ValueError(f"topics={topics!r}: must be a list of names")
    place = check_place(path, "path")
    return ArchiveSource(
        place, ValueFormat(format, value), max_offsets_per_batch, max_offsets_per_task, tuple(sorted(topics))
    )
