"""What a request to Kafka may be told, and where: what passes is asked again, what does not ends by name at once.

The clients are scripts with the real ones' ways: a client that is refused says so to `error_cb`, while it is polled,
and its requests go on until their time is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException, admin

from backend import kafka
from backend.errors import (
    AccessRefused,
    ChangelogUnavailable,
    HistoryLost,
    SinkUnavailable,
    SourceUnavailable,
    TopicMissing,
)
from backend.kafka_client import admin as asking
from backend.kafka_client import refusals, settling
from backend.kafka_client.identity import TopicIdentity
from backend.kafka_client.settings import KafkaSettings
from backend.sinks.kafka import commits
from backend.sinks.kafka import topics as sink_topics
from backend.sinks.kafka.commits import prepare
from backend.sinks.kafka.delivery import Delivery, Publication, unavailable
from backend.sinks.kafka.writer import TransactionalWriter
from backend.sources.kafka_fetch import fetch
from backend.sources.kafka_watch import check_end
from recovery.changelog.kafka.log import KafkaChangelog
from recovery.changelog.kafka.reader import PartitionReader
from recovery.changelog.kafka.topic import REQUIRED, partitions_of
from recovery.changelog.kafka.writer import PartitionWriter
from tests.unit.test_kafka_fetch import Message

SETTINGS = KafkaSettings("h:1", mechanism="PLAIN", username="u", password="told-nobody")
HALF = SimpleNamespace(get_most_significant_bits=lambda: 0, get_least_significant_bits=lambda: 10)
ABOUT = SimpleNamespace(topic_id=HALF, partitions=[SimpleNamespace(leader=1)])
SETTING = {"cleanup.policy": SimpleNamespace(value="compact"), "max.message.bytes": SimpleNamespace(value="10000")}
PATIENCE_S = 0.5
TO = Publication(SETTINGS, {"results": "r"}, (), "", {}, PATIENCE_S)
REFUSED = "refused"
SILENT = "silent"
PASSES = [
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._DESTROY_BROKER,
    KafkaError.NOT_COORDINATOR,
]


class Script:
    """What the cluster does: it gives some answers first, then is itself: refuses, is silent, or works."""

    def __init__(self, *first: int, then: str = "works") -> None:
        self.first, self.then, self.asked = list(first), then, 0
        self.waiting: list[KafkaError] = []

    def answer(self, value: Any, timeout_s: float) -> Any:
        """Answer a request that blocks."""
        self.asked += 1
        if self.first:
            raise KafkaException(KafkaError(self.first.pop(0), "scripted"))
        if self.then != "works":
            time.sleep(timeout_s)
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "scripted"))
        return value

    def poll(self, error_cb: Callable[[Any], None]) -> None:
        while self.waiting:
            error_cb(self.waiting.pop())
        if self.then == REFUSED:
            error_cb(KafkaError(KafkaError._AUTHENTICATION, "wrong password"))


class Client:
    script: Script

    def __init__(self, configuration: dict[str, Any]) -> None:
        self.error_cb = configuration["error_cb"]

    def __len__(self) -> int:
        return 0 if self.script.then == "works" else 1

    def poll(self, wait_s: float = 0.0) -> Any:
        time.sleep(wait_s)
        self.script.poll(self.error_cb)
        if self.script.then == "works":
            code = self.script.first.pop(0) if self.script.first else KafkaError._PARTITION_EOF
            return Message(5, code, partition=0)
        return None

    def later(self, value: Any) -> Future[Any]:
        """Answer a request of an admin client: never where the cluster does not."""
        future: Future[Any] = Future()
        if self.script.first:
            self.script.asked += 1
            future.set_exception(KafkaException(KafkaError(self.script.first.pop(0), "scripted")))
        elif self.script.then == "works":
            self.script.asked += 1
            future.set_result(value)
        return future

    def describe_topics(self, topics: Any, **_: Any) -> dict[str, Future[Any]]:
        return {"t": self.later(ABOUT)}

    def list_offsets(self, wanted: dict[Any, Any], **_: Any) -> dict[Any, Future[Any]]:
        return {at: self.later(SimpleNamespace(offset=5, leader_epoch=1)) for at in wanted}

    def describe_configs(self, resources: list[Any], **_: Any) -> dict[Any, Future[Any]]:
        return {resources[0]: self.later(SETTING)}

    def create_topics(self, topics: list[Any], **_: Any) -> dict[str, Future[Any]]:
        return {topics[0].topic: self.later(None)}

    def delete_records(self, edges: list[Any], **_: Any) -> dict[Any, Future[Any]]:
        return {edges[0]: self.later(edge(5))}

    def get_watermark_offsets(self, _: Any, *, timeout: float, cached: bool) -> Any:
        return self.script.answer((0, 5), timeout)

    def list_topics(self, _: str, timeout: float) -> Any:
        return self.script.answer(None, timeout)

    def init_transactions(self, timeout: float) -> Any:
        return self.script.answer(None, timeout)

    def flush(self, timeout: float) -> int:
        self.poll(timeout)
        return len(self)

    def consume(self, _: int, timeout: float) -> list[Any]:
        return []

    def produce(self, *_: Any) -> None: ...
    def purge(self) -> None: ...
    def assign(self, _: Any) -> None: ...
    def unassign(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (asking, sink_topics):
        monkeypatch.setattr(module, "TIMEOUT_S", PATIENCE_S)
    for module in ("reader", "writer", "topic", "log"):
        monkeypatch.setattr(f"recovery.changelog.kafka.{module}.TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr("recovery.changelog.kafka.reader.STALLED_S", PATIENCE_S)
    monkeypatch.setattr("backend.sinks.kafka.commits.TIMEOUT_S", PATIENCE_S)
    # the first look at messages of a process takes half a second of its own
    monkeypatch.setattr("backend.sources.kafka_fetch.STALL_S", 8 * PATIENCE_S)
    monkeypatch.setattr("backend.sources.kafka_watch.VALIDATED_S", PATIENCE_S)
    for module in ("sources.kafka_fetch", "sinks.kafka.commits", "sinks.kafka.topics", "sinks.kafka.writer"):
        monkeypatch.setattr(f"backend.{module}.SETTLE_S", 0.1)
    monkeypatch.setattr("backend.sources.kafka_fetch._idle", {})
    monkeypatch.setattr("backend.sources.kafka_fetch.WAIT_S", 0.05)
    monkeypatch.setattr("backend.sources.kafka_watch.WAIT_S", 0.05)
    monkeypatch.setattr("recovery.changelog.kafka.reader.WAIT_S", 0.05)
    monkeypatch.setattr("backend.sinks.kafka.delivery._LOOK_S", 0.05)
    monkeypatch.setattr(asking, "NEW_TOPIC_S", 0.05)
    monkeypatch.setattr(settling, "RETRY_S", 0.01)
    monkeypatch.setattr(settling, "SETTLE_S", 0.1)
    monkeypatch.setattr(asking, "SETTLE_S", 0.1)
    monkeypatch.setattr(refusals, "REFUSED_S", 0.1)
    monkeypatch.setattr(refusals, "LOOK_S", 0.05)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Script]:
    def make(*first: int, then: str = "works") -> Script:
        script = Script(*first, then=then)
        kind = type("Scripted", (Client,), {"script": script})
        for module, name in ((confluent_kafka, "Consumer"), (confluent_kafka, "Producer"), (admin, "AdminClient")):
            monkeypatch.setattr(module, name, kind)
        return script

    return make


def edge(offset: int) -> SimpleNamespace:
    return SimpleNamespace(low_watermark=offset)


def _deliver() -> None:
    try:
        delivery = Delivery(SETTINGS, {"t": 5000}, PATIENCE_S, {})
        delivery.send("t", b"v", b"k")
        delivery.finish()
    except KafkaException as error:
        raise unavailable(SETTINGS, "t", error) from None


REQUESTS: dict[str, tuple[Callable[[], object], type[Exception]]] = {
    "source: topics": (lambda: asking.identities(SETTINGS, ["t"]), SourceUnavailable),
    "source: ends": (lambda: asking.offsets(SETTINGS, ["t"], committed_only=True), SourceUnavailable),
    "source: messages": (lambda: list(fetch(SETTINGS.for_client(), "t", {0: (0, 5)})), SourceUnavailable),
    "source: an end after a new leader": (lambda: check_end(SETTINGS, ("t", 0), 5, 1), SourceUnavailable),
    "sink: topics": (lambda: sink_topics.look(SETTINGS, ["t"]), SinkUnavailable),
    "sink: commit topic": (lambda: prepare(SETTINGS, "t"), SinkUnavailable),
    "sink: producer": (lambda: TransactionalWriter(TO, "t")._open_producer(), SinkUnavailable),
    "sink: rows": (_deliver, SinkUnavailable),
    "changelog: topic": (lambda: KafkaChangelog(SETTINGS, "t").check(1, new=False), ChangelogUnavailable),
    "changelog: ends": (lambda: PartitionReader(SETTINGS, "t").watermarks(0), ChangelogUnavailable),
    "changelog: messages": (lambda: PartitionReader(SETTINGS, "t").read(0, 0, 5, print), ChangelogUnavailable),
    "changelog: producer": (
        lambda: PartitionWriter(SETTINGS, "t", find=lambda *_: 0)._open_producer("p"),
        ChangelogUnavailable,
    ),
    "changelog: cut": (lambda: KafkaChangelog(SETTINGS, "t")._delete_below(0, 5), ChangelogUnavailable),
}


@pytest.mark.parametrize("request_", REQUESTS)
def test_refused_credentials_end_each_request_by_name(cluster: Callable[..., Script], request_: str) -> None:
    ask, _ = REQUESTS[request_]
    cluster(then=REFUSED)
    with pytest.raises(AccessRefused, match="wrong password") as caught:
        ask()
    assert "told-nobody" not in str(caught.value)


def test_a_right_that_is_missing_where_an_end_is_checked_is_told_at_once(cluster: Callable[..., Script]) -> None:
    cluster(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(AccessRefused, match=r"where: .*t-0"):
        check_end(SETTINGS, ("t", 0), 5, 1)


def test_no_reader_needs_a_right_to_the_group_that_its_client_asks_for(
    cluster: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (commits, sink_topics):
        monkeypatch.setattr(module, "offsets", lambda *_, **__: {("t", 0): (0, 5)})
        monkeypatch.setattr(module, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    for read in (
        lambda: list(fetch(SETTINGS.for_client(), "t", {0: (0, 5)})),
        lambda: check_end(SETTINGS, ("t", 0), 5, 1),
        lambda: commits.newest(SETTINGS, "t"),
        lambda: sink_topics.check_purpose(SETTINGS, {"results": "t"}),
        lambda: PartitionReader(SETTINGS, "t").read(0, 0, 5, print),
    ):
        script = cluster(KafkaError.GROUP_AUTHORIZATION_FAILED)
        assert not read()
        assert script.first == []


@pytest.mark.slow
@pytest.mark.parametrize("request_", REQUESTS)
def test_a_cluster_that_is_silent_may_come_back(cluster: Callable[..., Script], request_: str) -> None:
    ask, named = REQUESTS[request_]
    cluster(then=SILENT)
    with pytest.raises(named):
        ask()


@pytest.mark.parametrize("request_", ["source: topics", "source: ends", "source: messages", "sink: topics"])
@pytest.mark.parametrize(
    ("code", "named"),
    [
        (KafkaError.UNKNOWN_TOPIC_OR_PART, TopicMissing),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, AccessRefused),
        (KafkaError.SASL_AUTHENTICATION_FAILED, AccessRefused),
    ],
)
@pytest.mark.slow
def test_what_the_broker_refuses_ends_it(
    cluster: Callable[..., Script], request_: str, code: int, named: type[Exception]
) -> None:
    ask, _ = REQUESTS[request_]
    cluster(*[code] * 1000)
    with pytest.raises(named):
        ask()


@pytest.mark.parametrize(
    "request_",
    [name for name in REQUESTS if name.split(": ")[1] in ("topics", "ends", "commit topic", "cut", "producer")],
)
@pytest.mark.parametrize("code", PASSES)
def test_a_broker_that_dies_under_a_request_or_hands_on_is_asked_again(
    cluster: Callable[..., Script], request_: str, code: int
) -> None:
    script = cluster(code)
    REQUESTS[request_][0]()
    assert script.asked >= 2


def test_an_answer_without_an_offset_is_none(cluster: Callable[..., Script], monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gives -1001 without an error where the broker died before it answered: no end of a partition."""
    cluster()
    answers = iter([-1001, 3, 7, 9])

    def list_offsets(self: Client, wanted: dict[Any, Any], **_: Any) -> dict[Any, Future[Any]]:
        return {at: self.later(SimpleNamespace(offset=next(answers), leader_epoch=1)) for at in wanted}

    monkeypatch.setattr(Client, "list_offsets", list_offsets)
    assert asking.offsets(SETTINGS, ["t"], committed_only=False) == {("t", 0): (7, 9)}
    cut = iter([-1001, 5])
    monkeypatch.setattr(Client, "delete_records", lambda self, edges, **_: {edges[0]: self.later(edge(next(cut)))})
    KafkaChangelog(SETTINGS, "t")._delete_below(0, 5)
    assert next(cut, None) is None, "asked again"


def test_a_changelog_remembers_records_of_one_shard_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    log, forgotten = KafkaChangelog(SETTINGS, "t"), list[int]()
    for shard in range(3):
        index = SimpleNamespace(forget_bytes=lambda shard=shard: forgotten.append(shard) or shard != 2)
        log._indexes[shard] = index  # type: ignore[assignment]
    monkeypatch.setattr(log, "_whole", lambda *_: None)
    log._refreshed(1)
    assert sorted(forgotten) == [0, 2]
    assert [*log._indexes] == [0, 1]


def test_a_changelogs_topic_that_is_not_there_is_made_by_the_next_start(cluster: Callable[..., Script]) -> None:
    cluster(*[KafkaError.UNKNOWN_TOPIC_OR_PART] * 100)
    assert KafkaChangelog(SETTINGS, "t").check(1, new=True) is None


def test_one_broker_of_several_may_refuse_while_another_answers(cluster: Callable[..., Script]) -> None:
    script = cluster(then=REFUSED)
    client = asking.admin_client(SETTINGS)
    asked: Future[int] = Future()
    looks = []

    def poll(_: float) -> None:
        looks.append(client.errors.refusal())
        script.poll(client.error_cb)
        if len(looks) == 3:
            asked.set_result(7)

    client.poll = poll
    assert refusals.answer(client, asked, PATIENCE_S * 60) == 7
    assert len(looks) == 3


def _kept_admin() -> Callable[[], object]:
    client = asking.admin_client(SETTINGS)
    return lambda: asking.identities(SETTINGS, ["t"], admin=client)


def _kept_consumer() -> Callable[[], object]:
    ask = REQUESTS["source: messages"][0]
    ask()
    return ask


def _kept_producer() -> Callable[[], object]:
    delivery = Delivery(SETTINGS, {"t": 5000}, PATIENCE_S, {})

    def deliver() -> None:
        delivery.start()
        delivery.send("t", b"v", b"k")
        delivery.finish()

    return deliver


@pytest.mark.slow
@pytest.mark.parametrize("kept", [_kept_admin, _kept_consumer, _kept_producer])
def test_what_a_kept_client_heard_while_it_was_not_asked_refuses_no_later_request(
    cluster: Callable[..., Script], kept: Callable[[], Callable[[], object]]
) -> None:
    """A broker refused all clients for a while, and is now merely away."""
    script = cluster()
    ask = kept()
    script.then = SILENT
    script.waiting += [KafkaError(KafkaError._AUTHENTICATION, "wrong password")] * 3
    with pytest.raises((SourceUnavailable, KafkaException)) as caught:
        ask()
    assert "wrong password" not in str(caught.value)
    script.then = REFUSED
    if kept is not _kept_producer:  # that one was thrown away with its messages
        with pytest.raises(AccessRefused):
            ask()


def test_a_connection_that_broke_is_no_refusal(cluster: Callable[..., Script], monkeypatch: pytest.MonkeyPatch) -> None:
    """As librdkafka 2.16 says it where a broker, or what stands before it, goes away during the handshake."""
    script = cluster(then=SILENT)
    broke = "SASL PLAIN mechanism handshake failed: Local: Broker transport failure: broker's supported mechanisms:"
    monkeypatch.setattr(
        script, "poll", lambda error_cb: error_cb(KafkaError(KafkaError._AUTHENTICATION, f"h:1: {broke} (n/a)"))
    )
    with pytest.raises(SourceUnavailable, match="handshake failed"):
        REQUESTS["source: topics"][0]()


@pytest.mark.parametrize("kind", [admin.AdminClient, confluent_kafka.Consumer, confluent_kafka.Producer])
def test_a_client_that_waits_for_nothing_is_still_a_client(kind: type) -> None:
    """Where one is made on first use, it is made once: confluent-kafka's own count as empty and would be made anew."""
    assert refusals.hearing(kind, {"bootstrap.servers": "127.0.0.1:1", "group.id": "g"})


@pytest.mark.slow
def test_what_the_client_says_stands_in_the_error_of_a_request_that_ran_out(cluster: Callable[..., Script]) -> None:
    script = cluster(then=SILENT)
    script.poll = lambda error_cb: [  # type: ignore[method-assign]
        error_cb(KafkaError(code, text))
        for code, text in ((KafkaError._SSL, "certificate verify failed"), (KafkaError._ALL_BROKERS_DOWN, "1/1 down"))
    ]
    for name in ("source: topics", "changelog: ends"):
        with pytest.raises((SourceUnavailable, ChangelogUnavailable), match="certificate verify failed"):
            REQUESTS[name][0]()


def test_a_deleted_topic_is_given_time_in_a_query_that_knew_it(
    cluster: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that has just come up may not know the topic yet."""
    monkeypatch.setattr(asking, "NEW_TOPIC_S", -1.0)
    with pytest.raises(TopicMissing):
        cluster(KafkaError.UNKNOWN_TOPIC_OR_PART)
        asking.offsets(SETTINGS, ["t"], committed_only=False)
    cluster(*[KafkaError.UNKNOWN_TOPIC_OR_PART] * 3)
    known = {"t": TopicIdentity(f"{10:032x}", 1)}
    assert asking.offsets(SETTINGS, ["t"], committed_only=False, known=known) == {("t", 0): (5, 5)}


def test_a_topic_of_a_query_that_has_run_is_given_time_by_all_that_ask_for_it(
    cluster: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a restart, where it is read again, and where it is the changelog's or a sink's: none takes it for missing."""
    monkeypatch.setattr(asking, "NEW_TOPIC_S", -1.0)
    monkeypatch.setattr("backend.sinks.kafka.commits.create_topic", None)
    known = kafka("t", servers=SETTINGS, value="x long").pinned({"t": TopicIdentity(f"{10:032x}", 1)})
    unknown = [KafkaError.UNKNOWN_TOPIC_OR_PART] * 3
    cluster(*unknown)
    assert known.identities()["t"].partitions == 1
    cluster(*unknown)
    prepare(SETTINGS, "t", known=True)
    for name, value in {**REQUIRED, "max.message.bytes": "1000000000"}.items():
        monkeypatch.setitem(SETTING, name, SimpleNamespace(value=value))
    cluster(*unknown)
    known.check_replayable()
    cluster(*unknown)
    assert partitions_of(SETTINGS, "t", 1, unknown_s=0.1) == 1
    cluster(*unknown)
    assert KafkaChangelog(SETTINGS, "t")._known_partitions() == 1


def test_a_changelogs_topic_that_is_gone_is_waited_for_once(cluster: Callable[..., Script]) -> None:
    log = KafkaChangelog(SETTINGS, "t")
    script = cluster(*[KafkaError.UNKNOWN_TOPIC_OR_PART] * 1_000_000)
    log._unknown_s = 0.1
    assert log._known_partitions() == 0
    before = script.asked
    assert log._known_partitions() == 0
    assert script.asked <= before + 2


def test_a_compacted_topic_is_refused_also_beside_one_that_may_not_be_asked_about(monkeypatch, caplog):
    denied = KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "no"))

    def configuration(_: Any, topic: str, **__: float) -> dict[str, str]:
        if topic == "a-private":
            raise denied
        return {"cleanup.policy": "compact" if topic == "b-compacted" else "delete"}

    monkeypatch.setattr(asking, "admin_client", lambda _: None)
    monkeypatch.setattr(asking, "configuration", configuration)
    asking.check_replayable(SETTINGS, ["a-private", "c-plain"])
    assert "whether a-private is compacted cannot be seen" in caplog.text
    assert "c-plain" not in caplog.text
    with pytest.raises(HistoryLost, match="b-compacted"):
        asking.check_replayable(SETTINGS, ["a-private", "b-compacted"])


def test_settings_that_no_client_takes_are_a_bad_option(tmp_path):
    """The client's own error names no option of ours, and came as it was."""
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\nno certificate\n-----END CERTIFICATE-----\n")
    settings = KafkaSettings(
        "h:1", ca_file=tmp_path / "ca.pem", mechanism="PLAIN", username="u", password="told-nobody"
    )
    with pytest.raises(ValueError, match=r"^servers='h:1': no client takes the settings: .*ca") as caught:
        asking.admin_client(settings)
    assert "told-nobody" not in str(caught.value)
