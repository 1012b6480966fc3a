"""Steps and DataFrames beside a topic, on a broker, the local disk lost between two runs: judged by plain loops."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path
from statistics import median as middle_of
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from backend import collect_list, join, kafka, median, policies, stream, tumbling
from backend.spark.session.connector import ensure_connector
from recovery.testing.events import Event
from tests.support.taken_back import newest_commit, take_back
from tests.support.waiting import ended

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.long]

START = 1_700_000_040_000  # a full minute
USERS = ("Ann", "Bob", "cy")
VALUE = "user string, n bigint, ms bigint"


def produced(topics: Any, topic: str, first: int, last: int) -> None:
    """Send one message a second, to two source partitions in turn."""
    for partition in (0, 1):
        rows = [
            {"user": USERS[n % 3], "n": n, "ms": START + 1000 * n} for n in range(first, last) if n % 2 == partition
        ]
        topics.produce(topic, [Event(row, partition=partition) for row in rows])


def written(path: Path, first: int, last: int) -> None:
    """Write one row a second to a folder that a stream of files reads."""
    path.mkdir(exist_ok=True)
    times = pa.array([START + 1000 * n for n in range(first, last)], pa.int64()).cast(pa.timestamp("ms", tz="UTC"))
    table = {"user": [USERS[n % 3].lower() for n in range(first, last)], "amount": list(range(first, last))}
    pq.write_table(pa.table({**table, "at": times.cast(pa.timestamp("us", tz="UTC"))}), path / f"from-{first}.parquet")


def run(spark: Any, job: Any, home: Path, **options: Any) -> None:
    places = {name: home / name for name in ("checkpoint", "results", "errors")}
    query = job.start(spark, **places, local_dir=home / "local", trigger="0 seconds", until="end", **options)
    ended(query)


def outputs(path: Path) -> list[dict[str, Any]]:
    return ds.dataset(path, format="parquet").to_table().to_pylist() if path.exists() else []


def test_a_topic_joined_with_a_dataframe_with_steps_on_both_sides(spark, kafka_broker, kafka_topics, tmp_path):
    topic = kafka_topics.create(2)

    def job() -> Any:
        frame = spark.readStream.schema("user string, amount bigint, at timestamp").parquet(str(tmp_path / "in"))
        left = (
            stream(kafka(topic, servers=kafka_broker.settings, value=VALUE), event_time="ms")
            .where(pc.field("n") >= 10)
            .with_columns(user=pc.utf8_lower(pc.field("user")))
        )
        right = stream(frame, event_time="at").where(pc.field("amount") < 90).select("user", "amount", "at")
        return join(
            left, right, on="user", within="3 s", left_retention="1 hour", right_retention="1 hour", max_ahead=None
        )

    for first, last in ((0, 60), (60, 100)):
        produced(kafka_topics, topic, first, last)
        written(tmp_path / "in", first, last)
        shutil.rmtree(tmp_path / "local", ignore_errors=True)
        run(spark, job(), tmp_path, shards=2)
    pairs = sorted((row["n"], row["amount"]) for row in outputs(tmp_path / "results"))
    assert pairs == [(n, m) for n in range(10, 100) for m in range(90) if n % 3 == m % 3 and abs(n - m) <= 3]
    assert outputs(tmp_path / "errors") == []


def test_steps_where_each_source_partition_is_a_shard(spark, kafka_broker, kafka_topics, tmp_path):
    topic = kafka_topics.create(2)

    def job() -> Any:
        return (
            stream(kafka(topic, servers=kafka_broker.settings, value=VALUE), event_time="ms", key="user")
            .where(pc.field("n") >= 10)
            .with_columns(twice=pc.field("n") * 2, user=pc.utf8_lower(pc.field("user")))
            .window(tumbling("30 seconds"), retention="1 hour", max_ahead=None)
            .aggregate(middle=median("twice"))
        )

    for first, last in ((0, 60), (60, 100)):
        produced(kafka_topics, topic, first, last)
        shutil.rmtree(tmp_path / "local", ignore_errors=True)
        run(spark, job(), tmp_path, route="partition")
    groups: dict[tuple[int, str, int], list[int]] = defaultdict(list)
    for n in range(10, 100):
        groups[n % 2, USERS[n % 3].lower(), n // 30].append(2 * n)
    newest = {
        (row["shard"], row["user"], (int(row["window_start"].timestamp()) - START // 1000) // 30): row["middle"]
        for row in sorted(outputs(tmp_path / "results"), key=lambda row: row["revision"])
    }
    assert newest == {key: middle_of(values) for key, values in groups.items()}
    assert outputs(tmp_path / "errors") == []


def test_kafka_by_hand_as_a_dataframe(spark, kafka_broker, kafka_topics, tmp_path):
    """`spark.readStream.format("kafka")`, with a lost disk and a planned micro-batch in another order."""
    topic = kafka_topics.create(2)
    ensure_connector(spark)

    def job(order: int | None) -> Any:
        options = {"kafka.bootstrap.servers": kafka_broker.settings.servers, "subscribe": topic}
        raw = spark.readStream.format("kafka").options(**options, startingOffsets="earliest").load()
        rows = raw.selectExpr(f"from_json(cast(value as string), '{VALUE}') as m").selectExpr(
            "lower(m.user) as user", "m.n as n", "timestamp_millis(m.ms) as at"
        )
        return (
            stream(rows if order is None else rows.repartition(order, "n"), event_time="at", key="user", name="by hand")
            .where(pc.field("n") >= 10)
            .window(tumbling("30 seconds"), retention="1 hour", max_ahead=None, policies=policies(early="each"))
            .aggregate(middle=median("n"), all=collect_list("n"))
        )

    produced(kafka_topics, topic, 0, 60)
    run(spark, job(None), tmp_path, shards=2)
    produced(kafka_topics, topic, 60, 100)
    run(spark, job(None), tmp_path, shards=2)
    planned = newest_commit(tmp_path / "checkpoint")
    before = sorted(str(row) for row in outputs(tmp_path / "results") if row["version"] <= planned)
    take_back(tmp_path / "checkpoint", planned)
    shutil.rmtree(tmp_path / "local")
    run(spark, job(5), tmp_path, shards=2)
    rows = outputs(tmp_path / "results")
    assert sorted(str(row) for row in rows if row["version"] <= planned) == before
    wanted: dict[tuple[str, int], list[int]] = defaultdict(list)
    for n in range(10, 100):
        wanted[USERS[n % 3].lower(), n // 30].append(n)
    rows.sort(key=lambda row: (row["version"], row["sequence"]))
    newest = {(row["user"], (int(row["window_start"].timestamp()) - START // 1000) // 30): row for row in rows}
    assert {name: (row["middle"], sorted(row["all"])) for name, row in newest.items()} == {
        name: (middle_of(values), values) for name, values in wanted.items()
    }
    assert outputs(tmp_path / "errors") == []
