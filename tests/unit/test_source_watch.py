"""The driver's watch over the sources: epochs are kept beside the checkpoint, and asked about where they rose."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from backend.errors import SourceUnavailable, SourceWentBack, UnknownFormat
from backend.kafka_client.admin import End
from backend.kafka_client.identity import TopicIdentity
from backend.kafka_client.refusals import ClientErrors
from backend.kafka_client.settings import KafkaSettings
from backend.sources import kafka_reader, kafka_watch
from backend.sources.kafka_reader import KafkaStreamReader
from backend.sources.kafka_watch import TopicWatch
from backend.spark.watching import LEADER_EPOCHS, SourceWatch
from recovery.supervise.spark_logs import MicroBatchFailed
from recovery.supervise.supervisor import RewindQuery

SETTINGS = KafkaSettings("nowhere:1")


class Cluster:
    """Stands in for the two questions to a broker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends: dict[tuple[str, int], End]) -> None:
        self.ends, self.checked = ends, list[tuple[tuple[str, int], int, int]]()
        monkeypatch.setattr(kafka_watch, "admin_client", lambda _: None)
        monkeypatch.setattr(kafka_watch, "ends", self.ends_of)
        monkeypatch.setattr(kafka_watch, "check_end", lambda _, key, at, epoch: self.checked.append((key, at, epoch)))

    def ends_of(self, _: Any, topics: tuple[str, ...], *__: Any, **___: Any) -> dict[tuple[str, int], End]:
        return {key: end for key, end in self.ends.items() if key[0] in topics}


class Source:
    def __init__(self, topic: str = "t") -> None:
        self.made = TopicWatch(SETTINGS, (topic,), {topic: TopicIdentity("a", 1)})

    def watch(self) -> TopicWatch:
        return self.made


def test_a_watch_that_was_closed_keeps_no_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Cluster(monkeypatch, {("t", 0): End(4, 0)})
    made: list[object] = []
    monkeypatch.setattr(kafka_watch, "admin_client", lambda _: made.append(object()) or made[-1])
    source = Source()
    watch = SourceWatch(str(tmp_path), [source])  # type: ignore[list-item]
    for _ in range(2):
        watch.look()
        watch.close()
    assert source.made._admin is None
    assert len(made) == 2


def committed(checkpoint: Path, following: int) -> None:
    for folder in ("commits", "offsets"):
        (checkpoint / folder).mkdir(exist_ok=True)
    (checkpoint / "commits" / "3").write_text("v1\n{}")
    (checkpoint / "offsets" / "3").write_text("v1\n{}\n" + json.dumps({"t": {"0": following}}) + "\n-")


class Answers:
    """A client for questions: notes the order in which they are asked and answered."""

    def __init__(self, partitions: int) -> None:
        self.partitions, self.log, self.errors = partitions, list[str](), ClientErrors()

    def poll(self, _: float) -> None: ...

    def _answer(self, name: str, value: Any) -> Any:
        def result(_: float) -> Any:
            self.log.append(f"answered {name}")
            return value

        return SimpleNamespace(result=result)

    def describe_topics(self, *_: Any, **__: Any) -> dict[str, Any]:
        self.log.append("asked topics")
        half = SimpleNamespace(get_most_significant_bits=lambda: 0, get_least_significant_bits=lambda: 10)
        return {"t": self._answer("topics", SimpleNamespace(topic_id=half, partitions=range(self.partitions)))}

    def list_offsets(self, wanted: Mapping[Any, Any], **_: Any) -> dict[Any, Any]:
        self.log.append(f"asked {len(wanted)} ends")
        return {at: self._answer("ends", SimpleNamespace(offset=5, leader_epoch=1)) for at in wanted}


def test_a_look_asks_both_questions_at_once_and_asks_again_where_there_are_new_partitions(monkeypatch):
    """Two requests, one round trip for each micro-batch; the first look does not know the partitions yet."""
    cluster = Answers(1)
    monkeypatch.setattr(kafka_watch, "admin_client", lambda _: cluster)
    watch = TopicWatch(SETTINGS, ("t",), {"t": TopicIdentity(f"{10:032x}", 1)})
    watch.look(dict)
    assert cluster.log == ["asked topics", "answered topics", "asked 1 ends", "answered ends"]
    cluster.log.clear()
    watch.look(dict)
    assert cluster.log == ["asked 1 ends", "asked topics", "answered topics", "answered ends"]
    cluster.partitions = 2
    watch.look(dict)
    assert watch.leader_epochs == {("t", 0): 1, ("t", 1): 1}
    watch._known = {"t": TopicIdentity("other", 1)}
    with pytest.raises(SourceWentBack, match="made again"):
        watch.look(dict)


def test_a_plan_asks_both_questions_at_once_and_asks_again_where_there_are_new_partitions(monkeypatch):
    cluster = Answers(1)
    monkeypatch.setattr(kafka_reader, "admin_client", lambda _: cluster)
    known = {"t": TopicIdentity(f"{10:032x}", 1)}
    reader = KafkaStreamReader(SETTINGS, ("t",), "read_committed", None, 1000, known=known)
    assert reader.latestOffset({}, ReadAllAvailable()) == {"t": {"0": 5}}
    assert cluster.log == ["asked topics", "answered topics", "asked 1 ends", "answered ends"]
    cluster.log.clear()
    assert reader.latestOffset({}, ReadAllAvailable()) == {"t": {"0": 5}}
    assert cluster.log == ["asked 1 ends", "asked topics", "answered topics", "answered ends"]
    cluster.partitions = 2
    cluster.log.clear()
    assert reader.latestOffset({}, ReadAllAvailable()) == {"t": {"0": 5, "1": 5}}
    assert cluster.log[2:4] == ["answered topics", "asked 2 ends"]
    known["t"] = TopicIdentity("other", 1)
    with pytest.raises(SourceWentBack, match="made again"):
        reader.latestOffset({}, ReadAllAvailable())


def test_an_end_is_checked_where_a_leader_is_new_and_only_there(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, {("t", 0): End(100, 4), ("t", 1): End(7, None)})
    committed(tmp_path, 90)
    SourceWatch(str(tmp_path), [Source()]).look()
    assert json.loads((tmp_path / LEADER_EPOCHS).read_bytes()) == {"format": 1, "epochs": {"t": {"0": 4}}}
    written = (tmp_path / LEADER_EPOCHS).stat().st_mtime_ns
    watch = SourceWatch(str(tmp_path), [Source()])
    watch.look()
    assert cluster.checked == []
    assert (tmp_path / LEADER_EPOCHS).stat().st_mtime_ns == written, "nothing is written in a micro-batch like others"
    cluster.ends[("t", 0)] = End(100, 6)
    watch.look()
    assert cluster.checked == [(("t", 0), 90, 4)], "what was committed was written under epoch 4 or before"
    watch.look()
    assert len(cluster.checked) == 1
    cluster.ends[("t", 0)] = End(100, 7)
    SourceWatch(str(tmp_path), [Source()]).look()  # while the job was stopped
    assert cluster.checked[1:] == [(("t", 0), 90, 6)]


def epochs_in(checkpoint: Path) -> Any:
    return json.loads((checkpoint / LEADER_EPOCHS).read_bytes())["epochs"]


def test_of_two_sources_each_writes_the_epochs_of_its_own_topics(monkeypatch, tmp_path):
    """What one source knew of the other's at the start is old by then, and was written over what is new."""
    cluster = Cluster(monkeypatch, {("a", 0): End(100, 4), ("b", 0): End(100, 4)})

    def look() -> None:
        SourceWatch(str(tmp_path), [Source("a"), Source("b")]).look()

    look()
    cluster.ends = {("a", 0): End(100, 5), ("b", 0): End(100, 6)}
    look()
    assert epochs_in(tmp_path) == {"a": {"0": 5}, "b": {"0": 6}}


def test_epochs_that_could_not_be_written_are_written_by_the_next_look(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, {("a", 0): End(100, 4), ("b", 0): End(100, 4)})
    first, second = Source("a"), Source("b")
    watch = SourceWatch(str(tmp_path), [first, second])
    watch.look()
    cluster.ends[("a", 0)] = End(100, 5)
    whole = second.made.look

    def fails(*_: Any, **__: Any) -> bool:
        raise SourceUnavailable("the cluster does not answer")

    monkeypatch.setattr(second.made, "look", fails)
    with pytest.raises(SourceUnavailable):
        watch.look()
    assert epochs_in(tmp_path)["a"] == {"0": 4}
    monkeypatch.setattr(second.made, "look", whole)
    watch.look()
    assert epochs_in(tmp_path) == {"a": {"0": 5}, "b": {"0": 4}}


def test_nothing_committed_means_nothing_to_lose(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, {("t", 0): End(100, 4)})
    watch = SourceWatch(str(tmp_path), [Source()])
    watch.look()
    cluster.ends[("t", 0)] = End(20, 5)
    watch.look()
    assert cluster.checked == []


def test_epochs_of_another_release_are_named_and_torn_ones_written_anew(monkeypatch, tmp_path):
    Cluster(monkeypatch, {("t", 0): End(100, 4)})
    (tmp_path / "rewind").mkdir()
    (tmp_path / LEADER_EPOCHS).write_text('{"format": 2}')
    with pytest.raises(UnknownFormat, match=r"epochs\.json"):
        SourceWatch(str(tmp_path), [Source()])
    (tmp_path / LEADER_EPOCHS).write_text('{"form')
    SourceWatch(str(tmp_path), [Source()]).look()
    assert json.loads((tmp_path / LEADER_EPOCHS).read_bytes())["epochs"] == {"t": {"0": 4}}


def test_sources_without_a_watch_are_passed_over(tmp_path):
    SourceWatch(str(tmp_path), [object()]).look()  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []


def test_a_micro_batch_is_not_published_when_its_source_is_another_one():
    published: list[int] = []

    def watch() -> None:
        raise SourceWentBack("a topic was deleted and made again")

    class Plan:
        lease = SimpleNamespace(check=lambda: None)

        def __init__(self, watch: Callable[[], None]) -> None:
            self.watch = watch

        def publish(self, _frames: Any, version: int) -> list[Mapping[str, Any]]:
            published.append(version)
            return []

    query = RewindQuery.__new__(RewindQuery)
    query._plan = Plan(watch)  # type: ignore[assignment]
    query._stopping = type("Never", (), {"is_set": lambda self: False})()  # type: ignore[assignment]
    query._publishing, query._gate, query._ending = set(), threading.Lock(), False  # type: ignore[assignment]
    with pytest.raises(MicroBatchFailed, match="made again"):
        query._publish(None, 7)  # type: ignore[arg-type]
    assert isinstance(query._raised, SourceWentBack)
    assert published == []


def test_an_end_that_is_lost_while_a_micro_batch_is_under_way_is_seen_by_the_next_one(monkeypatch, tmp_path):
    """A restore beside it looks, too, when the committed position lies before what the micro-batch has read."""
    cluster = Cluster(monkeypatch, {("t", 0): End(200, 5)})
    committed(tmp_path, 100)
    watch = SourceWatch(str(tmp_path), [Source()])
    watch.look()
    cluster.ends[("t", 0)] = End(150, 6)
    watch.look(beside=True)
    committed(tmp_path, 200)
    watch.look()
    assert cluster.checked == [(("t", 0), 100, 5), (("t", 0), 200, 5)]
