"""Load what the tests' JVMs load, then end as one should: `... train_java ARCHIVE DIRECTORY` (see quick_java)."""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession

from backend import count, mean, median, stream, tumbling
from recovery.daemon import OPTION

SCHEMA = "k string, v double, at timestamp"


def main(made: str, directory: Path) -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.extraJavaOptions", f"-XX:ArchiveClassesAtExit={made} -Xlog:cds=off -Xlog:cds+dynamic=off")
        .config("spark.driver.memory", "1g")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config(*OPTION)
        .getOrCreate()
    )
    gateway = spark.sparkContext._gateway
    rows = [(f"k{number % 3}", float(number), f"2026-01-01 00:{number % 60:02}:00") for number in range(1000)]
    frame = spark.createDataFrame(rows, "k string, v double, at string").selectExpr("k", "v", "timestamp(at) AS at")
    for _ in range(2):
        frame.coalesce(1).write.mode("append").parquet(str(directory / "in"))
    source = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(directory / "in"))
    query = (
        stream(source, event_time="at", key="k")
        .window(tumbling("10 minutes"), retention="1 hour")
        .aggregate(n=count(), mean=mean("v"), middle=median("v"))
        .start(
            spark,
            checkpoint=str(directory / "checkpoint"),
            results=str(directory / "out"),
            errors=str(directory / "errors"),
            until="end",
        )
    )
    query.await_termination()
    spark.read.parquet(str(directory / "out")).createOrReplaceTempView("out")
    frame.createOrReplaceTempView("given")
    spark.sql(
        "SELECT window_start, k, collect_list(v) AS v, max(sum(n)) OVER (PARTITION BY k ORDER BY window_start) AS n"
        " FROM out JOIN (SELECT k, v, at FROM given) USING (k) GROUP BY ALL ORDER BY 1, 2 LIMIT 5"
    ).collect()
    frame.selectExpr("to_json(struct(*)) AS value").write.text(str(directory / "json"))
    spark.read.schema(SCHEMA).json(str(directory / "json")).groupBy("k").count().toPandas()
    own = frame.sparkSession.readStream.schema(SCHEMA).parquet(str(directory / "in")).withWatermark("at", "1 minute")
    counts = own.groupBy("k", "at").count().writeStream.outputMode("append").format("parquet")
    counts.option("path", str(directory / "own")).option("checkpointLocation", str(directory / "of-own"))
    counts.trigger(availableNow=True).start().awaitTermination()
    spark.stop()
    gateway.proc.stdin.close()  # at which the JVM ends
    gateway.proc.wait()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
