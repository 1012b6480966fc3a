"""The client reader on a real broker: the connector is the oracle for what a message is, plain loops for counts.

Both read the same topics through whole jobs, so what is compared is what a user has: windows, errors, offsets.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import KafkaError

from backend import count, fetch_refused, kafka, median, stream, sum_, tumbling
from backend.errors import HistoryLost, SourceWentBack
from backend.kafka_client.reader import next_messages
from backend.sources import kafka_fetch
from backend.sources.formats import record_schema
from backend.sources.kafka_fetch import fetch
from backend.sources.kafka_reader import KafkaStreamReader
from backend.sources.spark_offsets import positions_in
from backend.spark.pack.frames import CODES_IN
from backend.spark.reading import streamed
from backend.spark.start import StartOptions, build_job
from recovery.testing.events import Event
from tests.kafka.test_kafka_source import delete_below
from tests.support.parsed import records_of
from tests.support.waiting import ended
from tests.unit.test_json_columns import GOOD, ODD
from tests.unit.test_kafka_fetch import Message

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.gentle]

MINUTE = 60_000
START = 1_700_000_000_000 // MINUTE * MINUTE
VALUE = "at bigint, who string, n int, x double"


def pipeline(source: Any, **options: Any) -> Any:
    return (
        stream(source, event_time="at", key="who")
        .window(tumbling("1 minute"), retention="1 hour", max_ahead=None, **options)
        .aggregate(n=count(), total=sum_("n"), middle=median("n"))
    )


def run(spark: Any, source: Any, path: Path, **options: Any) -> Any:
    """One run to the end of the topic, over the same checkpoint as before."""
    query = pipeline(source).start(
        spark, checkpoint=path / "c", results=path / "results", errors=path / "errors", local_dir=path / "local",
        shards=2, trigger="0 seconds", until="end", **options,
    )  # fmt: skip
    ended(query)
    return query


def rows_of(directory: Path) -> list[dict[str, Any]]:
    """All rows, but for an error's event time: Python has no date for the one that is out of range."""
    tables = [pq.ParquetFile(path).read() for path in sorted(directory.rglob("*.parquet"))]
    return [
        row
        for table in tables
        for row in table.select([name for name in table.schema.names if name != "event_time"]).to_pylist()
    ]


def newest(path: Path) -> dict[tuple[int, str], tuple[int, int, float]]:
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows_of(path / "results"):
        key = (int(row["window_start"].timestamp() * 1000), row["who"])
        if key not in found or row["revision"] > found[key]["revision"]:
            found[key] = row
    return {key: (row["n"], row["total"], row["middle"]) for key, row in found.items()}


def hostile(n: int, seed: int) -> list[Event]:
    """Messages of all kinds, good ones mostly; the bad ones alone, in rows, and at the ends."""
    rng = random.Random(seed)
    found: list[Event] = [Event(b"first is bad")]
    for number in range(n):
        at = START + number * 500 - rng.randrange(90_000)
        good = json.dumps({"at": at, "who": rng.choice(["ann", "bob", "ä😀"]), "n": rng.randrange(50), "x": 0.5})
        odd = [
            good.replace("{", "{ \n"),  # only Spark understands it, and counts it
            good.replace('"n": ', '"n": 1.'),
            json.dumps({"at": None, "who": "ann"}),
            json.dumps({"at": 2**63 - 1, "who": "bob"}),
            json.dumps({"at": at, "who": "y" * 31_000}),
            json.dumps({"at": at, "who": None, "n": None}),
            json.dumps({"at": at, "x": 1}),
            None,
            *GOOD,
            *ODD,
        ]
        bad = rng.random() < (0.5 if number % 700 < 60 else 0.004)
        found.append(
            Event(rng.choice(odd) if bad else good, key=f"k{number}", partition=rng.randrange(2), timestamp_ms=at)
        )
    every = [Event(value, key="odd", partition=n % 2) for n, value in enumerate(odd)]
    return [*found, *every, Event(b"last", partition=1), Event(None)]


@pytest.mark.parametrize("reader", ["client", "connector"])
def test_refused_messages_keep_their_bytes_and_come_back_from_the_topic(
    spark, kafka_broker, kafka_topics, tmp_path, reader
):
    """By hand: one is two days ahead of when it was written, one has no time, one is three hours late."""
    topic, hour = kafka_topics.create(1), 3_600_000
    values = [
        b'{"at": %d,  "who": "ann"}' % START,
        b'{"at": %d,  "who": "ahead"}' % (START + 48 * hour),
        b'{"who":  "none"}',
        b'{"at": %d,  "who": "ann"}' % (START + 3 * hour),
        b'{"at": %d,  "who": "late"}' % START,
    ]
    kafka_topics.produce(topic, [Event(v, key=f"k{n}", timestamp_ms=START + 3 * hour) for n, v in enumerate(values)])
    source = kafka(topic, servers=kafka_broker.settings, value=VALUE, reader=reader)
    job = stream(source, event_time="at", key="who").window(tumbling("1 minute"), retention="1 hour")
    query = job.aggregate(n=count()).start(
        spark, checkpoint=tmp_path / "c", results=tmp_path / "results", errors=tmp_path / "errors", shards=1,
        local_dir=tmp_path / "local", trigger="0 seconds", until="end",
    )  # fmt: skip
    ended(query)
    errors = {row["offset"]: row for row in rows_of(tmp_path / "errors")}
    reasons = {1: "in_future", 2: "no_event_time", 4: "out_of_retention"}
    assert {offset: row["reason"] for offset, row in errors.items()} == reasons
    assert {(row["topic"], row["partition"], row["timestamp"].timestamp() * 1000) for row in errors.values()} == {
        (topic, 0, START + 3 * hour)
    }
    assert {offset: errors[offset]["value"] for offset in (1, 2)} == {1: values[1], 2: values[2]}
    found = fetch_refused(spark, source, spark.read.parquet(str(tmp_path / "errors"))).collect()
    assert sorted((row["offset"], bytes(row["key"]), bytes(row["value"])) for row in found) == [
        (offset, b"k%d" % offset, values[offset]) for offset in (1, 2, 4)
    ]


def test_both_readers_see_the_same_messages(spark, kafka_broker, kafka_topics, tmp_path):
    """What the pack stage gets of each message, in a replay: the connector says what is right."""
    topic = kafka_topics.create(2)
    kafka_topics.produce(topic, [Event({"at": START, "who": "ann", "n": 1}, partition=1, timestamp_ms=-1)] * 3)
    kafka_topics.produce(topic, hostile(6_000, 1))
    kafka_topics.produce(topic, [{"at": START, "who": "ghost", "n": 1}] * 5, transaction="abort")

    def taken(reader: str) -> dict[tuple[int, int], str]:
        source = kafka(topic, servers=kafka_broker.settings, value=VALUE, key="record string", reader=reader)
        job = build_job(pipeline(source), spark, StartOptions(shards=3), stored=None, first_offsets=list)
        assert job.direct == (reader == "client")

        def see(batches):
            import pyarrow as pa

            for batch in batches:
                # how a batch numbers its keys is its own
                told = [repr({k: v for k, v in row.items() if k != CODES_IN}) for row in batch.to_pylist()]
                names = ["_partition", "_offset"]
                columns = [*(batch.column(name).cast(pa.int64()) for name in names), pa.array(told)]
                yield pa.RecordBatch.from_arrays(columns, [*names, "row"])

        ends = source.offsets()
        ranges = {(0, 0): (1, ends[topic, 0][1]), (0, 1): (0, ends[topic, 1][1] - 3)}
        rows = job.replay(spark, ranges, see, "_partition bigint, _offset bigint, row string").collect()
        assert len(rows) == len({(row[0], row[1]) for row in rows})
        return {(row[0], row[1]): row[2] for row in rows}

    mine, theirs = taken("client"), taken("connector")
    assert mine.keys() == theirs.keys()
    assert len(mine) > 5_000
    assert all("'_timestamp': None" in mine[1, offset] for offset in range(3)), mine[1, 0]
    for place, row in theirs.items():
        assert mine[place] == row, place


def test_jobs_on_both_readers_have_the_same_windows_and_errors(spark, kafka_broker, kafka_topics, tmp_path):
    topic = kafka_topics.create(2)
    kafka_topics.produce(topic, hostile(4_000, 2))
    found = {}
    for reader in ("client", "connector"):
        source = kafka(topic, servers=kafka_broker.settings, value=VALUE, max_offsets_per_trigger=1_500, reader=reader)
        query = run(spark, source, tmp_path / reader)
        errors = Counter(
            (row["partition"], row["offset"], row["reason"], row["detail"], row["key"], row["value"], row["timestamp"])
            for row in rows_of(tmp_path / reader / "errors")
        )
        assert max(errors.values()) == 1
        found[reader] = (newest(tmp_path / reader), errors, query.progress.rows)
    assert found["client"] == found["connector"]
    reasons = Counter(reason for _, _, reason, *_ in found["client"][1])
    assert {"malformed", "no_event_time", "out_of_range"} <= reasons.keys()


@pytest.mark.long
def test_a_checkpoint_goes_on_with_the_other_reader_and_back(spark, kafka_broker, kafka_topics, tmp_path):
    """With lost disks between: what the connector counted the client replays, and the reverse. Judged by a loop."""
    topic = kafka_topics.create(2)
    rng = random.Random(4)
    sent: list[dict[str, Any]] = []
    for turn, reader in enumerate(["connector", "client", "connector", "client"]):
        more = [
            {"at": START + (turn * 500 + n) * 300, "who": rng.choice("abc"), "n": rng.randrange(9)} for n in range(500)
        ]
        kafka_topics.produce(topic, [Event(row, partition=rng.randrange(2)) for row in more])
        sent += more
        source = kafka(topic, servers=kafka_broker.settings, value=VALUE, max_offsets_per_trigger=300, reader=reader)
        query = run(spark, source, tmp_path)
        assert (query.progress.restores, query.progress.adopted > 0) == (0, turn > 0)
        shutil.rmtree(tmp_path / "local")
    expected: dict[tuple[int, str], list[int]] = {}
    for row in sent:
        expected.setdefault((row["at"] // MINUTE * MINUTE, row["who"]), []).append(row["n"])
    assert {key: found[:2] for key, found in newest(tmp_path).items()} == {
        key: (len(ns), sum(ns)) for key, ns in expected.items()
    }
    assert rows_of(tmp_path / "errors") == []


def test_where_a_new_query_begins(spark, kafka_broker, kafka_topics, tmp_path):
    topic = kafka_topics.create(2)
    kafka_topics.produce(topic, [Event({"at": START, "who": "old", "n": 1}, partition=n % 2) for n in range(10)])

    def source(**options: Any) -> Any:
        return kafka(topic, servers=kafka_broker.settings, value=VALUE, **options)

    assert source().first_positions() == {(topic, 0): 0, (topic, 1): 0}
    latest = source(starting="latest")
    assert latest.first_positions() == {(topic, 0): 5, (topic, 1): 5}
    with pytest.raises(ValueError, match="starting="):
        source(starting={(topic, 0): 3}).first_positions()
    beyond = source(starting={(topic, 0): 3, (topic, 1): 6})
    with pytest.raises(ValueError, match=r"1\) has offsets from 0, the next one to come is 5"):
        run(spark, beyond, tmp_path / "beyond")
    assert [path for path in (tmp_path / "beyond").rglob("*") if path.is_file()] == []
    given = source(starting={(topic, 0): 3, (topic, 1): 5})
    run(spark, given, tmp_path / "given")
    assert newest(tmp_path / "given") == {(START, "old"): (2, 2, 1.0)}
    # begun at the end, killed before its first micro-batch was committed: what came meanwhile is read
    run(spark, latest, tmp_path / "latest")
    shutil.rmtree(tmp_path / "latest" / "c" / "commits")
    shutil.rmtree(tmp_path / "latest" / "c" / "offsets")
    kafka_topics.produce(topic, [Event({"at": START, "who": "new", "n": 1})])
    from backend.spark.first_offsets import known_positions

    kept = known_positions(str(tmp_path / "latest" / "c"), 0)
    assert kept == {(topic, 0): 5, (topic, 1): 5}


def reader_of(source: Any, **changes: Any) -> KafkaStreamReader:
    from dataclasses import replace

    return replace(source.stream_reader(), **changes)


def test_the_stream_readers_plan(spark, kafka_broker, kafka_topics):
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

    topic = kafka_topics.create(2)
    kafka_topics.produce(topic, [Event({"n": n}, partition=n % 2) for n in range(10)])
    source = kafka(topic, servers=kafka_broker.settings, value="n int", max_offsets_per_trigger=4)
    reader = reader_of(source, first={(topic, 0): 1, (topic, 1): 5}, per_task=2)
    begin = reader.initialOffset()
    assert positions_in(begin) == {(topic, 0): 1, (topic, 1): 5}
    limit = reader.getDefaultReadLimit()
    assert isinstance(limit, ReadMaxRows)
    end = reader.latestOffset(begin, limit)
    assert positions_in(end) == {(topic, 0): 5, (topic, 1): 5}
    pieces = [(piece.partition, piece.start, piece.end) for piece in reader.partitions(begin, end)]
    assert pieces == [(0, 1, 3), (0, 3, 5)]
    assert positions_in(reader.reportLatestOffset()) == {(topic, 0): 5, (topic, 1): 5}
    kafka_topics.grow(topic, 3)
    kafka_topics.produce(topic, [Event({"n": 1}, partition=2)])
    grown = reader.latestOffset(end, ReadAllAvailable())
    assert positions_in(grown) == {(topic, 0): 5, (topic, 1): 5, (topic, 2): 1}
    assert [(piece.partition, piece.start, piece.end) for piece in reader.partitions(end, grown)] == [(2, 0, 1)]
    available = reader_of(source)
    available.prepareForTriggerAvailableNow()
    kafka_topics.produce(topic, [Event({"n": 1})])
    assert positions_in(available.latestOffset(begin, ReadAllAvailable()))[topic, 0] == 5
    with pytest.raises(SourceWentBack, match="next offset to read is 9, the topic ends at 6"):
        reader.latestOffset({topic: {"0": 9}}, ReadAllAvailable())


def test_offsets_that_retention_takes_stop_the_read_by_name(spark, kafka_broker, kafka_topics):
    topic = kafka_topics.create()
    kafka_topics.produce(topic, [{"n": n} for n in range(10)])
    source = kafka(topic, servers=kafka_broker.settings, value="n int")
    ranges = {(topic, 0): (2, 10)}
    frame = records_of(spark, source, ranges)
    assert [row.offset for row in frame.orderBy("offset").collect()] == list(range(2, 10))
    delete_below(kafka_broker.settings, topic, 6)
    with pytest.raises(Exception, match=r"\[rewind:HistoryLost\].*offset [24] comes next"):
        frame.collect()
    with pytest.raises(HistoryLost, match="needed are 2 to 9, there are 6 to 9"):
        records_of(spark, source, ranges)


def test_a_client_that_had_fetched_more_gives_the_next_range_exactly(kafka_broker, kafka_topics):
    """It is kept between tasks, and had much of the topic in its queue when the task before ended."""
    topic = kafka_topics.create(2)
    kafka_topics.produce(topic, [Event(b"%d" % (n // 2), partition=n % 2) for n in range(60_000)])
    configuration = {**kafka_broker.settings.for_client(), "isolation.level": "read_committed"}
    ranges = [(0, 0, 10), (0, 5, 25), (1, 0, 10), (0, 29_990, 30_000), (0, 3, 4), (1, 20_000, 20_010), (1, 9, 12_000)]
    for partition, start, end in ranges * 3:
        found = list(fetch(configuration, topic, {partition: (start, end)}))
        rows = [row for records in found for row in records.select(["partition", "offset", "value"]).to_pylist()]
        assert rows == [{"partition": partition, "offset": n, "value": b"%d" % n} for n in range(start, end)]
    assert len(kafka_fetch._idle) == 1


def coordinates(records: Any) -> list[tuple[int, int]]:
    return [(row["partition"], row["offset"]) for row in records.select(["partition", "offset"]).to_pylist()]


def test_ranges_of_several_partitions_are_read_exactly_at_once(kafka_broker, kafka_topics, monkeypatch):
    """Also where one goes on behind its range while another is waited for, and where the client lost its place."""
    topic = kafka_topics.create(3)
    kafka_topics.produce(topic, [Event(b"%d" % n, partition=n % 2) for n in range(60_000)])
    configuration = {**kafka_broker.settings.for_client(), "isolation.level": "read_committed"}

    def check(ranges: dict[int, tuple[int, int]]) -> None:
        found = sorted(place for records in fetch(configuration, topic, ranges) for place in coordinates(records))
        assert found == [(number, at) for number, (start, end) in sorted(ranges.items()) for at in range(start, end)]

    assigned: list[list[int]] = []
    torn: set[int] = set()

    def asked(consumer: Any, at_most: int, wait_s: float) -> list[Any]:
        assigned.append(sorted(place.partition for place in consumer.assignment()))
        if len(assigned) not in torn:
            return next_messages(consumer, at_most, wait_s)
        return [*next_messages(consumer, 50, wait_s), Message(0, KafkaError._BAD_MSG, partition=0)]

    monkeypatch.setattr(kafka_fetch, "next_messages", asked)
    for _ in range(3):
        check({0: (0, 10), 1: (29_000, 30_000)})
        check({1: (5, 15), 0: (7, 25_000)})
        check({1: (3, 4)})
    kafka_topics.produce(topic, [Event(b"first", partition=2)])
    reading = fetch(configuration, topic, {0: (0, 10), 2: (0, 6)})
    begun = sorted(coordinates(next(reading)) + coordinates(next(reading)))
    assert begun == [*((0, at) for at in range(10)), (2, 0)]
    kafka_topics.produce(topic, [Event(b"more", partition=2)] * 5)
    assert [place for records in reading for place in coordinates(records)] == [(2, at) for at in range(1, 6)]
    assert assigned[-1] == [2], "nothing more of the other is read"
    check({0: (10, 20), 2: (1, 6)})
    torn |= {len(assigned) + 1, len(assigned) + 4}
    check({0: (100, 900), 1: (200, 900)})
    assert len(assigned) > max(torn)


def test_nothing_secret_is_told_by_plans(spark, kafka_broker, kafka_topics):
    from dataclasses import replace

    topic = kafka_topics.create()
    source = kafka(topic, servers=kafka_broker.settings, value="n int")
    secret = replace(kafka_broker.settings, mechanism="PLAIN", username="ann", password="s3cret-word")
    told = replace(source, settings=secret)
    reader = told.stream_reader(first={(topic, 0): 0})
    assert reader.settings.for_client()["sasl.password"] == "s3cret-word"
    assert "s3cret-word" not in repr(reader)
    frame = streamed(spark, reader, record_schema(), iter)
    explained = frame._jdf.queryExecution().toString() + frame._jdf.queryExecution().logical().toString()
    assert "s3cret-word" not in explained


def test_what_only_spark_reads_goes_through_the_connector(kafka_broker, kafka_topics):
    topic = kafka_topics.create()
    options = {"servers": kafka_broker.settings, "value": "day date, n int"}
    assert kafka(topic, **options).direct
    assert kafka(topic, key="who string", **options).direct
    assert not kafka(topic, key="who int", **options).direct
    assert not kafka(topic, headers={"trace": "string"}, **options).direct
    assert not kafka(topic, reader="connector", **options).direct
