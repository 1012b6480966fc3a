"""The job of a shard as executors make it: a light module, because every Python worker imports it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from backend.batch import Operator
from recovery.attempt import ShardJob
from recovery.changelog import open_changelog
from recovery.files import open_files
from recovery.package import Snapshots

SNAPSHOTS_DIRECTORY = "rewind/snapshots"
LAUNCHES = "rewind/launches.json"
_LAUNCHES_FORMAT = 1
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def snapshots(checkpoint: str) -> Snapshots:
    """Give the packages beside a checkpoint."""
    return Snapshots(f"{checkpoint.rstrip('/')}/{SNAPSHOTS_DIRECTORY}")


def shard_job(
    local_dir: Path,
    checkpoint: str,
    changelog_uri: str,
    operator: Operator,
    message_fields: tuple[pa.Field, ...],
    retain: int,
    snapshot_every: int | None,
    query_id: str,
    shard: int,
) -> ShardJob:
    """Make the job of one shard; all but the last two arguments are the same for every shard of a query.

    Args:
        local_dir: See `place`.
        checkpoint: Where packages of restored or moved shards are.
        changelog_uri: For `open_changelog`.
        operator: The stateful operator.
        message_fields: Arrow fields of its input.
        retain: Staged files kept behind the committed version.
        snapshot_every: See `ShardJob`.
        query_id: Spark's query id.
        shard: The shard.
    """
    return ShardJob(
        query_id=query_id,
        shard=shard,
        local_dir=place(local_dir, shard),
        operator=operator,
        message_fields=message_fields,
        changelog=open_changelog(changelog_uri),
        packages=snapshots(checkpoint),
        snapshot_every=snapshot_every,
        retain=retain,
    )


def place(local_dir: Path, shard: int) -> Path:
    """Give the directory of a shard's local state on this executor.

    Args:
        local_dir: Local state of all queries on the host, where all executors that are given the same one share it.
            `$NAME` is that of the environment where this is called; of a list of directories, as Spark gives an
            executor in `SPARK_EXECUTOR_DIRS`, each shard takes one. A variable that is not set stays, and is refused
            later.
        shard: The shard.
    """

    def value(found: re.Match[str]) -> str:
        text = os.environ.get(found.group(1) or found.group(2))
        paths = text.split(os.pathsep) if text else [found.group(0)]
        return paths[shard % len(paths)]

    return Path(_VARIABLE.sub(value, str(local_dir)))


def of_launch(make: Callable[[str, int], ShardJob], launch: int, query_id: str, shard: int) -> ShardJob:
    """Make the job of one shard for the tasks of one start of the query."""
    return replace(make(query_id, shard), launch=launch)


def next_launch(checkpoint: str) -> int:
    """Count the starts of a query, restarts by the supervisor too; durable on return.

    `<checkpoint>/rewind/launches.json` (format 1): `{"format": 1, "launch": 7}`. What cannot be read counts as none:
    then a database that is ahead looks like a zombie's again, which the supervisor copes with.
    """
    files, last = open_files(checkpoint), 0
    try:
        found = json.loads(files.read(LAUNCHES))
        last = int(found["launch"]) if found["format"] == _LAUNCHES_FORMAT else 0
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        last = 0
    files.write(LAUNCHES, [json.dumps({"format": _LAUNCHES_FORMAT, "launch": last + 1}).encode()])
    return last + 1
