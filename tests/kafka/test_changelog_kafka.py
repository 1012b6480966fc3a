"""The contract of a changelog over a Kafka topic, and what only a topic can have in the way."""

from __future__ import annotations

import os
import pickle
import random
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from backend.errors import AccessRefused, ChangelogDamaged, ChangelogUnavailable
from backend.kafka_client.admin import offsets
from backend.kafka_client.writer import hand_over
from recovery.changelog import open_changelog
from recovery.changelog.chunks import CHUNK_BYTES, ChunkKey
from recovery.changelog.kafka import log as changelog_log
from recovery.changelog.kafka import writer
from recovery.changelog.kafka.log import KafkaChangelog
from recovery.changelog.kafka.reader import PartitionReader
from recovery.changelog.kafka.writer import PartitionWriter
from recovery.changelog.protocol import Growth, place_and_growth
from recovery.changelog.records import Kind, encode_base, encode_delta
from tests.contracts.changelog import ChangelogContract, Make, Own, as_dict, changes, commit, record
from tests.support.bases import based

pytestmark = pytest.mark.kafka


@pytest.fixture
def topic(kafka_broker, kafka_topics) -> str:
    name = kafka_topics.create(13, cleanup_policy="delete", retention_ms=-1, retention_bytes=-1)
    return str(name)


@pytest.fixture
def make(kafka_broker, topic) -> Iterator[Make]:
    made: list[KafkaChangelog] = []

    def build(owner: str = "") -> KafkaChangelog:
        made.append(based(KafkaChangelog(kafka_broker.settings, topic, owner=owner), 4, 10_000))
        return made[-1]

    yield build
    for log in made:
        log.rest()
        log.rest()


class TestKafkaChangelog(ChangelogContract):
    cuts_orphans = False

    @pytest.fixture
    def own(self, make: Make) -> Own:
        return make

    @pytest.fixture(autouse=True)
    def place(self, kafka_broker, topic) -> None:
        self.settings, self.topic = kafka_broker.settings, topic

    def intrude(self, other: KafkaChangelog) -> None:
        other.append(record(0, mark="e"), changes({b"\x03a": b"intruder"}))

    def empty(self, shard: int) -> None:
        end = offsets(self.settings, [self.topic], committed_only=False)[self.topic, shard][1]
        delete_below(self.settings, self.topic, shard, end)


def delete_below(settings, topic, partition, offset) -> None:
    """What retention does, or somebody's hand."""
    admin = AdminClient(settings.for_client())
    for deleted in admin.delete_records([TopicPartition(topic, partition, offset)]).values():
        deleted.result(20)


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def offsets_of(settings, topic, partition) -> list[int]:
    """Offsets of the messages that a reader of committed records is given."""
    consumer = Consumer(
        settings.for_client()
        | {
            "group.id": "unused",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.assign([TopicPartition(topic, partition, 0)])
    found: list[int] = []
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for message in consumer.consume(100, 0.2):
            if message.error() is not None:
                consumer.close()
                return found
            found.append(message.offset())
    raise AssertionError("no end of the partition")


def test_the_topic_is_made_and_checked(kafka_broker, kafka_topics, monkeypatch):
    settings = kafka_broker.settings
    name = kafka_topics.create(1) + "-log"
    log = KafkaChangelog(settings, name)
    log.prepare(3)
    log.prepare(2)  # there already, and large enough
    with monkeypatch.context() as patch:
        patch.setattr(changelog_log, "create_topic", None)  # who may not make topics finds one made for it
        log.prepare(3)
    with pytest.raises(ValueError, match=r"has 3 partitions; 4 are needed"):
        log.prepare(4)
    kafka_topics.delete(name)
    compacted = kafka_topics.create(2, cleanup_policy="compact", retention_ms=-1)
    with pytest.raises(ValueError, match=r"cleanup\.policy=compact"):
        KafkaChangelog(settings, compacted).prepare(2)
    short = kafka_topics.create(2, retention_ms=604_800_000)
    with pytest.raises(ValueError, match=r"retention\.ms=604800000; a changelog needs retention\.ms=-1"):
        KafkaChangelog(settings, short).prepare(2)
    narrow = kafka_topics.create(2, retention_ms=-1, retention_bytes=-1, max_message_bytes=500_000)
    with pytest.raises(ValueError, match=r"max\.message\.bytes=500000; a changelog needs at least 790528"):
        KafkaChangelog(settings, narrow).prepare(2)


def test_large_records_are_split_and_read_in_bulk(make):
    log = make()
    rows = {b"\x03" + bytes([i]): noise(700_000 + i) for i in range(6)}
    log.append(record(0), changes(rows))
    log.append_base(record(0), sorted(rows.items()))
    assert as_dict(make().read(0, commit(0))) == rows
    assert max(entry.length for entry in log.entries(0)) > 5 * CHUNK_BYTES


def test_a_bound_on_kept_bytes_only_means_reading_again(kafka_broker, make, topic, monkeypatch):
    log = make()
    log.append(record(0), changes({b"\x03a": noise(1_000_000)}))
    log.append(record(1, commit(0)), changes({b"\x03b": noise(900_000)}))
    monkeypatch.setattr("recovery.changelog.kafka.index.CACHE_BYTES", 1)
    small = KafkaChangelog(kafka_broker.settings, topic)
    assert as_dict(small.read(0, commit(1))) == {b"\x03a": noise(1_000_000), b"\x03b": noise(900_000)}
    small.rest()


def test_a_record_whose_offset_the_client_does_not_know_is_found_at_the_end(kafka_topics, make, monkeypatch, topic):
    """A request that was repeated is answered "duplicate": the client reports it as delivered, without an offset."""

    class Delivered:
        def offset(self) -> None:
            return None

    def hand_over_without(producer, topic, *, on_delivery, **message):
        hand_over(producer, topic, on_delivery=lambda error, _: on_delivery(error, Delivered()), **message)

    def at(location: str) -> int:
        return int(location.partition("+")[0].rpartition("@")[2])

    log, rows = make(), {b"\x03" + bytes([i]): noise(700_000 + i) for i in range(4)}
    kafka_topics.produce(topic, ["not ours"] * 3)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "hand_over", hand_over_without)
        first = log.append(record(0), changes(rows)).location
        second = log.append(record(1, commit(0)), changes({b"\x03a": noise(900_000)})).location
        base = log.append_base(record(0), sorted(rows.items()))
        with pytest.raises(ChangelogUnavailable, match="it is not at the end"):
            log._find(0, b"12345678", 1)
    assert [at(first), at(second), at(base)] == sorted({at(first), at(second), at(base)})
    assert at(first) == 3
    assert {(entry.kind, at(entry.location)) for entry in make().entries(0)} == {
        (Kind.DELTA, at(first)),
        (Kind.DELTA, at(second)),
        (Kind.BASE, at(base)),
    }
    begins = [growth and growth.begins for _, growth in map(place_and_growth, (first, second))]
    assert begins == [at(first)] * 2
    third = make().append(record(2, commit(1)), changes({b"\x03b": b"2"})).location
    assert make().lost(0, commit(2), third) == ""
    assert as_dict(make().read(0, commit(1))) == rows | {b"\x03a": noise(900_000)}


def test_aborted_half_written_and_foreign_messages_are_in_nobodys_way(kafka_broker, kafka_topics, make, topic):
    settings = kafka_broker.settings
    log = make()
    log.append(record(0), changes({b"\x03a": b"1"}))
    kafka_topics.produce(topic, ["not ours"])
    key = ChunkKey(Kind.DELTA, commit(1, "b"), b"deadbeef", 0, False, Growth())
    whole = ChunkKey(Kind.DELTA, commit(1, "b"), b"aborted!", 0, True, Growth())
    writer = Producer(settings.for_client() | {"transactional.id": f"{topic}-somebody"})
    writer.init_transactions(20)
    writer.begin_transaction()
    writer.produce(topic, b"half of a record", key.encode(), 0)
    writer.produce(topic, encode_delta(record(1, commit(0), mark="b"), changes({b"\x03a": b"no"})), whole.encode(), 0)
    writer.flush(20)
    writer.abort_transaction(20)
    log.append(record(1, commit(0)), changes({b"\x03b": b"2"}))
    history = make().read(0, commit(1))
    assert as_dict(history) == {b"\x03a": b"1", b"\x03b": b"2"}
    told = make().verify(0, commit(1))
    assert [type(error) for error in told] == [ChangelogDamaged]
    assert "something else writes" in str(told[0])


def test_an_open_transaction_of_a_dead_writer_hides_nothing(kafka_broker, make, topic):
    writer = Producer(kafka_broker.settings.for_client() | {"transactional.id": f"{topic}-dead"})
    writer.init_transactions(20)
    writer.begin_transaction()
    writer.produce(topic, b"x", b"k", 0)
    writer.flush(20)  # never ended: readers of committed records stop here
    log = make()
    log.append(record(0), changes({b"\x03a": b"1"}))
    assert as_dict(make().read(0, commit(0))) == {b"\x03a": b"1"}


def test_two_workers_take_turns_and_the_lineage_decides(make):
    one, two = make(), make()
    one.append(record(0), changes({b"\x03a": b"1"}))
    two.append(record(1, commit(0), mark="b"), changes({b"\x03a": b"zombie"}))
    one.append(record(1, commit(0)), changes({b"\x03a": b"2"}))
    two.append(record(2, commit(1)), changes({b"\x03c": b"3"}))
    assert as_dict(make().read(0, commit(2))) == {b"\x03a": b"2", b"\x03c": b"3"}


def test_workers_that_take_turns_open_a_producer_once_each_and_look_at_nothing(make, monkeypatch):
    """Spark's pool gives a shard to another worker all the time: what it must know is in the pointer."""
    opened: list[str] = []
    open_producer = PartitionWriter._open_producer
    monkeypatch.setattr(
        PartitionWriter, "_open_producer", lambda self, name: opened.append(name) or open_producer(self, name)
    )
    one, two = make(), make()
    location, wanted = "", []
    for version, log in enumerate((one, one, two, one, two, two, one)):
        if version:
            monkeypatch.setattr(log, "_partitions", None)  # no reader
            wanted.append(log.wants_base(0, commit(version - 1), location))
        row = record(version, commit(version - 1) if version else None)
        location = log.append(row, changes({b"\x03a": b"%d" % version})).location
    assert wanted == [False, False, False, True, True, True]
    assert len(opened) == len(set(opened)) == 2, opened
    assert as_dict(make().read(0, commit(6))) == {b"\x03a": b"6"}
    assert make().lost(0, commit(6), location) == ""


def test_two_workers_that_chose_the_same_name_end_each_other_once(make):
    one, two = make(), make()
    two._writer._number = one._writer._number
    for version, log in enumerate((one, two, one, two, one)):
        log.append(record(version, commit(version - 1) if version else None), changes({b"\x03a": b"%d" % version}))
    assert one._writer._number != two._writer._number
    assert as_dict(make().read(0, commit(4))) == {b"\x03a": b"4"}


def test_two_workers_with_one_name_end_each_other_once_also_in_the_middle_of_a_large_record(make):
    """The client refuses the next piece in other words than the end of the transaction."""
    one, two = make(), make()
    two._writer._number = one._writer._number
    large = os.urandom(16 << 20)
    for version, log in enumerate((one, two, one, two)):
        log.append(record(version, commit(version - 1) if version else None), changes({b"\x03a": large}))
    assert one._writer._number != two._writer._number
    assert as_dict(make().read(0, commit(3))) == {b"\x03a": large}


def test_a_base_whose_producer_s_name_was_taken_while_it_was_written_says_so_and_takes_another(make, monkeypatch):
    opened: list[str] = []
    open_producer = PartitionWriter._open_producer
    monkeypatch.setattr(
        PartitionWriter, "_open_producer", lambda self, name: opened.append(name) or open_producer(self, name)
    )
    one, two = make(), make()
    row = record(0, None)
    one.append(row, changes({b"\x03a": b"0"}))

    def rows():
        for at in range(16):
            if at == 8:
                two.append_base(row, [(b"\x03a", b"0")])
            yield b"\x03%02d" % at, os.urandom(1 << 20)

    with pytest.raises(ChangelogUnavailable, match="another producer of its name was opened"):
        one.append_base(row, rows())
    for _ in range(2):
        one.append_base(row, [(b"\x03a", b"0")])
    first, ours, theirs, other, again = (name.rpartition("-0-")[2] for name in opened)
    assert (first.isdecimal(), ours, theirs, again) == (True, "base", "base", "base")
    assert re.fullmatch(r"base-\d+", other)
    assert as_dict(make().read(0, commit(0))) == {b"\x03a": b"0"}


def test_a_producer_is_held_by_its_query_so_that_another_one_does_not_end_it(make, monkeypatch):
    """Two that have both begun before either has written; later ones are refused by what they read."""
    opened: list[str] = []
    open_producer = PartitionWriter._open_producer
    monkeypatch.setattr(
        PartitionWriter, "_open_producer", lambda self, name: opened.append(name) or open_producer(self, name)
    )
    one, another = make("01" * 16), make("02" * 16)
    for version in range(3):
        for log in (one, another):
            log.append(record(version, commit(version - 1) if version else None), changes({b"\x03a": b"%d" % version}))
    assert len(opened) == len(set(opened)) == 2, opened


def test_the_end_of_a_partition_is_not_waited_for(make):
    class Watched:
        def __init__(self, consumer):
            self.consumer = consumer

        def __getattr__(self, name):
            return getattr(self.consumer, name)

        def consume(self, count, timeout):
            assert timeout == 0, "it would wait for messages that are not there"
            return self.consumer.consume(count, timeout)

        def poll(self, wait):
            told.append(self.consumer.poll(wait))
            return told[-1]

        def unassign(self):
            last.append(told[-1])
            return self.consumer.unassign()

    told: list[object] = []
    last: list[object] = []  # what each read got at its end; a busy broker may let its first message be waited for
    log = make()
    for version in range(3):
        log.append(record(version, commit(version - 1) if version else None), changes({b"\x03a": b"%d" % version}))
    reader = log._partitions()
    reader._consumer = Watched(reader._consumer)
    assert as_dict(log.read(0, commit(2))) == {b"\x03a": b"2"}
    assert last, "it was not read at all"
    assert None not in last, "it waited for messages behind the last one"


def test_a_damaged_base_is_told_and_done_without(kafka_broker, make, topic):
    log = make()
    log.append(record(0), changes({b"\x03a": b"1"}))
    log.append(record(1, commit(0)), changes({b"\x03b": b"2"}))
    key = ChunkKey(Kind.BASE, commit(1), b"badbase!", 0, True, Growth())
    data = bytearray(encode_delta(record(1, commit(0)), changes({b"\x03b": b"2"})))
    data[6:7] = b"B"
    producer = Producer(kafka_broker.settings.for_client())
    producer.produce(topic, bytes(data), key.encode(), 0)
    assert producer.flush(20) == 0
    history = make().read(0, commit(1))
    assert as_dict(history) == {b"\x03a": b"1", b"\x03b": b"2"}
    assert len(history.notes) == 1
    assert "checksum" in history.notes[0]


def test_what_is_missing_is_named(make, topic):
    log = make()
    log.append(record(1, commit(0)), changes({b"\x03b": b"2"}))
    with pytest.raises(ChangelogDamaged, match="missing") as caught:
        make().read(0, commit(1))
    assert f"{topic}-0" in str(caught.value)
    assert commit(0).name in str(caught.value)
    with pytest.raises(ChangelogDamaged):
        make().read(5, commit(0))  # an empty partition
    with pytest.raises(ChangelogDamaged, match="missing"):
        log.prune(0, [commit(1)])


def test_pruning_cuts_the_log_and_readers_before_and_after_go_on(kafka_broker, make, topic):
    log, reader = make(), make()
    parent = None
    for version in range(8):
        row = record(version, parent)
        log.append(row, changes({b"\x03a": str(version).encode()}))
        if version == 4:
            log.append_base(row, [(b"\x03a", b"4")])
        parent = row.commit
    assert as_dict(reader.read(0, commit(2))) == {b"\x03a": b"2"}
    before = offsets_of(kafka_broker.settings, topic, 0)
    gone = log.prune(0, [commit(6), commit(7)])
    assert len(gone) == 5  # the deltas of 0 to 4
    assert offsets_of(kafka_broker.settings, topic, 0) == before[5:]
    assert as_dict(reader.read(0, commit(7))) == {b"\x03a": b"7"}
    with pytest.raises(ChangelogDamaged):
        reader.read(0, commit(2))
    assert as_dict(make().read(0, commit(6))) == {b"\x03a": b"6"}
    log.append(record(8, commit(7)), changes({b"\x03b": b"8"}))
    assert as_dict(log.read(0, commit(8))) == {b"\x03a": b"7", b"\x03b": b"8"}


def test_a_pruning_after_a_rest_reads_what_is_new_and_keeps_no_bytes(make, monkeypatch, topic):
    spans: list[tuple[int, int]] = []
    read = PartitionReader.read

    def watched(self, shard, start, end, take):
        spans.append((start, end))
        read(self, shard, start, end, take)

    monkeypatch.setattr(PartitionReader, "read", watched)
    log, writer = make(), make()
    for version in range(12):
        row = record(version, commit(version - 1) if version else None)
        place = writer.append(row, changes({b"\x03a": noise(1000 + version)})).location
        if version % 4 == 3:
            writer.append_base(row, [(b"\x03a", noise(1000 + version))])
        if version in (5, 11):
            spans.clear()
            gone = log.prune(0, [commit(version)])
            assert len(gone) == {5: 4, 11: 10}[version]
            log.rest()
            assert not log._indexes[0]._cache
            if version == 5:
                behind = int(place.partition("+")[0].rpartition("@")[2])
    start = min(start for start, end in spans if end - start > 1)
    assert start > behind, "what was read before is read again"
    assert as_dict(log.read(0, commit(11))) == {b"\x03a": noise(1011)}


def test_a_rest_does_not_keep_half_of_a_record(kafka_broker, make, topic):
    log = make()
    log.append(record(0), changes({b"\x03a": b"0"}))
    producer = Producer(kafka_broker.settings.for_client())
    for at in range(2):
        half = ChunkKey(Kind.BASE, commit(0), b"deadbeef", at, False, Growth())
        producer.produce(topic, noise(500_000), half.encode(), 0)
    assert producer.flush(20) == 0
    assert as_dict(log.read(0, commit(0))) == {b"\x03a": b"0"}
    log.rest()
    assert not log._indexes
    assert as_dict(log.read(0, commit(0))) == {b"\x03a": b"0"}


def test_what_was_known_of_a_topic_that_was_made_again_cuts_nothing_of_the_new_one(kafka_topics, make, topic):
    """The commits are the same and the new one is longer: only a look at the place tells."""
    log = make()
    for version in range(4):
        log.append(record(version, commit(version - 1) if version else None), changes({b"\x03a": b"%d" % version}))
    log.append_base(record(3, commit(2)), [(b"\x03a", b"3")])
    assert log.prune(0, [commit(3)], dry_run=True)
    log.rest()
    kafka_topics.delete(topic)
    kafka_topics.create(13, name=topic, cleanup_policy="delete", retention_ms=-1, retention_bytes=-1)
    writer = make()
    writer.append_base(record(3, commit(2)), [(b"\x03a", b"3")])
    for version in range(4, 12):
        writer.append(record(version, commit(version - 1)), changes({b"\x03b": b"%d" % version}))
    assert log.prune(0, [commit(3)]) == []
    assert as_dict(make().read(0, commit(11))) == {b"\x03a": b"3", b"\x03b": b"11"}


def test_a_log_that_is_cut_while_it_is_verified_is_not_damaged(kafka_broker, make, topic, monkeypatch):
    log = make()
    for version in range(4):
        log.append(record(version, commit(version - 1) if version else None), changes({b"\x03a": noise(100)}))
    log.append_base(record(3, commit(2)), [(b"\x03a", b"1")])
    reader, asked, calls = make(), PartitionReader.watermarks, []

    def cut_behind(partition_reader, shard):
        found = asked(partition_reader, shard)
        calls.append(shard)
        if len(calls) == 1:
            assert log.prune(0, [commit(3)])
        return found

    monkeypatch.setattr(PartitionReader, "watermarks", cut_behind)
    assert reader.verify(0, commit(3)) == []
    assert reader.read(0, commit(3)).record.commit == commit(3)


def test_it_travels_as_its_settings_and_opens_by_uri(kafka_broker, make, topic):
    log = make()
    log.append(record(0), changes({b"\x03a": b"1"}))
    copy = pickle.loads(pickle.dumps(log))
    assert as_dict(copy.read(0, commit(0))) == {b"\x03a": b"1"}
    uri = f"kafka://{kafka_broker.settings.servers}/{topic}"
    assert as_dict(open_changelog(uri).read(0, commit(0))) == {b"\x03a": b"1"}
    assert open_changelog(uri) is open_changelog(uri)
    open_changelog(uri).rest()
    with pytest.raises(ValueError, match="kafka://host"):
        open_changelog("kafka://h:1")


def test_a_broker_that_was_killed_loses_nothing_that_was_acknowledged(local_kafka_broker):
    from recovery.testing.events import Topics

    topics = Topics(local_kafka_broker.settings)
    log = KafkaChangelog(local_kafka_broker.settings, topics.create(1) + "-log")
    log.prepare(1)
    log.append(record(0), changes({b"\x03a": b"1"}))
    local_kafka_broker.restart()
    log.append(record(1, commit(0)), changes({b"\x03b": b"2"}))
    assert as_dict(log.read(0, commit(1))) == {b"\x03a": b"1", b"\x03b": b"2"}
    log.rest()
    topics.close()


def test_a_wrong_password_is_named_without_it(secured_kafka_broker):
    settings = secured_kafka_broker.settings
    log = KafkaChangelog(settings, "log")
    log.prepare(1)
    log.append(record(0), changes({b"\x03a": b"1"}))
    assert as_dict(log.read(0, commit(0))) == {b"\x03a": b"1"}
    assert settings.password not in repr(log)
    wrong = KafkaChangelog(replace(settings, password="wr0ng-one"), "log")
    with pytest.raises(AccessRefused, match="Authentication failed") as caught:
        wrong.append(record(0), changes({}))
    assert "wr0ng-one" not in str(caught.value)
    log.rest()


def test_partitions_that_are_added_to_the_topic_are_nobodys(kafka_topics, make, topic):
    log = make("1" * 32)
    log.prepare(2, new=True)
    one = log.append(record(0), changes({b"\x03a": b"1"}))
    kafka_topics.grow(topic, 15)
    two = log.append(record(1, commit(0)), changes({b"\x03b": b"2"}))
    log.append(record(0, shard=12), changes({b"\x03a": b"12"}))
    for changelog in (log, make("1" * 32)):
        changelog.prepare(13)
        assert as_dict(changelog.read(0, commit(1))) == {b"\x03a": b"1", b"\x03b": b"2"}
        assert [changelog.lost(0, commit(n), at.location, whole=True) for n, at in enumerate((one, two))] == ["", ""]
        assert [len(changelog.entries(shard)) for shard in (0, 1, 12)] == [2, 0, 1]
    assert "no partition" in make().lost(15, commit(0), whole=True)


def test_a_topic_that_was_made_again_has_lost_everything_also_for_those_who_knew_the_old_one(kafka_topics, make, topic):
    log = make()
    parent = None
    for version in range(4):
        row = record(version, parent)
        location = log.append(row, changes({b"\x03a": str(version).encode()})).location
        parent = row.commit
    assert as_dict(log.read(0, commit(3))) == {b"\x03a": b"3"}
    kafka_topics.delete(topic)
    kafka_topics.create(13, name=topic, cleanup_policy="delete", retention_ms=-1, retention_bytes=-1)
    other = make()
    for version in range(6):  # more than there were: offsets alone look right
        other.append(
            record(version, commit(version - 1, "d") if version else None, mark="d"), changes({b"\x03a": b"d"})
        )
    assert "missing" in log.lost(0, commit(3), location)
    assert "missing" in make().lost(0, commit(3), location, whole=True)


@pytest.mark.parametrize("base", [b"", b"x" * (2 << 20)], ids=["little", "much"])
def test_a_lineage_that_goes_on_in_a_topic_that_was_made_again_is_lost(kafka_topics, make, topic, base):
    """Spark's pool: each commit is of another process, which knows of the log what the pointer says."""
    row = record(0, None)
    make().append(row, changes({b"\x03a": b"0"}))
    make().append_base(row, [(b"\x03a", base)])
    kafka_topics.delete(topic)
    kafka_topics.create(13, name=topic, cleanup_policy="delete", retention_ms=-1, retention_bytes=-1)
    location = f"{topic}-0@1+1+100+{len(base)}+1"
    for version in range(1, 6):
        log = make()
        log.wants_base(0, commit(version - 1), location)
        location = log.append(record(version, commit(version - 1)), changes({b"\x03a": b"1"})).location
        assert "missing" in make().lost(0, commit(version), location)
        assert "missing" in make().lost(0, commit(version), location, whole=True)
    make().append_base(record(5, commit(4)), [(b"\x03a", b"1")])
    location = make().append(record(6, commit(5)), changes({b"\x03a": b"6"})).location
    assert make().lost(0, commit(6), location) == ""
    assert as_dict(make().read(0, commit(6))) == {b"\x03a": b"6"}


def test_who_knew_a_topic_before_it_was_made_again_reads_the_new_one(kafka_topics, make, topic):
    """The new one is longer than what was known of the old one, so its end does not tell."""
    one = make()
    one.append(record(0, None), changes({b"\x03a": b"0"}))
    assert as_dict(one.read(0, commit(0))) == {b"\x03a": b"0"}
    kafka_topics.delete(topic)
    kafka_topics.create(13, name=topic, cleanup_policy="delete", retention_ms=-1, retention_bytes=-1)
    make().append_base(record(0, None), [(b"\x03a", b"0")])
    for version in range(1, 6):
        row = record(version, commit(version - 1))
        location = make().append(row, changes({b"\x03a": b"%d" % version})).location
    assert as_dict(one.read(0, commit(5))) == {b"\x03a": b"5"}
    with pytest.raises(ChangelogDamaged, match="missing"):
        one.read(0, commit(6))
    assert one.lost(0, commit(5), location, whole=True) == ""


def test_a_base_that_format_1_wrote_begins_a_lineage_and_the_log_is_not_read_whole(make, topic, kafka_broker):
    """Its messages do not say that a lineage begins with them."""
    log = make()
    log.append(record(0, None), changes({b"\x03a": b"0"}))
    data = b"".join(encode_base(record(0, None), [(b"\x03a", b"0")]))
    key = struct.Struct(">4sHc?I8sq16sIQQ").pack(
        b"RWKL", 1, Kind.BASE.value, True, 0, bytes(8), 0, bytes.fromhex(commit(0).uuid), 0, 0, 0
    )
    producer = Producer(kafka_broker.settings.for_client())
    producer.produce(topic, data, key, 0)
    producer.flush()
    for version in range(1, 4):
        location = make().append(record(version, commit(version - 1)), changes({b"\x03a": b"1"})).location
    log = make()
    assert log.lost(0, commit(3), location) == ""
    assert log._indexes == {}, "three messages were read"
    assert as_dict(log.read(0, commit(3))) == {b"\x03a": b"1"}
