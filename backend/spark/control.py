"""The control stream: how the driver tells every shard something, inside Spark's own offset log.

A request is a numbered file below `<checkpoint>/rewind/control`; the number of the newest one is the offset of a source
of our own, and the pack stage hands its row to every shard. So a drain is part of the micro-batch that Spark logged:
every attempt and every re-run of it drains alike, and a query that was killed between its last data and its drain still
drains after a restart without new data (Spark's timers would not fire before new data came).

Spark's own file source cannot be that source: its log holds absolute paths, and a checkpoint that was copied or moved
with a drain as its last micro-batch could not go on (`Wrong basePath`).

A request (format 2): `drain-<number>.json`, `{"format": 2, "drain": true}`, or `adopt-<number>.json`, `{"format": 2,
"adopt": {"<shard>": "<commit>"}}`: that shard's state is restored as of that commit, and it is to run what it queued
since. `"behind"` is the newest micro-batch that was planned when it was asked. Numbers are wall-clock milliseconds,
made larger than the newest there is: a request is also later than all those that were deleted.

A start asks for one row, too: Spark makes no micro-batch of its own after a start until something new comes, but what a
shard waits for may be due by now, by the clock or by options that were changed.

The offset in Spark's log, as JSON, carries what was asked, not only that something was: a micro-batch that runs again
is the same whatever files there are. Format 1: `{"format": 1, "asked": <number of the newest drain, 0 before the
first>}`. Format 2, from the first adoption on: `{"format": 2, "asked": ..., "adopt": [[<shard>, <number>,
"<commit>"], ...]}`, the newest of each shard. Both may have `"start": "<token>"`, of the start that planned it.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from backend.errors import UNDECODABLE, ControlDamaged, UnknownFormat, unknown_format
from backend.spark.reading import streamed
from backend.spark.resume import newest_planned
from recovery.commit.option_sets import versions_in
from recovery.commit.pointer import Commit
from recovery.files import open_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

REQUEST_FORMAT = 2
OFFSET_FORMAT = 1
ADOPTING_FORMAT = 2
DIRECTORY = "rewind/control"
_NAME = re.compile(r"(drain|adopt)-([1-9]\d*)\.json")
_BEGINNING = -1
"""Before the row that every query begins with: it makes a first micro-batch where the sources are empty."""


_asking = threading.Lock()


def ask_to_drain(checkpoint: str) -> int:
    """Ask that the next micro-batch to be planned drains, durable on return; gives the number of the request."""
    return _ask(checkpoint, "drain", True)


def drain_of(checkpoint: str, version: int) -> int:
    """Give the number of the newest drain that was asked for when a micro-batch was planned, 0 before the first."""
    return max(_asked(_logged(checkpoint, version)), 0)


def ask_to_adopt(checkpoint: str, commits: Mapping[int, str]) -> None:
    """Ask that shards adopt their queues in the next micro-batch to be planned; durable on return.

    Args:
        checkpoint: Spark's checkpoint location.
        commits: Shard -> name of the commit that its state is restored as of.
    """
    _ask(checkpoint, "adopt", {str(shard): commit for shard, commit in sorted(commits.items())})


def _ask(checkpoint: str, kind: str, what: object) -> int:
    with _asking:
        number = max([time.time_ns() // 1_000_000, *(one + 1 for _, one in _requests(checkpoint))])
        name = f"{DIRECTORY}/{kind}-{number}.json"
        content = {"format": REQUEST_FORMAT, kind: what, "behind": newest_planned(checkpoint)}
        open_files(checkpoint).write(name, [json.dumps(content).encode()])
        return number


def forget_requests(checkpoint: str) -> None:
    """Delete the requests that nothing goes by any more; at a start, with no query running.

    Those of a history that was taken back: asked behind a micro-batch that is planned no more, they would take effect
    in another one. And those that were done before the oldest micro-batch that Spark retains; but for the newest,
    behind which the next one is numbered.
    """
    versions, requests = versions_in(checkpoint, "offsets"), sorted(_requests(checkpoint), key=lambda one: one[1])
    if not versions or not requests:
        return
    try:
        oldest = _logged(checkpoint, versions[0])
    except UNDECODABLE:  # it is retained for going back: who does is told
        return
    done = {"drain": _asked(oldest), "adopt": max((number for number, _ in _adopt(oldest).values()), default=0)}
    files, gone = open_files(checkpoint), []
    for kind, number in requests:
        name = f"{DIRECTORY}/{kind}-{number}.json"
        if number <= done[kind]:
            gone += [name] if (kind, number) != requests[-1] else []
            continue
        try:
            behind = json.loads(files.read(name)).get("behind", -1)
        except (*UNDECODABLE, FileNotFoundError):
            continue  # whoever is to go by it says what is wrong with it
        gone += [name] if type(behind) is int and behind > versions[-1] else []
    files.delete(gone)


def _logged(checkpoint: str, version: int) -> dict[str, Any]:
    """Read the control stream's offset of a micro-batch: the last of its sources."""
    offset: dict[str, Any] = json.loads(open_files(checkpoint).read(f"offsets/{version}").decode().splitlines()[-1])
    return offset


def control_rows(spark: SparkSession, checkpoint: str) -> DataFrame:
    """Give the control stream: at most one row per micro-batch, columns `drain` and `adopt` (JSON)."""
    start = uuid.uuid4().hex if newest_planned(checkpoint) >= 0 else ""
    return streamed(spark, ControlReader(checkpoint, start), "drain boolean, adopt string", iter, name="rewind_control")


@dataclass
class Row(InputPartition):
    """The row of a micro-batch in which there is something to say."""

    drain: bool
    adopt: str = "{}"


class ControlReader(DataSourceStreamReader):
    """Turns requests into offsets, and offsets into rows: the same row for the same two offsets, whatever is on disk.

    Args:
        checkpoint: Path or URI of the checkpoint.
        start: Names the start; "" for the first one, whose first micro-batch needs nobody to ask for it.
    """

    def __init__(self, checkpoint: str, start: str = "") -> None:
        self._checkpoint, self._start = checkpoint, start

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Start before the row that every query begins with."""
        return _offset(_BEGINNING)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Give the offset of the newest request, and of this start; never behind `start`, also without the requests.

        Raises:
            UnknownFormat: Another release wrote the newest request.
            ControlDamaged: The newest request cannot be read.
        """
        asked, adopt = max(_asked(start), 0), _adopt(start)
        known = max((number for number, _ in adopt.values()), default=0)
        for kind, number in sorted(_requests(self._checkpoint), key=lambda one: one[1]):
            if kind == "drain" and number > asked:
                self._read(kind, number)
                asked = number
            elif kind == "adopt" and number > known:
                adopt |= {shard: (number, commit) for shard, commit in self._read(kind, number).items()}
        return _offset(asked, adopt, self._start or start.get("start", ""))

    def _read(self, kind: str, number: int) -> Any:
        name = f"{DIRECTORY}/{kind}-{number}.json"
        return _checked(open_files(self._checkpoint).read(name), kind, f"{self._checkpoint}/{name}")

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan the one row: does anything later than `start` ask for a drain, and who is to adopt what?"""
        if "logOffset" in end:  # planned and not committed when control rows came through Spark's file source
            return [Row(drain=int(end["logOffset"]) > 0)]
        before = _adopt(start)
        adopt = {
            shard: commit for shard, (number, commit) in _adopt(end).items() if before.get(shard, (0,))[0] < number
        }
        return [Row(drain=_asked(end) > max(_asked(start), 0), adopt=json.dumps(adopt, sort_keys=True))]

    def read(self, partition: InputPartition) -> Iterator[tuple[bool, str]]:
        """Give the row."""
        return iter([(partition.drain, partition.adopt)] if isinstance(partition, Row) else [])


def _checked(data: bytes, kind: str, where: str) -> Any:
    try:
        request = json.loads(data)
        written, what = request.get("format"), request.get(kind)
        adopts = (
            {str(int(shard)): Commit.of_name(commit).name for shard, commit in what.items()} if kind == "adopt" else {}
        )
    except UNDECODABLE as error:
        raise ControlDamaged(
            "a request to the job cannot be read",
            where=where,
            why=str(error),
            command="delete the file, start the query, and ask again",
        ) from error
    if written != REQUEST_FORMAT or (kind == "drain" and what is not True):
        raise UnknownFormat(
            "a request to the job has an unknown format",
            where=where,
            why=f"format {written!r}, this release reads {REQUEST_FORMAT}",
            command="install the release that wrote it, or delete the file",
        )
    return adopts


def _requests(checkpoint: str) -> list[tuple[str, int]]:
    found = [_NAME.fullmatch(name) for name in open_files(checkpoint).list(DIRECTORY)]
    return [(name[1], int(name[2])) for name in found if name]


def _offset(asked: int, adopt: Mapping[str, tuple[int, str]] = MappingProxyType({}), start: str = "") -> dict[str, Any]:
    began = {"start": start} if start else {}
    if not adopt:
        return {"format": OFFSET_FORMAT, "asked": asked, **began}
    adoptions = [[int(shard), *adopt[shard]] for shard in sorted(adopt, key=int)]
    return {"format": ADOPTING_FORMAT, "asked": asked, "adopt": adoptions, **began}


def _adopt(offset: dict[str, Any]) -> dict[str, tuple[int, str]]:
    return {str(shard): (int(number), str(commit)) for shard, number, commit in offset.get("adopt", ())}


def _asked(offset: dict[str, Any]) -> int:
    if "logOffset" in offset:  # of Spark's file source, which an earlier release used: its requests have no numbers
        return 0
    if offset.get("format") not in (OFFSET_FORMAT, ADOPTING_FORMAT):
        found, read = f"format {offset.get('format')!r}", f"{OFFSET_FORMAT} and {ADOPTING_FORMAT}"
        raise unknown_format("the control stream's offset in the checkpoint has an unknown format", found, read)
    return int(offset["asked"])
