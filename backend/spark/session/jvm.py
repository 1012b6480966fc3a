"""Every use of what only a classic Spark session has: its context, its JVM, the gateway to it.

Spark Connect has none of them: what Rewind needs to run there is this list.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from backend.spark.session import file_manager
from recovery.supervise.placement import Place

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery


WORKER_TIME = ("spark.python.authenticate.socketTimeout", "120s")
"""For `SparkSession.builder.config(*WORKER_TIME)`."""


UNIX_SOCKETS = "spark.python.unix.domain.socket.enabled"
UNIX_SOCKETS_FOLDER = "spark.python.unix.domain.socket.dir"
LONGEST_FOLDER = 60
"""Bytes of its path: Spark adds a name of 43, and a socket's path has 107 at most."""
MOST_TASKS = 10_000
"""Of a job, which are looked at for where they ran."""
LISTEN_S = 2.0
CHECKPOINT_FILES = "spark.sql.streaming.checkpointFileManagerClass"
STATE_CHECKSUMS = ("spark.sql.streaming.checkpoint.fileChecksum.enabled", "false")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


def context_of(spark: SparkSession) -> SparkContext:
    """Return the session's context: local properties, single tasks, its configuration."""
    return spark.sparkContext


def cores(spark: SparkSession) -> int:
    """Return how many tasks Spark runs side by side by default."""
    return int(context_of(spark).defaultParallelism)


def speculates(spark: SparkSession) -> bool:
    """Return whether Spark may run a second attempt of a task beside the first."""
    return str(context_of(spark).getConf().get("spark.speculation", "false")).lower() == "true"


def give_workers_time(spark: SparkSession) -> None:
    """Let Spark wait longer for a Python worker that it started, unless the user has said how long.

    It gives a worker 15 s to connect, then fails the task or the query; on a busy host a worker imports for longer.
    What runs on a cluster's executors has their own setting, which they got at their start.
    """
    conf = context_of(spark)._jsc.sc().conf()
    if not conf.contains(WORKER_TIME[0]):
        conf.set(*WORKER_TIME)


def use_unix_sockets(spark: SparkSession) -> None:
    """Let Spark talk to its Python workers through Unix domain sockets, unless the user has said what it is to use.

    Through TCP, what one side writes in two parts waits up to 40 ms for the other's acknowledgement of the first one,
    two or three times in a micro-batch. Executors of a cluster have the setting as of their start, with folders of
    their own: there it is the user's to say (`UNIX_SOCKETS`).
    """
    conf = context_of(spark)._jsc.sc().conf()
    if not is_local(spark) or conf.contains(UNIX_SOCKETS):
        return
    folder = conf.get(UNIX_SOCKETS_FOLDER, jvm_of(spark).java.lang.System.getProperty("java.io.tmpdir"))
    if len(os.fsencode(folder)) <= LONGEST_FOLDER and os.access(folder, os.W_OK):
        conf.set(UNIX_SOCKETS, "true")


def checkpoint_files(spark: SparkSession, checkpoint: str) -> dict[str, str]:
    """Return what Spark is to write a checkpoint's files with, as settings; none where that is the user's or Spark's.

    On a local disk Spark's choice starts a process for nearly each thing that it asks of a file, `readlink` or `chmod`:
    about sixty in a micro-batch of two shards. Another of its own renames as it does and starts none for `readlink`,
    and ours (`file_manager`) none at all, where tasks run in the JVM that it was compiled in. Hadoop writes a checksum
    beside each file then, which reading checks; Spark's own beside those of the state would be second ones, by two
    files and four threads more a shard.
    """
    hadoop = context_of(spark)._jsc.hadoopConfiguration()
    scheme = checkpoint.partition(":")[0] if _URI.match(checkpoint) else _default_scheme(spark)
    if scheme != "file" or spark.conf.get(CHECKPOINT_FILES, None) is not None:
        return {}
    if hadoop.get("fs.file.impl") is not None:  # another one for local files may write no checksums
        return {CHECKPOINT_FILES: file_manager.SPARKS}
    ours = is_local(spark) and file_manager.is_defined(jvm_of(spark))
    given = [STATE_CHECKSUMS] if spark.conf.get(STATE_CHECKSUMS[0], None) is None else []
    return {CHECKPOINT_FILES: file_manager.OURS if ours else file_manager.SPARKS, **dict(given)}


def check_same_files(spark: SparkSession, checkpoint: str) -> None:
    """Refuse a path that Spark would look for on another filesystem than Rewind does: parts would lie on each.

    Raises:
        ValueError: Names the option, and both URIs that it may be.
    """
    if not _URI.match(checkpoint) and _default_scheme(spark) != "file":
        default = context_of(spark)._jsc.hadoopConfiguration().get("fs.defaultFS")
        raise ValueError(
            f"checkpoint={checkpoint!r}: Spark's default filesystem (fs.defaultFS) is {default}, and a path without a"
            f" scheme is a local one to Rewind: allowed are {str(default).rstrip('/')}{checkpoint} and"
            f" file://{checkpoint}"
        )


def is_local(spark: SparkSession) -> bool:
    """Return whether tasks run in the driver's JVM."""
    return str(context_of(spark).master).partition("[")[0] == "local"


def _default_scheme(spark: SparkSession) -> str:
    hadoop = context_of(spark)._jsc.hadoopConfiguration()
    return str(jvm_of(spark).org.apache.hadoop.fs.FileSystem.getDefaultUri(hadoop).getScheme())


def run_on_tasks(
    spark: SparkSession, items: Sequence[Any], function: Callable[[Iterable[Any]], Iterator[Any]]
) -> list[Any]:
    """Run a function over items in one Spark job, a task an item; return all that it yields. No job without items."""
    return context_of(spark).parallelize(items, len(items)).mapPartitions(function).collect() if items else []


def is_same_session(one: SparkSession, other: SparkSession) -> bool:
    """Return whether two handles are of one classic session; one of Spark Connect is none."""
    own = getattr(one, "_jsparkSession", None)
    return own is not None and bool(own.equals(getattr(other, "_jsparkSession", None)))


def own_format(spark: SparkSession, name: str) -> str:
    """Return a name for a data source that is a session's own.

    What is registered in a session is in those that are made of it (`newSession`), where no other may have the name.
    """
    return f"{name}_{spark._jsparkSession.sessionUUID().replace('-', '')}"


def cloned(spark: SparkSession) -> SparkSession:
    """Return a session with the settings, views and data sources of a classic one, and from now on its own.

    PySpark gives `RDD.toDF` to the session that was made last; it stays with the one that has it.
    """
    from pyspark import RDD
    from pyspark.sql import SparkSession

    to_dataframe = RDD.toDF
    try:
        return SparkSession(context_of(spark), spark._jsparkSession.cloneSession())
    finally:
        RDD.toDF = to_dataframe


def analyzed_plan(dataframe: DataFrame) -> Any:
    """Return the JVM's analyzed plan of a DataFrame."""
    return dataframe._jdf.queryExecution().analyzed()


def jvm_of(spark_or_context: SparkSession | SparkContext) -> Any:
    """Return the view of the JVM's packages; None where there is no JVM."""
    return getattr(spark_or_context, "_jvm", None)


def gateway() -> Any:
    """Return the gateway to the JVM of this process."""
    from pyspark import SparkContext

    return SparkContext._gateway


def pins_threads() -> bool:
    """Return whether a thread of Python has one of the JVM, whose local properties Spark gives to tasks."""
    from py4j.clientserver import ClientServer

    return isinstance(gateway(), ClientServer)


class Executors:
    """Where Spark's executors are, and which of them it prefers for a shard: `recovery.supervise.placement.Cluster`.

    Spark has no public way to any of it; its executors tell its coordinator in the same words which state they have.

    Args:
        spark: A session on a cluster: locally there are no executors.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._stores: tuple[str, list[Any]] = ("", [])

    def executors(self) -> frozenset[str]:
        """Return the ids of the executors that are there."""
        return frozenset(filter(None, self._context().getExecutorIds().mkString(",").split(",")))

    def active(self, executors: Collection[str]) -> list[Place]:
        """Return those that tasks are given to: not what is about to go."""
        found, backend = self._context().statusStore().executorList(True), self._context().schedulerBackend()
        known = [found.apply(number) for number in range(found.size())]
        hosts = {one.id(): one.hostPort().rpartition(":")[0] for one in known}
        return [Place(one, hosts[one]) for one in executors if one in hosts and backend.isExecutorActive(one)]

    def place(self, query: StreamingQuery, shard: int) -> Place | None:
        """Return where Spark prefers to run a shard, None where it prefers nothing."""
        found = self._coordinator().getLocation(self._store(query, shard))
        if found.isEmpty():
            return None
        host, _, executor = str(found.get()).removeprefix("executor_").rpartition("_")
        return Place(executor, host)

    def prefer(self, query: StreamingQuery, shard: int, old: Place, new: Place) -> None:
        """Have Spark prefer another executor for a shard, if it still prefers the old one."""
        if self.place(query, shard) == old:
            none = getattr(getattr(jvm_of(self._spark).scala.collection.immutable, "Nil$"), "MODULE$")
            self._coordinator().reportActiveInstance(self._store(query, shard), new.host, new.executor, none)

    def ran(self, group: str) -> dict[int, Place]:
        """Return where the tasks of a group's job ran that succeeded, by number, when the job has succeeded.

        Spark's listeners hear of a job a moment after its end: they are waited for, `LISTEN_S` at most.
        """
        tracker, deadline = context_of(self._spark).statusTracker(), time.monotonic() + LISTEN_S
        while time.monotonic() < deadline:
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
            if jobs and jobs[0] is not None and jobs[0].status == "SUCCEEDED":
                [stage] = jobs[0].stageIds
                found = self._context().statusStore().taskList(stage, 0, MOST_TASKS)
                tasks = [found.apply(number) for number in range(found.size())]
                done = [task for task in tasks if task.status() == "SUCCESS"]
                return {task.partitionId(): Place(task.executorId(), task.host()) for task in done}
            time.sleep(LISTEN_S / 40)
        return {}

    def _context(self) -> Any:
        return context_of(self._spark)._jsc.sc()

    def _coordinator(self) -> Any:
        return self._spark._jsparkSession.streams().stateStoreCoordinator()

    def _store(self, query: StreamingQuery, shard: int) -> Any:
        """Return Spark's name of a shard's state in a run of a query; made once."""
        if self._stores[0] != str(query.runId):
            self._stores = str(query.runId), []
        run, stores = self._stores
        if len(stores) <= shard:
            jvm = jvm_of(self._spark)
            state, folder = jvm.org.apache.spark.sql.execution.streaming.state, query._jsq.streamingQuery()
            root, run_id = f"{folder.resolvedCheckpointRoot()}/state", jvm.java.util.UUID.fromString(run)
            for number in range(len(stores), shard + 1):
                stores.append(state.StateStoreProviderId(state.StateStoreId(root, 0, number, "default"), run_id))
        return stores[shard]
