"""See that a Spark session has the Kafka connector; a running session gets it too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.spark.session import jars
from backend.spark.session.jvm import jvm_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def ensure_connector(spark: SparkSession) -> None:
    """Load Spark's Kafka connector unless the session has it: from `spark.jars`, `--packages`, or the class path.

    Called in each thread that opens a Kafka source: Spark finds data sources with the class loader of the calling
    thread, and `ADD JAR` sets it. Executors fetch the jars from the driver.

    Raises:
        JarsUnavailable: The jars cannot be had.
    """
    wanted = jars.connector(spark.version)
    if not _loaded(spark, wanted.marker):
        for path in jars.resolve(wanted):
            spark.sql(f"ADD JAR '{path}'").collect()


def _loaded(spark: SparkSession, name: str) -> bool:
    """Tell whether the calling thread's class loader has a class; a session without a JVM brings its own jars."""
    from py4j.protocol import Py4JJavaError

    jvm = jvm_of(spark)
    if jvm is None:
        return True
    try:
        jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(name)
    except Py4JJavaError:
        return False
    return True
