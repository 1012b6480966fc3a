"""The Spark session of the benchmarks: this interpreter's workers, UTC, quiet; and Spark's own state store as compared.

`CLUSTER` is two executors, each a process with a core and a disk of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCAL, CLUSTER = "local[2]", "local-cluster[2,1,1024]"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


@contextmanager
def session(master: str = LOCAL, *, memory: str = "2g", conf: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Start Spark, and stop it at the end."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    from pyspark.sql import SparkSession

    builder = (
        SparkSession.builder.master(master)
        .config("spark.driver.memory", memory)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
    )
    for name, value in (conf or {}).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def sparks_own_store(spark: Any, *, partitions: int = 2, changelog: bool = True) -> None:
    """Let queries that start from now on use Spark's RocksDB store."""
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    spark.conf.set(
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true" if changelog else "false"
    )
    spark.conf.set("spark.sql.shuffle.partitions", str(partitions))


def size(path: Path, *suffixes: str) -> int:
    """Give the bytes of all files below a directory, of those with one of the suffixes when any is given."""
    files = [f for f in path.rglob("*") if f.is_file() and not f.is_symlink()]
    return sum(f.stat().st_size for f in files if not suffixes or f.suffix in suffixes)
