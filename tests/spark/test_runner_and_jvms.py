"""The runner of the tests where a JVM hangs, and where one is killed: that module's doing, and no other's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.test_runner import OWN, Planted, last, lines

pytestmark = [pytest.mark.spark, pytest.mark.long]

SESSION = """
pytestmark = [pytest.mark.spark, pytest.mark.timeout({limit})]

@pytest.fixture(scope="session")
def spark():
    from tests.conftest import spark_environment
    from pyspark.sql import SparkSession

    os.environ.update(spark_environment())
    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "localhost")
    session = builder.getOrCreate()
    yield session
    session.stop()
"""
SOUND = "def test_it(spark):\n    tries()\n    assert spark.range(3).count() == 3\n"


def test_a_call_into_a_jvm_that_never_returns_costs_its_module_and_shows_both_stacks(tmp_path: Path) -> None:
    sleeps = (
        "def test_it(spark):\n    if not tries():\n        spark.sparkContext._jvm.java.lang.Thread.sleep(600000)\n"
    )
    planted = Planted(tmp_path, sleeps=SESSION.format(limit=20) + sleeps, sound=SESSION.format(limit=600) + SOUND)
    status, out = planted.run("--lanes", "1")

    assert status == 0, out
    assert planted.tries() == {"sleeps": 2, "sound": 1}
    assert last(out) == "2 passed in _ s, 1 unsteady"
    log = planted.log("sleeps")
    assert "HANG: tests/test_sleeps.py::test_it is over its limit of 20 s" in log
    assert "Full thread dump" in log
    assert "java.lang.Thread.sleep" in log
    assert "in test_it" in log
    assert log.index("Full thread dump") < log.index("in test_it")


def test_a_jvm_that_is_killed_costs_its_module_and_no_other(tmp_path: Path) -> None:
    killed = """
def test_it(spark):
    jvm = spark.sparkContext._jvm
    if not tries():
        os.kill(jvm.java.lang.ProcessHandle.current().pid(), signal.SIGKILL)
    assert jvm.java.lang.Math.abs(-3) == 3
"""
    planted = Planted(
        tmp_path,
        killed=SESSION.format(limit=600) + killed,
        sound=SESSION.format(limit=600) + SOUND,
        plain=OWN + "def test_it():\n    tries()\n",
    )
    status, out = planted.run()

    assert status == 0, out
    assert planted.tries() == {"killed": 2, "sound": 1, "plain": 1}
    (unsteady,) = lines(out, "UNSTEADY 1: ")
    assert unsteady.startswith("UNSTEADY 1: tests/test_killed.py (")
