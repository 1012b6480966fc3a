"""A reset that was interrupted: a mark in the checkpoint from before the first deletion until after the last one.

File `<checkpoint>/rewind/reset.json` (format 1): `{"format": 1, "query_id": id or null, "outputs": [path, ...],
"owners": {path: query}}`. While it is there the checkpoint is none, whatever else still lies in it; `rewind reset` goes
on from it. Marks of before have no owners.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
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
        owners: Which query they were of, as far as it is known.
    """

    query_id: str | None
    outputs: tuple[str, ...] = ()
    owners: Mapping[str, str] = field(default_factory=dict)


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
        return Mark(found["query_id"], tuple(found["outputs"]), dict(found.get("owners", {})))
    except FileNotFoundError:
        return None
    except UNDECODABLE:
        return Mark(None)


def write_mark(checkpoint: str, mark: Mark) -> None:
    """Write the mark; durable on return."""
    content: dict[str, object] = {"format": FORMAT, "query_id": mark.query_id, "outputs": list(mark.outputs)}
    content["owners"] = dict(mark.owners)
    open_files(checkpoint).write(NAME, [json.dumps(content).encode()])
