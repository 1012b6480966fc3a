"""Where a query goes on, read out of Spark's offset log, and whether its sources still have what comes next.

`<checkpoint>/offsets/<batch>`: a version line, one of metadata, then the end offset of each source in the order of the
plan. Spark would find out in the first micro-batch, and
advise to skip what is gone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from shlex import quote

from backend.errors import StateCorrupted
from backend.sources import Source, TopicPartition
from backend.sources.spark_offsets import positions_in
from backend.texts import visible
from recovery.commit.manifest import query_id
from recovery.commit.option_sets import newest_in, versions_in
from recovery.commit.spark_files import METADATA, damaged_spark_files, read_spark_file
from recovery.files import open_files

_HEADER_LINES = 2
_DRAFT = re.compile(r"\.{1,2}\d+\.(?:crc|[\w-]+\.tmp(?:\.crc)?)")
"""A file that Spark has begun to write for a number, or the checksum of one."""


def check_resumable(checkpoint: str, sources: Sequence[Source]) -> None:
    """Ask each source that can tell (`check_positions`) whether it has what the query reads next.

    Args:
        checkpoint: Spark's checkpoint location; nothing is asked when no micro-batch is committed there.
        sources: In the order of the job's inputs.

    Raises:
        HistoryLost: An offset that comes next is gone.
        StateCorrupted: Spark's logs are not whole.
        PointerDamaged: One of its files is damaged.
    """
    for damaged in damaged_spark_files(checkpoint):
        raise damaged
    if METADATA in open_files(checkpoint).list():
        query_id(checkpoint)
    _check_no_hole(checkpoint)
    for source, positions in zip(sources, committed_positions(checkpoint), strict=False):
        check = getattr(source, "check_positions", None)
        if check is not None and positions:
            check(positions)


def _check_no_hole(checkpoint: str) -> None:
    """Refuse logs in which more than the micro-batch after the last committed one is planned: Spark would run the last.

    A query may run: it has committed all but the last that was seen to be planned.
    """
    planned = newest_planned(checkpoint)
    committed = newest_in(checkpoint, "commits")
    if planned > committed + 1:
        back = "put commits and offsets back from a copy of the checkpoint"
        raise StateCorrupted(
            "Spark's own logs have a hole",
            where=f"{checkpoint}/{'offsets' if committed >= 0 else 'commits'}",
            why=f"micro-batch {planned} is planned, and "
            + (f"the last one that is committed is {committed}" if committed >= 0 else "none is committed"),
            command=f"to go on from {committed}, remove every file of offsets with a higher number, and"
            f" its .<number>.crc; or {back}"
            if committed >= 0
            else f"{back}; or rewind reset {quote(checkpoint)}",
        )


def newest_planned(checkpoint: str) -> int:
    """Return the newest micro-batch that Spark has planned, committed or not; -1 before the first."""
    return newest_in(checkpoint, "offsets")


def has_begun(checkpoint: str) -> bool:
    """Tell whether Spark has started a query there: where that begins holds. A start that is refused begins none."""
    planned = any(versions_in(checkpoint, log) for log in ("offsets", "commits"))
    return planned or METADATA in open_files(checkpoint).list()


def committed_positions(checkpoint: str) -> list[dict[TopicPartition, int]]:
    """Give the next offsets per source as of the last committed micro-batch; of some sources none.

    Raises:
        StateCorrupted: Spark's logs are not whole: what it has committed it does not say that it has planned.
    """
    committed = versions_in(checkpoint, "commits")
    if not committed:
        return []
    name = f"offsets/{committed[-1]}"
    try:
        text = read_spark_file(checkpoint, name).decode()
    except FileNotFoundError as error:
        raise StateCorrupted(
            "a file of Spark's own log is gone",
            where=f"{checkpoint}/{name}",
            why=f"commits/{committed[-1]} says that the micro-batch is committed, and {name} would say up to which"
            " offsets it read",
            command=f"put it back from a copy of the checkpoint; or rewind reset {quote(checkpoint)}",
        ) from error
    return [positions_in(line) for line in text.splitlines()[_HEADER_LINES:]]


def clear_unplanned(checkpoint: str) -> None:
    """Delete what Spark has left of a query of which nothing is planned: it starts none where anything lies.

    * `state/<operator>/<partition>`: Spark's executors upload a snapshot up to a minute after their query was stopped,
      also when the checkpoint has been reset meanwhile.
    * `offsets/.0.<id>.tmp`: of a driver that died while it wrote the first offsets.

    Called under the checkpoint's lease; does nothing where a micro-batch is planned or committed.

    Raises:
        StateCorrupted: Something else lies there. State that Spark has described, above all: that comes after offsets.
    """
    if newest_planned(checkpoint) >= 0 or versions_in(checkpoint, "commits"):
        return
    files = open_files(checkpoint)
    for operator in files.folders("state"):
        partitions = files.folders(f"state/{operator}")
        if operator.isdecimal() and all(map(str.isdecimal, partitions)) and not files.list(f"state/{operator}"):
            files.delete_folder(f"state/{operator}")
    for log in ("offsets", "commits"):
        files.delete([f"{log}/{name}" for name in files.list(log) if _DRAFT.fullmatch(name)])
    for folder in ("offsets", "state", "commits"):
        for name in (*files.folders(folder), *files.list(folder), *files.list(folder, temporary=True)):
            raise StateCorrupted(
                "files lie in the checkpoint, and Spark's log of what was planned is gone",
                where=f"{checkpoint}/{folder}/{visible(name)}",
                why="neither offsets nor commits has a micro-batch",
                command=f"put both back from a copy of the checkpoint; or rewind reset {quote(checkpoint)};"
                " where the files are of something else, give the query a directory of its own",
            )
