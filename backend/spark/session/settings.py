"""The Spark settings that Rewind needs: a session of its own to read with, the user's while a query is started.

A session's settings are one for all its threads. What only reads gets a clone of the session (`apart`). A query has to
be started in the user's own, which lists it and tells its listeners of it: one start at a time changes the settings,
and puts them back; two that overlap would start one query with half of the other's, and leave the rest behind.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from backend.spark.session.jvm import checkpoint_files, cloned
from recovery.commit.option_sets import newest_in
from recovery.files import open_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from backend.spark.job import Job

log = logging.getLogger("rewind.start")

ARROW_BYTES = 32 * 1024 * 1024
"""Bound on an Arrow batch, beside the one on its rows: a worker takes some times as much memory, however large the
messages are."""
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_UNCHECKED = {
    f"spark.sql.shuffle.orderIndependentChecksum.{name}": "false" for name in ("enabled", "enableFullRetryOnMismatch")
}
"""A map task that runs again may cut frames elsewhere: other bytes, from which a shard makes the same messages."""

_UNLESS_SET = {
    # each version of a shard's row has its changelog; a copy of RocksDB beside them, in every tenth micro-batch, costs
    # it some 15 ms, and spares a load the replay of at most 40 small files
    "spark.sql.streaming.stateStore.minDeltasForSnapshot": "50",
}
_CHANGELOG = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"
MOST_DELTAS = 600
"""Versions of a shard's row behind Spark's newest copy of its RocksDB. Its changelog's files name all of them, in a
text of 64 KB, which ends at 864: from then on the state can not be written to again. A query that runs makes a copy
each minute; what ends before, or can not send its copies, comes closer with each micro-batch."""
MOST_DELTAS_OF_SHORT = 200
"""The same where a query ends by itself: it may be over before a minute, the next one too."""
_COPY = re.compile(r"(\d+)_.*\.zip")
_LOOKS = 16
"""Shards that are looked at side by side."""
SESSION = {"timezone": "spark.sql.session.timeZone", "ansi": "spark.sql.ansi.enabled"}
"""Settings that messages are read under, by their name in the manifest: a query and its replays go by those of its
start, whatever the user's session is set to by then."""
_AS_IT_IS: Mapping[str, str] = MappingProxyType({})

_ONE_START = threading.RLock()


def session_entries(spark: SparkSession) -> dict[str, str]:
    """Return what messages are read under in the user's session, by the names in `SESSION`: the manifest's entries."""
    with _ONE_START:  # what another start has set is not the user's
        return {name: str(spark.conf.get(setting)) for name, setting in SESSION.items()}


def apart(
    spark: SparkSession,
    shards: int,
    arrow_rows: int,
    checkpoint: str | None = None,
    session: Mapping[str, str] = _AS_IT_IS,
) -> SparkSession:
    """Return a clone of a session, with what a read of state or of a source needs; the given one keeps its settings.

    Args:
        spark: The session.
        shards: Number of shuffle partitions.
        arrow_rows: Rows of an Arrow batch.
        checkpoint: Spark's checkpoint location, to read its state: as a query of ours writes it.
        session: What messages are read under, by the names in `SESSION`.
    """
    with _ONE_START:
        clone = cloned(spark)
        files = checkpoint_files(spark, checkpoint) if checkpoint is not None else {}
    for name, value in (_wanted(shards, arrow_rows, session) | files).items():
        clone.conf.set(name, value)
    return clone


@contextmanager
def settings(
    spark: SparkSession, job: Job, arrow_rows: int, checkpoint: str, *, copied: bool = False
) -> Iterator[None]:
    """Set what a query needs while it is started; Spark clones the session then, so the user's is put back after.

    Args:
        spark: The session.
        job: What is started.
        arrow_rows: Rows of an Arrow batch.
        checkpoint: Spark's checkpoint location.
        copied: Spark copies its RocksDB in each micro-batch, instead of writing a changelog: see `is_copied`.
    """
    with _ONE_START:  # what another start has set is not the user's
        wanted = _wanted(job.shards, arrow_rows, job.session) | checkpoint_files(spark, checkpoint)
        wanted |= {name: value for name, value in _UNLESS_SET.items() if spark.conf.get(name, None) is None}
        if copied:
            wanted[_CHANGELOG] = "false"
        if job.direct:
            # The JVM sees packed rows only. Code generated for them costs more than it saves: Spark writes it anew for
            # each task and micro-batch (measured: 50 ms of planning and 100 ms in all per micro-batch).
            wanted |= {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
        if job.ranked:  # Spark's check of shuffles stays: a DataFrame's plan may not be deterministic
            wanted = {name: value for name, value in wanted.items() if name not in _UNCHECKED}
        before = {name: spark.conf.get(name, None) for name in wanted}
        try:
            for name, value in wanted.items():
                spark.conf.set(name, value)
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    spark.conf.unset(name)
                else:
                    spark.conf.set(name, value)


def is_copied(checkpoint: str, shards: int, *, ends: bool) -> bool:
    """Return whether a query has to copy Spark's RocksDB in each micro-batch, as the newest copy of a shard is too old.

    Args:
        checkpoint: Spark's checkpoint location.
        shards: Number of shards.
        ends: The query ends by itself.
    """
    most = MOST_DELTAS_OF_SHORT if ends else MOST_DELTAS
    version = newest_in(checkpoint, "commits") + 1  # of the state; the log has the one before
    if version <= most:
        return False
    files = open_files(checkpoint)

    def newest(shard: int) -> int:
        names = (_COPY.fullmatch(name) for name in files.list(f"state/0/{shard}"))
        return max((int(found[1]) for found in names if found is not None), default=0)

    with ThreadPoolExecutor(_LOOKS) as pool:
        behind = version - min(pool.map(newest, range(shards)))
    if behind > most:
        log.info("Spark copies its RocksDB in each micro-batch: its newest copy is %d versions old", behind)
    return behind > most


def _wanted(shards: int, arrow_rows: int, session: Mapping[str, str]) -> dict[str, str]:
    return {
        "spark.sql.shuffle.partitions": str(shards),
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        # unique ids of the committed state in commits/: under format 1 a zombie can overwrite it
        "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
        _CHANGELOG: "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(arrow_rows),
        "spark.sql.execution.arrow.maxBytesPerBatch": str(ARROW_BYTES),
        "spark.sql.execution.arrow.transformWithStateInPandas.maxRecordsPerBatch": "64",
        # what parses, hashes and joins columns takes them for binary and string; so bounded, they need no more
        "spark.sql.execution.arrow.useLargeVarTypes": "false",
        # windows of idle sources close, and until="end" ends, in micro-batches without data
        "spark.sql.streaming.noDataMicroBatches.enabled": "true",
        **_UNCHECKED,
        # Spark gives this to Python workers of its sources and not to those of its stateful operator: two daemons
        "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
        **{SESSION[name]: value for name, value in session.items()},
    }
