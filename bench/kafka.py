"""From Kafka to windows beside Spark's own and Quix: `python -m bench.kafka [--quick] [--messages N] [--peers PYTHON]`.

JSON of 56 bytes, a thousand keys, tumbling windows of ten seconds, two partitions, changelog in Kafka, broker on the
same two cores. A backlog is worked off: micro-batches have two million messages, two to three seconds of them for us,
twice as long for Spark's own, where Quix commits after five by default. It runs as one process and as two (one consumer
group), with its defaults. Compared is the rate in steady state: ours over
whole micro-batches without the first ones, Quix's from its first message to its last. Windows that both closed must be
equal. Changelog bytes are keys and values of the records in the changelog's topic (Quix adds headers: shown apart), per
message. Beside our rate two floors: the topic read and parsed alone, thrown away; and the same messages into a stateful
operator in Python that does nothing (`bench/floor.py`).

Spark's own windows read the same topic through its connector, which fetches in bulk as ours does, parse with
`from_json`, and keep state in RocksDB with changelog checkpointing. Ours, Spark's and the floors run in turn, three
times, once the JVM's compilers have settled (`bench/warm.py`); given are medians. Every window that Spark closed must
be among ours. The quick form runs Quix as one process only, and the floors once.

Quix Streams is in an environment of its own (`make peers`), never in the product's.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from backend import count, kafka, max_, median, policies, stream, sum_, tumbling
from backend.sources.formats import record_schema
from backend.sources.kafka import IN_BULK
from backend.sources.spark_offsets import positions_in
from backend.spark.reading import streamed
from backend.spark.session.connector import ensure_connector
from bench.floor import empty
from bench.session import has_messages, session, sparks_own
from bench.table import Options, report
from bench.warm import ROUNDS, Warm
from recovery.testing.broker import Broker, open_broker

START_MS = 1_700_000_000_000
KEYS = 1_000
BATCHES, WARM_UP = 9, 3
TURNS = 3
SMALL = 40
"""Small micro-batches of each side in a round of the warm-up."""
QUIX_S = 1_800
"""How long a run of the peer may take."""
PEERS = Path(__file__).parent.parent / ".venv-peers" / "bin" / "python"


def fill(broker: Broker, topic: str, messages: int, per_second: int) -> None:
    """Write so many messages per second of event time; a key is always in the same partition."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    settings = broker.settings.for_client()
    admin = AdminClient(settings)  # its futures end with it
    kept = {"retention.ms": "-1"}  # by the records' timestamps, which are old
    for made in admin.create_topics([NewTopic(topic, 2, 1, config=kept)]).values():
        made.result()
    producer = Producer({**settings, "linger.ms": 50, "queue.buffering.max.messages": 200_000})
    random = np.random.default_rng(7)
    keys, values = random.integers(0, KEYS, messages).tolist(), random.integers(0, 1000, messages).tolist()
    for number, (key, value) in enumerate(zip(keys, values, strict=True)):
        at = START_MS + number * 1000 // per_second
        name = f"customer-{key:04d}"
        text = f'{{"key":"{name}","x":{value:3d},"at":{at}}}'
        while True:
            try:
                producer.produce(topic, text.encode(), name.encode(), partition=key % 2, timestamp=at)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(60) == 0


def consumed(broker: Broker, topics: list[str]) -> Iterator[Any]:
    """Give every record of topics, to their ends as they are now."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({**broker.settings.for_client(), "group.id": uuid.uuid4().hex, "enable.auto.commit": False})
    known = consumer.list_topics().topics
    for topic in topics:
        for partition in known[topic].partitions:
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition))
            consumer.assign([TopicPartition(topic, partition, low)])
            while low < high:
                for record in consumer.consume(10_000, timeout=1.0):
                    low = record.offset() + 1
                    yield record
                position = consumer.position([TopicPartition(topic, partition)])[0].offset
                low = max(low, position)  # control records are not given
    consumer.close()


def log_bytes(broker: Broker, topics: list[str]) -> tuple[int, int]:
    """Give bytes of keys and values, and of headers, of the records in changelog topics."""
    payload = headers = 0
    for record in consumed(broker, topics):
        payload += len(record.key() or b"") + len(record.value() or b"")
        headers += sum(len(name) + len(value or b"") for name, value in record.headers() or [])
    return payload, headers


def topics_with(broker: Broker, text: str) -> list[str]:
    """Name the topics whose names contain a text."""
    from confluent_kafka.admin import AdminClient

    return [name for name in AdminClient(broker.settings.for_client()).list_topics(timeout=10).topics if text in name]


def offsets_read(progress: Any) -> int:
    """Give how many offsets of topics a micro-batch was planned to read."""
    read = 0
    for source in progress["sources"]:
        start, end = positions_in(source["startOffset"]), positions_in(source["endOffset"])
        read += sum(after - start.get(place, 0) for place, after in end.items())
    return read


def rate(progress: list[Any], rows: Callable[[Any], int] = offsets_read) -> float:
    """Give messages a second over whole micro-batches, without the first ones; 0 where there are no others."""
    batches = progress[WARM_UP:]
    milliseconds = sum(p["durationMs"]["triggerExecution"] for p in batches)
    return sum(map(rows, batches)) / milliseconds * 1000 if milliseconds else 0.0


class Ours:
    """Our job on a topic."""

    def __init__(
        self, spark: Any, broker: Broker, topic: str, directory: Path, *, full_state: bool, per: int,
        retention: str = "1 second",
    ) -> None:  # fmt: skip
        self.spark, self.broker, self.topic, self.directory = spark, broker, topic, directory
        self.full_state, self.per, self.retention = full_state, per, retention
        self.log = f"ours-log-{uuid.uuid4().hex[:8]}"

    def source(self) -> Any:
        """Give the messages."""
        return kafka(self.topic, servers=self.broker.settings.servers, value="key string, x long, at long",
                     max_offsets_per_trigger=self.per)  # fmt: skip

    def input_alone(self) -> float:
        """Read and parse the topic, throw it away; give messages a second."""
        parse = self.source().parse("UTC")

        def parsed(batches: Iterator[Any]) -> Iterator[Any]:
            for rows in batches:
                parse(rows)
                yield rows.slice(0, 1)

        source = self.source()
        query = (
            streamed(self.spark, source.stream_reader(), record_schema(), parsed)
            .writeStream.format("noop")
            .option("checkpointLocation", str(self.directory / "floor"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return rate([p for p in query.recentProgress if p["numInputRows"]])

    def into_nothing(self, batches: int) -> float:
        """Send the topic through a stateful operator in Python that does nothing; give messages a second."""
        return rate(empty(self.spark, self.pipeline(), self.directory / "empty", 2, batches))

    def pipeline(self) -> Any:
        """Give the job."""
        aggregates = {"n": count(), "total": sum_("x"), "worst": max_("x")}
        if self.full_state:
            aggregates = {"n": count(), "typical": median("x")}
        return (
            stream(self.source(), event_time="at", key="key")
            .window(tumbling("10 seconds"), retention=self.retention, max_ahead=None, policies=policies(late="off"))
            .aggregate(**aggregates)
        )

    def run(self, *listeners: Any) -> dict[str, Any]:
        """Run to the end of the topic; give rate and bytes."""
        servers = self.broker.settings.servers
        query = self.pipeline().start(
            self.spark, checkpoint=self.directory / "checkpoint", results=self.directory / "results",
            errors=self.directory / "errors", changelog=f"kafka://{servers}/{self.log}", shards=2,
            local_dir=self.directory / "local", trigger="0 seconds", until="end", listeners=listeners,
            queue_bytes="off",  # a restore is measured alone
        )  # fmt: skip
        query.await_termination()
        batches = [p for p in query.query.recentProgress if has_messages(p)]
        found = rate(batches, lambda p: int(p["observedMetrics"]["rewind"]["rows"]))
        return {"messages": query.progress.rows, "rate": found, "restores": query.progress.restores}

    def lose_state(self) -> None:
        """Delete what lies on the disk."""
        shutil.rmtree(self.directory / "local")

    def windows(self) -> dict[tuple[int, str], tuple[Any, ...]]:
        """Return the closed windows."""
        rows = self.spark.read.parquet(str(self.directory / "results")).where("reason = 'full'")
        return _by_window(rows.select("window_start", "key", *_columns(self.full_state)))


def _columns(full_state: bool) -> list[str]:
    return ["n", "typical"] if full_state else ["n", "total", "worst"]


def _by_window(rows: Any) -> dict[tuple[int, str], tuple[Any, ...]]:
    """Return rows of (start, key, aggregates) as a dictionary."""
    return {(round(start.timestamp() * 1000), key): tuple(found) for start, key, *found in rows.collect()}


class Sparks:
    """Spark's own windows on a topic."""

    def __init__(self, spark: Any, broker: Broker, topic: str, directory: Path, *, full_state: bool, per: int) -> None:
        self.spark, self.broker, self.topic, self.directory = spark, broker, topic, directory
        self.full_state, self.per = full_state, per

    def run(self) -> float:
        """Run to the end of the topic; return messages a second."""
        from pyspark.sql import functions as f

        ensure_connector(self.spark)
        total = [f.sum("x").alias("total"), f.max("x").alias("worst")]
        aggregates = [f.percentile("x", f.lit(0.5)).alias("typical")] if self.full_state else total
        query = (
            sparks_own(self.spark)
            .readStream.format("kafka")
            .options(**IN_BULK)
            .option("kafka.bootstrap.servers", self.broker.settings.servers)
            .option("kafka.isolation.level", "read_committed")
            .option("subscribe", self.topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", str(self.per))
            .load()
            .select(f.from_json(f.col("value").cast("string"), "key string, x long, at long").alias("m"))
            .select("m.key", "m.x", f.timestamp_millis("m.at").alias("time"))
            .withWatermark("time", "1 second")
            .groupBy(f.window("time", "10 seconds").alias("w"), "key")
            .agg(f.count("*").alias("n"), *aggregates)
            .select(f.col("w.start").alias("start"), "key", *_columns(self.full_state))
            .writeStream.format("parquet")
            .option("path", str(self.directory / "results"))
            .option("checkpointLocation", str(self.directory / "checkpoint"))
            .outputMode("append")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return rate([p for p in query.recentProgress if p["numInputRows"]])

    def windows(self) -> dict[tuple[int, str], tuple[Any, ...]]:
        """Return the closed windows."""
        return _by_window(self.spark.read.parquet(str(self.directory / "results")))


class Quix:
    """The peer's job on a topic, in so many processes."""

    def __init__(
        self, python: Path, broker: Broker, topic: str, directory: Path, *, full_state: bool, n: int, grace_ms: int = 0
    ) -> None:
        self.python, self.broker, self.topic, self.directory = python, broker, topic, directory
        self.full_state, self.processes, self.grace_ms = full_state, n, grace_ms
        self.group = f"quix-{uuid.uuid4().hex[:8]}"
        self.output = f"{self.group}-windows"

    def run(self) -> dict[str, Any]:
        """Run to the end of the topic; give rate, and each process's own report."""
        common = {"servers": self.broker.settings.servers, "topic": self.topic, "output": self.output,
                  "group": self.group, "full_state": self.full_state, "idle_s": 8.0,
                  "grace_ms": self.grace_ms}  # fmt: skip
        running = []
        for number in range(self.processes):
            options = {**common, "state_dir": str(self.directory / f"state-{number}")}
            command = [str(self.python), str(Path(__file__).with_name("quix_peer.py")), json.dumps(options)]
            with (self.directory / f"quix-{number}.log").open("a") as log:
                running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True))
        told = []
        try:
            for number, process in enumerate(running):
                out, _ = process.communicate(timeout=QUIX_S)
                assert process.returncode == 0, (self.directory / f"quix-{number}.log").read_text()[-2000:]
                told.append(json.loads(out.strip().splitlines()[-1]))
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        busy = [one for one in told if one["messages"]]
        messages = sum(one["messages"] for one in told)
        seconds = max(one["last"] for one in busy) - min(one["first"] for one in busy) if busy else 0.0
        return {"messages": messages, "rate": messages / seconds if seconds else 0.0, "processes": told}

    def windows(self) -> dict[tuple[int, str], tuple[int, ...]]:
        """Give the closed windows: the aggregates, of full state how many messages."""
        found = {}
        names = ("values",) if self.full_state else ("n", "total", "worst")
        for record in consumed(self.broker, [self.output]):
            row = json.loads(record.value())
            found[row["start"], record.key().decode()] = tuple(row[name] for name in names)
        return found

    def changelog(self) -> list[str]:
        """Name its changelog topics."""
        return topics_with(self.broker, f"changelog__{self.group}")

    def lose_state(self) -> None:
        """Delete what lies on the disk."""
        for directory in self.directory.glob("state-*"):
            shutil.rmtree(directory)

    def log(self) -> str:
        """Give what it logged."""
        return "".join(path.read_text() for path in self.directory.glob("quix-*.log"))


def compare(
    spark: Any,
    broker: Broker,
    python: Path,
    short: str,
    long: str,
    *,
    full_state: bool,
    messages: int,
    peers: int,
    quick: bool,
) -> list[Any]:
    """Run ours, Spark's own and the floors in turn, then the peer in one process and in two; compare.

    Args:
        spark: The session.
        broker: Has the topics.
        python: Has the peer.
        short: A topic of `peers` messages, for the peer, and for both to agree on.
        long: One of `messages`, for us and Spark's own.
        full_state: Keep every message.
        messages: See above.
        peers: See above.
        quick: One turn, the peer in one process, and the floors once.
    """  # fmt: skip
    what = "full state (every message kept)" if full_state else "count, sum, max"
    per = max(messages // BATCHES, 1)
    rates: dict[str, list[float]] = {"ours": [], "sparks": [], "alone": [], "nothing": []}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        directory = Path(name)

        def place(label: str) -> Path:
            (directory / label).mkdir()
            return directory / label

        check = Ours(spark, broker, short, place("check"), full_state=full_state, per=per)
        check.run()
        windows = check.windows()
        for number in range(1 if quick else TURNS):
            ours = Ours(spark, broker, long, place(f"ours-{number}"), full_state=full_state, per=per)
            found = ours.run()
            assert found["messages"] == messages
            rates["ours"].append(found["rate"])
            sparks = Sparks(spark, broker, long, place(f"sparks-{number}"), full_state=full_state, per=per)
            rates["sparks"].append(sparks.run())
            mine, theirs = ours.windows(), sparks.windows()
            assert theirs, "Spark closed no window"
            assert theirs.items() <= mine.items(), "a window of Spark's is not among ours"
            if not (quick and full_state):
                rates["alone"].append(ours.input_alone())
                rates["nothing"].append(ours.into_nothing(BATCHES))
        mine_rate, sparks_rate = (statistics.median(rates[label]) for label in ("ours", "sparks"))
        alone, nothing = (statistics.median(rates[label]) if rates[label] else "" for label in ("alone", "nothing"))
        payload, headers = log_bytes(broker, [ours.log])
        rows = [
            {"what": what, "who": "Rewind", "processes": "2 cores", "messages": messages, "messages/s": mine_rate,
             "changelog B/message": payload / messages, "with headers": (payload + headers) / messages,
             "Rewind / this": 1.0,
             "input alone/s": alone, "empty operator/s": nothing},
            {"what": what, "who": "Spark's own windows", "processes": "2 cores", "messages": messages,
             "messages/s": sparks_rate, "changelog B/message": "", "with headers": "",
             "Rewind / this": mine_rate / sparks_rate if sparks_rate else "", "input alone/s": "",
             "empty operator/s": ""},
        ]  # fmt: skip
        for processes in (1,) if quick else (1, 2):
            quix = Quix(python, broker, short, place(f"quix-{processes}"), full_state=full_state, n=processes)
            found = quix.run()
            assert found["messages"] == peers, found
            closed = quix.windows()
            if not closed:
                print(f"the peer closed no window and runs again; its log ends\n{quix.log()[-4000:]}", flush=True)
                quix = Quix(python, broker, short, place(f"again-{processes}"), full_state=full_state, n=processes)
                found = quix.run()
                assert found["messages"] == peers, found
                closed = quix.windows()
            same = closed.keys() & windows.keys()
            assert len(same) > len(closed) * 0.9, (len(same), len(closed), len(windows))
            assert all(closed[window] == windows[window][: len(closed[window])] for window in same)
            payload, headers = log_bytes(broker, quix.changelog())
            rows.append({"what": what, "who": "Quix Streams", "processes": str(processes), "messages": peers,
                         "messages/s": found["rate"], "changelog B/message": payload / peers,
                         "with headers": (payload + headers) / peers,
                         "Rewind / this": mine_rate / found["rate"], "input alone/s": "",
                         "empty operator/s": ""})  # fmt: skip
    return rows


def warm_up(spark: Any, broker: Broker, topic: str, messages: int) -> None:
    """Run a topic of so many messages into ours and into Spark's own, incremental and full state, in small pieces."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        for side in (Ours, Sparks):
            for full_state in (False, True):
                directory = Path(name) / f"{side.__name__}-{full_state}"
                directory.mkdir()
                side(spark, broker, topic, directory, full_state=full_state, per=messages // SMALL).run()


def beside_peers(name: str, text: str | None, messages: int, arguments: Sequence[str] | None) -> Namespace:
    """Parse the options of a benchmark that runs the peer; ends the process with 2 where the peer is not there.

    Args:
        name: As for `Options`.
        text: As for `Options`.
        messages: Default of `--messages`.
        arguments: As for `Options.parse`.
    """
    parser = Options(name, text)
    parser.add_argument("--messages", type=int, default=messages)
    parser.add_argument("--peers", type=Path, default=PEERS, help="a Python that has quixstreams")
    options = parser.parse(arguments)
    if not options.peers.exists():
        print(f"{options.peers} is not there: run make peers, or give --peers", file=sys.stderr)
        sys.exit(2)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    options = beside_peers("kafka", __doc__, 18_000_000, arguments)
    started = time.perf_counter()
    rows = []
    broker, close = open_broker()
    try:
        messages, peers = (60_000, 30_000) if options.quick else (options.messages, options.messages // 36)
        short, long = f"short-{uuid.uuid4().hex[:8]}", f"long-{uuid.uuid4().hex[:8]}"
        fill(broker, short, peers, 1_000 if options.quick else 10_000)
        fill(broker, long, messages, 1_000 if options.quick else 10_000)
        sizes = {"messages": messages, "peers": peers}
        with session() as spark:
            rounds = 0 if options.quick else ROUNDS
            warm = Warm(spark, lambda: warm_up(spark, broker, short, peers), rounds=rounds)
            for full_state in (False, True):
                found = compare(
                    spark, broker, options.peers, short, long, full_state=full_state, quick=options.quick, **sizes
                )
                rows += found
                print(json.dumps(found), flush=True)
            notes = warm.notes()
    finally:
        close()
    report(
        "kafka",
        options,
        "From a Kafka topic to windows, broker on the same two cores",
        rows,
        [*notes, f"{time.perf_counter() - started:.0f} s in all"],
    )


if __name__ == "__main__":
    main()
