"""A broker that refuses a producer's first request to a partition and takes what comes behind it.

That is what happens while a topic is new or its leader moves. With more than one request on its way, librdkafka takes
the second one's success for the first one's: its messages are reported as delivered, and never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition

from backend.kafka_client.admin import offsets
from backend.kafka_client.settings import KafkaSettings
from backend.sinks.kafka.delivery import Delivery
from recovery.changelog.kafka.log import KafkaChangelog
from recovery.demo import produce
from recovery.testing.events import Topics
from tests.contracts.changelog import as_dict, changes, commit, record
from tests.kafka.test_changelog_kafka import noise
from tests.support.kafka_proxy import Api, Order, ProxiedBroker

pytestmark = pytest.mark.kafka

WAIT_S = 60.0
MESSAGES, BYTES = 8, 300_000
"""A request takes a few of them."""

Write = Callable[[KafkaSettings, str, list[bytes]], object]


@pytest.fixture(scope="module")
def broker() -> Iterator[ProxiedBroker]:
    with ProxiedBroker() as broker:
        yield broker


@pytest.fixture
def topic(broker: ProxiedBroker) -> Iterator[str]:
    topics = Topics(broker.settings)
    yield topics.create()
    topics.close()


@pytest.fixture
def refusal(broker: ProxiedBroker, topic: str) -> Iterator[Order]:
    """The first request to the topic is refused."""
    order = broker.proxy.order(Api.Produce, "refused", lambda: None, mentions=(topic.encode(),))
    yield order
    assert order.fired.is_set()


def values_of(settings: KafkaSettings, topic: str) -> list[bytes]:
    """Read what readers of committed messages are given."""
    end = offsets(settings, [topic], committed_only=True)[topic, 0][1]
    reading = {"group.id": "refused", "isolation.level": "read_committed", "enable.partition.eof": True}
    consumer = Consumer(settings.for_client() | reading | {"enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found = list[bytes]()
    try:
        while (message := consumer.poll(WAIT_S)) is not None and message.error() is None:
            found.append(message.value())
        assert message is not None and message.offset() >= end, "the partition's end"
    finally:
        consumer.close()
    return found


def deliver(settings: KafkaSettings, topic: str, values: list[bytes]) -> None:
    delivery = Delivery(settings, {topic: 1_000_000}, WAIT_S, {})
    for value in values:
        delivery.send(topic, value, b"k")
    delivery.finish()


def deliver_in_a_transaction(settings: KafkaSettings, topic: str, values: list[bytes]) -> None:
    delivery = Delivery(settings, {topic: 1_000_000}, WAIT_S, {"transactional.id": "refused"})
    delivery.producer.init_transactions(WAIT_S)
    delivery.producer.begin_transaction()
    for value in values:
        delivery.send(topic, value, b"k")
    delivery.finish()
    delivery.producer.commit_transaction(WAIT_S)


def play(settings: KafkaSettings, topic: str, values: list[bytes]) -> None:
    times = pa.array(range(len(values)), pa.timestamp("ms", "UTC"))
    keys, partitions = pa.array([b"k"] * len(values)), pa.array([0] * len(values))
    rows = {"partition": partitions, "key": keys, "value": pa.array(values), "timestamp": times}
    produce.produce(settings, topic, pa.table(rows))


def events(settings: KafkaSettings, topic: str, values: list[bytes]) -> None:
    Topics(settings).produce(topic, values)


@pytest.mark.parametrize("write", [deliver, deliver_in_a_transaction, play, events])
def test_a_refused_request_is_written_before_what_comes_behind_it(
    broker: ProxiedBroker, topic: str, refusal: Order, write: Write
) -> None:
    values = [noise(BYTES + number) for number in range(MESSAGES)]
    write(broker.proxied, topic, values)
    assert values_of(broker.settings, topic) == values


def test_a_record_of_the_changelog_whose_first_piece_is_refused_is_whole(
    broker: ProxiedBroker, topic: str, refusal: Order
) -> None:
    rows = {b"\x03" + bytes([number]): noise(700_000 + number) for number in range(6)}
    log = KafkaChangelog(broker.proxied, topic)
    try:
        log.append(record(0), changes(rows))
        assert as_dict(log.read(0, commit(0))) == rows
    finally:
        log.rest()
