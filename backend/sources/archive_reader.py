"""The archive as a PySpark data source (the Python data source API of Spark 4.2).

The offset of the stream, JSON in Spark's offset log (format 1)::

    {"format": 1, "next": {"<topic>": {"<partition>": next offset to read}},
     "first": {"<topic>": {"<partition>": first offset ever read}}}

`first` makes a micro-batch in which a partition appears readable again in the same way after the archive's old files
were removed: a retry then fails instead of silently reading less.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import BinaryType, StructField, StructType

from backend.errors import HistoryLost, SourceWentBack, UnknownFormat
from backend.sources import OffsetRange, TopicPartition
from backend.sources.archive_files import read_range
from backend.sources.archive_index import Archive, PartitionIndex, Slice, gap_error
from backend.sources.formats import ValueFormat, record_schema
from backend.spark.bundles import BUNDLE, bundle

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1


def row_schema(value: ValueFormat) -> StructType:
    """Give the schema of unparsed rows."""
    return record_schema(value.fields() if value.name == "typed" else BinaryType())


@dataclass
class Piece(InputPartition):
    """One task's share: a half-open offset range of one source partition and the files it lies in."""

    topic: str
    partition: int
    start: int
    end: int
    slices: list[Slice]
    gaps: list[OffsetRange]


class RewindArchive(DataSource):
    """`format("rewind_archive")`; use `backend.archive`, which sets its options."""

    @classmethod
    def name(cls) -> str:
        """Give the name of the format."""
        return "rewind_archive"

    def schema(self) -> StructType:
        """Give the schema that `row_schema` made for the options; with `bundled`, of bundles of such rows."""
        if "bundled" in self.options:
            return StructType([StructField(BUNDLE, BinaryType())])
        return StructType.fromJson(json.loads(self.options["schema_json"]))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Read fixed ranges."""
        return ArchiveBatchReader(dict(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Read on and on."""
        return ArchiveStreamReader(dict(self.options))


class _Reader:
    """What both readers share: options, the index, planning and reading."""

    def __init__(self, options: dict[str, str]) -> None:
        self._path = options["path"]
        self._topics = set(json.loads(options["topics"]))
        self._per_batch = int(options["max_offsets_per_batch"])
        self._per_task = int(options["max_offsets_per_task"])
        self._ranges = json.loads(options.get("ranges", "[]"))
        schema = StructType.fromJson(json.loads(options["schema_json"]))
        self._bundled = "bundled" in options
        if self._bundled:
            schema = with_fields(schema, json.loads(options["bundled"]))
        self.arrow_schema = to_arrow_schema(schema, timezone="UTC")
        self._archive = Archive(self._path)

    def index(self) -> dict[TopicPartition, PartitionIndex]:
        """Look at the archive: one listing, and the footers of files not seen before."""
        found = self._archive.partitions()
        return {key: value for key, value in found.items() if not self._topics or key[0] in self._topics}

    def plan(self, topic: str, partition: int, start: int, end: int) -> list[Piece]:
        """Cut a range into tasks.

        Raises:
            HistoryLost: The archive no longer holds the beginning of the range.
            SourceGap: It does not hold the end of it.
        """
        if start >= end:
            return []
        index = self.index().get((topic, partition))
        if index is None or start < index.range[0]:
            have = "no file of this partition" if index is None else f"offsets from {index.range[0]}"
            raise HistoryLost(
                "the archive no longer holds offsets that are still to be read",
                where=f"{self._path}, {topic}-{partition}",
                why=f"needed are {start} to {end - 1}, there is {have}",
                command="put the files back",
            )
        if end > index.range[1]:
            raise gap_error(self._path, topic, partition, index.range[1], end)
        bounds = [*range(start, end, self._per_task), end]
        return [Piece(topic, partition, low, high, *index.cut(low, high)) for low, high in pairwise(bounds)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one piece, checked, as Arrow batches; runs in a task."""
        if not isinstance(partition, Piece):  # Spark's stand-in for "no partitions at all"
            return iter(())
        rows = read_piece(self._path, self.arrow_schema, partition)
        return map(bundle, rows) if self._bundled else rows


def read_piece(path: str, schema: pa.Schema, piece: Piece) -> Iterator[pa.RecordBatch]:
    """Read one piece, checked, as Arrow batches of a schema of `archive_index.REQUIRED` columns."""
    wanted = (piece.start, piece.end)
    return read_range(path, piece.topic, piece.partition, wanted, piece.slices, piece.gaps, schema)


def with_fields(rows: StructType, names: Sequence[str]) -> StructType:
    """Leave fields of the values out of a schema of rows; one stays at least, to tell a null value."""
    value = rows["value"].dataType
    assert isinstance(value, StructType), "only typed values have fields"
    kept = [field for field in value.fields if field.name in names] or value.fields[:1]
    return StructType([*rows.fields[:-1], StructField("value", StructType(kept))])


class ArchiveBatchReader(_Reader, DataSourceReader):
    """Reads the ranges of the option `ranges`: `[[topic, partition, start, end], ...]`, half-open."""

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the ranges."""
        return self.planned()

    def planned(self) -> list[Piece]:
        """Give the pieces of the ranges."""
        return [piece for wanted in self._ranges for piece in self.plan(*wanted)]


class ArchiveStreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the archive from its earliest offsets on, with at most `max_offsets_per_batch` per source partition."""

    _target: dict[TopicPartition, int] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Start before everything: partitions are entered when they are first seen."""
        return {"format": FORMAT, "next": {}, "first": {}}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Give the bound; Spark has no limit per partition, so `max_rows` stands for that here."""
        return ReadMaxRows(self._per_batch)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Remember what is there: files that come later are not read by this run."""
        self._target = {key: index.range[1] for key, index in self.index().items()}

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Give the end of the archive, for the lag in Spark's progress."""
        return self._offset(self.initialOffset(), {key: index.range[1] for key, index in self.index().items()})

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Give the end of the next micro-batch.

        Raises:
            SourceWentBack: The archive ends before what was already read.
        """
        known = _positions(start, "next")
        index = self.index()
        for key, position in known.items():
            if key not in index or index[key].range[1] < position:
                raise SourceWentBack(
                    "the archive ends before what was already read",
                    where=f"{self._path}, {key[0]}-{key[1]}",
                    why=f"the next offset to read is {position}, the archive ends at "
                    + (str(index[key].range[1]) if key in index else "nothing"),
                    command="put the files back, or start with a new checkpoint",
                )
        ends = dict(known)
        for key, partition in index.items():
            latest = partition.range[1]
            if self._target is not None:
                latest = min(latest, self._target.get(key, known.get(key, -1)))
                if key not in self._target and key not in known:
                    continue
            at = known.get(key, partition.range[0])
            if isinstance(limit, ReadAllAvailable):
                ends[key] = max(at, latest)
            else:
                bound = limit.max_rows if isinstance(limit, ReadMaxRows) else self._per_batch
                ends[key] = max(at, min(latest, partition.next_present(at) + bound))
        return self._offset(start, ends)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan one micro-batch: the same ranges for the same two offsets, always."""
        starts, firsts = _positions(start, "next"), _positions(end, "first")
        return [
            piece
            for key, stop in sorted(_positions(end, "next").items())
            for piece in self.plan(*key, starts.get(key, firsts[key]), stop)
        ]

    def _offset(self, start: dict[str, Any], ends: dict[TopicPartition, int]) -> dict[str, Any]:
        firsts = _positions(start, "first")
        index = self.index()
        result: dict[str, Any] = self.initialOffset()
        for (topic, partition), end in sorted(ends.items()):
            first = firsts.get((topic, partition))
            first = index[topic, partition].range[0] if first is None else first
            result["next"].setdefault(topic, {})[str(partition)] = end
            result["first"].setdefault(topic, {})[str(partition)] = first
        return result


def _positions(offset: dict[str, Any], part: str) -> dict[TopicPartition, int]:
    if offset.get("format") != FORMAT:
        raise UnknownFormat(
            "the archive's offset in the checkpoint has an unknown format",
            why=f"format {offset.get('format')!r}, this release reads {FORMAT}",
            command="install the release that wrote it",
        )
    return {(topic, int(number)): at for topic, numbers in offset[part].items() for number, at in numbers.items()}
