"""What a person does to a running query, and between its runs: on a real Spark, through the public calls."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from backend import archive, count, foreach_sink, stream, tumbling
from backend.errors import (
    CheckpointInUse,
    CheckpointTaken,
    HistoryLost,
    ManifestMismatch,
    QueryStopped,
    SinkUnavailable,
    StateCorrupted,
)
from backend.sources.archive_files import write_archive
from backend.spark.observed import observed
from recovery.cli import app
from recovery.commit.lease import DIRECTORY
from recovery.inspect.checkpoint_view import Checkpoint
from recovery.inspect.user_job import job_of
from recovery.supervise.supervisor import RewindQuery
from tests.support.collecting import CollectSink
from tests.support.waiting import ended
from tests.support.waiting import until as wait_until

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

PATIENCE_S = 150  # on a busy machine; each takes some seconds


def write(path: Path, seconds: list[int], first: int = 0) -> None:
    """Write messages of one partition, by their seconds."""
    values = [json.dumps({"key": "a", "at": second * 1000}).encode() for second in seconds]
    arrays = {
        "topic": pa.array(["t"] * len(seconds)),
        "partition": pa.array([0] * len(seconds), pa.int32()),
        "offset": pa.array(range(first, first + len(seconds)), pa.int64()),
        "timestamp": pa.array([second * 1000 for second in seconds], pa.timestamp("ms", tz="UTC")),
        "key": pa.array([None] * len(seconds), pa.binary()),
        "value": pa.array(values, pa.binary()),
    }
    write_archive(path / f"from-{first}", pa.table(arrays))


def job(path: Path, minutes: int = 1) -> Any:
    source = archive(str(path / "archive"), value="key string, at long")
    windows = stream(source, event_time="at", key="key").window(tumbling(f"{minutes} minutes"), retention="1 hour")
    return windows.aggregate(n=count()).options(shards=1, trigger="0 seconds")


def start(spark: Any, path: Path, **options: Any) -> Any:
    places = {"checkpoint": path / "checkpoint", "local_dir": path / "local"}
    if "sink" not in options:
        places |= {"results": path / "results", "errors": path / "errors"}
    return job(path).start(spark, **(places | options))


def rows(path: Path, results: str = "results") -> list[tuple[str, int, int, int]]:
    """Read (reason, revision, window's start in seconds, count)."""
    files = sorted((path / results).glob("batch=*/*.parquet"))
    found = [row for file in files for row in pq.read_table(file).to_pylist()]
    found.sort(key=lambda row: (row["version"], row["sequence"]))
    return [(row["reason"], row["revision"], int(row["window_start"].timestamp()), row["n"]) for row in found]


def command(path: Path, *words: str, code: int) -> dict[str, Any]:
    told = [words[0], str(path / "checkpoint"), *words[1:], "--local-dir", str(path / "local"), "--json"]
    result = CliRunner().invoke(app, [word for word in told if word is not None])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def published(query: Any) -> None:
    """Wait for the first micro-batch."""
    done = threading.Event()
    for _ in range(PATIENCE_S * 10):
        if query.progress.micro_batches or not query.is_active:
            return
        done.wait(0.1)
    raise AssertionError("no micro-batch")


def test_what_is_restored_ahead_is_where_it_says_and_the_next_start_goes_on(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "archive", [0, 30, 70])
    ended(start(spark, tmp_path, until="end"))
    shutil.rmtree(tmp_path / "local")
    (tmp_path / "ahead.py").write_text(
        "from pathlib import Path\nfrom tests.spark import test_hands_on_a_query as hands\n\n\n"
        f"def job(spark):\n    return hands.job(Path({str(tmp_path)!r}))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("recovery.inspect.user_job.session", lambda master: nullcontext(spark))
    snapshots = tmp_path / "checkpoint" / "rewind" / "snapshots"
    before = set(snapshots.rglob("*"))
    words = ["restore", str(tmp_path / "checkpoint"), "ahead:job", "--local-dir", str(tmp_path / "local")]
    said = [CliRunner().invoke(app, words) for _ in range(2)]
    assert [one.exit_code for one in said] == [0, 0], said[0].output + said[1].output
    assert "1 of 1 shards are in the checkpoint's snapshots now" in said[0].output
    assert set(snapshots.rglob("*")) > before
    assert "nothing had to be restored" in said[1].output
    shutil.rmtree(tmp_path / "local")  # on another host
    assert command(tmp_path, "restore", "ahead:job", code=0)["restored"] == 0

    logged = tmp_path / "checkpoint" / "rewind" / "changelog" / "0"
    record = max(logged.glob("*.delta"))
    whole = record.read_bytes()
    record.write_bytes(whole[:-1])
    for words, restored in (("ahead:job",), 0), (("ahead:job", "--dry-run"), None):
        found = command(tmp_path, "restore", *words, code=1)
        assert (found["restored"], [shard["here"] for shard in found["shards"]]) == (restored, ["unknown"])
    record.write_bytes(whole)

    commits = (tmp_path / "checkpoint" / "commits").rename(tmp_path / "commits")
    error = command(tmp_path, "restore", "ahead:job", code=1)["error"]
    assert command(tmp_path, "restore", "ahead:job", "--dry-run", code=1)["error"] == error
    with pytest.raises(StateCorrupted, match="none is committed") as caught:
        start(spark, tmp_path)
    assert error["what"] == caught.value.what
    assert error["where"] == caught.value.where == str(tmp_path / "checkpoint" / "commits")
    commits.rename(tmp_path / "checkpoint" / "commits")
    write(tmp_path / "archive", [80, 200], first=3)
    ended(start(spark, tmp_path, until="end"))
    assert [row for row in rows(tmp_path) if row[0] == "full"] == [
        ("full", 0, 0, 2),
        ("full", 1, 60, 2),
    ]  # after a drain


def test_a_copy_goes_on_beside_its_original_whose_changelog_lies_elsewhere(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/operation.md says it: its own outputs and local state, restored first, for its new changelog is empty."""
    write(tmp_path / "archive", [0, 30, 70])
    ended(start(spark, tmp_path, until="end", changelog=str(tmp_path / "log")))
    before = {file: file.read_bytes() for file in (tmp_path / "log").rglob("*") if file.is_file()}
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "checkpoint", copy / "checkpoint")
    (tmp_path / "ahead.py").write_text(
        "from pathlib import Path\nfrom tests.spark import test_hands_on_a_query as hands\n\n\n"
        f"def job(spark):\n    return hands.job(Path({str(tmp_path)!r}))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("recovery.inspect.user_job.session", lambda master: nullcontext(spark))
    result = CliRunner().invoke(app, ["outputs", str(copy / "checkpoint"), "--new"])
    assert result.exit_code == 0, result.output

    def go(home: Path, **options: Any) -> Any:
        places = {name: home / name for name in ("checkpoint", "results", "errors")}
        return job(tmp_path).start(spark, **places, local_dir=home / "local", until="end", **options)

    with pytest.raises(HistoryLost) as caught:
        go(copy, changelog=str(copy / "log"))
    assert str(caught.value).count("next: ") == 1
    assert f"rewind restore {copy / 'checkpoint'} <module:function>" in caught.value.command
    assert command(copy, "restore", "ahead:job", code=0)["restored"] == 1
    write(tmp_path / "archive", [80, 200], first=3)
    ended(go(copy, changelog=str(copy / "log")))
    assert [row for row in rows(copy) if row[0] == "full"] == [("full", 1, 60, 2)]
    ended(start(spark, tmp_path, until="end", changelog=str(tmp_path / "log")))
    assert [row for row in rows(tmp_path) if row[0] == "full"] == [("full", 0, 0, 2), ("full", 1, 60, 2)]
    assert {file: file.read_bytes() for file in before} == before


def test_a_running_query_keeps_its_checkpoint_to_itself(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "archive", [0, 30, 70])
    query = start(spark, tmp_path, name="clicks")
    try:
        published(query)
        with pytest.raises(CheckpointInUse, match="query 'clicks'") as caught:
            start(spark, tmp_path, results=tmp_path / "other", errors=tmp_path / "other-errors")
        assert "query.stop()" in caught.value.command
        assert not (tmp_path / "other").exists(), "nothing was made"
        for words in (
            ("reset", "--yes"),
            ("reset", "--yes", "--local-only"),
            ("restore", "tests.support.own_job:sales"),
        ):
            assert command(tmp_path, *words, code=1)["error"]["code"] == "CheckpointInUse"
        told = ("reset", str(tmp_path / "checkpoint"), "--yes", "--json", "--local-dir", str(tmp_path / "local"))
        words = [sys.executable, "-m", "recovery.cli", *told]
        other = subprocess.run(words, check=False, capture_output=True, text=True)
        assert other.returncode == 1
        error = json.loads(other.stdout)["error"]
        assert error["code"] == "CheckpointInUse"
        assert "query 'clicks'" in error["why"]
        assert query.is_active
        assert query.query.isActive
    finally:
        query.stop()
    assert query.exception is None
    assert not spark.streams.active
    assert rows(tmp_path) == [("full", 0, 0, 2)]

    with pytest.raises(ManifestMismatch, match="another one than this query has written to"):
        start(spark, tmp_path, results=tmp_path / "other")
    with pytest.raises(ManifestMismatch, match="another one than this query has written to"):
        start(spark, tmp_path, results=tmp_path / "errors", errors=tmp_path / "results")
    (tmp_path / "results").rename(tmp_path / "moved")
    places = {"results": tmp_path / "moved", "until": "end"}
    ended(start(spark, tmp_path, **places))
    shown = [("full", 0, 0, 2), ("drain", 0, 60, 1)]
    assert rows(tmp_path, "moved") == shown
    # with nothing new, nothing is sent again; with something new, what is open is
    ended(start(spark, tmp_path, **places))
    assert rows(tmp_path, "moved") == shown
    write(tmp_path / "archive", [80], first=3)
    ended(start(spark, tmp_path, **places))
    assert rows(tmp_path, "moved") == [*shown, ("drain", 1, 60, 2)]

    opened = Checkpoint(str(tmp_path / "checkpoint"), tmp_path / "local")
    assert job_of(job(tmp_path), spark, opened.location, opened.manifest).grouping == opened.manifest.grouping
    routed = replace(opened.manifest, entries={**opened.manifest.entries, "route": "partition"})
    assert job_of(job(tmp_path), spark, opened.location, routed).route == "partition", "as start() was given it"
    with pytest.raises(ManifestMismatch, match=r"operator\.window\.size"):
        job_of(job(tmp_path, minutes=2), spark, opened.location, opened.manifest)

    kept = command(tmp_path, "reset", "--dry-run", code=0)["kept"]
    assert any(f"{tmp_path}/moved" in one and "--outputs" in one for one in kept)
    shutil.copytree(tmp_path / "moved", tmp_path / "kept")
    shutil.copytree(tmp_path / "checkpoint/state/0/0", tmp_path / "state-of-0")
    command(tmp_path, "reset", "--yes", "--outputs", code=0)
    assert [(tmp_path / name).exists() for name in ("checkpoint", "moved", "errors", "archive")] == [0, 0, 0, 1]
    with pytest.raises(ManifestMismatch, match="belongs to another query"):
        start(spark, tmp_path, results=tmp_path / "kept")
    # Spark's maintenance uploads a stopped query's snapshot up to a minute later, into what was deleted meanwhile:
    # before a start, between its looking and Spark's, and into the new query's
    late, launched = shutil.copytree(tmp_path / "state-of-0", tmp_path / "checkpoint/state/0/0"), []

    def uploads_first(frames: Any) -> Any:
        launched.append(late.exists())
        if len(launched) == 1:
            shutil.copytree(tmp_path / "state-of-0", late)
        return observed(frames)

    with monkeypatch.context() as patched:
        patched.setattr("backend.spark.start.observed", uploads_first)
        ended(start(spark, tmp_path, **places))
    # the second start, or one more where Spark's own late upload came between, finds the place swept
    assert len(launched) >= 2
    assert not any(launched)
    assert rows(tmp_path, "moved") == [("full", 0, 0, 2), ("drain", 0, 60, 2)]
    shutil.copytree(tmp_path / "state-of-0", late, dirs_exist_ok=True)
    write(tmp_path / "archive", [90], first=4)
    ended(start(spark, tmp_path, **places))
    assert rows(tmp_path, "moved") == [("full", 0, 0, 2), ("drain", 0, 60, 2), ("drain", 1, 60, 3)]


def test_a_sink_others_and_a_newer_driver_stop_a_query(spark: Any, tmp_path: Path) -> None:
    write(tmp_path / "archive", [0, 30, 70])
    asked = threading.Event()

    def enough(results: pa.Table, errors: pa.Table, version: int) -> None:
        assert ready.wait(PATIENCE_S)
        query.stop()
        asked.set()

    ready = threading.Event()
    query = start(spark, tmp_path, sink=foreach_sink(enough))
    ready.set()
    ended(query)
    assert asked.is_set()
    assert not spark.streams.active

    bounded = start(spark, tmp_path, sink=foreach_sink(lambda *_: None), until="end")
    for one in spark.streams.active:
        one.stop()
    with pytest.raises(QueryStopped, match="before the end of its input"):
        ended(bounded)
    bounded.stop()
    with pytest.raises(QueryStopped, match="has ended"):
        bounded.drain()
    ended(start(spark, tmp_path, sink=foreach_sink(lambda *_: None), until="end"))

    older = start(spark, tmp_path, sink=foreach_sink(lambda *_: None))
    newer = tmp_path / "checkpoint" / DIRECTORY / f"{99:012d}-{'a' * 32}.json"
    newer.write_text(json.dumps({"format": 1, "what": "a query", "pid": 1, "host": "elsewhere", "since": "now"}))
    with pytest.raises(CheckpointTaken, match="a query, process 1 on elsewhere"):
        ended(older)
    assert not spark.streams.active


@pytest.mark.parametrize("until", [None, "end"])
def test_sparks_own_stop_inside_a_micro_batch_is_no_failure(spark: Any, tmp_path: Path, until: str | None) -> None:
    """Before: `MicroBatchFailed`, or the interruption by the JVM's name."""
    write(tmp_path / "archive", [0, 30, 70])
    began, released = str(tmp_path / "began"), str(tmp_path / "released")

    def block(messages: pa.Table, context: Any) -> None:
        from pathlib import Path  # it travels by value
        from time import sleep

        Path(began).touch()
        while not Path(released).exists():
            sleep(0.05)

    source = archive(str(tmp_path / "archive"), value="key string, at long")
    blocking = stream(source, key="key").process(block, stores=[], result=pa.schema([("n", pa.int64())]))
    query = blocking.options(shards=1, trigger="0 seconds").start(
        spark, checkpoint=tmp_path / "checkpoint", local_dir=tmp_path / "local", sink=CollectSink(), until=until
    )
    try:
        wait_until(Path(began).exists, what="a task that runs", alive=lambda: query.is_active)
        query.query.stop()
        if until is None:
            assert query.await_termination(PATIENCE_S)
            assert query.exception is None
        else:
            with pytest.raises(QueryStopped, match="before the end of its input"):
                query.await_termination(PATIENCE_S)
    finally:
        Path(released).touch()
        query.stop()


class FailsOnce(CollectSink):
    """What it writes to is not there for its first micro-batch: the query is started again."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def take(self, rows: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
        self.asked += 1
        if self.asked == 1:
            raise SinkUnavailable("away", where="here", why="a test", command="wait")
        return super().take(rows, version)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("before Spark's query is started", marks=pytest.mark.long),
        "when Spark's query runs, and nobody watches it yet",
    ],
)
def test_a_stop_during_a_new_start_leaves_nothing_running(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Before: `stop()` returned, and Spark's query ran on without a supervisor."""
    write(tmp_path / "archive", [0, 30, 70])
    launch, stoppers = RewindQuery._start_query, []

    def again(query: RewindQuery) -> Any:
        early = launch(query) if "runs" in moment else None
        stoppers.append(threading.Thread(target=query.stop))
        stoppers[0].start()
        assert query._stopping.wait(PATIENCE_S)
        return early if early is not None else launch(query)

    monkeypatch.setattr(RewindQuery, "_start_query", again)
    query = start(spark, tmp_path, sink=FailsOnce())
    ended(query)
    stoppers[0].join(PATIENCE_S)
    assert not stoppers[0].is_alive()
    assert query.exception is None
    assert not spark.streams.active
    assert len(stoppers) == 1, "it is not started once more"
    monkeypatch.undo()
    sink = CollectSink()
    ended(start(spark, tmp_path, sink=sink, until="end"))
    kept = [row for table in sink.results.values() for row in table.to_pylist()]
    assert ("drain", 1) in [(row["reason"], row["n"]) for row in kept]


def test_queries_that_start_at_once_in_one_session_get_their_own_settings(spark: Any, tmp_path: Path) -> None:
    """Their shards are a setting of the session, which is one for all threads, while Spark's query is started."""
    names = ("spark.sql.shuffle.partitions", "spark.sql.streaming.stateStore.providerClass")
    users = [spark.conf.get(name, None) for name in names]
    done: dict[int, bool] = {}

    def run(shards: int) -> None:
        path = tmp_path / str(shards)
        write(path / "archive", [0, 30, 70])
        done[shards] = start(spark, path, shards=shards, until="end").await_termination(PATIENCE_S)

    threads = [threading.Thread(target=run, args=(shards,)) for shards in (1, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == {1: True, 3: True, 5: True}
    for shards in done:
        assert rows(tmp_path / str(shards)) == [("full", 0, 0, 2), ("drain", 0, 60, 1)]
        planned = (tmp_path / str(shards) / "checkpoint" / "offsets" / "0").read_text().splitlines()[1]
        assert json.loads(planned)["conf"]["spark.sql.shuffle.partitions"] == str(shards)
    assert [spark.conf.get(name, None) for name in names] == users
