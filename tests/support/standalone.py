"""A Spark standalone master and two workers, each a process of its own; the workers may call themselves differently.

Spark starts no second copy of a task on a host that runs one, and tells hosts by their names: two names of this one are
two hosts to it. Each executor has a disk of its own below `disks` (`SPARK_EXECUTOR_DIRS`).
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyspark

from recovery.demo.session import WORKERS
from recovery.drill.process import Runner, environment, executors, kill
from tests.support.waiting import until

SPARK_HOME = Path(pyspark.__file__).parent
TWO_NAMES = ("localhost", "127.0.0.1")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """A master and two workers with a core each.

    Args:
        path: Logs, work directories and disks come here.
        hosts: What the workers call themselves.
        memory: Of a worker.
        env: Beside this process's environment; executors inherit it.
    """

    def __init__(
        self,
        path: Path,
        hosts: tuple[str, str] = ("127.0.0.1", "127.0.0.1"),
        memory: str = "700m",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self.hosts, self.memory = path, hosts, memory
        self.disks = path / "hosts"
        self.environment = {
            **environment(WORKERS),
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_HOSTNAME": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(self.disks),
            "SPARK_MASTER_OPTS": "-Dspark.deploy.maxExecutorRetries=-1",
            "TZ": "UTC",
            **(env or {}),
        }
        self.url = f"spark://127.0.0.1:{free_port()}"
        self.started: list[subprocess.Popen[bytes]] = []
        self.master = self._start("master.Master", "127.0.0.1", "--port", self.url.rpartition(":")[2])
        self.workers = [self._worker(number) for number in (0, 1)]

    def _worker(self, number: int) -> subprocess.Popen[bytes]:
        place = ("--cores", "1", "--memory", self.memory, "--work-dir", str(self.path / f"work-{number + 1}"))
        return self._start("worker.Worker", self.hosts[number], *place, self.url)

    def _start(self, kind: str, host: str, *options: str) -> subprocess.Popen[bytes]:
        name = f"{kind.partition('.')[0]}-{len(self.started)}"
        command = [SPARK_HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{kind}", "--host", host]
        with (self.path / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--webui-port", "0", *options], stdout=log, stderr=log, env=self.environment
            )
        self.started.append(process)
        return process

    def submit(self, script: Path, conf: Mapping[str, str], *options: str) -> subprocess.Popen[bytes]:
        """Start a driver with executors of one core each; its log is `job.log`."""
        wanted = {
            "spark.driver.memory": "700m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.extraJavaOptions": "-Duser.timezone=UTC",
            "spark.executor.memory": "600m",
            "spark.executor.cores": "1",
            "spark.executor.extraJavaOptions": "-Duser.timezone=UTC",
            "spark.ui.enabled": "false",
            "spark.log.level": "ERROR",
            **conf,
        }
        settings = [word for name, value in wanted.items() for word in ("--conf", f"{name}={value}")]
        command = [SPARK_HOME / "bin" / "spark-submit", "--master", self.url, *settings, script, *options]
        with (self.path / "job.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)
        self.started.append(process)
        return process

    def replace(self, number: int) -> None:
        """Kill a worker with its executor, as when its host dies, and start another one of its name."""
        kill(self.workers[number].pid)
        self.workers[number].wait()
        self.workers[number] = self._worker(number)

    def family(self, number: int | None = None) -> list[psutil.Process]:
        """Give the executors, with all that they started; of one worker or of both."""
        found = []
        for worker in self.workers if number is None else [self.workers[number]]:
            with suppress(psutil.NoSuchProcess):
                found += psutil.Process(worker.pid).children(recursive=True)
        return found

    def executors(self) -> dict[str, psutil.Process]:
        """Give the executors by the disk that each has."""
        return executors(self.family())

    def both(self) -> None:
        """Wait until each worker has an executor.

        Raises:
            WaitedTooLong: One has none.
        """
        until(lambda: all(executors(self.family(number)) for number in range(len(self.workers))), what="executors")

    def close(self) -> None:
        """End all that was started."""
        for process in reversed(self.started):
            kill(process.pid)
            process.wait()


class OnCluster(Runner):
    """A driver process whose executors are those of a cluster."""

    def __init__(self, cluster: Cluster, *arguments: Any) -> None:
        self.cluster = cluster
        super().__init__(*arguments)

    def family(self) -> list[psutil.Process]:
        """Give the driver and the executors."""
        return [*super().family(), *self.cluster.family()]
