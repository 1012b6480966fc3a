"""The Kafka source on a real broker: what a stream and a replay see, and what they refuse."""

from __future__ import annotations

import datetime
import io
import json
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from backend.errors import HistoryLost, SourceWentBack, TopicMissing
from backend.kafka_client.identity import compare
from backend.kafka_client.settling import while_it_settles
from backend.sources.formats import COLUMNS
from backend.sources.kafka import kafka
from recovery.failures import losses_named
from recovery.testing.events import Event
from tests.support.parsed import replayed, streamed

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.gentle]

VALUE = "n int, who string"


def stream(spark: Any, source: Any, checkpoint: Path) -> list[list[Any]]:
    """Run to the end of the topic; the rows of each micro-batch, in order of partition and offset."""
    batches: list[list[Any]] = []

    def take(frame: Any, version: int) -> None:
        batches.append(sorted(frame.collect(), key=lambda row: (row.topic, row.partition, row.offset)))

    writer = streamed(spark, source).writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return batches


def delete_below(settings: Any, topic: str, offset: int, partition: int = 0) -> None:
    """What retention does, now."""
    admin = AdminClient(settings.for_client())
    for deleted in admin.delete_records([TopicPartition(topic, partition, offset)]).values():
        deleted.result(20)


def ids(rows: list[Any]) -> list[tuple[int, int]]:
    return [(row.partition, row.offset) for row in rows]


def test_every_kind_of_record_comes_through_and_nothing_is_dropped(spark, kafka_broker, kafka_topics, tmp_path):
    topic = kafka_topics.create(2)
    ms = 1_600_000_000_123
    kafka_topics.produce(
        topic,
        [
            Event({"n": 1, "who": "ann"}, key="7", timestamp_ms=ms, headers={"trace": b"abc", "tries": b"3"}),
            Event({"n": 2}, key=None, timestamp_ms=ms - 5_000),
            Event(b"\xff{broken", key="k", timestamp_ms=ms, headers={"tries": b"many"}),
            Event(None, key="8", timestamp_ms=ms),
            Event({"n": "no number"}, partition=1, timestamp_ms=ms),
            Event({"n": 4, "who": None}, partition=1, timestamp_ms=ms),
        ],
    )
    source = kafka(
        topic,
        servers=kafka_broker.settings,
        value=VALUE,
        key="user bigint",
        headers={"trace": "string", "tries": "int"},
    )
    (rows,) = stream(spark, source, tmp_path / "c")
    assert list(rows[0].asDict()) == list(COLUMNS)
    assert ids(rows) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    first, second, third, fourth, fifth, sixth = rows
    assert first.fields.asDict() == {"n": 1, "who": "ann", "user": 7, "trace": "abc", "tries": 3}
    assert (first.topic, bytes(first.key), first.malformed) == (topic, b"7", None)
    assert json.loads(bytes(first.raw)) == {"n": 1, "who": "ann"}
    naive = datetime.datetime(2020, 9, 13, 12, 26, 40, 123_000)
    assert first.timestamp.astimezone(datetime.UTC).replace(tzinfo=None) == naive
    assert second.fields.asDict() == {"n": 2, "who": None, "user": None, "trace": None, "tries": None}
    assert second.key is None
    assert third.fields is None
    assert bytes(third.raw) == b"\xff{broken"
    assert "not a JSON object" in third.malformed
    assert (fourth.fields, fourth.raw, fourth.malformed) == (None, None, "the value is null")
    assert bytes(fourth.key) == b"8"
    assert bytes(fifth.raw) == b'{"n": "no number"}'
    assert sixth.fields.n == 4
    again = replayed(spark, source, {(topic, 0): (0, 4), (topic, 1): (0, 2)}).collect()
    assert sorted(again, key=lambda row: (row.partition, row.offset)) == rows


def test_a_replay_reads_exactly_the_ranges(spark, kafka_broker, kafka_topics):
    one, two = kafka_topics.create(2), kafka_topics.create()
    kafka_topics.produce(one, [Event({"n": n}, partition=n % 2) for n in range(20)])
    kafka_topics.produce(two, [{"n": 100 + n} for n in range(5)])
    source = kafka([one, two], servers=kafka_broker.settings, value=VALUE)
    assert source.offsets() == {(one, 0): (0, 10), (one, 1): (0, 10), (two, 0): (0, 5)}
    rows = replayed(spark, source, {(one, 0): (3, 6), (one, 1): (2, 2), (two, 0): (4, 5)}).collect()
    assert sorted((row.topic == two, row.offset, row.fields.n) for row in rows) == [
        (False, 3, 6),
        (False, 4, 8),
        (False, 5, 10),
        (True, 4, 104),
    ]
    nothing = replayed(spark, source, {(one, 0): (3, 3)})
    assert nothing.columns == list(COLUMNS)
    assert nothing.collect() == []


def test_history_that_is_gone_or_not_there_yet_is_an_error(spark, kafka_broker, kafka_topics):
    topic = kafka_topics.create()
    kafka_topics.produce(topic, [{"n": n} for n in range(10)])
    delete_below(kafka_broker.settings, topic, 4)
    source = kafka(topic, servers=kafka_broker.settings, value=VALUE)
    assert source.offsets() == {(topic, 0): (4, 10)}
    assert [row.offset for row in replayed(spark, source, {(topic, 0): (4, 10)}).collect()] == [4, 5, 6, 7, 8, 9]
    with pytest.raises(HistoryLost, match="needed are 3 to 5, there are 4 to 9"):
        replayed(spark, source, {(topic, 0): (3, 6)})
    with pytest.raises(HistoryLost, match="needed are 8 to 10, there are 4 to 9"):
        replayed(spark, source, {(topic, 0): (8, 11)})
    with pytest.raises(HistoryLost):
        replayed(spark, source, {(topic, 5): (0, 1)})


def test_what_retention_takes_while_it_is_read_has_a_name_and_a_next_command(spark, kafka_broker, kafka_topics):
    topic = kafka_topics.create()
    kafka_topics.produce(topic, [{"n": n} for n in range(10)])
    source = kafka(topic, servers=kafka_broker.settings, value=VALUE)
    frame = replayed(spark, source, {(topic, 0): (2, 10)})  # all is there when it is asked for
    delete_below(kafka_broker.settings, topic, 6)
    with pytest.raises(HistoryLost) as caught, losses_named(lambda: replayed(spark, source, {(topic, 0): (2, 10)})):
        frame.collect()
    assert "rewind reset <checkpoint>" in caught.value.command
    source.check_positions({(topic, 0): 6, ("another", 0): 0})
    with pytest.raises(HistoryLost, match="offset 5 comes next, the earliest is 6: retention took 1 offsets"):
        source.check_positions({(topic, 0): 5})


def test_aborted_transactions_are_not_counted(spark, kafka_broker, kafka_topics, tmp_path):
    topic = kafka_topics.create()
    kafka_topics.produce(topic, [{"n": 1}, {"n": 2}], transaction="commit")  # offsets 0, 1, marker 2
    kafka_topics.produce(topic, [{"n": 66}], transaction="abort")  # 3, marker 4
    kafka_topics.produce(topic, [{"n": 3}], transaction="commit")  # 5, marker 6
    source = kafka(topic, servers=kafka_broker.settings, value=VALUE, max_offsets_per_trigger=2)
    batches = stream(spark, source, tmp_path / "c")
    assert [row.fields.n for batch in batches for row in batch] == [1, 2, 3]
    replay = replayed(spark, source, {(topic, 0): (1, 7)}).collect()
    assert sorted(row.offset for row in replay) == [1, 5]
    everything = kafka(topic, servers=kafka_broker.settings, value=VALUE, isolation="read_uncommitted")
    assert sorted(row.fields.n for row in replayed(spark, everything, {(topic, 0): (0, 7)}).collect()) == [1, 2, 3, 66]


def test_micro_batches_are_bounded_and_new_partitions_are_read_from_their_beginning(
    spark, kafka_broker, kafka_topics, tmp_path
):
    topic = kafka_topics.create()
    kafka_topics.produce(topic, [{"n": n} for n in range(7)])
    source = kafka(topic, servers=kafka_broker.settings, value=VALUE, max_offsets_per_trigger=3)
    before = source.identities()
    assert [ids(batch) for batch in stream(spark, source, tmp_path / "c")] == [
        [(0, 0), (0, 1), (0, 2)],
        [(0, 3), (0, 4), (0, 5)],
        [(0, 6)],
    ]
    kafka_topics.grow(topic, 2)
    kafka_topics.produce(topic, [Event({"n": 8}, partition=1), Event({"n": 9}, partition=0)])
    assert [ids(batch) for batch in stream(spark, source, tmp_path / "c")] == [[(0, 7), (1, 0)]]
    (note,) = compare(before, source.identities())
    assert "has 2 partitions, it had 1" in note


def test_a_topic_made_again_stops_the_stream_and_is_told_by_its_id(spark, kafka_broker, kafka_topics, tmp_path):
    from pyspark.errors import StreamingQueryException

    topic = kafka_topics.create()
    kafka_topics.produce(topic, [{"n": n} for n in range(5)])
    source = kafka(topic, servers=kafka_broker.settings, value=VALUE)
    stream(spark, source, tmp_path / "c")
    before = source.identities()
    assert compare(before, source.identities()) == []
    kafka_topics.delete(topic)
    kafka_topics.create(name=topic)
    kafka_topics.produce(topic, [{"n": 1}])
    with pytest.raises(StreamingQueryException):
        stream(spark, source, tmp_path / "c")
    kafka_topics.produce(topic, [{"n": n} for n in range(20)])  # now the offsets alone would look right
    with pytest.raises(SourceWentBack, match="made again"):
        compare(before, source.identities())


def test_log_append_time_is_the_brokers(spark, kafka_broker, kafka_topics):
    topic = kafka_topics.create(message_timestamp_type="LogAppendTime")
    kafka_topics.produce(topic, [Event({"n": 1}, timestamp_ms=1_000)])
    (row,) = replayed(spark, kafka(topic, servers=kafka_broker.settings, value=VALUE), {(topic, 0): (0, 1)}).collect()
    assert row.timestamp.year > 2020


AVRO = json.dumps(
    {
        "type": "record",
        "name": "Flight",
        "fields": [
            {"name": "origin", "type": "string"},
            {"name": "delay", "type": ["null", "double"]},
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
            {"name": "legs", "type": {"type": "array", "items": "int"}},
        ],
    }
)


def test_avro_values_are_fields_and_other_bytes_are_malformed(spark, kafka_broker, kafka_topics):
    topic = kafka_topics.create()
    at = datetime.datetime(2013, 1, 1, 5, 17, tzinfo=datetime.UTC)
    buffer = io.BytesIO()
    fastavro.schemaless_writer(
        buffer, fastavro.parse_schema(json.loads(AVRO)), {"origin": "EWR", "delay": None, "at": at, "legs": [1, 2]}
    )
    good = buffer.getvalue()
    kafka_topics.produce(topic, [good, good + b"\x00", good[:3], None])
    source = kafka(topic, servers=kafka_broker.settings, value=AVRO, format="avro")
    rows = sorted(replayed(spark, source, {(topic, 0): (0, 4)}).collect(), key=lambda row: row.offset)
    fields = rows[0].fields
    assert (fields.origin, fields.delay, fields.legs) == ("EWR", None, [1, 2])
    assert fields.at.astimezone(datetime.UTC) == at
    assert [row.malformed for row in rows[1:]] == ["the value is not Avro of the given schema"] * 2 + [
        "the value is null"
    ]
    assert bytes(rows[2].raw) == good[:3]


def test_raw_values_and_functions_of_ones_own(spark, kafka_broker, kafka_topics):
    def two_words(values: pa.Array) -> pa.Array:
        split = [value.decode().split(" ") if value else [] for value in values.to_pylist()]
        return pa.array(
            [{"left": words[0], "right": words[1]} if len(words) == 2 else None for words in split],
            pa.struct([("left", pa.string()), ("right", pa.string())]),
        )

    topic = kafka_topics.create()
    kafka_topics.produce(topic, [b"a b", b"alone"])
    ranges = {(topic, 0): (0, 2)}
    raw = replayed(spark, kafka(topic, servers=kafka_broker.settings, format="raw"), ranges).collect()
    assert sorted(bytes(row.fields.value) for row in raw) == [b"a b", b"alone"]
    source = kafka(topic, servers=kafka_broker.settings, value="left string, right string", format=two_words)
    rows = sorted(replayed(spark, source, ranges).collect(), key=lambda row: row.offset)
    assert rows[0].fields.asDict() == {"left": "a", "right": "b"}
    assert (rows[1].malformed, bytes(rows[1].raw)) == ("the value is not what the function takes", b"alone")
    described = source.describe()["value"]
    assert described["function"].endswith("two_words")


def test_groups_of_others_stay_as_they_are(spark, kafka_broker, kafka_topics, tmp_path):
    topic = kafka_topics.create()
    kafka_topics.produce(topic, [{"n": n} for n in range(5)])
    config = kafka_broker.settings.for_client() | {"group.id": f"other-{topic}", "enable.auto.commit": False}
    consumer = Consumer(config)
    while_it_settles(lambda: consumer.commit(offsets=[TopicPartition(topic, 0, 2)], asynchronous=False))
    admin = AdminClient(kafka_broker.settings.for_client())
    source = kafka(topic, servers=kafka_broker.settings, value=VALUE)
    stream(spark, source, tmp_path / "c")
    replayed(spark, source, {(topic, 0): (0, 5)}).collect()
    groups = {group.group_id for group in admin.list_consumer_groups().result(20).valid}
    assert f"other-{topic}" in groups
    assert not any(group.startswith("spark-kafka") for group in groups)
    assert consumer.committed([TopicPartition(topic, 0)], timeout=20)[0].offset == 2
    consumer.close()


def test_a_topic_that_is_not_there_is_named(kafka_broker):
    with pytest.raises(TopicMissing, match="no-such-topic"):
        kafka("no-such-topic", servers=kafka_broker.settings, value=VALUE).offsets()
