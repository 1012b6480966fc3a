"""Seals: what was decided of each shard in a micro-batch that may have been published.

A micro-batch that runs again must make the same rows. A shard that queued it made none, one that adopted made those of
its queue too. So where a shard did either, that is written down after the tasks ran and before a sink brings anything
out; a start hands it to the tasks of the micro-batch that Spark has planned and not committed. No seal: no shard did,
or nothing of the micro-batch is out. One that says of a micro-batch which ran again that no shard did outlives the seal
that a driver before, which stood still, writes too late.

`<checkpoint>/rewind/seals/<version>-<incarnation>.json` (format 1): `{"format": 1, "shards": {"3": "queued"}}`; of a
version the newest incarnation's counts, so a driver that was replaced overwrites nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from backend.errors import UNDECODABLE, ControlDamaged
from recovery.files import open_files

FORMAT = 1
DIRECTORY = "rewind/seals"
DECISION = "decision"
"""Name among a shard's metrics."""
_NAME = re.compile(r"(\d+)-(\d+)\.json")


class Decision(Enum):
    """What a task did with its micro-batch, other than run it."""

    QUEUED = "queued"
    ADOPTED = "adopted"


def decisions_in(rows: Iterable[Mapping[str, Any]]) -> dict[int, Decision]:
    """Return what tasks decided, out of what they reported: rows with `shard` and `metrics` (JSON, or None)."""
    found = {}
    for row in rows:
        decision = json.loads(row["metrics"] or "{}").get(DECISION)
        if decision is not None:
            found[int(row["shard"])] = Decision(decision)
    return found


def write_seal(checkpoint: str, version: int, incarnation: int, decided: Mapping[int, Decision]) -> None:
    """Write what was decided in a micro-batch; durable on return."""
    content = {"format": FORMAT, "shards": {str(shard): one.value for shard, one in sorted(decided.items())}}
    name = f"{DIRECTORY}/{version}-{incarnation}.json"
    open_files(checkpoint).write(name, [json.dumps(content).encode()])


def read_seal(checkpoint: str, version: int) -> dict[int, Decision]:
    """Read what was decided in a micro-batch; empty when nothing binds it.

    Raises:
        ControlDamaged: It cannot be read.
    """
    files = open_files(checkpoint)
    newest = max((one for one in _seals(checkpoint) if one[0] == version), default=None)
    if newest is None:
        return {}
    name = f"{DIRECTORY}/{newest[0]}-{newest[1]}.json"
    try:
        content = json.loads(files.read(name))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, this release reads {FORMAT}")
        return {int(shard): Decision(one) for shard, one in content["shards"].items()}
    except UNDECODABLE as error:
        raise ControlDamaged(
            "what was decided in a micro-batch cannot be read",
            where=f"{files.uri}/{name}",
            why=str(error),
            command="put the file back, or install the release that wrote it",
        ) from error


def prune_seals(checkpoint: str, oldest: int, planned: int | None = None) -> None:
    """Delete seals that bind nothing any more.

    Args:
        checkpoint: Spark's checkpoint location.
        oldest: Seals of older versions go: Spark cannot run them again.
        planned: At a start, seals of newer versions go, too: they were taken back, and will be other micro-batches.
            Beside a running query none is too new.
    """
    gone = [one for one in _seals(checkpoint) if one[0] < oldest or (planned is not None and one[0] > planned)]
    open_files(checkpoint).delete(f"{DIRECTORY}/{version}-{incarnation}.json" for version, incarnation in gone)


def _seals(checkpoint: str) -> list[tuple[int, int]]:
    found = [_NAME.fullmatch(name) for name in open_files(checkpoint).list(DIRECTORY)]
    return [(int(one[1]), int(one[2])) for one in found if one is not None]
