"""A reset that was interrupted: a mark in the checkpoint from before the first deletion until after the last one.

File `<checkpoint>/rewind/reset.json` (format 1): `{"format": 1, "query_id": id or null, "outputs": [path, ...]}`. While
it is there the checkpoint is none, whatever else still lies in it; `rewind reset` goes on from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from shlex import quote

from backend.errors import UNDECODABLE, ResetInterrupted
from recovery.files import open_files

FORMAT = 1
NAME = "rewind/reset.json"


@dataclass(frozen=True, slots=True)
class Mark:
    """What an interrupted reset was to delete besides the checkpoint.

    Attributes:
        query_id: Spark's query id, the name of the local state; None where the checkpoint did not say.
        outputs: Directories of results and errors.
    """

    query_id: str | None
    outputs: tuple[str, ...] = ()


def check_whole(checkpoint: str) -> None:
    """Check that no reset of the checkpoint was interrupted.

    Raises:
        ResetInterrupted: One was.
    """
    if NAME.rpartition("/")[2] in open_files(checkpoint).list("rewind"):
        raise ResetInterrupted(
            "a reset of this checkpoint was interrupted",
            where=f"{checkpoint}/{NAME}",
            why="part of it is deleted",
            command=f"rewind reset {quote(checkpoint)} --yes",
        )


def read_mark(checkpoint: str) -> Mark | None:
    """Read the mark of an interrupted reset; None when there is none. One that cannot be read names nothing else."""
    try:
        found = json.loads(open_files(checkpoint).read(NAME))
        return Mark(found["query_id"], tuple(found["outputs"]))
    except FileNotFoundError:
        return None
    except UNDECODABLE:
        return Mark(None)


def write_mark(checkpoint: str, mark: Mark) -> None:
    """Write the mark; durable on return."""
    content = {"format": FORMAT, "query_id": mark.query_id, "outputs": list(mark.outputs)}
    open_files(checkpoint).write(NAME, [json.dumps(content).encode()])
