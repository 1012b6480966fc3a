"""The Spark settings that Rewind needs, set only while a query or a read is being made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ARROW_BYTES = 32 * 1024 * 1024
"""Bound on an Arrow batch, beside the one on its rows: a worker takes some times as much memory, however large the
messages are."""
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


@contextmanager
def settings(spark: SparkSession, shards: int, arrow_rows: int, *, few_rows: bool = False) -> Iterator[None]:
    """Set what a query needs while it is started; Spark clones the session then, so the user's is put back after.

    Args:
        spark: The session.
        shards: Number of shuffle partitions.
        arrow_rows: Rows of an Arrow batch.
        few_rows: The JVM sees packed rows only. Code generated for them costs more than it saves: Spark writes it anew
            for each task and micro-batch (measured: 50 ms of planning and 100 ms in all per micro-batch).
    """
    wanted = {
        "spark.sql.shuffle.partitions": str(shards),
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        # unique ids of the committed state in commits/: under format 1 a zombie can overwrite it
        "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(arrow_rows),
        "spark.sql.execution.arrow.maxBytesPerBatch": str(ARROW_BYTES),
        "spark.sql.execution.arrow.transformWithStateInPandas.maxRecordsPerBatch": "64",
        "spark.sql.session.timeZone": spark.conf.get("spark.sql.session.timeZone"),
    }
    if few_rows:
        wanted |= {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
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
