"""What Spark says to a task about the micro-batch that it belongs to."""

from __future__ import annotations

import json

from pyspark import TaskContext

from backend.errors import RewindError
from recovery.files import open_files


def query_and_version() -> tuple[str, int]:
    """Return Spark's query id and the version (Spark's batch id) of the task's micro-batch.

    Raises:
        RewindError: Called outside a task of a streaming query.
    """
    context = TaskContext.get()
    if context is None:
        raise RewindError("the stateful operator was called outside a task")
    query_id = context.getLocalProperty("sql.streaming.queryId")
    version = context.getLocalProperty("streaming.sql.batchId")
    if query_id is None or version is None:
        raise RewindError("the task does not say which query and micro-batch it belongs to")
    return query_id, int(version)


def batch_time(checkpoint: str) -> int:
    """Return the batch time of the task's micro-batch, milliseconds, as Spark logged it when it was planned.

    Spark writes its log before any task runs, and a micro-batch that runs again has the same time.

    Args:
        checkpoint: Spark's checkpoint location.
    """
    _, version = query_and_version()
    logged = open_files(checkpoint).read(f"offsets/{version}").decode().splitlines()[1]
    return int(json.loads(logged)["batchTimestampMs"])
