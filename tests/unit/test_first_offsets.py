"""Where a query begins: asked once, kept as Spark's connector keeps it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backend.errors import UnknownFormat
from backend.spark import start
from backend.spark.first_offsets import known_positions, write_positions
from backend.spark.job import Input, Job
from backend.spark.session import jvm
from recovery.commit.manifest import read_manifest


def test_each_source_of_a_query_has_its_own(tmp_path: Path) -> None:
    first = {("t", 0): 6, ("t", 1): 7}
    write_positions(str(tmp_path), 1, first)
    assert known_positions(str(tmp_path), 1) == first
    assert known_positions(str(tmp_path), 0) is None
    assert (tmp_path / "sources/1/0").read_bytes() == b'\0v1\n{"t": {"0": 6, "1": 7}}'


def test_what_the_connector_wrote_is_read(tmp_path: Path) -> None:
    """Its form: `KafkaSourceInitialOffsetWriter`, version 1."""
    (tmp_path / "sources/0").mkdir(parents=True)
    (tmp_path / "sources/0/0").write_bytes(b'\0v1\n{"t":{"1":3,"0":4}}')
    assert known_positions(str(tmp_path), 0) == {("t", 0): 4, ("t", 1): 3}
    (tmp_path / "sources/0/0").write_bytes(b'\0v2\n{"t":{"1":3,"0":4}}')
    with pytest.raises(UnknownFormat, match="sources/0/0"):
        known_positions(str(tmp_path), 0)


class Topic:
    """Holds offsets from 0; a new query begins at its end, which moves on."""

    def __init__(self, name: str, end: int) -> None:
        self.topics, self.end = (name,), end

    def offsets(self, spark: Any) -> dict[tuple[str, int], tuple[int, int]]:
        return {(self.topics[0], 0): (0, self.end)}

    def first_positions(self) -> dict[tuple[str, int], int]:
        self.end += 1
        return {(self.topics[0], 0): self.end - 1}


class Archive:
    """Says nothing of where a query begins: where it does itself."""

    topics = ("a",)

    def offsets(self, spark: Any) -> dict[tuple[str, int], tuple[int, int]]:
        return {("a", 0): (3, 9)}


def test_joins_count_from_where_the_query_begins(tmp_path: Path) -> None:
    """With `starting="latest"` they counted a million orders that nobody read, and nothing met any more."""
    sources: dict[str, Any] = {"left": Topic("orders", 1_000_000), "right": Topic("shipments", 5_000), "": Archive()}
    pipeline: Any = SimpleNamespace(
        sides=tuple(sources), streams=[SimpleNamespace(source=source) for source in sources.values()]
    )
    nobody: Any = None
    checkpoint = str(tmp_path)
    firsts = start._first_offsets(pipeline, nobody, checkpoint)
    assert firsts == [[0, 0, 1_000_000], [1, 0, 5_000], [2, 0, 3]]
    job = Job(tuple(Input(source, None, (), name) for name, source in sources.items()), "key", (0,), nobody, (), None)
    job.begin(checkpoint, firsts, known=False)
    assert known_positions(checkpoint, 0) == {("orders", 0): 1_000_000}, "`streaming` goes by it"
    assert job.began(checkpoint) == {(0, 0): 1_000_000, (1, 0): 5_000}
    assert known_positions(checkpoint, 2) is None
    assert start._first_offsets(pipeline, nobody, checkpoint) == firsts, "a start that dies before its manifest"
    assert start._first_offsets(pipeline, nobody)[0] == [0, 0, 1_000_001]


class Kept(Topic):
    """Its new query begins at the earliest message or at the end, as it is asked to; neither moves by itself."""

    low, starting = 0, "earliest"

    def offsets(self, spark: Any) -> dict[tuple[str, int], tuple[int, int]]:
        return {(self.topics[0], 0): (self.low, self.end)}

    def first_positions(self) -> dict[tuple[str, int], int]:
        return {(self.topics[0], 0): self.low if self.starting == "earliest" else self.end}


class Refused(Exception):
    """A sink does not open."""


class Started(Exception):
    """Everything is taken: Spark's query comes next."""


@pytest.fixture
def begin_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Start a query on a topic; gives where it begins, by its join, by its manifest and as `streaming` goes by it."""
    checkpoint, nothing, counted = str(tmp_path), cast(Any, None), list[Any]()
    opened: list[BaseException | None] = []

    def open_it(_: str) -> None:
        if (error := opened.pop()) is not None:
            raise error

    def started(*_: Any) -> Any:
        raise Started

    def make(pipeline: Any, *_: Any, first_offsets: Callable[[], Any], **__: Any) -> Job:
        counted[:] = first_offsets()
        return Job((Input(pipeline.streams[0].source, None, ()),), "key", (0,), operator, (), None)

    operator: Any = SimpleNamespace(replays=False)
    sink: Any = SimpleNamespace(describe=lambda: {"kind": "played"}, open=open_it, publish=None)
    changelog = SimpleNamespace(check=lambda *_, **__: None, prepare=lambda *_, **__: None)
    for name in ("check_not_connect", "check_session"):
        monkeypatch.setattr(start, name, lambda *_, **__: None)
    for name in ("check_same_files", "give_workers_time", "use_unix_sockets"):
        monkeypatch.setattr(jvm, name, lambda *_, **__: None)
    monkeypatch.setattr(start, "_places", lambda *_: ([], set()))
    monkeypatch.setattr(start, "known_sources", lambda pipeline, *_: pipeline)
    monkeypatch.setattr(start, "build_job", make)
    monkeypatch.setattr(start, "describe", lambda _, entries: entries)
    monkeypatch.setattr(start, "open_changelog", lambda *_: changelog)
    monkeypatch.setattr(start, "queue_limit", lambda *_: None)
    monkeypatch.setattr(start, "terms_of", started)

    def begin(topic: Topic, refused: bool = False) -> Any:
        opened.append(Refused() if refused else None)
        pipeline: Any = SimpleNamespace(sides=("",), streams=[SimpleNamespace(source=topic)])
        with pytest.raises(Refused if refused else Started):
            start.start(pipeline, nothing, checkpoint, sink, start.StartOptions())
        stored = read_manifest(checkpoint)
        assert stored is not None
        known = known_positions(checkpoint, 0)
        return counted[0][2], stored.entries["first_offsets"][0][2], known and known[topic.topics[0], 0]

    return begin


def test_a_start_that_is_refused_does_not_fix_where_the_query_begins(
    begin_at: Callable[..., Any], tmp_path: Path
) -> None:
    """Retention went on meanwhile: `HistoryLost`, though nothing was ever read; or the user said another `starting`."""
    topic = Kept("orders", 5_000)
    assert begin_at(topic, refused=True) == (0, 0, 0)
    topic.low = 1_000
    assert begin_at(topic, refused=True)[0] == 1_000
    topic.starting = "latest"
    assert begin_at(topic) == (5_000, 5_000, 5_000)
    (tmp_path / "metadata").write_text('{"id":"0"}')
    topic.low, topic.end, topic.starting = 2_000, 9_000, "earliest"
    assert begin_at(topic) == (5_000, 5_000, 5_000), "Spark has started a query, which plans its first micro-batch"


def test_a_start_that_an_older_release_refused_does_not_fix_where_joins_count_from(
    begin_at: Callable[..., Any], tmp_path: Path
) -> None:
    """It wrote down the earliest offsets, and not where the query begins: `streaming` asked for that."""
    topic = Kept("orders", 5_000)
    begin_at(topic, refused=True)
    (tmp_path / "sources/0/0").unlink()
    topic.starting = "latest"
    assert begin_at(topic) == (5_000, 5_000, 5_000)


def test_what_a_query_that_has_begun_goes_by_is_not_written_again(begin_at: Callable[..., Any], tmp_path: Path) -> None:
    topic = Kept("orders", 5_000)
    begin_at(topic)
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets/0").write_text("v1\n{}\n")
    (tmp_path / "sources/0/0").unlink()  # as releases left it whose connector began by itself
    topic.low = 1_000
    assert begin_at(topic) == (0, 0, 1_000), "the source is asked, once: the manifest's may be those of another start"
    topic.low = 2_000
    assert begin_at(topic) == (0, 0, 1_000)
