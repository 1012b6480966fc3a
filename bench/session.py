"""The Spark session of the benchmarks: this interpreter's workers, UTC, quiet; and Spark's own state store as compared.

`CLUSTER` is two executors, each a process with a core and a disk of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from backend.sources.spark_offsets import positions_in
from backend.spark.session.file_manager import SPARKS
from backend.spark.session.jvm import CHECKPOINT_FILES, checkpoint_files
from recovery.daemon import OPTION
from recovery.failures import Kind, read

Result = TypeVar("Result")
ROOT = Path(__file__).resolve().parent.parent
LOCAL, CLUSTER = "local[2]", "local-cluster[2,1,1024]"
TRIES = 3
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


@contextmanager
def session(master: str = LOCAL, *, memory: str = "2g", conf: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Start Spark, and stop it at the end; within another session give that one.

    Raises:
        RuntimeError: The other one is of another kind.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        if running.sparkContext.master != master:
            raise RuntimeError(f"{master} is asked for while {running.sparkContext.master} runs")
        yield running
        return
    builder = (
        SparkSession.builder.master(master)
        .config("spark.driver.memory", memory)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .config(*OPTION)
    )
    for name, value in (conf or {}).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def steadily(run: Callable[[Path], Result], directory: Path) -> Result:
    """Run a query that has no supervisor into a directory; again from nothing where a Python worker came up too late.

    Spark waits for ten seconds, which a busy machine may need. Any other failure is raised.
    """
    for _ in range(TRIES - 1):
        try:
            return run(directory)
        except Exception as error:
            if read(error).kind is not Kind.PASSES:
                raise
            print(f"once more, Spark said: {str(error).splitlines()[0]}", flush=True)
            shutil.rmtree(directory, ignore_errors=True)
    return run(directory)


def has_messages(progress: Any) -> bool:
    """Return whether a micro-batch had messages: ours counts them itself; else whether a source of ours moved on.

    Of Spark's sources the rows are counted. What reads in the Python workers gives few rows, and the source that
    carries requests to drain gives one of its own.
    """
    ours = progress["observedMetrics"].get("rewind")
    if ours is not None:
        return bool(ours["rows"])
    read = (positions_in(source["endOffset"]) != positions_in(source["startOffset"]) for source in progress["sources"])
    return any(read) or progress["numInputRows"] > 1


def sparks_own(spark: Any, *, partitions: int = 2, changelog: bool = True, files: str = SPARKS) -> Any:
    """Give a session for Spark's own queries, with its RocksDB store: what is set there is not for ours.

    Its checkpoint's files are written as fast as Spark can by itself: what nobody has who does not run Rewind, the
    class that ours are written with, is given by name where it is compared.
    """
    own = spark.newSession()
    settings = {
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true" if changelog else "false",
        "spark.sql.shuffle.partitions": str(partitions),
        **checkpoint_files(own, "file:/"),
        CHECKPOINT_FILES: files,
    }
    for name, value in settings.items():
        own.conf.set(name, value)
    return own


def size(path: Path, *suffixes: str) -> int:
    """Give the bytes of all files below a directory, of those with one of the suffixes when any is given."""
    total = 0
    for file in path.rglob("*"):
        with suppress(FileNotFoundError):  # Spark's stores tidy up behind a query that has ended
            if file.is_file() and not file.is_symlink() and (not suffixes or file.suffix in suffixes):
                total += file.stat().st_size
    return total
