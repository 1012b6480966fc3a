"""What the Kafka sink says in its messages, how copies are told, and which options it refuses."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from backend import kafka_sink
from backend.batch import ERROR_SCHEMA
from backend.errors import SinkConflict, SinkUnavailable, SourceUnavailable, TopicMissing, UnknownFormat
from backend.kafka_client.identity import TopicIdentity
from backend.kafka_client.refusals import ClientErrors
from backend.kafka_client.settings import KafkaSettings
from backend.kafka_client.settling import SETTLE_S
from backend.python_rows import arrow_value, python_values
from backend.sinks.kafka import sink as kafka_sinks
from backend.sinks.kafka import topics as sink_topics
from backend.sinks.kafka import writer as kafka_writer
from backend.sinks.kafka.commits import Published, decode, encode
from backend.sinks.kafka.delivery import Publication
from backend.sinks.kafka.rows import Message, check_key, to_messages
from backend.sinks.sql import _values
from backend.sinks.tables import ERRORS, RESULTS, readable


def table(**columns: pa.Array) -> pa.Table:
    return readable(pa.table(columns), RESULTS, 7, 2, 0)


def test_a_row_is_a_json_object_with_its_id_first_and_times_in_milliseconds():
    made = to_messages(
        table(
            window_start=pa.array([-3_600_000, 2**62]),
            origin=pa.array(["JFK", None]),
            mean=pa.array([1.5, float("nan")]),
            seen=pa.array([datetime.datetime(2013, 1, 1, 5, 17, tzinfo=datetime.UTC), None], pa.timestamp("us", "UTC")),
        ),
        RESULTS,
        "windows",
        (),
        "q",
    )
    assert [(message.topic, message.key) for message in made] == [("windows", b"7-2-0"), ("windows", b"7-2-1")]
    first, second = (json.loads(message.value) for message in made)
    assert first == {
        "id": "7-2-0", "version": 7, "shard": 2, "sequence": 0, "query_id": "q",
        "window_start": -3_600_000, "origin": "JFK", "mean": 1.5, "seen": "2013-01-01T05:17:00.000000Z",
    }  # fmt: skip
    assert next(iter(first)) == "id"
    assert (second["window_start"], second["origin"], second["mean"], second["seen"]) == (2**62, None, None, None)


def test_times_that_python_has_no_date_for_stop_no_sink():
    far = pa.array([2_932_897, 0, None], pa.date32())
    inside = pa.array([[253_402_300_800_000_000], [0], None], pa.list_(pa.timestamp("us")))
    made = to_messages(table(day=far, times=inside), RESULTS, "windows", (), "q")
    rows = [json.loads(message.value) for message in made]
    assert [row["day"] for row in rows] == ["10000-01-01", "1970-01-01", None]
    assert [row["times"] for row in rows] == [["10000-01-01T00:00:00.000000"], ["1970-01-01T00:00:00"], None]
    deep = pa.array(
        [[{"m": [("a", 253_402_300_800_000)]}]], pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.timestamp("ms")))]))
    )
    assert python_values(deep) == [[{"m": [("a", "10000-01-01T00:00:00.000")]}]]
    beyond = pa.array([9 * 10**18, -9 * 10**18, 1_040_000_000_000_000_000, None], pa.timestamp("us", "UTC"))
    assert python_values(beyond) == beyond.cast(pa.int64()).to_pylist()
    assert python_values(pa.array([20_000_000], pa.date32())) == [20_000_000]
    texts = [json.loads(one.value)["at"] for one in to_messages(table(at=beyond), RESULTS, "windows", (), "q")]
    assert texts == ["9000000000000000000", "-9000000000000000000", "1040000000000000000", None]
    assert _values(far) == [None, datetime.date(1970, 1, 1), None]
    assert _values(inside)[2] is None


def test_an_error_keeps_its_bytes_as_base64():
    fixed = {"topic": "t", "stream": 0, "partition": 1, "offset": 9, "timestamp": 5, "reason": "malformed"}
    bad = pa.Table.from_pylist([{**fixed, "value": b"\xff{", "key": None}], schema=ERROR_SCHEMA)
    (message,) = to_messages(readable(bad, ERRORS, 7, 2, 4), ERRORS, "bad", ("origin",), "q")
    said = json.loads(message.value)
    assert message.key == b"7-2-e4"
    assert (said["value"], said["key"], said["timestamp"], said["offset"]) == ("/3s=", None, 5, 9)


def test_the_key_is_text_or_json_of_the_columns_that_were_named():
    rows = table(origin=pa.array(["JFK"]), n=pa.array([3]))
    keys = [to_messages(rows, RESULTS, "t", key, "q")[0].key for key in (("origin",), ("n",), ("origin", "n"))]
    assert keys == [b"JFK", b"3", b'["JFK",3]']
    check_key(rows, ("origin", "n", "query_id"))
    with pytest.raises(ValueError, match=r"key='carrier': allowed are the results' columns id, version.*query_id.*n$"):
        check_key(rows, ("origin", "carrier"))


def test_columns_of_the_users_that_are_called_as_ours_are_renamed():
    (message,) = to_messages(
        table(query_id=pa.array(["a"]), too_large=pa.array([1])), RESULTS, "t", ("query_id_",), "q"
    )
    said = json.loads(message.value)
    assert (said["query_id"], said["query_id_"], said["too_large_"], message.key) == ("q", "a", 1, b"a")
    assert "too_large" not in said


def test_the_commit_record_is_read_back_and_another_is_refused():
    contents = {"results": {0: (2, "ab"), 11: (1, "cd")}, "errors": {}}
    record = Published("q", 7, 3, contents, "w", {"r": "1f"})
    assert decode(encode(record), "t") == record
    assert json.loads(encode(record)) == {
        "query": "q", "version": 7, "messages": 3,
        "contents": {"results": {"0": [2, "ab"], "11": [1, "cd"]}, "errors": {}},
        "writer": "w", "topics": {"r": "1f"}, "format": 1,
    }  # fmt: skip
    old = b'{"query": "q", "version": 7, "messages": 3, "digest": "ab", "format": 1}'  # as release 0.1 wrote it
    assert decode(old, "t") == Published("q", 7, 3), "of what it brought nothing can be compared"
    for data, why in [
        (b'{"query":"q","version":1,"format":2}', "format 2, this release reads 1"),
        (b"hello", "something else"),
    ]:
        with pytest.raises(UnknownFormat, match=why):
            decode(data, "t")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"results": ""}, "results="),
        ({"errors": "r"}, "errors='r'"),
        ({"servers": "nowhere"}, "servers='nowhere'"),
        ({"servers": 5}, "servers=5"),
        ({"key": 5}, "key=5: must be a column"),
        ({"key": ["n", 5]}, r"key=\['n', 5\]: must be a column"),
        ({"guarantee": "hope"}, "guarantee='hope': allowed are exactly_once, at_least_once"),
        ({"commits": "e"}, "commits='e'"),
        ({"errors": "r-commits"}, "commits='r-commits': must be a topic of its own"),
        ({"errors": "e/e"}, "errors='e/e': must be the name of a topic"),
        ({"results": "r" * 245}, "commits='rrr.*at most 249"),
        ({"patience": "0 seconds"}, "patience='0 seconds'"),
        ({"overflow": ""}, "overflow=''"),
        ({"overflow": 5}, "overflow=5"),
        ({"overflow": "nosuch://x"}, "overflow='nosuch://x'"),
        ({"overflow": "memory://x"}, "overflow='memory://x'"),
        ({"accept_published": -1}, "accept_published=-1"),
        ({"accept_published": True}, "accept_published=True"),
    ],
)
def test_a_bad_option_is_named(options, named):
    with pytest.raises(ValueError, match=named):
        kafka_sink(**{"results": "r", "errors": "e", "servers": "h:1", **options})


def test_tasks_are_given_what_they_need_wherever_they_stand(tmp_path, monkeypatch):
    text = "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n"
    (tmp_path / "ca.pem").write_text(text)
    monkeypatch.chdir(tmp_path)
    settings = KafkaSettings("h:1", ca_file="ca.pem")
    sink = kafka_sink("r", "e", servers=settings, guarantee="at_least_once", overflow="whole")
    to = sink.publication
    assert (to.settings.ca_file, to.overflow) == (text, str(tmp_path / "whole"))
    assert sink.places() == {"overflow": str(tmp_path / "whole")}
    assert kafka_sink("r", "e", servers="h:1").places() == {}


def test_durations_and_nested_times_of_nanoseconds_are_iso_8601():
    at = 1_700_000_000_000_000_001
    rows = table(
        took=pa.array([86_401_500_000_000], pa.duration("ns")),
        back=pa.array([-1], pa.duration("ns")),
        same=pa.array([86_401_500_000], pa.duration("us")),
        times=pa.array([[at]], pa.list_(pa.timestamp("ns", "UTC"))),
        of=pa.array([{"at": at}], pa.struct([("at", pa.timestamp("ns"))])),
    )
    [message] = to_messages(rows, RESULTS, "t", ("took", "times"), "q")
    value = json.loads(message.value)
    assert value["times"] == ["2023-11-14T22:13:20.000000001+00:00"]
    assert value["of"] == {"at": "2023-11-14T22:13:20.000000001"}
    assert value["took"] == value["same"] == "P1DT1.5S"
    assert value["back"] == "-PT0.000000001S"
    assert json.loads(message.key) == [value["took"], value["times"]]


def test_a_certificate_that_is_not_there_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match=r"^ca_file='.*ca\.pem': cannot be read"):
        kafka_sink("r", "e", servers=KafkaSettings("h:1", ca_file=tmp_path / "ca.pem"))


@pytest.mark.parametrize(
    ("commits", "name"),
    [
        (None, "rewind-sink-r"),
        ("r-commits", "rewind-sink-r"),
        ("a-commits", "rewind-sink-r/a-commits"),
        ("b", "rewind-sink-r/b"),
    ],
)
def test_who_fences_whom_goes_by_the_commit_topic(commits, name):
    """Queries with others may write to the same topics."""
    assert kafka_sink("r", "e", servers="h:1", commits=commits)._writer._name == name


def test_what_is_told_of_it_holds_nothing_secret():
    settings = KafkaSettings("h:1", mechanism="PLAIN", username="ann", password="s3cret-x")
    sink = kafka_sink("r", "e", servers=settings)
    assert sink.describe() == {
        "kind": "kafka", "guarantee": "exactly_once", "results": "r", "errors": "e", "commits": "r-commits",
    }  # fmt: skip
    assert kafka_sink("r", "e", servers="h:1", guarantee="at_least_once").describe()["commits"] == "r-commits"
    assert "s3cret-x" not in repr(sink) + str(vars(sink))


ONE_ROW = {RESULTS: {0: (1, "ab")}, ERRORS: {}}
TO = Publication(KafkaSettings("h:1"), {RESULTS: "r", ERRORS: "e"}, (), "", {}, 120.0)


class Producer:
    """Stands in for a client: what it was asked, and nothing else."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.producer, self.errors = log, self, ClientErrors()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: self.log.append(name)


def asking(log: list[str], ids: dict[str, str]) -> Callable[..., Callable[[], dict[str, TopicIdentity]]]:
    """Stand in for `asked_identities`: what the topics are when they are asked for."""

    def asked(*_: object, **__: object) -> Callable[[], dict[str, TopicIdentity]]:
        log.append("ask")
        found = {name: TopicIdentity(number, 1) for name, number in ids.items()}

        def answered() -> dict[str, TopicIdentity]:
            log.append("answer")
            return found

        return answered

    return asked


@pytest.mark.parametrize("strict", [True, False])
def test_an_output_that_was_made_again_is_seen_between_the_last_row_and_the_commit(monkeypatch, caplog, strict):
    log, ids = list[str](), {"r": "one", "e": "two"}
    monkeypatch.setattr(kafka_writer, "Delivery", lambda *_: Producer(log))
    monkeypatch.setattr(kafka_writer, "newest", lambda *_: None)
    monkeypatch.setattr(kafka_writer, "was_cut", lambda *_: False)
    monkeypatch.setattr(kafka_writer, "admin_client", lambda _: None)
    monkeypatch.setattr(kafka_writer, "asked_identities", asking(log, ids))
    writer = kafka_writer.TransactionalWriter(TO, "r-commits", strict=strict)
    writer.open("q", dict(ids), dict.fromkeys(ids, 10_000))
    writer.publish(0, [Message("r", b"", b"{}")], ONE_ROW)
    assert log[-5:] == ["send", "ask", "finish", "answer", "commit_transaction"]
    ids["e"] = "three"
    log.clear()
    if strict:
        with pytest.raises(SinkConflict, match="an output topic was deleted and made again; where: h:1/e;"):
            writer.publish(1, [Message("r", b"", b"{}")], ONE_ROW)
        assert "commit_transaction" not in log
        assert log[-2:] == ["abort_transaction", "drop"]
        return
    for version in (1, 2):
        writer.publish(version, [], ONE_ROW)
    assert log.count("commit_transaction") == 2
    assert caplog.text.count("e was deleted and made again; the query goes on in the new one") == 1


def test_an_output_that_was_made_again_while_rows_were_on_their_way_for_long_is_seen(monkeypatch):
    log, ids, now = list[str](), {"r": "one"}, [0.0]

    class Slow(Producer):
        def finish(self) -> None:
            self.log.append("finish")
            now[0] += 1.0
            ids["r"] = "two"  # its broker was away, and the topic was made again meanwhile

    monkeypatch.setattr(kafka_writer, "Delivery", lambda *_: Slow(log))
    monkeypatch.setattr(kafka_writer, "newest", lambda *_: None)
    monkeypatch.setattr(kafka_writer, "was_cut", lambda *_: False)
    monkeypatch.setattr(kafka_writer, "admin_client", lambda _: None)
    monkeypatch.setattr(kafka_writer, "asked_identities", asking(log, ids))
    monkeypatch.setattr(kafka_writer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    writer = kafka_writer.TransactionalWriter(TO, "r-commits")
    with pytest.raises(SinkConflict, match="an output topic was deleted and made again; where: h:1/r;"):
        writer.open("q", {"r": "one"}, {"r": 10_000})
    assert log[-7:] == ["send", "ask", "finish", "ask", "answer", "abort_transaction", "drop"]


UNKNOWN = KafkaException(KafkaError(KafkaError._UNKNOWN_TOPIC, "scripted"))


@pytest.fixture(params=[True, False, None])
def there(request, monkeypatch):
    """Whether the topics are there when they are asked for because the client did not find one; None: no answer."""

    def identities(_: KafkaSettings, topics: Sequence[str], **more: object) -> dict[str, TopicIdentity]:
        assert more["unknown_s"] == SETTLE_S
        assert "r" in topics
        if request.param is None:
            raise SourceUnavailable("no answer")
        if not request.param:
            raise TopicMissing("it is not there")
        return {}

    monkeypatch.setattr(sink_topics, "identities", identities)
    return request.param


def test_a_topic_that_a_broker_does_not_know_for_a_moment_is_written_to_again(monkeypatch, there):
    log, ids, failures = list[str](), {"r": "one"}, list[KafkaException]()

    class Unknown(Producer):
        def finish(self) -> None:
            if failures:
                raise failures.pop()

    monkeypatch.setattr(kafka_writer, "Delivery", lambda *_: Unknown(log))
    monkeypatch.setattr(kafka_writer, "newest", lambda *_: writer._newest)
    monkeypatch.setattr(kafka_writer, "was_cut", lambda *_: False)
    monkeypatch.setattr(kafka_writer, "admin_client", lambda _: None)
    monkeypatch.setattr(kafka_writer, "asked_identities", asking(log, ids))
    monkeypatch.setattr(kafka_writer, "RETRY_S", 0.0)
    writer = kafka_writer.TransactionalWriter(TO, "r-commits")
    writer.open("q", {"r": "one"}, {"r": 10_000})
    log.clear()
    failures.append(UNKNOWN)
    if there is False:
        with pytest.raises(TopicMissing, match="it is not there"):
            writer.publish(0, [Message("r", b"", b"{}")], ONE_ROW)
        assert "commit_transaction" not in log
        assert log.count("begin_transaction") == 1
        return
    writer.publish(0, [Message("r", b"", b"{}")], ONE_ROW)
    assert log.count("begin_transaction") == 2
    assert log.count("commit_transaction") == 1


def test_a_task_that_does_not_find_a_topic_asks_for_it(monkeypatch, there):
    class Unknown(Producer):
        def finish(self) -> None:
            raise UNKNOWN

    monkeypatch.setattr(kafka_sinks, "Delivery", lambda *_: Unknown([]))
    sink = kafka_sink("r", "e", servers="h:1", guarantee="at_least_once")
    with pytest.raises(TopicMissing if there is False else SinkUnavailable):
        kafka_sinks._produce([(kafka_sinks.Report(0, {}, {}), [Message("r", b"", b"{}")])], sink.publication)


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin", "+01:00"])
@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_times_that_python_has_no_date_for_come_back_as_they_were(unit: str, zone: str | None) -> None:
    per_second, kind = {"s": 1, "ms": 10**3, "us": 10**6}[unit], pa.timestamp(unit, zone)
    for seconds in (-63_000_000_000, -63_000_000_001, 253_433_836_800, 900_000_000_000, 2**43):
        column = pa.array([seconds * per_second], pa.int64()).cast(kind)
        [found] = python_values(column)
        assert pa.array([arrow_value(found, kind)], kind).equals(column)
    [text] = python_values(pa.array([-63_000_000_000], pa.int64()).cast(pa.timestamp("s", "Europe/Berlin")))
    assert text == "-0027-08-11T08:00:00Z"  # 10,005 days less 8 hours before 0001-01-01, by hand


@pytest.mark.parametrize("kind", [pa.date32(), pa.date64()])
def test_dates_that_python_has_not_come_back_as_they_were(kind: pa.DataType) -> None:
    for days in (-800_000, 2_933_262, 12_000_000):
        column = pa.array([days], pa.int32()).cast(pa.date32()).cast(kind)
        [found] = python_values(column)
        assert pa.array([arrow_value(found, kind)], kind).equals(column)
