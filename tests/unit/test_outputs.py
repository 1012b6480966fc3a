"""A restart that would write elsewhere is refused, unless the output has moved or the user says so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backend import kafka_sink
from backend.errors import ManifestMismatch, SinkConflict, StateCorrupted, UnknownFormat
from backend.sinks.directory import VersionedDirectory
from backend.sinks.kafka import sink as kafka
from backend.sinks.kafka import writer as kafka_writer
from backend.sinks.parquet import ParquetSink
from backend.spark.start import _open_sink
from recovery.cli import app
from recovery.commit.manifest import Manifest, write_manifest
from recovery.commit.outputs import NAME, check_outputs, forget_outputs, output_id, read_outputs, write_outputs

QUERY = "q" * 32


class Says:
    """A sink that says something of itself."""

    def __init__(self, **told: Any) -> None:
        self.told = told

    def describe(self) -> dict[str, object]:
        return self.told


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """Give a checkpoint with a planned micro-batch, whose outputs are `results` and `errors` beside it."""
    location = tmp_path / "checkpoint"
    (location / "offsets").mkdir(parents=True)
    (location / "offsets" / "0").write_text("v1")
    begin(str(location), sink(tmp_path))
    return str(location)


def sink(home: Path, results: str = "results", errors: str = "errors") -> ParquetSink:
    return ParquetSink(home / results, home / errors)


def begin(checkpoint: str, one: Any) -> None:
    """Do what `start` does with a sink."""
    query = output_id(checkpoint, QUERY)
    check_outputs(checkpoint, query, one)
    getattr(one, "open", lambda query: None)(query)
    write_outputs(checkpoint, one)


def test_the_same_outputs_go_on(checkpoint: str, tmp_path: Path) -> None:
    begin(checkpoint, sink(tmp_path))


@pytest.mark.parametrize("results", ["other", "errors"])
def test_other_outputs_are_refused_before_anything_is_made(checkpoint: str, tmp_path: Path, results: str) -> None:
    errors = "results" if results == "errors" else "errors"
    with pytest.raises(ManifestMismatch, match="another one than this query has written to") as caught:
        begin(checkpoint, sink(tmp_path, results, errors))
    assert f"results {tmp_path}/results" in caught.value.why
    assert f"results {tmp_path}/{results}" in caught.value.why
    assert "rewind outputs" in caught.value.command
    assert not (tmp_path / "other").exists()


def test_outputs_that_moved_with_what_is_in_them_go_on(checkpoint: str, tmp_path: Path) -> None:
    (tmp_path / "results").rename(tmp_path / "moved")
    with pytest.raises(ManifestMismatch):
        begin(checkpoint, sink(tmp_path, "moved", "new-errors"))
    begin(checkpoint, sink(tmp_path, "moved"))
    assert read_outputs(checkpoint)["results"] == str(tmp_path / "moved")
    (tmp_path / "all").mkdir()
    for name in ("checkpoint", "moved", "errors"):
        (tmp_path / name).rename(tmp_path / "all" / name)
    begin(str(tmp_path / "all" / "checkpoint"), sink(tmp_path / "all", "moved"))


def test_the_user_may_say_that_it_goes_on_elsewhere(checkpoint: str, tmp_path: Path) -> None:
    write_manifest(checkpoint, Manifest(1, (0,), {"query": QUERY, "operator": {}}))
    words = ["outputs", checkpoint, "--json"]
    assert json.loads(CliRunner().invoke(app, words).stdout)["outputs"]["results"] == str(tmp_path / "results")
    with pytest.raises(ManifestMismatch):
        begin(checkpoint, sink(tmp_path, "other"))
    assert CliRunner().invoke(app, [*words, "--new"]).exit_code == 0
    begin(checkpoint, sink(tmp_path, "other", "other-errors"))
    begin(checkpoint, sink(tmp_path, "other", "other-errors"))
    with pytest.raises(ManifestMismatch, match="another one than"):
        begin(checkpoint, sink(tmp_path))
    assert CliRunner().invoke(app, [*words, "--new"]).exit_code == 0
    with pytest.raises(ManifestMismatch, match="belongs to another query"):
        begin(checkpoint, sink(tmp_path))


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        ({"kind": "kafka", "results": "r", "errors": "e", "commits": "c", "guarantee": "exactly_once"},
         {"kind": "kafka", "results": "r", "errors": "e", "commits": "c", "guarantee": "at_least_once"}, True),
        ({"kind": "kafka", "results": "r", "errors": "e", "commits": "c"},
         {"kind": "kafka", "results": "r2", "errors": "e", "commits": "c"}, False),
        ({"kind": "kafka", "results": "r", "errors": "e", "commits": "c"},
         {"kind": "parquet", "results": "r", "errors": "e"}, False),
        ({"kind": "foreach", "function": "a"}, {"kind": "foreach", "function": "b"}, True),
        ({"kind": "foreach", "function": "a"}, {"kind": "collect"}, False),
        ({"kind": "mine", "place": 1}, {"kind": "mine", "place": 2}, True),
    ],
)  # fmt: skip
def test_what_makes_an_output_another_one(checkpoint: str, before: Any, now: Any, same: bool) -> None:
    Path(checkpoint, NAME).unlink()
    begin(checkpoint, Says(**before))
    if same:
        begin(checkpoint, Says(**now))
    else:
        with pytest.raises(ManifestMismatch, match="another one"):
            begin(checkpoint, Says(**now))


def test_before_anything_was_planned_a_mistyped_output_may_be_put_right(checkpoint: str, tmp_path: Path) -> None:
    Path(checkpoint, "offsets", "0").unlink()
    begin(checkpoint, sink(tmp_path, "other"))


def test_a_checkpoint_that_does_not_say_goes_on_and_says_from_then_on(checkpoint: str, tmp_path: Path) -> None:
    """One of release 0.1; the directories' own marks still hold."""
    Path(checkpoint, NAME).unlink()
    begin(checkpoint, sink(tmp_path, "other", "other-errors"))
    assert read_outputs(checkpoint)["results"] == str(tmp_path / "other")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\x00{[",
        b'{"format": 1, "number": "x", "outputs": {}}',
        b'{"format": 1, "number": 0, "outputs": null}',
        b'{"format": 1, "number": 1, "outputs": []}',
        b'{"format": 1, "number": 1, "outputs": {"kind": "parquet", "results": "out"}}',
        b'{"format": 1, "number": 2, "outputs": null, "before": [{"kind": "kafka", "commits": "c"}]}',
        b'{"format": 1, "number": 1, "outputs": null, "before": {}}',
        b'{"format": 1, "number": 1, "outputs": null, "before": [{}]}',
    ],
)
def test_a_file_that_is_damaged_ends_a_start_and_nothing_is_written(
    checkpoint: str, tmp_path: Path, content: bytes
) -> None:
    """Else the query would go on in other outputs, and nobody be told."""
    Path(checkpoint, NAME).write_bytes(content)
    with pytest.raises(StateCorrupted, match="cannot be read") as caught:
        begin(checkpoint, sink(tmp_path, "other", "other-errors"))
    assert caught.value.where == f"{checkpoint}/{NAME}"
    assert not (tmp_path / "other").exists()
    assert Path(checkpoint, NAME).read_bytes() == content


def test_outputs_of_a_kind_that_lack_a_place_are_other_ones(checkpoint: str, tmp_path: Path) -> None:
    Path(checkpoint, NAME).write_text('{"format": 1, "number": 1, "outputs": {"kind": "delta"}}')
    with pytest.raises(ManifestMismatch, match="it was delta; it is parquet"):
        begin(checkpoint, sink(tmp_path))


def test_what_the_error_tells_to_write_goes_on_in_the_outputs_that_there_are(checkpoint: str, tmp_path: Path) -> None:
    forget_outputs(checkpoint)
    begin(checkpoint, sink(tmp_path, "second", "second-errors"))
    Path(checkpoint, NAME).write_text("{")
    with pytest.raises(StateCorrupted) as caught:
        begin(checkpoint, sink(tmp_path, "second", "second-errors"))
    said = re.search(r"write ({.*}) into the file", caught.value.command)
    owner = json.loads((tmp_path / "second" / "_rewind" / "owner.json").read_text())["query"]
    assert said is not None and owner == f"{QUERY}-2"
    Path(checkpoint, NAME).write_text(json.dumps(json.loads(said[1]) | {"number": 2}))
    begin(checkpoint, sink(tmp_path, "second", "second-errors"))
    assert read_outputs(checkpoint)["results"] == str(tmp_path / "second")


def test_a_file_of_a_later_release_is_refused(checkpoint: str, tmp_path: Path) -> None:
    Path(checkpoint, NAME).write_text('{"format": 9, "outputs": {}}')
    with pytest.raises(UnknownFormat, match=r"format.*9, this release reads 1"):
        begin(checkpoint, sink(tmp_path))


def test_a_directory_for_results_does_not_become_one_for_errors(tmp_path: Path) -> None:
    sink(tmp_path).open(QUERY)
    with pytest.raises(ManifestMismatch, match="holds results, given for errors"):
        VersionedDirectory(tmp_path / "results", "errors").open(QUERY)
    owner = tmp_path / "results" / "_rewind" / "owner.json"
    owner.write_text(json.dumps({"format": 1, "query": QUERY}))  # of release 0.1, which did not say
    VersionedDirectory(tmp_path / "results", "errors").open(QUERY)


class Opened(Says):
    """A sink that takes note of what may be out when it is opened."""

    planned: int | None = None
    away = False

    def resume_from(self, planned: int) -> None:
        self.planned = planned

    def open(self, query: str) -> None:
        if self.away:
            raise OSError("the process dies")


def test_in_new_outputs_nothing_is_out_whatever_was_planned(checkpoint: str) -> None:
    """Until they have been opened once; where nothing says that they are new, what was planned may be out."""
    one = Opened(kind="mine", place=1)
    _open_sink(one, checkpoint, QUERY)
    assert one.planned == 0
    forget_outputs(checkpoint)
    one = Opened(kind="mine", place=2)
    one.away = True
    with pytest.raises(OSError, match="dies"):
        _open_sink(one, checkpoint, f"{QUERY}-2")
    assert one.planned == -1
    one.away = False
    for planned in (-1, 0):
        _open_sink(one, checkpoint, f"{QUERY}-2")
        assert one.planned == planned
    for content in (None, '{"format": 1, "number": 2, "outputs": null}'):  # of release 0.1; as the error says
        Path(checkpoint, NAME).unlink()
        if content is not None:
            Path(checkpoint, NAME).write_text(content)
        _open_sink(one, checkpoint, QUERY)
        assert one.planned == 0


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [
        ({"kind": "kafka", "results": "r", "errors": "e", "commits": "c", "guarantee": "at_least_once"},
         {"kind": "kafka", "results": "r", "errors": "e", "commits": "c", "guarantee": "exactly_once"}, False),
        ({"kind": "kafka", "results": "r", "errors": "e", "commits": "c"},
         {"kind": "kafka", "results": "r", "errors": "e2", "commits": "c2"}, False),
        ({"kind": "kafka", "results": "r", "errors": "e", "commits": "c"},
         {"kind": "kafka", "results": "r2", "errors": "e2", "commits": "c"}, False),
        ({"kind": "kafka", "results": "r", "errors": "e", "commits": "c"},
         {"kind": "kafka", "results": "r2", "errors": "e", "commits": "c2"}, True),
        ({"kind": "sql", "url": "u", "results": "r", "errors": "e"},
         {"kind": "kafka", "results": "r", "errors": "e", "commits": "c"}, True),
        ({"kind": "foreach_batch", "function": "a"}, {"kind": "foreach_batch", "function": "a"}, False),
        ({"kind": "foreach_batch", "function": "a"}, {"kind": "foreach_batch", "function": "b"}, True),
    ],
)  # fmt: skip
def test_outputs_that_the_query_has_written_to_before_are_not_new(
    checkpoint: str, before: Any, now: Any, new: bool
) -> None:
    """Also where it has written to others since: what was planned may be out there."""
    for one in (Says(**before), Says(kind="mine")):
        forget_outputs(checkpoint)
        begin(checkpoint, one)
    forget_outputs(checkpoint)
    opened = Opened(**now)
    _open_sink(opened, checkpoint, f"{QUERY}-4")
    assert opened.planned == (-1 if new else 0)


def topics_of_others(
    monkeypatch: pytest.MonkeyPatch, purpose: Any, commits: str = "w-commits"
) -> tuple[Any, list[str]]:
    """Return a Kafka sink whose topics have rows of other queries, and what it writes; nothing is in its commit topic.

    Args:
        monkeypatch: Puts stubs in the cluster's place.
        purpose: In place of `check_purpose`.
        commits: Its commit topic.
    """
    written: list[str] = []
    monkeypatch.setattr(
        kafka, "look", lambda _, topics, **__: ({name: name for name in topics}, dict.fromkeys(topics, 2**20))
    )
    monkeypatch.setattr(kafka, "check_purpose", purpose)
    monkeypatch.setattr(kafka, "prepare", lambda _, topic, **__: written.append(topic))
    monkeypatch.setattr(kafka_writer, "was_cut", lambda *_: False)
    monkeypatch.setattr(kafka_writer, "ever_written", lambda _, topics: ["all-errors"])
    monkeypatch.setattr(kafka_writer.TransactionalWriter, "_open_producer", lambda _: None)
    monkeypatch.setattr(kafka_writer.TransactionalWriter, "_write", lambda self, *_: written.append(self.to.query))
    return kafka_sink("windows", "all-errors", servers="h:1", commits=commits), written


def test_a_query_that_has_run_goes_on_in_a_topic_that_others_write_to(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its empty commit topic was not deleted, made again or emptied: it is new."""
    forget_outputs(checkpoint)
    one, written = topics_of_others(monkeypatch, lambda *_: None)
    _open_sink(one, checkpoint, f"{QUERY}-2")
    assert written == ["w-commits", f"{QUERY}-2"]
    with pytest.raises(SinkConflict, match="deleted, made again or emptied"):
        _open_sink(one, checkpoint, f"{QUERY}-2")  # by now it is not


@pytest.mark.parametrize("commits", ["w-commits", "other-commits"])
def test_new_outputs_with_the_results_of_before_and_nothing_in_the_commit_topic_are_refused(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, commits: str
) -> None:
    """The micro-batch that was planned may be out there: it came a second time."""
    write_outputs(checkpoint, topics_of_others(monkeypatch, lambda *_: None)[0])
    forget_outputs(checkpoint)
    one, written = topics_of_others(monkeypatch, lambda *_: None, commits)
    for _ in range(2):
        with pytest.raises(SinkConflict, match="deleted, made again or emptied"):
            _open_sink(one, checkpoint, f"{QUERY}-2")
    assert f"{QUERY}-2" not in written
    assert read_outputs(checkpoint) is None


def test_a_query_that_has_run_does_not_go_on_in_another_ones_changelog(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any, topics: Any) -> None:
        raise ManifestMismatch(f"{[*topics.values()]}: one is a changelog", where="h:1", why="", command="")

    forget_outputs(checkpoint)
    one, written = topics_of_others(monkeypatch, refuse)
    for _ in range(2):
        with pytest.raises(ManifestMismatch, match=r"\['windows', 'all-errors'\]: one is a changelog"):
            _open_sink(one, checkpoint, f"{QUERY}-2")
    assert not written
    assert read_outputs(checkpoint) is None
