"""One run of a job on a secured cluster, a process of its own: source, changelog and sink take their secrets from the
environment. It says much more than a job should: Spark logs at INFO and writes an event log."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from backend import count, kafka, kafka_sink, median, stream, sum_, tumbling

LOGGING = """rootLogger.level = info
rootLogger.appenderRef.out.ref = out
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
logger.python.name = org.apache.spark.api.python.PythonGatewayServer
logger.python.level = info
logger.kafka.name = org.apache.kafka
logger.kafka.level = info
"""
"""PySpark's gateway counts as a shell: unless its own logger says otherwise it raises the root's level to WARN."""


def main() -> None:
    servers, topic, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    (out / "events").mkdir(exist_ok=True)
    (out / "log4j2.properties").write_text(LOGGING)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.memory", "900m")
        .config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile=file:{out / 'log4j2.properties'}")
        .config("spark.driver.host", "localhost")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.dir", str(out / "events"))
        .config("spark.eventLog.compress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(out / "warehouse"))
        .config("spark.local.dir", str(out / "spark"))
        .getOrCreate()
    )
    query = (
        stream(
            kafka(
                topic,
                servers=servers,
                value="at bigint, who string, n int",
                max_offsets_per_trigger=150,
                reader=os.environ["READER"],
            ),
            event_time="at",
            key="who",
        )
        .window(tumbling("1 minute"), retention="1 hour", max_ahead=None)
        .aggregate(count=count(), total=sum_("n"), middle=median("n"))
        .start(
            spark,
            checkpoint=out / "checkpoint",
            sink=kafka_sink(f"{topic}-windows", f"{topic}-errors", servers=servers, key="who"),
            local_dir=out / "local",
            changelog=f"kafka://{servers}/{topic}-changelog",
            shards=2,
            trigger="0 seconds",
            until="end",
        )
    )
    query.await_termination(200)
    print(query.query.lastProgress.json if query.query.lastProgress else "", repr(query.query.explain(True)))
    print(f"restores: {query.progress.restores}")
    spark.stop()


if __name__ == "__main__":
    main()
