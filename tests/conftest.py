"""What the tests share: one local Spark per run, and a directory that Spark's leftovers go to."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["recovery.testing", "tests.runner.hangs"]
pytest.register_assert_rewrite("tests.contracts")

# Hypothesis: in `make test` the same examples each time, so that a red run is a change's doing and can be repeated;
# `HYPOTHESIS_PROFILE=fresh` takes new ones, `nightly` (`make torture`) hunts with many.
_QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
settings.register_profile("default", deadline=None, max_examples=75, derandomize=True, suppress_health_check=_QUIET)
settings.register_profile("fresh", deadline=None, suppress_health_check=_QUIET)
settings.register_profile("nightly", deadline=None, max_examples=5000, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure() -> None:
    """End by SIGTERM as by Ctrl-C: fixtures end their brokers, JVMs and processes; and let JVMs start quickly."""
    from tests.support import quick_java  # not before pytest has looked at the plugins that it imports

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.update(quick_java.environment())


def spark_environment() -> dict[str, str]:
    """Give the environment in which a Python worker finds this interpreter and this checkout."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "TZ": "UTC",
    }


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Start Spark once for all tests that ask for it: `local[2]`, UTC, no UI, nothing left behind."""
    from pyspark.sql import SparkSession

    from backend.spark.session.jvm import UNIX_SOCKETS_FOLDER, WORKER_TIME
    from recovery.daemon import OPTION

    os.environ.update(spark_environment())
    scratch = tmp_path_factory.mktemp("spark")
    sockets = tempfile.mkdtemp(prefix="rewind-", dir="/tmp")  # the path of a socket is short, that of a test is not
    builder = (
        SparkSession.builder.master("local[2]")
        .appName("rewind-tests")
        .config("spark.driver.memory", "1g")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "localhost")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", f"-Duser.timezone=UTC -Dderby.system.home={scratch}")
        .config(*WORKER_TIME)
        .config(UNIX_SOCKETS_FOLDER, sockets)
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .config(*OPTION)
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
        .config("spark.local.dir", str(scratch / "local"))
        # lost shuffle files take the only executor's block manager off Spark's list; a local session cannot register it
        # again, each heartbeat fails, and after 60 of them, ten minutes later, the JVM would exit (status 56)
        .config("spark.executor.heartbeat.maxFailures", "1000000")
    )
    session = builder.getOrCreate()
    yield session
    for query in session.streams.active:
        query.stop()
    session.stop()
    shutil.rmtree(sockets, ignore_errors=True)
