"""The parent of Spark's Python workers, with everything imported that a worker of ours needs: an option of the session.

Spark forks Python workers from `pyspark.daemon`, which has imported next to nothing: each new worker imports pyspark,
pandas, pyarrow and Rewind again, for one to two seconds of a core, and Spark starts new ones for each kind of task, on
each executor, after each idle minute. Set before the session starts::

    SparkSession.builder.config("spark.python.daemon.module", "recovery.daemon")  # or .config(*recovery.daemon.OPTION)

it imports them once, and a worker has them when it is forked, in memory that all workers share. And all of them keep
what they free (`backend.allocation`), which otherwise only those do that run a task of ours. Nothing else changes: the
same manager forks the same workers, and a job without this option runs as well after it has warmed up.

Spark imports so little because threads do not survive a fork. What is imported here runs no Python thread, which is
checked, and two native ones whose libraries are made for forks: OpenBLAS (numpy) ends its threads before a fork and
starts them again when it needs them; jemalloc (pyarrow) does in the forked process what its thread would do.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import sys
import threading

OPTION = ("spark.python.daemon.module", "recovery.daemon")
"""For `SparkSession.builder.config(*OPTION)`."""

MODULES = (
    "pandas",
    "pyarrow.acero",
    "pyarrow.compute",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "pyspark.worker",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.streaming.stateful_processor_api_client",
    "pyspark.sql.streaming.stateful_processor_util",
    "pyspark.sql.worker.plan_data_source_read",
    "backend.joins.operator",
    "backend.windows.merging.kind",
    "backend.windows.operator",
    "backend.process",
    "backend.sinks.parquet",
    "backend.sources.archive_reader",
    "backend.spark.pack.pack_input",
    "backend.spark.processor",
    "backend.spark.shard_task",
    "recovery.restore.all_shards",
    "recovery.snapshots.uploads",
)
"""What the first task of a worker would import, and what that imports."""
OF_KAFKA = ("backend.sinks.kafka.sink", "backend.sources.kafka_fetch", "backend.sources.kafka_reader")
"""The same, where Kafka's client is installed."""


def preload() -> None:
    """Import what a worker of ours needs.

    Raises:
        RuntimeError: One of it runs a thread of its own by now: workers would be forked without it.
    """
    with contextlib.redirect_stdout(sys.stderr):  # Spark reads the daemon's port from its standard output
        for name in (*MODULES, *(OF_KAFKA if importlib.util.find_spec("confluent_kafka") else ())):
            importlib.import_module(name)
        from backend.allocation import reuse_memory
        from backend.sinks.tables import warm_up

        reuse_memory()
        warm_up()
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        raise RuntimeError(f"threads run before workers are forked: {', '.join(threads)}")
    gc.collect()
    gc.freeze()  # the collector would write to, and so copy, what workers share


def main() -> None:
    """Preload, then be Spark's daemon."""
    from pyspark.daemon import manager

    preload()
    manager()


if __name__ == "__main__":
    main()
