"""The options of the Kafka source: refused by name before anything starts; nothing secret described."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from pyspark.sql.types import LongType, StructType

from backend import count, fetch_refused, stream, tumbling
from backend.errors import HistoryLost
from backend.kafka_client.identity import TopicIdentity, compare
from backend.kafka_client.settings import KafkaSettings
from backend.sources.kafka import KafkaSource, kafka
from backend.spark.job import Input
from backend.spark.start import StartOptions, _check_clusters, build_job


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"topics": ""}, "topics="),
        ({"topics": ["a", "a"]}, "topics="),
        ({"topics": "a,b"}, "topics="),
        ({"topics": ["a", "b c"]}, "must be the name of a topic"),
        ({"topics": "clicks*"}, r"topics='clicks\*': must be the name of a topic"),
        ({"topics": "x" * 250}, "at most 249"),
        ({"topics": ".."}, "topics="),
        ({"servers": "h:99999"}, "servers='h:99999'"),
        ({"servers": "h:one"}, "servers='h:one'"),
        ({"servers": "nowhere"}, "servers="),
        ({"servers": 5}, "servers=5: must be host:port"),
        ({"servers": None}, "servers=None"),
        ({"isolation": "serializable"}, "isolation="),
        ({"starting": "middle"}, "starting="),
        ({"starting": {("other", 0): 1}}, "starting="),
        ({"starting": 5}, "starting=5: must be 'earliest'"),
        ({"starting": None}, "starting=None"),
        ({"starting": {("a", 0): "3"}}, "starting={.*'3'}: must be"),
        ({"starting": {("a", 0): True}}, "starting={.*True}: must be"),
        ({"starting": {"a": 3}}, "starting={'a': 3}: must be"),
        ({"max_offsets_per_trigger": 0}, "max_offsets_per_trigger=0"),
        ({"format": "xml"}, "format='xml'"),
        ({"format": "typed"}, "format='typed': allowed are json, avro, raw, or a function"),
        ({"value": ""}, "value=''"),
        ({"key": "a int, b int"}, "key="),
        ({"key": "a"}, "key="),
        ({"key": 0}, "key=0: must be one field"),
        ({"key": b"a int"}, "key=b'a int': must be one field"),
        ({"options": {"failOnDataLoss": "false"}}, "failOnDataLoss"),
        ({"options": 5}, "options=5: must be a dictionary"),
        ({"options": {"minPartitions": 4}}, "options={'minPartitions': 4}: must be a dictionary of texts"),
        ({"headers": ["a"]}, r"headers=\['a'\]: must be a dictionary of texts"),
        ({"options": {"kafka.sasl.jaas.config": "x"}}, "KafkaSettings"),
        ({"reader": "jvm"}, "reader='jvm'"),
        ({"reader": "client", "headers": {"h": "string"}}, "reader='client': headers"),
        ({"reader": "client", "options": {"minPartitions": "4"}}, "reader='client': options"),
        ({"reader": "client", "key": "user bigint"}, "reader='client': key='user bigint'"),
    ],
)
def test_a_bad_option_is_named(options, named):
    with pytest.raises(ValueError, match=named):
        kafka(**{"topics": "a", "servers": "h:1", "value": "n int", **options})


def test_offsets_to_start_from_are_written_as_the_connector_reads_them():
    source = kafka("t", servers="h:1", value="n int", starting={("t", 0): 5, ("t", 1): 0})
    assert json.loads(source.starting) == {"t": {"0": 5, "1": 0}}


def test_the_manifest_gets_what_a_replay_depends_on_and_nothing_secret():
    settings = KafkaSettings("h:1", mechanism="PLAIN", username="ann", password="s3cret")
    source = kafka(["b", "a"], servers=settings, value="n  int", key="k string", headers={"h": "int"})
    assert source.topics == ("a", "b")
    described = source.describe()
    assert described["topics"] == ["a", "b"]
    assert described["isolation"] == "read_committed"
    assert described["value"]["schema"] == "n int"
    assert "s3cret" not in json.dumps(described) + repr(source)
    assert "key_parser" not in described
    assert kafka("a", servers="h:1", value="n int", key="k int").describe()["key_parser"] == 2


def test_identities_tell_a_topic_made_again_from_one_that_grew():
    was = {"t": TopicIdentity("1", 2)}
    assert compare(was, {"t": TopicIdentity("1", 2)}) == []
    assert len(compare(was, {"t": TopicIdentity("1", 3), "new": TopicIdentity("9", 1)})) == 1


class Reader:
    """Takes options as Spark's readers do: names without case, the last one counts."""

    def __init__(self) -> None:
        self.taken: dict[str, str] = {}

    def format(self, name: str) -> Reader:
        assert name == "kafka"
        return self

    def options(self, **given: str) -> Reader:
        self.taken |= {name.lower(): value for name, value in given.items()}
        return self

    def option(self, name: str, value: str) -> Reader:
        return self.options(**{name: value})

    def load(self) -> None:
        raise LookupError("as far as this goes")


@pytest.mark.parametrize(
    ("options", "fetched", "polled"),
    [(None, "8388608", "5000"), ({"Kafka.Max.Poll.Records": "77"}, "8388608", "77")],
)
def test_it_is_read_in_bulk_unless_the_options_say_otherwise(options, fetched, polled, monkeypatch):
    monkeypatch.setattr("backend.spark.session.connector.ensure_connector", lambda spark: None)
    session = SimpleNamespace(readStream=Reader())
    with pytest.raises(LookupError):
        kafka("t", servers="h:1", value="n int", options=options, reader="connector").stream(session)
    taken = session.readStream.taken
    assert (taken["kafka.max.partition.fetch.bytes"], taken["kafka.max.poll.records"]) == (fetched, polled)


@pytest.mark.parametrize(("options", "tasks"), [(None, "6"), ({"minpartitions": "40"}, "40")])
def test_a_replay_has_work_for_all_cores(options, tasks, monkeypatch):
    monkeypatch.setattr("backend.spark.session.connector.ensure_connector", lambda spark: None)
    monkeypatch.setattr(KafkaSource, "offsets", lambda self, spark=None: {("t", 0): (0, 10)})
    monkeypatch.setattr(KafkaSource, "check_replayable", lambda self: None)
    session = SimpleNamespace(read=Reader(), sparkContext=SimpleNamespace(defaultParallelism=3))
    with pytest.raises(LookupError):
        kafka("t", servers="h:1", value="n int", options=options, reader="connector").batch(session, {("t", 0): (2, 5)})
    assert session.read.taken["minpartitions"] == tasks


def test_of_a_compacted_topic_refused_messages_come_back_and_replays_do_not(monkeypatch):
    def compacted(*_, **__):
        raise HistoryLost("a compacted topic cannot be read again as it was")

    monkeypatch.setattr("backend.kafka_client.admin.check_replayable", compacted)
    monkeypatch.setattr(KafkaSource, "offsets", lambda self, spark=None: {("t", 0): (3, 10)})
    monkeypatch.setattr(KafkaSource, "fields", lambda self: StructType().add("at", LongType()))
    monkeypatch.setattr(KafkaSource, "parse", lambda self, timezone: iter)
    source, session, errors = kafka("t", servers="h:1", value="at bigint"), MagicMock(), MagicMock()
    session.sparkContext.defaultParallelism = 1
    errors.columns = ["topic", "partition", "offset"]
    chosen = errors.select.return_value.where.return_value.distinct.return_value.limit.return_value.collect
    chosen.return_value = [("t", 0, 4)]
    fetch_refused(session, source, errors)
    assert session.range.called, "one piece is to be read"
    chosen.return_value = [("t", 0, 1), ("t", 0, 4)]
    with pytest.raises(HistoryLost, match="needed are 1 to 4, there are 3 to 9"):
        fetch_refused(session, source, errors)
    job = stream(source, event_time="at").window(tumbling("1 day"), retention="1 hour").aggregate(n=count())
    made = build_job(job, session, StartOptions(shards=1), stored=None, first_offsets=list)
    for replay in (
        lambda: made.replay(session, {(0, 0): (4, 5)}, iter, "n int"),
        lambda: replace(source, reader="connector").batch(session, {("t", 0): (4, 5)}),
    ):
        with pytest.raises(HistoryLost, match="a compacted topic cannot be read again"):
            replay()


@pytest.mark.parametrize("name", ["maxRecordsPerPartition", "maxrecordsperpartition"])
def test_an_option_that_a_replay_sets_itself_does_not_end_it(name, monkeypatch):
    monkeypatch.setattr("backend.spark.session.connector.ensure_connector", lambda spark: None)
    monkeypatch.setattr(KafkaSource, "offsets", lambda self, spark=None: {("t", 0): (0, 10)})
    monkeypatch.setattr(KafkaSource, "check_replayable", lambda self: None)
    session = SimpleNamespace(read=Reader(), sparkContext=SimpleNamespace(defaultParallelism=3))
    with pytest.raises(LookupError):
        kafka("t", servers="h:1", value="n int", options={name: "7"}).batch(session, {("t", 0): (2, 5)})
    assert session.read.taken["maxrecordsperpartition"] == "500000"


def test_settings_that_travel_hold_the_files_texts(tmp_path):
    text = "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n"
    files = {name: str(tmp_path / name) for name in ("ca_file", "certificate_file", "key_file")}
    for name in files.values():
        (tmp_path / name).write_text(text)
    settings = KafkaSettings("h:1", key_password="s3cret", **files)
    there = settings.for_client()
    assert there["ssl.ca.location"] == files["ca_file"]
    assert there["ssl.key.location"] == files["key_file"]
    travels = settings.inlined()
    client = travels.for_client()
    assert [client[f"ssl.{kind}.pem"] for kind in ("ca", "certificate", "key")] == [text] * 3
    assert not any(name.endswith(".location") for name in client)
    assert travels.for_spark() == settings.for_spark()
    assert travels.inlined() == travels
    assert "BEGIN" not in repr(replace(travels, ca_file=None, certificate_file="c"))
    assert KafkaSettings("h:1").inlined() == KafkaSettings("h:1")


def test_a_topic_of_one_name_in_two_clusters_is_refused_and_one_cluster_by_two_names_is_not():
    def side(servers: str) -> Input:
        return Input(kafka("orders", servers=servers, value="k string"), None, ())

    with pytest.raises(ValueError, match=r"servers='dc2:9092': the topic 'orders' is read from dc1:9092, too"):
        _check_clusters([side("dc1:9092"), side("dc2:9092")])
    _check_clusters([side("a:9092,b:9092"), side("b:9092, a:9092"), side("b:9092")])
