"""The control stream: how the driver tells every shard something, inside Spark's own offset log.

Spark's file source watches `<checkpoint>/rewind/control/*.json`; a new file there becomes a row of the next
micro-batch, and the pack stage hands it to every shard. So a drain is part of the micro-batch that Spark logged: every
attempt and every re-run of it drains alike, and a query that was killed between its last data and its drain still
drains after a restart without new data (Spark's timers would not fire before new data came).

A control file (format 1): `{"format": 1, "drain": true}`.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING

from recovery.files import open_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMAT = 1
DIRECTORY = "rewind/control"
_SCHEMA = "format int, drain boolean"
_SEED = "start.json"


def prepare_control(checkpoint: str) -> None:
    """Make the directory that Spark's file source watches; it must exist before a query starts."""
    files = open_files(checkpoint)
    if _SEED not in files.list(DIRECTORY):
        files.write(f"{DIRECTORY}/{_SEED}", [json.dumps({"format": FORMAT, "drain": False}).encode()])


def ask_to_drain(checkpoint: str) -> None:
    """Ask that the next micro-batch to be planned drains; durable on return."""
    name = f"{DIRECTORY}/drain-{uuid.uuid4().hex}.json"
    open_files(checkpoint).write(name, [json.dumps({"format": FORMAT, "drain": True}).encode()])


def control_rows(spark: SparkSession, checkpoint: str) -> DataFrame:
    """Give the control stream: one row per control file, columns `format` and `drain`."""
    return (
        spark.readStream.schema(_SCHEMA)
        .option("pathGlobFilter", "*.json")
        .option("maxFileAge", "3650d")  # by default a file a week older than the newest is ignored
        .json(f"{checkpoint.rstrip('/')}/{DIRECTORY}")
    )
