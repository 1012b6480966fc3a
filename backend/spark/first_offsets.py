"""Where a new query begins, said once: the first micro-batch may be planned again, and topics go on meanwhile.

Until Spark has started a query (`has_begun`) nothing was read, and each start says it anew: one may be refused.

Spark logs the end of a micro-batch, and the beginning of the first one nowhere. Its Kafka connector writes it to
`<checkpoint>/sources/<number>/0` (a zero byte, `v1`, a line break, JSON of topic -> partition -> offset); readers of
ours keep theirs at the same place in the same form, so a checkpoint goes on with either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from backend.errors import UnknownFormat
from backend.sources import TopicPartition
from backend.sources.spark_offsets import offset_json, positions_in
from recovery.files import open_files

HEAD = b"\0v1\n"


def write_positions(checkpoint: str, number: int, first: Mapping[TopicPartition, int]) -> None:
    """Write down where a source's query begins, in place of what a start decided that was refused."""
    open_files(checkpoint).write(f"sources/{number}/0", [HEAD + json.dumps(offset_json(first)).encode()])


def known_positions(checkpoint: str, number: int) -> dict[TopicPartition, int] | None:
    """Return where a source's query began; None where nothing is written.

    Args:
        checkpoint: Spark's checkpoint location.
        number: Of the source, in the order of the plan.

    Raises:
        UnknownFormat: What is written there is of another release.
    """
    files, folder = open_files(checkpoint), f"sources/{number}"
    if "0" not in files.list(folder):
        return None
    data = files.read(f"{folder}/0")
    if not data.startswith(HEAD):
        raise UnknownFormat(
            "the first offsets of a source have an unknown format",
            where=f"{checkpoint}/{folder}/0",
            why=f"it begins with {data[:8]!r}, not {HEAD!r}",
        )
    return positions_in(data[len(HEAD) :].decode())
