"""The control stream: how the driver tells every shard something, inside Spark's own offset log.

A request is a numbered file below `<checkpoint>/rewind/control`; the number of the newest one is the offset of a source
of our own, and the pack stage hands its row to every shard. So a drain is part of the micro-batch that Spark logged:
every attempt and every re-run of it drains alike, and a query that was killed between its last data and its drain still
drains after a restart without new data (Spark's timers would not fire before new data came).

Spark's own file source cannot be that source: its log holds absolute paths, and a checkpoint that was copied or moved
with a drain as its last micro-batch could not go on (`Wrong basePath`).

A request (format 2): `drain-<number>.json`, `{"format": 2, "drain": true}`; numbers are wall-clock milliseconds, made
larger than the newest there is: a request is also later than all those that were deleted. The offset (format 1) in
Spark's log, as JSON: `{"format": 1, "asked": <number of the newest request, 0 before the first>}`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from backend.errors import UNDECODABLE, ControlDamaged, UnknownFormat
from recovery.files import open_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

REQUEST_FORMAT = 2
OFFSET_FORMAT = 1
DIRECTORY = "rewind/control"
_NAME = re.compile(r"drain-([1-9]\d*)\.json")
_BEGINNING = -1
"""Before the row that every query begins with: it makes a first micro-batch where the sources are empty."""


def ask_to_drain(checkpoint: str) -> None:
    """Ask that the next micro-batch to be planned drains; durable on return."""
    number = max(_newest(checkpoint) + 1, time.time_ns() // 1_000_000)
    name = f"{DIRECTORY}/drain-{number}.json"
    open_files(checkpoint).write(name, [json.dumps({"format": REQUEST_FORMAT, "drain": True}).encode()])


def control_rows(spark: SparkSession, checkpoint: str) -> DataFrame:
    """Give the control stream: at most one row per micro-batch, column `drain`."""
    spark.dataSource.register(RewindControl)
    return spark.readStream.format(RewindControl.name()).option("path", checkpoint).load()


@dataclass
class Row(InputPartition):
    """The row of a micro-batch in which there is something to say."""

    drain: bool


class RewindControl(DataSource):
    """`format("rewind_control")`; use `control_rows`."""

    @classmethod
    def name(cls) -> str:
        """Give the name of the format."""
        return "rewind_control"

    def schema(self) -> str:
        """Give the schema."""
        return "drain boolean"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Read the requests of a checkpoint."""
        return ControlReader(self.options["path"])


class ControlReader(DataSourceStreamReader):
    """Turns requests into offsets, and offsets into rows: the same row for the same two offsets, whatever is on disk.

    Args:
        checkpoint: Path or URI of the checkpoint.
    """

    def __init__(self, checkpoint: str) -> None:
        self._checkpoint = checkpoint

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Start before the row that every query begins with."""
        return _offset(_BEGINNING)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Give the newest request's offset; never behind `start`, also when requests were deleted.

        Raises:
            UnknownFormat: Another release wrote the newest request.
            ControlDamaged: The newest request cannot be read.
        """
        asked = max(_asked(start), 0)
        newest = _newest(self._checkpoint)
        if newest <= asked:
            return _offset(asked)
        name = f"{DIRECTORY}/drain-{newest}.json"
        _check(open_files(self._checkpoint).read(name), f"{self._checkpoint}/{name}")
        return _offset(newest)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan the one row: does anything later than `start` ask for a drain?"""
        if "logOffset" in end:  # planned and not committed when control rows came through Spark's file source
            return [Row(drain=int(end["logOffset"]) > 0)]
        return [Row(drain=_asked(end) > max(_asked(start), 0))]

    def read(self, partition: InputPartition) -> Iterator[tuple[bool]]:
        """Give the row."""
        return iter([(partition.drain,)] if isinstance(partition, Row) else [])


def _check(data: bytes, where: str) -> None:
    try:
        request = json.loads(data)
        written, drain = request.get("format"), request.get("drain")
    except UNDECODABLE as error:
        raise ControlDamaged(
            "a request to the job cannot be read",
            where=where,
            why=str(error),
            command="delete the file, start the query, and ask again",
        ) from error
    if written != REQUEST_FORMAT or drain is not True:
        raise UnknownFormat(
            "a request to the job has an unknown format",
            where=where,
            why=f"format {written!r}, this release reads {REQUEST_FORMAT}, and only requests to drain",
            command="install the release that wrote it, or delete the file",
        )


def _newest(checkpoint: str) -> int:
    found = [_NAME.fullmatch(name) for name in open_files(checkpoint).list(DIRECTORY)]
    return max((int(name[1]) for name in found if name), default=0)


def _offset(asked: int) -> dict[str, Any]:
    return {"format": OFFSET_FORMAT, "asked": asked}


def _asked(offset: dict[str, Any]) -> int:
    if "logOffset" in offset:  # of Spark's file source, which an earlier release used: its requests have no numbers
        return 0
    if offset.get("format") != OFFSET_FORMAT:
        raise UnknownFormat(
            "the control stream's offset in the checkpoint has an unknown format",
            why=f"format {offset.get('format')!r}, this release reads {OFFSET_FORMAT}",
            command="install the release that wrote it",
        )
    return int(offset["asked"])
