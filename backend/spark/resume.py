"""Where a query goes on, read out of Spark's offset log, and whether its sources still have what comes next.

`<checkpoint>/offsets/<batch>`: a version line, one of metadata, then the end offset of each source in the order of the
plan; for a Kafka source JSON, topic -> partition -> next offset. Spark would find out in the first micro-batch, and
advise to skip what is gone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from backend.sources import Source, TopicPartition
from recovery.files import open_files

_HEADER_LINES = 2


def check_resumable(checkpoint: str, sources: Sequence[Source]) -> None:
    """Ask each source that can tell (`check_positions`) whether it has what the query reads next.

    Args:
        checkpoint: Spark's checkpoint location; nothing is asked when no micro-batch is committed there.
        sources: In the order of the job's inputs.

    Raises:
        HistoryLost: An offset that comes next is gone.
    """
    for source, positions in zip(sources, committed_positions(checkpoint), strict=False):
        check = getattr(source, "check_positions", None)
        if check is not None and positions:
            check(positions)


def committed_positions(checkpoint: str) -> list[dict[TopicPartition, int]]:
    """Give the next offsets per source as of the last committed micro-batch; empty where a source says none of Kafka's.

    >>> _positions('{"t": {"0": 5}}'), _positions('{"logOffset": 0}'), _positions("-")
    ({('t', 0): 5}, {}, {})
    """
    files = open_files(checkpoint)
    committed = [int(name) for name in files.list("commits") if name.isdigit()]
    if not committed:
        return []
    text = files.read(f"offsets/{max(committed)}").decode()
    return [_positions(line) for line in text.splitlines()[_HEADER_LINES:]]


def _positions(line: str) -> dict[TopicPartition, int]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(found, Mapping):
        return {}
    return {
        (topic, int(partition)): int(offset)
        for topic, partitions in found.items()
        if isinstance(partitions, Mapping)
        for partition, offset in partitions.items()
        if partition.isdigit()
    }
