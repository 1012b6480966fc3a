"""From a message to its result: `python -m bench.latency [--quick] [--seconds N]`.

1,000 messages a second into a Kafka topic of two partitions, steadily; ten keys, tumbling windows of one second by
event time, which is the moment of sending. Latency is from a window's end (its last message was sent then) until its
row can be read: our sink's directory has its name, Spark's file sink has logged the file, a consumer of the topic of
results has it. Ours runs with its default trigger, one second, and with `trigger="0 seconds"`, which is back to back
as Spark's own. Spark's windows close by a watermark without delay, ours at the first message behind the end. Spark's
update mode sends a window again and again; its last row counts, which has all messages, though nothing says that it is
the last. The session is warmed up until the JVM's compilers have settled (`bench/warm.py`); then what runs back to back
does so in turn, twice. A query's first micro-batches are left out. Who sends and who reads are processes of their own.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from backend import count, kafka, kafka_sink, policies, stream, sum_, tumbling
from backend.spark.session.connector import ensure_connector
from backend.spark.session.file_manager import OURS, SPARKS
from bench.session import has_messages, session, sparks_own
from bench.table import Options, report
from bench.warm import ROUNDS, Warm
from recovery.testing.broker import Broker, open_broker

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Event

APART = multiprocessing.get_context("spawn")
PER_SECOND, KEYS = 1_000, 10
WARM_UP = 20
"""Micro-batches with messages, at the start of a query, that are not measured; no more than seconds that are."""


def make_topic(broker: Broker, what: str) -> str:
    """Make a topic of two partitions; return its name."""
    from confluent_kafka.admin import AdminClient, NewTopic

    topic = f"latency-{what}-{uuid.uuid4().hex[:8]}"
    admin = AdminClient(broker.settings.for_client())
    for made in admin.create_topics([NewTopic(topic, 2, 1)]).values():
        made.result()
    return topic


def send(client: dict[str, Any], topic: str, ended: Event) -> None:
    """Send ten messages every ten milliseconds until told to stop; runs in a process of its own."""
    from confluent_kafka import Producer

    producer = Producer({**client, "linger.ms": 2})
    number, began = 0, time.time()
    while not ended.is_set() and parent_lives():
        for _ in range(PER_SECOND // 100):
            text = f'{{"key":"k{number % KEYS}","x":{number % 7},"at":{int(time.time() * 1000)}}}'
            producer.produce(topic, text.encode(), partition=number % 2)
            number += 1
        producer.poll(0)
        time.sleep(max(0.0, began + number / PER_SECOND - time.time()))
    producer.flush(30)


def read(client: dict[str, Any], topic: str, ended: Event, told: Connection) -> None:
    """Read a topic of results, as far as they are committed, until told to stop; runs in a process of its own.

    Tells when it begins, and (window end in milliseconds, key) -> when its last row came, milliseconds.
    """
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    own = {"group.id": topic, "isolation.level": "read_committed", "fetch.wait.max.ms": 5}
    consumer = Consumer({**client, **own})
    partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
    told.send("began")
    seen: dict[tuple[int, str], float] = {}
    while not ended.is_set() and parent_lives():
        for message in consumer.consume(100, timeout=0.02):
            if message.error() is None:
                row = json.loads(message.value())
                seen[row["window_end"], row["key"]] = time.time() * 1000
    consumer.close()
    told.send(seen)


def parent_lives() -> bool:
    """Tell whether the benchmark still runs."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()


class Sender:
    """Sends messages steadily until told to stop, apart from the driver: neither waits for the other's interpreter."""

    def __init__(self, broker: Broker) -> None:
        self.topic, self._ended = make_topic(broker, "messages"), APART.Event()
        given = (broker.settings.for_client(), self.topic, self._ended)
        self._process = APART.Process(target=send, args=given, daemon=True)
        self._process.start()

    def check(self) -> None:
        """Check that it sends."""
        if not self._process.is_alive():
            raise RuntimeError("the process that sends has ended")

    def stop(self) -> None:
        """Stop, and wait for the end."""
        self._ended.set()
        self._process.join()


class Reader:
    """Reads a topic of results, as far as they are committed, until told to stop; apart from the driver, too."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self._ended = APART.Event()
        self._told, told = APART.Pipe(duplex=False)
        given = (broker.settings.for_client(), topic, self._ended, told)
        self._process = APART.Process(target=read, args=given, daemon=True)
        self._process.start()
        told.close()  # the reader's own is left: if it dies, nobody waits for it
        self._told.recv()

    def late(self, began: float) -> list[float]:
        """Stop, and give the milliseconds from the ends of windows that ended later than `began`."""
        self._ended.set()
        seen: dict[tuple[int, str], float] = self._told.recv()
        self._process.join()
        # the last seconds' windows may have had no last row yet
        newest = max((end for end, _ in seen), default=0)
        return [at - end for (end, _), at in seen.items() if began < end <= newest - 2_000]


def measure(query: Any, seconds: int) -> float:
    """Let a query run for so many seconds, and for a few micro-batches before; give when these ended, milliseconds."""
    deadline = time.monotonic() + 180
    while sum(has_messages(p) for p in query.recentProgress) < min(WARM_UP, seconds):
        if query.exception() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the query does not run: {query.exception()}")
        time.sleep(0.1)
    began = time.time() * 1000
    time.sleep(seconds)
    return began


def job(broker: Broker, topic: str) -> Any:
    """Give our job."""
    source = kafka(topic, servers=broker.settings.servers, value="key string, x long, at long", starting="latest")
    return (
        stream(source, event_time="at", key="key")
        .window(tumbling("1 second"), retention="10 seconds", policies=policies(late="off"))
        .aggregate(n=count(), total=sum_("x"))
    )


def ours(spark: Any, broker: Broker, topic: str, run: Path, seconds: int, trigger: str = "1 second") -> list[float]:
    """Run our job; give the milliseconds from the end of each window until its row was readable."""
    query = job(broker, topic).start(
        spark, checkpoint=run / "checkpoint", results=run / "results", errors=run / "errors", shards=2,
        local_dir=run / "local", trigger=trigger,
    )  # fmt: skip
    began = measure(query.query, seconds)
    query.stop()
    found = []
    for directory in (run / "results").glob("batch=*"):
        readable = directory.stat().st_ctime * 1000  # of its last change: when it got its name
        for file in directory.glob("*.parquet"):
            ends = pq.read_table(file, columns=["window_end"])["window_end"].cast(pa.timestamp("ms", "UTC"))
            found += [readable - end for end in ends.cast("int64").to_pylist() if end > began]
    return found


def ours_to_kafka(spark: Any, broker: Broker, topic: str, run: Path, seconds: int) -> list[float]:
    """Run our job into a topic, exactly once; give the same."""
    results, errors = make_topic(broker, "results"), make_topic(broker, "errors")
    query = job(broker, topic).start(
        spark, checkpoint=run / "checkpoint", sink=kafka_sink(results, errors, servers=broker.settings.servers),
        shards=2, local_dir=run / "local", trigger="0 seconds",
    )  # fmt: skip
    reader = Reader(broker, results)
    began = measure(query.query, seconds)
    found = reader.late(began)
    query.stop()
    return found


def windows_of_spark(spark: Any, broker: Broker, topic: str, files: str = SPARKS) -> Any:
    """Give Spark's own windows, their checkpoint written with a class."""
    from pyspark.sql import functions as f

    ensure_connector(spark)
    return (
        sparks_own(spark, files=files)
        .readStream.format("kafka")
        .option("kafka.bootstrap.servers", broker.settings.servers)
        .option("subscribe", topic)
        .load()
        .select(f.from_json(f.col("value").cast("string"), "key string, x long, at long").alias("m"))
        .select("m.*", f.timestamp_millis("m.at").alias("time"))
        .withWatermark("time", "0 seconds")
        .groupBy(f.window("time", "1 second").alias("w"), "key")
        .agg(f.count("*").alias("n"), f.sum("x").alias("total"))
    )


def sparks(spark: Any, broker: Broker, topic: str, run: Path, seconds: int) -> list[float]:
    """Run Spark's own windows; give the same."""
    query = (
        windows_of_spark(spark, broker, topic)
        .select("w.end", "key", "n", "total")
        .writeStream.format("parquet")
        .option("path", str(run / "results"))
        .option("checkpointLocation", str(run / "checkpoint"))
        .outputMode("append")
        .start()
    )
    began = measure(query, seconds)
    query.stop()
    found: list[float] = []
    known: set[Path] = set()
    logs = (run / "results" / "_spark_metadata").glob("[0-9]*")
    for log in sorted(logs, key=lambda path: int(path.name.removesuffix(".compact"))):
        readable = log.stat().st_ctime * 1000
        for line in log.read_text().splitlines()[1:]:
            file = Path(json.loads(line)["path"].removeprefix("file://"))
            if file in known:  # every tenth log says again what those before it said
                continue
            known.add(file)
            ends = pq.read_table(file, columns=["end"])["end"].cast(pa.timestamp("ms", "UTC"))
            found += [readable - end for end in ends.cast("int64").to_pylist() if end > began]
    return found


def sparks_updates(spark: Any, broker: Broker, topic: str, run: Path, seconds: int, files: str = SPARKS) -> list[float]:
    """Run Spark's own windows in update mode into a topic; give the same, of each window's last row."""
    from pyspark.sql import functions as f

    updates = make_topic(broker, "updates")
    row = f.struct(f.unix_millis("w.end").alias("window_end"), "key", "n", "total")
    query = (
        windows_of_spark(spark, broker, topic, files)
        .select(f.to_json(row).alias("value"))
        .writeStream.format("kafka")
        .option("kafka.bootstrap.servers", broker.settings.servers)
        .option("topic", updates)
        .option("checkpointLocation", str(run / "checkpoint"))
        .outputMode("update")
        .start()
    )
    reader = Reader(broker, updates)
    began = measure(query, seconds)
    found = reader.late(began)
    query.stop()
    return found


RUNS: dict[str, Callable[..., list[float]]] = {
    "ours, default trigger": ours,
    "ours, trigger 0 s": partial(ours, trigger="0 seconds"),
    "ours to Kafka, trigger 0 s": ours_to_kafka,
    "Spark's own, append to files": sparks,
    "Spark's own, update to Kafka": sparks_updates,
    "the same, with our checkpoint files": partial(sparks_updates, files=OURS),
}
BACK_TO_BACK = (
    "ours, trigger 0 s",
    "ours to Kafka, trigger 0 s",
    "Spark's own, update to Kafka",
    "the same, with our checkpoint files",
)
"""What the session is warmed up with, and what runs in turn."""
TURNS = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = Options("latency", __doc__)
    parser.add_argument("--seconds", type=int, default=45)
    options = parser.parse(arguments)
    seconds = 8 if options.quick else options.seconds
    sender = None
    broker, close = open_broker()
    try:
        sender = Sender(broker)
        with session() as spark, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:

            def lateness(who: str, seconds: int) -> list[float]:
                # a directory of its own each time
                found = RUNS[who](spark, broker, sender.topic, Path(tempfile.mkdtemp(dir=name)), seconds)
                sender.check()
                most = KEYS * (max(seconds, 20) + 60)  # a window a second; some are left over from the warm-up
                assert len(found) <= most, f"{who}: {len(found)} windows, some are counted twice"
                return found

            def warm_up() -> None:
                for who in BACK_TO_BACK:
                    lateness(who, WARM_UP)

            warm = Warm(spark, warm_up, rounds=0 if options.quick else ROUNDS)
            late: dict[str, list[float]] = {who: [] for who in RUNS}
            for turn in range(1 if options.quick else TURNS):
                for who in RUNS if turn == 0 else BACK_TO_BACK:
                    # Spark's windows close two micro-batches later: in the small form it needs longer
                    late[who] += lateness(who, max(seconds, 20) if RUNS[who] is sparks else seconds)
            notes = warm.notes()
    finally:
        if sender is not None:
            sender.stop()
        close()
    rows = []
    for who, found in late.items():
        assert found, f"{who} gave no windows"
        p50, p99 = (float(np.percentile(found, q)) for q in (50, 99))
        rows.append({"who": who, "windows": len(found), "p50 ms": p50, "p99 ms": p99})
    report(
        "latency",
        options,
        f"From a window's end to its readable row, {PER_SECOND:,} messages a second, broker on the same two cores",
        rows,
        notes,
    )


if __name__ == "__main__":
    main()
