"""Broken builds for the drill: loaded by every Python process whose path leads here, workers of Spark included.

Each defect replaces one function of the product while the file that `REWIND_TEST_DEFECT` names says its name; with no
such file, everything is the product's own.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from backend.store.protocol import Region, Staged
from backend.store.staging import file_digest
from recovery.restore import carry_out, planner, replay

CARRY_OUT = carry_out.CarryOut
DEFECT = Path(os.environ["REWIND_TEST_DEFECT"])


def active(name: str) -> bool:
    return DEFECT.exists() and DEFECT.read_text() == name


def defect(where: Any, function: str, name: str, broken: Any) -> None:
    sound = getattr(where, function)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (broken if active(name) else sound)(*args, **kwargs)

    setattr(where, function, chosen)


def every_staged_file(
    self: Any, pointer: Any, found: Any, here: Any, target: Any, why: str, sound: Any = CARRY_OUT._try
) -> str:
    """`for step in found.steps` became "for every file that lies there"."""
    if isinstance(found, planner.Fetch):
        return str(sound(self, pointer, found, here, target, why))
    for commit in reversed(target.staged_commits()):
        path = target.staged(commit)
        here.store.confirm(Staged(path, *file_digest(path), 0))
    return ""


def without_the_last(record: Any, sound: Any = replay.accepting) -> Any:
    """The last message of a chunk is skipped."""
    return lambda messages: sound(record)(messages)[:-1]


def any_parent(target: Any, start: Any, steps: Any) -> Any:
    """A staged file that is here is applied, whatever the database is at."""
    return (planner.Step(target, steps[target][1]),) if target in steps else None


def without_an_aggregate(history: Any, *rest: Any, sound: Any = replay.restore_shard, **options: Any) -> Any:
    """The first aggregate in the changelog is skipped."""
    keys = history.keys.to_pylist()
    first = next((at for at, key in enumerate(keys) if key[0] == Region.AGGREGATES), len(keys))
    others = pa.array([at for at in range(len(keys)) if at != first], pa.int64())
    less = replace(history, keys=history.keys.take(others), values=history.values.take(others))
    return sound(less, *rest, **options)


defect(CARRY_OUT, "_try", "ingest every staged file", every_staged_file)
defect(replay, "accepting", "skip the last replayed message", without_the_last)
defect(planner, "_path", "ignore the parent", any_parent)
defect(replay, "restore_shard", "skip a logged row", without_an_aggregate)
