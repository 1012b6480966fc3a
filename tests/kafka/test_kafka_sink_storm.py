"""Both guarantees in a storm: the broker is killed at random moments, attempts give up, zombies write on.

What plays Spark runs a micro-batch again until it has worked, and only then begins the next one; the rows of every
micro-batch are known before.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from backend import kafka_sink
from backend.errors import SinkConflict, SinkUnavailable
from backend.sinks.dedupe import Dedupe
from tests.kafka.test_kafka_sink import frame, produced, read, results

pytestmark = pytest.mark.kafka

MICRO_BATCHES = 8
OUTAGES = 4
TRIES = 30


class Job:
    """A query's driver: one sink at a time, and the ones before it, which may write again."""

    def __init__(self, settings: Any, topics: tuple[str, str], guarantee: str, seed: int) -> None:
        self.random, self.settings, self.topics, self.guarantee = random.Random(seed), settings, topics, guarantee
        self.sinks: list[Any] = []
        self.planned = -1
        self.failures: list[str] = []
        self.rows = {v: [self.random.randrange(1, 1500) for _ in range(2)] for v in range(MICRO_BATCHES)}

    def run(self) -> None:
        for version in range(MICRO_BATCHES):
            for _ in range(TRIES):
                try:
                    if not self.sinks or self.random.random() < 0.3:
                        self.start()
                    self.planned = version
                    self.publish(self.sinks[-1], version)
                    if len(self.sinks) > 1 and self.random.random() < 0.5:
                        self.publish(self.random.choice(self.sinks[:-1]), version)
                        self.start()  # only to find out: a zombie at least once is refused behind its rows
                    break
                except SinkUnavailable as error:
                    self.failures.append(str(error))
                except SinkConflict as error:
                    self.failures.append(str(error))
                    self.start_until_it_works()
            else:
                raise AssertionError(f"micro-batch {version} did not work in {TRIES} tries: {self.failures[-1]}")

    def publish(self, sink: Any, version: int) -> None:
        counts = self.rows[version]
        made = [frame(shard, version, results(*range(count))) for shard, count in enumerate(counts)]
        (sink.finish if self.guarantee == "exactly_once" else lambda m, v: produced(sink, m, v))(made, version)

    def start(self) -> None:
        patience = f"{self.random.choice([1, 3, 30])} seconds"
        sink = kafka_sink(*self.topics, servers=self.settings, key="n", guarantee=self.guarantee, patience=patience)
        sink.resume_from(self.planned)
        sink.open("q")
        self.sinks = [*self.sinks[-2:], sink]

    def start_until_it_works(self) -> None:
        for _ in range(TRIES):
            try:
                return self.start()
            except SinkUnavailable as error:
                self.failures.append(str(error))
        raise AssertionError(self.failures[-1])


@pytest.mark.long
def test_no_row_is_lost_and_none_comes_twice(local_kafka_broker, kafka_topics):
    seed = 11
    jobs = []
    for number, guarantee in enumerate(("exactly_once", "at_least_once")):
        topics = kafka_topics.create(3), kafka_topics.create()
        kafka_topics.adopt(f"{topics[0]}-commits")
        jobs.append(Job(local_kafka_broker.settings, topics, guarantee, seed + number))
    draw = random.Random(seed)
    over = threading.Event()
    raised: list[BaseException] = []

    def run(job: Job) -> None:
        try:
            job.run()
        except BaseException as error:  # told by the test's own thread
            raised.append(error)

    def storm() -> None:
        for _ in range(OUTAGES):
            if over.wait(draw.uniform(0.5, 4)):
                return
            local_kafka_broker.kill()
            time.sleep(draw.choice([0, 1, 4]))
            local_kafka_broker.start()

    threads = [threading.Thread(target=run, args=[job]) for job in jobs]
    weather = threading.Thread(target=storm)
    for thread in (*threads, weather):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    weather.join()
    assert not raised
    for job in jobs:
        found = read(job.settings, job.topics[0], 3)
        dedupe = Dedupe()
        once = [row["id"] for row in found if job.guarantee == "exactly_once" or dedupe.is_new(row, *row["_at"])]
        wanted = [
            f"{version}-{shard}-{n}"
            for version, counts in job.rows.items()
            for shard, count in enumerate(counts)
            for n in range(count)
        ]
        assert sorted(once) == sorted(wanted)
        print(f"{job.guarantee}: {len(found)} messages of {len(wanted)} rows, {len(job.failures)} failures")
    assert any(job.failures for job in jobs), "the storm passed by"
