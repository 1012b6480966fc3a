"""Topics that take little: every micro-batch goes out, small rows whole, large ones cut, marked and told."""

from __future__ import annotations

import json
import os
from typing import Any

import pyarrow as pa
import pytest
import xxhash
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from backend import kafka_sink
from backend.batch import ERROR_SCHEMA
from backend.kafka_client.writer import cause_of
from backend.sinks.kafka.delivery import Delivery
from tests.kafka.test_kafka_sink import frame, produced, read
from tests.support.packed import pack
from tests.support.waiting import until

pytestmark = [pytest.mark.kafka, pytest.mark.gentle]

RESULTS_LIMIT, ERRORS_LIMIT = 2000, 6000


def rows() -> list[dict[str, Any]]:
    """Small results of 50 kB in all, one with a large list, one with a large key; an error with a large value."""
    keys = [*(f"k{n}" for n in range(400)), "tails", "x" * 3000]
    lists = [*([f"N{n}"] for n in range(400)), [f"N{n}" for n in range(110_000)], []]
    made = pa.table({"window_start": pa.array(range(402)), "origin": keys, "tails": pa.array(lists)})
    fixed = {"topic": "flights", "stream": 0, "partition": 3, "reason": "malformed", "key": None}
    bad = [{**fixed, "offset": 7, "value": b"\xff" * 800_000}, {**fixed, "offset": 8, "value": b"?" * 3000}]
    return [frame(0, 0, pack(made), pack(pa.Table.from_pylist(bad, schema=ERROR_SCHEMA)))]


@pytest.fixture
def topics(kafka_topics: Any) -> tuple[str, str]:
    names = (
        kafka_topics.create(2, max_message_bytes=RESULTS_LIMIT),
        kafka_topics.create(max_message_bytes=ERRORS_LIMIT),
    )
    kafka_topics.adopt(f"{names[0]}-commits")
    return names


def publish(sink: Any, made: list[dict[str, Any]], version: int) -> None:
    (sink.finish(made, version) if sink.describe()["guarantee"] == "exactly_once" else produced(sink, made, version))


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_what_is_too_large_is_cut_marked_kept_and_told(kafka_broker, topics, tmp_path, guarantee, caplog):
    settings = kafka_broker.settings
    sink = kafka_sink(
        *topics, servers=settings, key="origin", guarantee=guarantee, overflow=tmp_path / "whole", patience="5 seconds"
    )
    sink.open("q")
    publish(sink, rows(), 0)
    found = {row["sequence"]: row for row in read(settings, topics[0], 2)}
    assert sorted(found) == list(range(402))
    assert all((found[n]["origin"], found[n]["tails"]) == (f"k{n}", [f"N{n}"]) for n in range(400))
    assert all("too_large" not in found[n] for n in range(400))
    large, keyed = found[400], found[401]
    assert (large["window_start"], large["origin"], large["too_large"]["cut"]) == (400, "tails", ["tails"])
    assert (keyed["window_start"], keyed["tails"], keyed["too_large"]["cut"]) == (401, [], ["origin"])
    first, second = read(settings, topics[1])
    assert (first["topic"], first["partition"], first["offset"]) == ("flights", 3, 7)
    assert first["too_large"]["cut"] == ["value"]
    assert second["value"]
    assert "too_large" not in second
    kept = {path.stem: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert all(xxhash.xxh3_128_hexdigest(value) == name for name, value in kept.items())
    assert set(kept) == {row["too_large"]["digest"] for row in (large, keyed, first)}
    assert json.loads(kept[large["too_large"]["digest"]])["tails"] == [f"N{n}" for n in range(110_000)]
    assert "micro-batch 0: 3 rows are larger" in caplog.text


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_a_topic_that_takes_more_or_less_than_at_the_start(kafka_broker, kafka_topics, guarantee):
    settings = kafka_broker.settings
    topics = kafka_topics.create(max_message_bytes=8_000_000), kafka_topics.create()
    kafka_topics.adopt(f"{topics[0]}-commits")
    sink = kafka_sink(*topics, servers=settings, guarantee=guarantee, patience="5 seconds")
    sink.open("q")
    publish(sink, rows(), 0)
    whole = read(settings, topics[0])
    assert len(whole) == 402
    assert not any("too_large" in row for row in whole), "a row of 1.1 MB goes whole where the topic takes it"
    client = AdminClient(settings.for_client())
    entry = ConfigEntry("max.message.bytes", "3000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topics[0], incremental_configs=[entry])
    client.incremental_alter_configs([resource])[resource].result(20)
    publish(sink, [row | {"version": 1} for row in rows()], 1)
    ids = [row["id"] for row in read(settings, topics[0]) if row["version"] == 1]
    assert len(set(ids)) == 402


def test_a_topic_that_takes_too_little_for_any_row_is_named(kafka_broker, kafka_topics):
    topics = kafka_topics.create(max_message_bytes=500), kafka_topics.create()
    with pytest.raises(ValueError, match=f"topic '{topics[0]}' has max.message.bytes=500; a sink needs at least 1024"):
        kafka_sink(*topics, servers=kafka_broker.settings).open("q")


@pytest.mark.parametrize("seen", ["by the next message", "at the end"])
def test_what_ended_a_transaction_is_told_and_not_that_it_has_ended(kafka_broker, kafka_topics, seen):
    """The client throws everything away for a message that is refused, and takes no more; it keeps why."""
    topic = kafka_topics.create(1, max_message_bytes=2000)
    more = {"transactional.id": f"{topic}-writer", "message.max.bytes": 1_000_000}
    delivery = Delivery(kafka_broker.settings, {topic: 1_000_000}, 60.0, more)
    delivery.producer.init_transactions(30)
    delivery.producer.begin_transaction()
    assert cause_of(delivery.producer, KafkaError(KafkaError._STATE)).code() == KafkaError._STATE, "it runs"
    delivery.send(topic, os.urandom(100_000), b"")  # the client compresses
    if seen == "by the next message":

        def takes_no_more():
            try:
                delivery.producer.produce(topic, b"small", b"")  # nobody polls: no report is seen
            except KafkaException as error:
                return error.args[0].code() == KafkaError._STATE
            return False

        until(takes_no_more, what="a failed transaction")
    with pytest.raises(KafkaException) as caught:
        delivery.send(topic, b"small", b"")
        delivery.finish()
    assert caught.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
    delivery.producer.abort_transaction(30)
