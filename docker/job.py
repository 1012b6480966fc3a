"""Departures per airport and hour from a Kafka topic: the job that compose.yaml submits to Spark.

Submitted again over the same checkpoint it goes on where it was; state that a lost worker took along is restored.
"""

from __future__ import annotations

import argparse
import signal
import threading

from pyspark.sql import SparkSession

from backend import count, max_, mean, median, stream, tumbling
from backend.sources.kafka import kafka
from recovery.daemon import OPTION
from recovery.inspect.displays import PrometheusListener
from recovery.listener import LoggingListener
from recovery.supervise.metrics import serve_metrics


def main() -> None:
    """Run until a signal, or to the end of the topic."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--checkpoint", required=True, help="directory that driver and executors share")
    parser.add_argument("--local-dir", required=True, help="local state of each executor's host")
    parser.add_argument("--offsets", type=int, default=20_000, help="bound on the offsets of a micro-batch")
    parser.add_argument("--metrics-port", type=int, default=0, help="0 serves no metrics")
    parser.add_argument("--until-end", action="store_true", help="end where the topic ends now")
    options = parser.parse_args()

    spark = (
        SparkSession.builder.appName("rewind-departures")
        .config("spark.sql.session.timeZone", "UTC")
        .config(*OPTION)
        .getOrCreate()
    )
    departures = kafka(
        options.topic,
        servers=options.servers,
        value="origin string, delay double, scheduled timestamp",
        max_offsets_per_trigger=options.offsets,
    )
    query = (
        stream(departures, event_time="scheduled", key="origin")
        .window(tumbling("1 hour"), retention="6 hours", max_ahead=None)
        .aggregate(flights=count(), mean=mean("delay"), worst=max_("delay"), typical=median("delay"))
        .start(
            spark,
            checkpoint=f"{options.checkpoint}/state",
            results=f"{options.checkpoint}/windows",
            errors=f"{options.checkpoint}/errors",
            local_dir=options.local_dir,
            changelog=f"kafka://{options.servers}/{options.topic}-changelog",
            route="partition",  # one shard per airport: the cheapest replay, and lateness decided message by message
            until="end" if options.until_end else None,
            listeners=(LoggingListener(), PrometheusListener()),
        )
    )
    if options.metrics_port:
        serve_metrics(query, port=options.metrics_port, address="0.0.0.0")
    stopped = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stopped.set())
    while not stopped.is_set() and not query.await_termination(1.0):
        pass
    if query.is_active:
        query.stop()
    done = query.progress
    print(f"{done.micro_batches} micro-batches, {done.restores} restores, {done.adopted} beside the query")
    spark.stop()


if __name__ == "__main__":
    main()
