"""Planning and reading an archive (the Python data source API of Spark 4.2).

The offset of the stream, JSON in Spark's offset log (format 1)::

    {"format": 1, "next": {"<topic>": {"<partition>": next offset to read}},
     "first": {"<topic>": {"<partition>": first offset ever read}}}

`first` makes a micro-batch in which a partition appears readable again in the same way after the archive's old files
were removed: a retry then fails instead of silently reading less.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from backend.errors import HistoryLost, SourceWentBack, unknown_format
from backend.sources import OffsetRange, TopicPartition
from backend.sources.archive_files import read_range
from backend.sources.archive_index import PartitionIndex, Slice, check_absent
from backend.sources.archive_seen import Memory, check_seen
from backend.sources.formats import ValueFormat, record_schema
from backend.sources.results_files import read_results
from backend.sources.spark_offsets import offset_json, positions_in

if TYPE_CHECKING:
    from backend.sources.archive import ArchiveSource

FORMAT = 1


def row_schema(value: ValueFormat, names: Collection[str] | None = None) -> StructType:
    """Return the schema of records.

    Args:
        value: What the values are.
        names: Fields of structs that are needed; one stays at least, to tell a null value. None for all.
    """
    if value.name != "typed":
        return record_schema()
    fields = value.fields().fields
    chosen = fields if names is None else [field for field in fields if field.name in names] or fields[:1]
    return record_schema(StructType(chosen))


@dataclass
class Piece(InputPartition):
    """One task's share: a half-open offset range of one source partition and the files it lies in.

    Attributes:
        slices: What the index has for the range, in offset order.
        gaps: The declared gaps that overlap it: their offsets give no rows.
        results: It is of a job's results.
    """

    topic: str
    partition: int
    start: int
    end: int
    slices: list[Slice]
    gaps: list[OffsetRange]
    results: bool = False


class ArchiveStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans pieces of an archive, and reads them.

    A stream is read from the earliest offsets on, at most `max_offsets_per_batch` per source partition at a time.
    """

    _target: dict[TopicPartition, int] | None = None

    def __init__(self, source: ArchiveSource, names: Collection[str] | None = None) -> None:
        self._source, self._path, self._archive = source, source.path, source.open()
        self._memory = Memory(*source.memory)
        self.schema = row_schema(source.value, names)
        self.arrow_schema = to_arrow_schema(self.schema, timezone="UTC")

    def code(self, name: str) -> None:
        """Let the texts of a field of structs come as a dictionary, where files have a small one."""
        value = self.arrow_schema.field("value")
        if self._source.results or not pa.types.is_struct(value.type) or value.type.field(name).type != pa.string():
            return
        kind = pa.dictionary(pa.int32(), pa.string())
        kinds = [field.with_type(kind) if field.name == name else field for field in value.type]
        at = self.arrow_schema.get_field_index("value")
        self.arrow_schema = self.arrow_schema.set(at, value.with_type(pa.struct(kinds)))

    def index(self) -> dict[TopicPartition, PartitionIndex]:
        """Look at the archive; see `ArchiveSource.look`."""
        return self._source.look(self._archive)

    def plan(
        self, found: Mapping[TopicPartition, PartitionIndex], key: TopicPartition, start: int, end: int
    ) -> list[Piece]:
        """Cut a half-open range of a source partition, of those that `index` gave, into tasks.

        Raises:
            HistoryLost: The archive no longer holds the beginning of the range.
            SourceGap: It does not hold the end of it.
        """
        if start >= end:
            return []
        (topic, partition), index = key, found.get(key)
        if index is None or start < index.range[0]:
            have = "no file of this partition" if index is None else f"offsets from {index.range[0]}"
            raise HistoryLost(
                "the archive no longer holds offsets that are still to be read",
                where=f"{self._path}, {topic}-{partition}",
                why=f"needed are {start} to {end - 1}, there is {have}",
                command="put the files back",
            )
        check_absent((), index.range[1], end, self._path, topic, partition)
        results, pieces = self._source.results, list[Piece]()
        while (low := index.next_present(start)) < end:  # a gap needs no task, however wide it is
            start = min(low + self._source.max_offsets_per_task, end)
            pieces.append(Piece(topic, partition, low, start, *index.cut(low, start), results))
        return pieces

    def read(self, partition: Piece) -> Iterator[pa.RecordBatch]:
        """Read one piece, checked, as Arrow batches; runs in a task."""
        return read_piece(self._path, self.arrow_schema, partition)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Start before everything: partitions are entered when they are first seen."""
        return {"format": FORMAT, "next": {}, "first": {}}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Give the bound; Spark has no limit per partition, so `max_rows` stands for that here."""
        return ReadMaxRows(self._source.max_offsets_per_batch)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Remember what is there: files that come later are not read by this run."""
        self._target = {key: index.range[1] for key, index in self.index().items()}

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Give the end of the archive, for the lag in Spark's progress."""
        return self._offset(self.initialOffset(), {key: index.range[1] for key, index in self.index().items()})

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Give the end of the next micro-batch.

        Raises:
            SourceWentBack: The archive ends before what was already read, or has offsets or files below it that were
                not there.
        """
        known = _positions(start, "next")
        index = self.index()
        self._check_seen(start)
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
                if key not in self._target:
                    continue
                latest = min(latest, self._target[key])
            at = known.get(key, partition.range[0])
            if not isinstance(limit, ReadAllAvailable):
                bound = limit.max_rows if isinstance(limit, ReadMaxRows) else self._source.max_offsets_per_batch
                latest = min(latest, partition.next_present(at) + bound)
            ends[key] = max(at, latest)
        end = self._offset(start, ends)
        self._memory.remember(self._archive, _positions(end, "first"), ends)
        return end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan one micro-batch: the same ranges for the same two offsets, always.

        Raises:
            SourceWentBack: As `latestOffset`: a micro-batch that was planned before a restart is looked at here only.
        """
        starts, firsts = _positions(start, "next"), _positions(end, "first")
        index = self.index()
        self._check_seen(end)
        return [
            piece
            for key, stop in sorted(_positions(end, "next").items())
            for piece in self.plan(index, key, starts.get(key, firsts[key]), stop)
        ]

    def _check_seen(self, offset: dict[str, Any]) -> None:
        check_seen(self._archive, self._memory.seen, _positions(offset, "first"), _positions(offset, "next"))

    def _offset(self, start: dict[str, Any], ends: dict[TopicPartition, int]) -> dict[str, Any]:
        firsts, found = _positions(start, "first"), self._archive.found
        firsts = {key: firsts[key] if key in firsts else found[key].range[0] for key in ends}
        return {"format": FORMAT, "next": offset_json(ends), "first": offset_json(firsts)}


def read_piece(path: str, schema: pa.Schema, piece: Piece) -> Iterator[pa.RecordBatch]:
    """Read one piece, checked, as Arrow batches of the schema of `row_schema`."""
    return (read_results if piece.results else read_range)(path, piece, schema)


def _positions(offset: dict[str, Any], part: str) -> dict[TopicPartition, int]:
    if offset.get("format") != FORMAT:
        found = f"format {offset.get('format')!r}"
        raise unknown_format("the archive's offset in the checkpoint has an unknown format", found, FORMAT)
    return positions_in(offset[part])
