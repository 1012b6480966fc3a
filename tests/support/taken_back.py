"""A checkpoint as a driver leaves it that dies while a planned micro-batch runs."""

from __future__ import annotations

from pathlib import Path


def newest_commit(checkpoint: Path) -> int:
    """Return the newest micro-batch that Spark has committed."""
    return max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))


def take_back(checkpoint: Path, planned: int) -> None:
    """Take back Spark's commit of a micro-batch, and everything after it: it is planned, and runs again."""
    for folder, newest in (("offsets", planned), ("commits", planned - 1)):
        for path in (checkpoint / folder).glob("[0-9]*"):
            if int(path.name) > newest:
                path.unlink()
                path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
