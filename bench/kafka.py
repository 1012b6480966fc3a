"""From a Kafka topic to windows beside Quix Streams: `python -m bench.kafka [--quick] [--messages N] [--peers PYTHON]`.

JSON of 56 bytes, a thousand keys, tumbling windows of ten seconds, two partitions, changelog in Kafka, broker on the
same two cores. A backlog is worked off: micro-batches have a million messages, three seconds or so of them, where Quix
commits after five by default. It runs as one process and as two (one consumer group), told to commit every 10,000
messages, its default otherwise. Compared is the rate in steady state: ours over whole micro-batches without the first
ones, Quix's from its first message to its last. Windows that both closed must be equal. Changelog bytes are keys and
values of the records in the changelog's topic (Quix adds headers: shown apart), per message. Beside our rate two
floors: the topic read and parsed alone, thrown away; and the same messages into a stateful operator in Python that does
nothing (`bench/floor.py`).

Quix Streams is in an environment of its own (`make peers`), never in the product's.
"""

from __future__ import annotations

import json
import shutil
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
from backend.sources.spark_offsets import positions_in
from bench.floor import empty
from bench.session import has_messages, session
from bench.table import Options, report
from recovery.broker import Broker, open_broker

START_MS = 1_700_000_000_000
KEYS = 1_000
BATCHES, WARM_UP = 6, 3
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
        source = self.source()
        query = (
            source.stream_mixed(self.spark, source.fields().names, source.first_positions())
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
        )  # fmt: skip
        query.await_termination()
        batches = [p for p in query.query.recentProgress if has_messages(p)]
        found = rate(batches, lambda p: int(p["observedMetrics"]["rewind"]["rows"]))
        return {"messages": query.progress.rows, "rate": found, "restores": query.progress.restores}

    def lose_state(self) -> None:
        """Delete what lies on the disk."""
        shutil.rmtree(self.directory / "local")

    def windows(self) -> dict[tuple[int, str], tuple[int, int, int]]:
        """Give the closed windows."""
        rows = self.spark.read.parquet(str(self.directory / "results")).where("reason = 'full'").collect()
        return {
            (round(row["window_start"].timestamp() * 1000), row["key"]): (row["n"], row["total"], row["worst"])
            for row in rows
        }


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
            log = (self.directory / f"quix-{number}.log").open("a")
            command = [str(self.python), str(Path(__file__).with_name("quix_peer.py")), json.dumps(options)]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True))
        told = []
        for process in running:
            out, _ = process.communicate(timeout=3600)
            assert process.returncode == 0, (self.directory / "quix-0.log").read_text()[-2000:]
            told.append(json.loads(out.strip().splitlines()[-1]))
        busy = [one for one in told if one["messages"]]
        messages = sum(one["messages"] for one in told)
        seconds = max(one["last"] for one in busy) - min(one["first"] for one in busy) if busy else 0.0
        return {"messages": messages, "rate": messages / seconds if seconds else 0.0, "processes": told}

    def windows(self) -> dict[tuple[int, str], tuple[int, int, int]]:
        """Give the closed windows."""
        found = {}
        for record in consumed(self.broker, [self.output]):
            row = json.loads(record.value())
            found[row["start"], record.key().decode()] = (row["n"], row["total"], row["worst"])
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
    spark: Any, broker: Broker, python: Path, short: str, long: str, *, full_state: bool, messages: int, peers: int
) -> list[Any]:
    """Run ours, the peer in one process, the peer in two; compare.

    Args:
        spark: The session.
        broker: Has the topics.
        python: Has the peer.
        short: A topic of `peers` messages, for the peer, and for both to agree on.
        long: One of `messages`, for us.
        full_state: Keep every message.
        messages: See above.
        peers: See above.
    """
    what = "full state (every message kept)" if full_state else "count, sum, max"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        windows = {}
        for label, topic in (("check", short), ("ours", long)):
            (directory / label).mkdir()
            ours = Ours(spark, broker, topic, directory / label, full_state=full_state, per=max(messages // BATCHES, 1))
            found = ours.run()
            if label == "check" and not full_state:
                windows = ours.windows()
        alone, nothing = ours.input_alone(), ours.into_nothing(BATCHES)
        payload, _ = log_bytes(broker, [ours.log])
        assert found["messages"] == messages
        rows.append({"what": what, "who": "Rewind", "processes": "2 cores", "messages": messages,
                     "messages/s": found["rate"], "changelog B/message": payload / messages,
                     "with headers": payload / messages, "Rewind / this": 1.0, "input alone/s": alone,
                     "empty operator/s": nothing})  # fmt: skip
        for processes in (1, 2):
            (directory / f"quix-{processes}").mkdir()
            quix = Quix(python, broker, short, directory / f"quix-{processes}", full_state=full_state, n=processes)
            found = quix.run()
            assert found["messages"] == peers, found
            if windows:
                theirs = quix.windows()
                same = theirs.keys() & windows.keys()
                assert len(same) > len(theirs) * 0.9, (len(same), len(theirs), len(windows))
                assert all(theirs[window] == windows[window] for window in same)
            payload, headers = log_bytes(broker, quix.changelog())
            rows.append({"what": what, "who": "Quix Streams", "processes": str(processes), "messages": peers,
                         "messages/s": found["rate"], "changelog B/message": payload / peers,
                         "with headers": (payload + headers) / peers,
                         "Rewind / this": rows[0]["messages/s"] / found["rate"], "input alone/s": "",
                         "empty operator/s": ""})  # fmt: skip
    return rows


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
    options = beside_peers("kafka", __doc__, 6_000_000, arguments)
    started = time.perf_counter()
    rows = []
    broker, close = open_broker()
    try:
        messages, peers = (200_000, 50_000) if options.quick else (options.messages, options.messages // 12)
        short, long = f"short-{uuid.uuid4().hex[:8]}", f"long-{uuid.uuid4().hex[:8]}"
        fill(broker, short, peers, 1_000 if options.quick else 10_000)
        fill(broker, long, messages, 1_000 if options.quick else 10_000)
        sizes = {"messages": messages, "peers": peers}
        with session() as spark:
            for full_state in (False, True):
                rows += compare(spark, broker, options.peers, short, long, full_state=full_state, **sizes)
                print(json.dumps(rows[-3:]), flush=True)
    finally:
        close()
    report(
        "kafka",
        options,
        "From a Kafka topic to windows, broker on the same two cores",
        rows,
        [f"{time.perf_counter() - started:.0f} s in all"],
    )


if __name__ == "__main__":
    main()
