"""A micro-batch's figures in Spark's own progress: `observedMetrics["rewind"]` in a query's progress and to listeners.

Every shard's task sends its figures with its output; Spark sums them up as observed metrics on the way to the sink, so
a `StreamingQueryListener` gets them without a job of its own. Per shard they are in `RewindQuery.progress.last`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NAME = "rewind"
_PARSED = "figures"
SUMS = (
    "received",
    "rows",
    "results",
    "results_late",
    "errors",
    "errors_in_future",
    "leaps",
    "opened",
    "windows_open",
    "messages_stored",
    "staged_bytes",
    "logged_bytes",
    "message_log_bytes",
    "uploaded_bytes",
    "fetched_bytes",
)
"""Over all shards: messages that came and messages folded; rows emitted, and of them by late updates; errors, and of
them event times too far ahead; messages that moved a watermark by more than `max_ahead`; windows begun (of hopping
windows the panes), windows open after it (of hopping windows the windows; a window that several shards have counts in
each), messages in the store, bytes."""
LONGEST = ("open_ms", "ingest_ms", "operate_ms", "stage_ms", "changelog_ms", "upload_ms", "settle_ms")
"""Milliseconds of each step on the shard that took longest for it; ingesting the parent is a part of opening, to settle
is to wait for a compaction."""


def observed(states: DataFrame) -> DataFrame:
    """Let Spark observe the figures in the column `metrics`; null where no shard has one of that name.

    The text is parsed once a row, in a column of its own: within each figure it would be parsed, and a parser be made,
    22 times in each task.
    """
    from pyspark.sql import functions as f

    schema = ", ".join([*(f"{name} bigint" for name in SUMS), *(f"{name} double" for name in LONGEST)])
    parsed = f.col(_PARSED)
    sums = [f.sum(parsed.getField(name)).alias(name) for name in SUMS]
    longest = [f.max(parsed.getField(name)).alias(name) for name in LONGEST]
    return states.withColumn(_PARSED, f.from_json("metrics", schema)).observe(NAME, *sums, *longest).drop(_PARSED)
