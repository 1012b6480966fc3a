"""A job from Kafka to Kafka with its changelog in Kafka, while everything around it is killed, cut and emptied.

`python -m tests.kafka.storm --seconds 300 --seed 7` runs one storm after another, each with a broker and topics of its
own, the sink's guarantees and the readers in turn (seeds 0 to 3 are the four). Which blow falls next, and when, comes
from the seed (where it strikes is the machine's doing). Messages are written all the while, out of order. Seeds 4 to 7,
12 to 15, ... begin at the end of a topic that has messages, and the driver is killed once before anything else. Blows
(`--blows "cut,emptied"` takes some of them):

* `worker`: a Python worker is killed.
* `driver`: the driver is killed with everything, and started again.
* `disk`: the same, and the local state is gone: a restore from the changelog and the source.
* `restore`: the same, and the driver is killed again in the middle of what follows.
* `zombie`: Python's workers stand still while the driver is killed and a new one restores elsewhere; then they go on.
* `broker`: the broker is killed, and comes back after a while; `outage`: after three minutes.
* `restore without a broker`: a disk is lost, and the broker is away when the restore wants to begin.
* `cut`: the source is cut below what the windows' retention still needs, as its own retention would.
* `grown`: the source and the changelog get a partition, as long as the source has less than four.
* `stopped`: the driver is killed, topics grow and the source is cut, and it is started again after a while.
* `emptied`: the changelog loses all its records while the state is whole; the next two commits are left in peace.

In the end the results are read with `read_committed`, and through `Dedupe` where rows come at least once, and compared
with plain loops over what was written: no row twice, no window missing, none with other contents.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from backend import Dedupe, KafkaSettings, count, kafka, kafka_sink, median, stream, sum_, tumbling
from backend.kafka_client.admin import offsets
from backend.kafka_client.writer import IDEMPOTENT
from backend.spark.first_offsets import known_positions
from backend.spark.resume import committed_positions
from recovery.daemon import OPTION
from recovery.testing.broker import LocalBroker
from recovery.testing.events import Topics
from tests.conftest import ROOT
from tests.kafka.test_kafka_stream import events, windows_of
from tests.support import quick_java
from tests.support.waiting import Died, until

GUARANTEES = ("exactly_once", "at_least_once")
BLOWS = (
    "worker", "worker", "driver", "driver", "disk", "disk", "restore", "broker", "broker", "restore without a broker",
    "cut", "emptied", "zombie", "grown", "stopped", "outage",
)  # fmt: skip
PARTITIONS = 2
MOST_PARTITIONS = 4
"""Of the source; the results have `PARTITIONS`."""
DAEMON = OPTION[1]
AT_ONCE = 40
"""Messages that are written together."""
RETAINED = 450
"""Messages per partition of an hour's retention, ten seconds apart, and of ten minutes of disorder and more."""
PAUSE_S = (1.0, 8.0)
AWAY_S = (0.5, 25.0)
OUTAGE_S = 180.0
END_S = 400.0


def job(config: dict[str, Any]) -> int:
    """Run the job until it ends: what the storm starts as a process of its own."""
    from recovery.inspect.user_job import session

    settings, home = KafkaSettings(config["servers"]), Path(config["home"])
    source = kafka(
        config["topic"], servers=settings, value="at bigint, who string, n int", max_offsets_per_trigger=1_000,
        reader=config["reader"], starting=config["starting"],
    )  # fmt: skip
    sink = kafka_sink(
        f"{config['topic']}-results", f"{config['topic']}-errors", servers=settings, guarantee=config["guarantee"]
    )
    pipeline = (
        stream(source, event_time="at", key="who")
        .window(tumbling("1 minute"), retention="1 hour", max_ahead=None, idle_after=None)
        .aggregate(count=count(), total=sum_("n"), middle=median("n"))
    )
    with session(conf={"spark.sql.streaming.minBatchesToRetain": "10"}) as spark:
        query = pipeline.start(
            spark,
            checkpoint=home / "checkpoint",
            sink=sink,
            local_dir=home / "local",
            changelog=f"kafka://{settings.servers}/{config['topic']}-changelog",
            shards=2,
            trigger="0 seconds",
            until="end" if config["end"] else None,
        )
        try:
            query.await_termination()
        except Exception as error:
            print(f"ended by: {error}", flush=True)
            return 1
    return 0


class Writer(threading.Thread):
    """Writes messages all the while; what the broker did not acknowledge is waited for."""

    def __init__(self, settings: KafkaSettings, topic: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._topic, self._seed, self._over = topic, seed, threading.Event()
        patient = IDEMPOTENT | {"message.timeout.ms": 0, "linger.ms": 5, "log_level": 0}
        patient["topic.metadata.refresh.interval.ms"] = 1_000
        self._producer = Producer(settings.for_client() | patient)
        self._failed: list[str] = []
        self._turn = 0
        self.since = dict.fromkeys(range(PARTITIONS), 0)
        """Partition -> the turn of its first messages."""
        self.written: dict[int, list[dict[str, Any]]] = {}

    def run(self) -> None:
        """Write until told to stop."""
        while not self._over.wait(1.0):
            turn = self._turn
            for partition in [partition for partition, first in self.since.items() if first <= turn]:
                seed = self._seed * 100_000 + turn * MOST_PARTITIONS + partition
                rows = events(AT_ONCE, seed=seed, first=turn * AT_ONCE)
                for row in rows:
                    self._producer.produce(self._topic, json.dumps(row), partition=partition, on_delivery=self._told)
                self.written.setdefault(partition, []).extend(rows)
            self._producer.poll(0)
            self._turn += 1

    def more(self) -> None:
        """Write to one more partition soon: the producer looks at the topic once a second."""
        self.since = {**self.since, len(self.since): self._turn + 10}

    def finish(self) -> None:
        """Stop writing; everything is acknowledged on return."""
        self._over.set()
        self.join()
        assert self._producer.flush(120) == 0, "the broker does not take the messages"
        assert not self._failed, self._failed[0]

    def _told(self, error: Any, _message: Any) -> None:
        if error is not None:
            self._failed.append(str(error))


@dataclass
class Storm:
    """One job and its misfortunes."""

    root: Path
    seed: int
    broker: LocalBroker
    blows: tuple[str, ...] = BLOWS
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.guarantee = GUARANTEES[self.seed % len(GUARANTEES)]
        self.reader = ("client", "connector")[self.seed // len(GUARANTEES) % 2]
        self.starting = ("earliest", "latest")[self.seed // 4 % 2]
        self.topics = Topics(self.broker.settings)
        self.topic = self.topics.create(PARTITIONS)
        for suffix in ("results", "errors"):
            self.topics.create(PARTITIONS, name=f"{self.topic}-{suffix}")
        self.home = self.root / "job"
        self.process: subprocess.Popen[bytes] | None = None
        self.zombies: list[psutil.Process] = []
        self.writer = Writer(self.broker.settings, self.topic, self.seed)
        self.began = time.monotonic()

    def rage(self, seconds: float) -> list[dict[str, Any]]:
        """Run the job and strike for so many seconds after its first commit, then let it end.

        Returns:
            What was written from where the job began.
        """
        self.writer.start()
        try:
            if self.starting == "latest":
                self._die_before_the_first_micro_batch()
            self._launch()
            self._wait_for(1)
            end = time.monotonic() + seconds
            dealt: list[str] = []
            while time.monotonic() < end:
                if not dealt:  # each falls once before any falls again
                    dealt = self.random.sample(self.blows, len(self.blows))
                self._strike(dealt.pop())
                self._wait(self.random.uniform(*PAUSE_S))
            self.writer.finish()
            self._kill()
            self._launch(end=True)
            assert self.process is not None
            try:
                code = self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"the job does not end within {END_S:.0f} s") from None
            assert code == 0, f"the job failed: {self._last_words()}"
        finally:
            self._kill()
            self._end_zombies()
        first = known_positions(str(self.home / "checkpoint"), 0) or {}
        kept = []
        for partition, rows in self.writer.written.items():
            begin = first.get((self.topic, partition), 0)
            kept += rows[begin:]
            self.seen["messages before the beginning"] += begin
        return kept

    def _die_before_the_first_micro_batch(self) -> None:
        """Let the job say where it begins, behind messages that it is not to read, and kill it there."""
        until(lambda: len(self.writer.written.get(0, [])) > AT_ONCE, what="messages to begin behind")
        self._launch()
        said = self.home / "checkpoint" / "sources" / "0" / "0"
        self._until(said.exists, "the job to say where it begins")
        self.seen["died before the first micro-batch"] += self.newest < 0
        self._kill()
        self._wait(self.random.uniform(*PAUSE_S))

    def check(self, written: list[dict[str, Any]]) -> int:
        """Compare the results with plain loops; give how many windows there are.

        Raises:
            AssertionError: A row came twice, or a window is missing, or another one.
        """
        dedupe, ids, newest = Dedupe(), Counter[str](), dict[tuple[int, str], dict[str, Any]]()
        copies = 0
        for partition, row in read(self.broker.settings, f"{self.topic}-results"):
            if self.guarantee == "at_least_once" and not dedupe.is_new(row, f"{self.topic}-results", partition):
                copies += 1
                continue
            ids[row["id"]] += 1
            key = (row["window_start"], row["who"])
            if key not in newest or row["revision"] > newest[key]["revision"]:
                newest[key] = row
        assert max(ids.values()) == 1, f"{sum(n > 1 for n in ids.values())} rows came twice"
        found = {key: (row["count"], row["total"], row["middle"]) for key, row in newest.items()}
        expected = windows_of(written)
        wrong = {key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)}
        assert not wrong, f"{len(wrong)} of {len(expected)} windows differ, such as {sorted(wrong)[:3]}"
        errors = read(self.broker.settings, f"{self.topic}-errors")
        assert not errors, f"{len(errors)} errors, such as {errors[0]}"
        self.seen += Counter({"copies told": copies, "rows": sum(ids.values()), "messages": len(written)})
        return len(expected)

    # --------------------------------------------------------------------------------------------------------- blows

    def _strike(self, blow: str) -> None:
        if self.process is not None and self.process.poll() is not None:
            raise AssertionError(f"the job ended: {self._last_words()}")
        self.seen[blow] += 1
        print(f"{time.monotonic() - self.began:7.1f} s  micro-batch {self.newest}: {blow}", flush=True)
        if blow == "worker":
            self._kill_worker()
        elif blow == "cut":
            self._cut()
        elif blow == "grown":
            self._grow()
        elif blow == "emptied":
            self._empty()
        elif blow in ("broker", "outage"):
            self.broker.kill()
            time.sleep(OUTAGE_S if blow == "outage" else self.random.uniform(*AWAY_S))
            self.broker.start()
        elif blow == "zombie":
            self._leave_zombies()
        else:
            self._kill()
            if blow == "stopped":
                self._grow()
                self._cut()
                self._wait(self.random.uniform(*PAUSE_S))
            elif blow != "driver":
                shutil.rmtree(self.home / "local", ignore_errors=True)
            if blow == "restore without a broker":
                self._launch()
                self._wait_for_line("state is restored")
                self.broker.kill()
                time.sleep(self.random.uniform(*AWAY_S))
                self.broker.start()
            elif blow == "restore":
                self._launch()
                self._wait_for_line("state is restored")
                time.sleep(self.random.uniform(0.0, 8.0))
                self._kill()
                self._launch()
            else:
                self._launch()
            self._wait_for(self.newest + 1)

    def _workers(self) -> list[psutil.Process]:
        """Give Python's workers that Spark's daemon has forked."""
        assert self.process is not None
        found = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                parent = one.parent()
                if DAEMON in one.cmdline() and parent is not None and DAEMON in parent.cmdline():
                    found.append(one)
        return found

    def _kill_worker(self) -> None:
        self._until(lambda: bool(self._workers()), "a worker")
        with suppress(psutil.NoSuchProcess, IndexError):  # they come and go
            self.random.choice(self._workers()).kill()
            self.seen["workers killed"] += 1

    def _leave_zombies(self) -> None:
        """Stop the workers, take the host's disk away, let another driver go on, and then the workers too."""
        self._until(lambda: bool(self._workers()), "a worker")
        for one in self._workers():
            with suppress(psutil.NoSuchProcess):
                one.suspend()
                self.zombies.append(one)
        self.seen["workers left behind"] += len(self.zombies)
        self._kill()
        (self.home / "local").rename(self.home / f"local-{len(list(self.home.iterdir()))}")
        self._launch()
        self._wait_for(self.newest + 1)
        for one in self.zombies:
            with suppress(psutil.NoSuchProcess):
                one.resume()
        self._wait(self.random.uniform(*PAUSE_S))
        self._end_zombies()

    def _end_zombies(self) -> None:
        while self.zombies:
            with suppress(psutil.NoSuchProcess):
                self.zombies.pop().kill()

    def _grow(self) -> None:
        """Give the source and the changelog one partition more; messages go there from now on."""
        partitions = len(self.writer.since) + 1
        if partitions <= MOST_PARTITIONS:
            self.topics.grow(self.topic, partitions)
            self.topics.grow(f"{self.topic}-changelog", partitions)
            self.writer.more()
            self.seen["partitions added"] += 1

    def _cut(self) -> None:
        """Cut what no retained window begins in: it lies so far behind what all partitions have committed."""
        committed = committed_positions(str(self.home / "checkpoint"))
        read = dict(committed[0]) if committed else {}
        since = {partition: turn * AT_ONCE for partition, turn in self.writer.since.items()}
        edge = min(read.get((self.topic, partition), 0) + first for partition, first in since.items()) - RETAINED
        edges = {partition: edge - first for partition, first in since.items() if edge > first}
        if edges:
            self._delete(self.topic, edges)
            self.seen["partitions cut"] += len(edges)

    def _empty(self) -> None:
        """Take everything from the changelog; a commit of each shard later it is whole again."""
        log = f"{self.topic}-changelog"
        held = offsets(self.broker.settings, [log], committed_only=False)
        self._delete(log, {partition: end for (_, partition), (_, end) in held.items()})
        self._wait_for(self.newest + 10)

    def _delete(self, topic: str, edges: dict[int, int]) -> None:
        admin = AdminClient(self.broker.settings.for_client() | {"log_level": 0})
        wanted = [TopicPartition(topic, partition, edge) for partition, edge in edges.items()]
        for deleted in admin.delete_records(wanted).values():
            deleted.result(30)

    # ----------------------------------------------------------------------------------------------------- processes

    def _launch(self, *, end: bool = False) -> None:
        config = {
            "servers": self.broker.settings.servers, "topic": self.topic, "home": str(self.home), "end": end,
            "guarantee": self.guarantee, "reader": self.reader, "starting": self.starting,
        }  # fmt: skip
        environment = os.environ | quick_java.environment() | {"PYTHONPATH": str(ROOT), "TZ": "UTC"}
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.kafka.storm", "--job", json.dumps(config)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment, cwd=ROOT,
            )  # fmt: skip

    def _kill(self) -> None:
        """Kill the driver and everything that it started, but those that are to stay behind."""
        if self.process is None:
            return
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children(recursive=True)
            for one in family:
                with suppress(psutil.NoSuchProcess):
                    if one not in self.zombies:
                        one.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.1)

    def _wait_for(self, version: int) -> None:
        self._until(lambda: self.newest >= version, f"micro-batch {version}")

    def _wait_for_line(self, text: str) -> None:
        begin = (self.root / "log").stat().st_size

        def said() -> bool:
            with (self.root / "log").open("rb") as log:
                log.seek(begin)
                return text.encode() in log.read()

        self._until(said, f"the job to say {text!r}")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            until(condition, what=what, alive=lambda: self.process is not None and self.process.poll() is None)
        except Died as error:
            error.add_note(self._last_words())
            raise

    @property
    def newest(self) -> int:
        """The newest micro-batch that Spark has committed, -1 before the first."""
        return max((int(path.name) for path in (self.home / "checkpoint" / "commits").glob("[0-9]*")), default=-1)

    def _last_words(self) -> str:
        lines = (self.root / "log").read_text(errors="replace").splitlines()
        said = [line for line in lines if line.startswith("ended by:")]
        return said[-1] if said else " | ".join(lines[-3:])


def read(settings: KafkaSettings, topic: str) -> list[tuple[int, dict[str, Any]]]:
    """Read all rows that a reader of committed ones is given, with their partition."""
    consumer = Consumer(
        settings.for_client()
        | {
            "group.id": "unused", "enable.auto.commit": False, "isolation.level": "read_committed",
            "enable.partition.eof": True, "auto.offset.reset": "earliest",
        }
    )  # fmt: skip
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    rows: list[tuple[int, dict[str, Any]]] = []
    ended: set[int] = set()
    deadline = time.monotonic() + 120
    while len(ended) < PARTITIONS:
        assert time.monotonic() < deadline, "the results cannot be read to their end"
        for message in consumer.consume(500, 0.2):
            if message.error() is None:
                rows.append((message.partition(), json.loads(message.value())))
            elif message.error().code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
    consumer.close()
    return rows


def one(seed: int, seconds: float, blows: tuple[str, ...] = BLOWS) -> Storm | None:
    """Run and check one storm; give it, or None when something was wrong: its directory is kept then."""
    root = Path(tempfile.mkdtemp(prefix="rewind-kafka-storm-"))
    with LocalBroker() as broker:
        storm = Storm(root, seed, broker, blows)
        try:
            storm.seen["windows"] = storm.check(storm.rage(seconds))
        except AssertionError as error:
            print(f"seed {seed} ({storm.guarantee}, {storm.reader}) FAILS: {error}\nkept: {root}", flush=True)
            return None
        finally:
            with suppress(Exception):
                storm.topics.close()
    storm.seen["micro-batches"] = storm.newest + 1
    shutil.rmtree(root)
    return storm


def main() -> int:
    """Run storms from the command line until the time is up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=float, default=180.0, help="how long one storm strikes, seconds")
    parser.add_argument("--blows", default=",".join(BLOWS), help="which ones fall, with commas between")
    parser.add_argument("--job", help="used by the storm itself")
    options = parser.parse_args()
    if options.job:
        return job(json.loads(options.job))
    blows = tuple(options.blows.split(","))
    if unknown := set(blows) - set(BLOWS):
        parser.error(f"--blows: {', '.join(sorted(unknown))}; there are {', '.join(dict.fromkeys(BLOWS))}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its job and its broker end with it
    began = time.monotonic()
    seed, end = options.seed, began + options.seconds
    seen: Counter[str] = Counter()
    while time.monotonic() < end:
        storm = one(seed, min(options.each, max(20.0, end - time.monotonic())), blows)
        if storm is None:
            return 1
        print(f"seed {seed} ({storm.guarantee}, {storm.reader}): equal, {dict(storm.seen)}", flush=True)
        seen += storm.seen + Counter({"storms": 1})
        seed += 1
    print(f"all equal in {time.monotonic() - began:.0f} s: {dict(seen)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
