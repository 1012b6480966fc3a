"""What sinks publish: one copy per micro-batch, whole or not at all, only of the attempts that count."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from backend import foreach_batch
from backend.aggregates import count
from backend.batch import ERROR_SCHEMA, RESULT_FIELDS
from backend.errors import ManifestMismatch, OutputDiffers, StorageFailed, UnknownFormat
from backend.joins.spec import join_spec
from backend.kafka_client.settings import KafkaSettings
from backend.places import real_place
from backend.sinks import directory as directory_module
from backend.sinks.directory import VersionedDirectory
from backend.sinks.foreach import ForeachSink
from backend.sinks.kafka.delivery import Publication
from backend.sinks.kafka.sink import _encoded
from backend.sinks.objects import object_files
from backend.sinks.parquet import ParquetSink
from backend.sinks.tables import readable, unpack
from backend.windows.definitions import tumbling
from backend.windows.spec import window_spec
from recovery.files import LocalFiles
from tests.support.collecting import CollectSink
from tests.support.packed import pack
from tests.support.sink_story import Player, Story, check_seen, operator, to_attempts
from tests.unit.test_table_sinks import over

RESULT_SCHEMA = pa.schema([*RESULT_FIELDS, pa.field("origin", pa.string()), pa.field("flights", pa.int64())])
HOUR_MS = 3_600_000


def results(*flights: int) -> bytes | None:
    rows = [
        {"reason": "full", "revision": 0, "window_start": -HOUR_MS, "window_end": 0, "origin": "JFK", "flights": n}
        for n in flights
    ]
    return pack(pa.Table.from_pylist(rows, schema=RESULT_SCHEMA))


def errors(*offsets: int) -> bytes | None:
    fixed = {"stream": 0, "partition": 0, "event_time": 1, "reason": "malformed", "value": b"?"}
    return pack(pa.Table.from_pylist([{**fixed, "offset": offset} for offset in offsets], schema=ERROR_SCHEMA))


def frame(shard: int, version: int, *, res: bytes | None = None, err: bytes | None = None, metrics: str = "{}") -> Any:
    return {"shard": shard, "version": version, "results": res, "errors": err, "metrics": metrics}


def batch_of(*frames: Any) -> pa.RecordBatch:
    schema = pa.schema(
        [
            ("shard", pa.int32()),
            ("version", pa.int64()),
            ("queued_in", pa.int64()),
            ("results", pa.binary()),
            ("errors", pa.binary()),
            ("metrics", pa.string()),
        ]
    )
    return pa.RecordBatch.from_pylist(list(frames), schema=schema)


def publish(sink: ParquetSink, version: int, *frames: Any, given_up: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
    """What `ParquetSink.publish` does, with the tasks run here; `given_up` ran too, but Spark dropped its attempt."""
    write, attempts = sink.writing().write, sink.attempts(version)
    reports = []
    for counts, given in ((False, given_up), (True, frames)):
        shards = {one["shard"]: [other for other in given if other["shard"] == one["shard"]] for one in given}
        for mine in shards.values():
            reports += write(batch_of(*mine), version).to_pylist() if counts else []
            write(batch_of(*mine), version)  # a task that Spark ran twice
    return sink.finish(reports, version, attempts)


def read(root: Path) -> list[dict[str, Any]]:
    found = ds.dataset(root, format="parquet", partitioning="hive").to_table().to_pylist()
    return sorted(found, key=lambda row: (row["batch"], row["shard"], row["sequence"]))


@pytest.fixture
def sink(tmp_path: Path) -> ParquetSink:
    made = ParquetSink(tmp_path / "out", tmp_path / "err")
    made.open("q")
    return made


def test_rows_of_a_queue_keep_the_micro_batch_that_they_were_queued_in(sink: ParquetSink, tmp_path: Path) -> None:
    """Whatever takes them: it is the shard's third commit that publishes in micro-batch 9 what came in 7 and 8."""
    queued = [(7, results(1, 2)), (8, results(3)), (None, results(4))]
    frames = [frame(3, 9, res=made) | {"queued_in": at} for at, made in queued]
    wanted = [(7, "7-3-0", 1), (7, "7-3-1", 2), (8, "8-3-0", 3), (9, "9-3-0", 4)]
    publish(sink, 9, *frames)
    assert [(row["version"], row["id"], row["flights"]) for row in sorted(read(tmp_path / "out"), key=_id)] == wanted

    taken: list[Any] = []
    ForeachSink(lambda made, *_: taken.extend(made.to_pylist())).take(frames, 9)
    assert [(row["version"], row["id"], row["flights"]) for row in taken] == wanted

    to = Publication(KafkaSettings("h:1"), {"results": "r", "errors": "e"}, (), "q", {}, 1.0)
    [(_, messages)] = _encoded(frames, 9, to)
    found = [json.loads(message.value) for message in messages]
    assert [(row["version"], row["id"], row["flights"]) for row in found] == wanted


def _id(row: dict[str, Any]) -> str:
    return str(row["id"])


def test_an_event_time_that_no_reader_has_a_date_for_does_not_spoil_the_file():
    """Spark's timestamps are microseconds: 2**63 - 1 of them are 9,223,372,036,854,775 ms."""
    last = 9_223_372_036_854_775
    times = [5, None, last, last + 1, -last, -last - 1, 2**62 + 1]
    rows = [
        {"stream": 0, "partition": 0, "offset": n, "event_time": time, "reason": "in_future", "detail": "why"}
        for n, time in enumerate(times)
    ]
    rows[5]["detail"] = None
    found = readable(pa.Table.from_pylist(rows, ERROR_SCHEMA), "errors", 0, 0, 0)
    kept = found["event_time"].cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist()
    assert kept == [5_000, None, last * 1_000, None, -last * 1_000, None, None]
    assert found["detail"].to_pylist() == [
        *["why"] * 3,
        f"why; the event time is {last + 1} ms",
        "why",
        f"the event time is {-last - 1} ms",
        f"why; the event time is {2**62 + 1} ms",
    ]


LAST_MS = 9_223_372_036_854_775


def with_starts(*starts: int) -> bytes | None:
    fixed = {"reason": "full", "revision": 0, "window_end": 0, "origin": "JFK", "flights": 1}
    return pack(pa.Table.from_pylist([fixed | {"window_start": start} for start in starts], schema=RESULT_SCHEMA))


def test_a_window_that_spark_has_no_date_for_does_not_spoil_the_file(sink: ParquetSink, tmp_path: Path) -> None:
    """Files that Spark reads have null there; what is compared when the micro-batch runs again is as it was made."""
    starts = (5, LAST_MS, LAST_MS + 1, -LAST_MS - 1)
    publish(sink, 0, frame(0, 0, res=with_starts(*starts)))
    files = list((tmp_path / "out" / "batch=0").iterdir())
    outboxes: list[Any] = [foreach_batch(lambda results, errors, version: None), object_files("s3://b/r", "s3://b/e")]
    for number, outbox in enumerate(outboxes):
        outbox.begin(str(tmp_path / "outbox"), operator())
        outbox._files = LocalFiles(tmp_path / f"outbox {number}")
        write = outbox.writing().write
        folder = outbox.folder(0)
        write(batch_of(frame(0, 0, res=with_starts(*starts))), 0)
        files += (tmp_path / f"outbox {number}" / folder).iterdir()
    assert len(files) == 3
    for file in files:
        found = pq.read_table(file)["window_start"].cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist()
        assert found == [5_000, LAST_MS * 1_000, None, None]
    with pytest.raises(OutputDiffers):
        publish(sink, 0, frame(0, 0, res=with_starts(5, LAST_MS, LAST_MS + 2, -LAST_MS - 1)))


def test_rows_get_an_id_and_times_become_timestamps(sink: ParquetSink, tmp_path: Path) -> None:
    summary = publish(
        sink, 7, frame(1, 7, res=results(5, 6), metrics='{"late": 2}'), frame(0, 7, res=results(4), err=errors(9))
    )
    assert summary == [
        {"shard": 0, "results": 1, "errors": 1, "metrics": {}},
        {"shard": 1, "results": 2, "errors": 0, "metrics": {"late": 2}},
    ]
    rows = read(tmp_path / "out")
    assert [(row["id"], row["version"], row["shard"], row["sequence"], row["flights"]) for row in rows] == [
        ("7-0-0", 7, 0, 0, 4),
        ("7-1-0", 7, 1, 0, 5),
        ("7-1-1", 7, 1, 1, 6),
    ]
    assert rows[0]["window_start"] == datetime(1969, 12, 31, 23, tzinfo=UTC)
    [error] = read(tmp_path / "err")
    assert (error["id"], error["offset"], error["reason"], error["value"]) == ("7-0-e0", 9, "malformed", b"?")
    assert error["event_time"] == datetime(1970, 1, 1, 0, 0, 0, 1000, tzinfo=UTC)
    [file] = (tmp_path / "err" / "batch=7").iterdir()
    assert pq.read_schema(file).metadata[b"rewind.format"] == b"1"


def test_several_frames_of_a_shard_go_on_counting(sink: ParquetSink, tmp_path: Path) -> None:
    summary = publish(
        sink,
        1,
        frame(3, 1, res=results(1), metrics='{"n": 1, "drained": 1}'),
        frame(3, 1, res=results(2), metrics='{"n": 4, "drained": -1}'),
    )
    assert summary == [{"shard": 3, "results": 2, "errors": 0, "metrics": {"n": 5, "drained": 1}}]
    assert [row["id"] for row in read(tmp_path / "out")] == ["1-3-0", "1-3-1"]


def test_publishing_again_replaces_the_micro_batch_and_only_that(sink: ParquetSink, tmp_path: Path) -> None:
    publish(sink, 0, frame(0, 0, res=results(1)))
    publish(sink, 1, frame(0, 1, res=results(2)), frame(1, 1, res=results(3)))
    before = set((tmp_path / "out" / "batch=1").iterdir())
    publish(sink, 1, frame(1, 1, res=results(3)), frame(0, 1, res=results(2)))
    assert [(row["batch"], row["flights"]) for row in read(tmp_path / "out")] == [(0, 1), (1, 2), (1, 3)]
    assert not before & set((tmp_path / "out" / "batch=1").iterdir()), "all of it is replaced"


OTHERS = {
    "another value": (frame(0, 1, res=results(2, 9)), "shard 0 published 2 results, now others"),
    "another order": (frame(0, 1, res=results(3, 2)), "shard 0 published 2 results, now others"),
    "fewer": (frame(0, 1, res=results(2)), "shard 0 published 2 results, now 1"),
    "none": (frame(0, 1), "shard 0 published 2 results, now 0"),
    "another shard": (frame(4, 1, res=results(2, 3)), "shard 0 published 2 results, now 0, shard 4 published 0"),
    "another error": (frame(0, 1, res=results(2, 3), err=errors(8)), "shard 0 published 1 errors, now others"),
    "no error": (frame(0, 1, res=results(2, 3)), "shard 0 published 1 errors, now 0"),
}


@pytest.mark.parametrize("again", OTHERS)
def test_a_micro_batch_that_runs_again_with_other_rows_is_refused_by_name(
    sink: ParquetSink, tmp_path: Path, again: str
) -> None:
    """What readers have seen stays, by a new process too; the way out that the error names is one."""
    publish(sink, 1, frame(0, 1, res=results(2, 3), err=errors(7)))
    seen = read(tmp_path / "out"), read(tmp_path / "err")
    made, why = OTHERS[again]
    restarted = ParquetSink(tmp_path / "out", tmp_path / "err")
    restarted.resume_from(1)  # planned, and not committed
    restarted.open("q")
    for one in (sink, restarted):
        with pytest.raises(OutputDiffers, match="micro-batch 1 was published, ran again") as caught:
            publish(one, 1, made)
        assert caught.value.why.startswith(why)
        assert "not deterministic" in caught.value.why
        assert str(tmp_path / "out" / "batch=1") in caught.value.command
        assert (read(tmp_path / "out"), read(tmp_path / "err")) == seen
    for folder in ("out", "err"):
        shutil.rmtree(tmp_path / folder / "batch=1")
    publish(restarted, 1, made)
    assert [row["flights"] for row in read(tmp_path / "out")] == ([] if again == "none" else unpacked(made))


def unpacked(made: dict[str, Any]) -> list[int]:
    return unpack(made["results"])["flights"].to_pylist()


def test_what_died_between_results_and_errors_goes_on(sink: ParquetSink, tmp_path: Path) -> None:
    publish(sink, 1, frame(0, 1, res=results(2), err=errors(7)))
    shutil.rmtree(tmp_path / "err" / "batch=1")
    publish(sink, 1, frame(0, 1, res=results(2), err=errors(7)))
    assert [row["offset"] for row in read(tmp_path / "err")] == [7]


def test_files_that_an_older_release_named_are_replaced(sink: ParquetSink, tmp_path: Path) -> None:
    publish(sink, 1, frame(0, 1, res=results(2)))
    [file] = (tmp_path / "out" / "batch=1").iterdir()
    file.rename(file.with_name(f"results-00000-{'a' * 32}.parquet"))
    publish(sink, 1, frame(0, 1, res=results(5)))
    assert [row["flights"] for row in read(tmp_path / "out")] == [5]


def test_a_checkpoint_that_was_taken_back_replaces_what_it_plans_anew(sink: ParquetSink, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        publish(sink, version, frame(0, version, res=results(version)))
    sink.resume_from(1)
    sink.open("q")
    publish(sink, 2, frame(0, 2, res=results(20)))  # other cuts, another batch time: not the same micro-batch
    publish(sink, 3, frame(0, 3, res=results(30)))
    assert [row["flights"] for row in read(tmp_path / "out")] == [1, 20, 30]
    for version in (1, 3):
        with pytest.raises(OutputDiffers):
            publish(sink, version, frame(0, version, res=results(99)))


def reopened(tmp_path: Path, planned: int) -> ParquetSink:
    made = ParquetSink(tmp_path / "out", tmp_path / "err")
    made.resume_from(planned)
    made.open("q")
    return made


def test_what_was_taken_back_is_replaced_however_many_starts_it_takes(sink: ParquetSink, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        publish(sink, version, frame(0, version, res=results(version), err=errors(version)))
    reopened(tmp_path, 1)
    for _ in range(2):  # micro-batch 2 is planned anew, and the driver dies before it is out
        again = reopened(tmp_path, 2)
    publish(again, 2, frame(0, 2, res=results(20), err=errors(20)))
    again = reopened(tmp_path, 2)
    with pytest.raises(OutputDiffers):
        publish(again, 2, frame(0, 2, res=results(21), err=errors(20)))
    again = reopened(tmp_path, 3)
    publish(again, 3, frame(0, 3, res=results(30), err=errors(30)))
    assert [row["flights"] for row in read(tmp_path / "out")] == [1, 20, 30]
    assert [row["offset"] for row in read(tmp_path / "err")] == [1, 20, 30]
    reopened(tmp_path, 3)
    assert [path.name for path in (tmp_path / "out" / "_rewind").iterdir()] == ["owner.json"]


def test_a_publication_that_failed_is_not_compared_with_what_was_taken_back(
    sink: ParquetSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither output is, whichever failed, and what this run brought out is."""
    real = VersionedDirectory.publish
    for version in (1, 2):
        publish(sink, version, frame(0, version, res=results(version), err=errors(version)))
    again = reopened(tmp_path, 1)
    for failing in ("results", "errors"):

        def refuse(self: VersionedDirectory, *given: Any, holds: str = failing) -> None:
            if self.holds == holds:
                raise StorageFailed("no room", where="", why="", command="")
            real(self, *given)

        monkeypatch.setattr(VersionedDirectory, "publish", refuse)
        with pytest.raises(StorageFailed):
            publish(again, 2, frame(0, 2, res=results(20), err=errors(20)))
    monkeypatch.setattr(VersionedDirectory, "publish", real)
    with pytest.raises(OutputDiffers, match="published 1 results, now others"):
        publish(again, 2, frame(0, 2, res=results(21), err=errors(20)))
    publish(again, 2, frame(0, 2, res=results(20), err=errors(20)))
    assert [row["flights"] for row in read(tmp_path / "out")] == [1, 20]
    assert [row["offset"] for row in read(tmp_path / "err")] == [1, 20]


def test_the_note_of_what_was_taken_back_has_this_form(sink: ParquetSink, tmp_path: Path) -> None:
    """Format 1, frozen."""
    publish(sink, 4, frame(0, 4, res=results(2)))
    [file] = (tmp_path / "out" / "batch=4").iterdir()
    file.rename(file.with_name("a.parquet"))
    (tmp_path / "out" / "batch=4" / "b.parquet").write_bytes(b"")
    reopened(tmp_path, 3)
    note = tmp_path / "out" / "_rewind" / "stale.json"
    assert note.read_bytes() == b'{"versions":{"4":"a7f091929a7d8d0e"},"format":1}'
    note.write_bytes(b'{"format": 2}')
    with pytest.raises(UnknownFormat, match="format 2, this release reads 1"):
        reopened(tmp_path, 3)


def test_files_of_attempts_that_spark_dropped_are_not_published(sink: ParquetSink, tmp_path: Path) -> None:
    publish(sink, 0, frame(0, 0, res=results(1)), given_up=(frame(0, 0, res=results(1)), frame(1, 0, res=results(9))))
    assert [row["flights"] for row in read(tmp_path / "out")] == [1]
    assert [path.name for path in (tmp_path / "out" / "_rewind").iterdir()] == ["owner.json"]


def test_empty_micro_batches_publish_nothing(sink: ParquetSink, tmp_path: Path) -> None:
    assert publish(sink, 0, frame(0, 0)) == [{"shard": 0, "results": 0, "errors": 0, "metrics": {}}]
    assert sink.finish([], 1, sink.attempts(1)) == []
    assert not list((tmp_path / "out").glob("batch=*"))


@pytest.mark.parametrize("atomic", [True, False])
def test_a_reader_sees_a_whole_micro_batch_at_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    seen: list[set[str] | None] = []
    real_rename, real_exchange, directory = Path.rename, directory_module._exchange, VersionedDirectory(tmp_path)

    def look() -> None:
        target = directory.path(0)
        seen.append({path.name for path in target.iterdir()} if target.exists() else None)

    def rename(self: Path, target: Path) -> Path:
        result = real_rename(self, target)
        look()
        return result

    def exchange(one: Path, other: Path) -> bool:
        done = real_exchange(one, other) if atomic else False
        look()
        return done

    directory.open("q")
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(directory_module, "_exchange", exchange)
    for names in ({"a", "b"}, {"c", "d"}):
        attempt = directory.attempt(0, "run")
        for name in names:
            (attempt / name).write_bytes(b"x")
        directory.publish(0, attempt, [(name, 1) for name in names])
    whole = [{"a", "b"}, {"c", "d"}, None]
    assert all(state in whole for state in seen)
    if atomic:
        assert None not in seen[seen.index({"a", "b"}) :]
    assert {path.name for path in directory.path(0).iterdir()} == {"c", "d"}
    assert [path.name for path in (tmp_path / "_rewind").iterdir()] == ["owner.json"]


def replaced(directory: VersionedDirectory, *names: str) -> None:
    attempt = directory.attempt(0, "-".join(names))
    for name in names:
        (attempt / name).write_bytes(b"x")
    directory.publish(0, attempt, [(name, 1) for name in names])


class Death(BaseException):
    """The driver died."""


@pytest.mark.parametrize("failure", [Death(), OSError(errno.EIO, "Input/output error")], ids=["crash", "error"])
def test_what_a_replacement_moved_away_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    """On filesystems that cannot exchange two directories."""
    directory, real = VersionedDirectory(tmp_path), Path.rename
    directory.open("q")
    replaced(directory, "a", "b")

    def rename(self: Path, target: Path) -> Path:
        if self.name.startswith("ready-"):
            raise failure
        return real(self, target)

    monkeypatch.setattr(directory_module, "_exchange", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises((Death, StorageFailed)):
        replaced(directory, "c")
    assert directory.path(0).exists() == isinstance(failure, OSError)
    monkeypatch.setattr(Path, "rename", real)
    VersionedDirectory(tmp_path).open("q")
    assert {path.name for path in directory.path(0).iterdir()} == {"a", "b"}
    assert [path.name for path in (tmp_path / "_rewind").iterdir()] == ["owner.json"]


def test_what_a_withdrawal_moved_away_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = VersionedDirectory(tmp_path)
    directory.open("q")
    replaced(directory, "a")

    def die(*_: Any, **__: Any) -> None:
        raise Death

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(Death):
        replaced(directory)
    monkeypatch.undo()
    VersionedDirectory(tmp_path).open("q")
    assert directory.published() == []


def test_a_crash_leaves_nothing_that_the_next_start_does_not_clear(sink: ParquetSink, tmp_path: Path) -> None:
    publish(sink, 0, frame(0, 0, res=results(1)))
    for directory in sink._directories.values():
        (directory.attempt(1, "run") / "half.parquet").write_bytes(b"PAR1")
    assert [row["flights"] for row in read(tmp_path / "out")] == [1]
    ParquetSink(tmp_path / "out", tmp_path / "err").open("q")
    assert [path.name for path in (tmp_path / "out" / "_rewind").iterdir()] == ["owner.json"]


def test_a_file_that_is_shorter_than_written_is_not_published(tmp_path: Path) -> None:
    directory = VersionedDirectory(tmp_path)
    attempt = directory.attempt(0, "run")
    (attempt / "a").write_bytes(b"x")
    with pytest.raises(StorageFailed, match="the task wrote 2"):
        directory.publish(0, attempt, [("a", 2)])
    assert directory.published() == []


@pytest.mark.parametrize(("batches", "deaths"), [(5, 12), pytest.param(40, 100, marks=pytest.mark.long)])
def test_no_row_comes_twice_and_none_is_missing_wherever_the_driver_dies(
    batches: int, deaths: int, tmp_path: Path
) -> None:
    story = Story(17, batches)
    columns = 'id, reason, shard, epoch_ms(window_start), origin, n, "odd ""total"".x"'

    def published(kind: str, names: str) -> list[tuple[Any, ...]]:
        if not list((tmp_path / kind).glob("batch=*")):
            return []
        return sorted(over({"o": ds.dataset(tmp_path / kind, format="parquet").to_table()}, f"SELECT {names} FROM o"))

    player = Player(
        lambda: ParquetSink(tmp_path / "results", tmp_path / "errors"),
        "",
        story,
        deaths,
        run_tasks=to_attempts,
        commits=("publish",),
        tables=lambda sink: list(sink._directories.values()),
        is_out=lambda sink, version: (tmp_path / "results" / f"batch={version}").exists(),
        look=lambda: (published("results", columns), published("errors", 'id, "offset"')),
    )
    player.run()
    errors = sorted(row for rows in story.errors for row in rows)
    assert player.look() == (sorted(story.log), errors)
    player.start(39)  # clears what the attempts left
    assert [path.name for path in tmp_path.glob("*/_rewind/*")] == ["owner.json"] * 2
    check_seen(player.seen, deaths)


def test_an_output_of_another_query_is_refused(sink: ParquetSink, tmp_path: Path) -> None:
    sink.open("q")
    with pytest.raises(ManifestMismatch, match="written by query q, this is p"):
        ParquetSink(tmp_path / "out", tmp_path / "err").open("p")
    (tmp_path / "out" / "_rewind" / "owner.json").write_text('{"format": 2, "query": "q"}')
    with pytest.raises(UnknownFormat):
        sink.open("q")
    (tmp_path / "old" / "batch=3").mkdir(parents=True)
    with pytest.raises(ManifestMismatch, match="already holds"):
        ParquetSink(tmp_path / "old", tmp_path / "err").open("q")


def test_frames_of_another_micro_batch_are_refused(sink: ParquetSink) -> None:
    with pytest.raises(RuntimeError, match="micro-batch 4 handed to the sink as micro-batch 5"):
        publish(sink, 5, frame(0, 4, res=results(1)))
    with pytest.raises(RuntimeError, match="micro-batch 4"):
        CollectSink().take([frame(0, 4)], 5)


@pytest.mark.parametrize("path", ["", "s3://bucket/out", "hdfs://host/out"])
def test_paths_that_cannot_be_replaced_atomically_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="results="):
        ParquetSink(path, "err")
    with pytest.raises(ValueError, match="another directory"):
        ParquetSink("out", "out")


def test_the_function_of_foreach_gets_tables_in_order() -> None:
    calls: list[tuple[pa.Table, pa.Table, int]] = []
    sink = ForeachSink(lambda *tables: calls.append(tables))
    summary = sink.take([frame(1, 2, res=results(8)), frame(0, 2, res=results(7), err=errors(3))], 2)
    assert [one["results"] for one in summary] == [1, 1]
    [(found, failed, version)] = calls
    assert version == 2
    assert found.column("flights").to_pylist() == [7, 8]
    assert found.column("id").to_pylist() == ["2-0-0", "2-1-0"]
    assert failed.column("offset").to_pylist() == [3]
    sink.take([frame(0, 3, err=errors(4))], 3)
    assert calls[1][0].num_rows == 0
    sink.take([frame(0, 4)], 4)
    assert len(calls) == 2


def test_the_collecting_sink_keeps_one_copy_per_version() -> None:
    sink = CollectSink()
    sink.take([frame(0, 0, res=results(1))], 0)
    sink.take([frame(0, 1, res=results(2), err=errors(1))], 1)
    sink.take([frame(0, 1, res=results(3))], 1)
    assert {version: table.column("flights").to_pylist() for version, table in sink.results.items()} == {0: [1], 1: [3]}
    assert sink.errors == {}


def test_tables_survive_packing() -> None:
    table = pa.Table.from_pylist([{"a": 1}, {"a": None}])
    packed = pack(table)
    assert packed is not None
    assert unpack(packed).equals(table)
    assert pack(table.slice(0, 0)) is None


def test_a_field_of_the_users_called_id_comes_out_beside_the_rows_own_id():
    table = pa.table({"reason": ["full"], "id": [7], "version": ["v1"]})
    row = readable(table, "results", 3, 0, 5).to_pylist()[0]
    assert (row["id"], row["version"], row["id_"], row["version_"]) == ("3-0-5", 3, 7, "v1")


def test_two_columns_never_get_one_name():
    schema = pa.schema([("id", pa.int64()), ("id_", pa.int64())])
    window_spec(tumbling(1000), schema, {"n": count()}, keys=["id"], retention=0)
    named = window_spec(tumbling(1000), pa.schema([("ID", pa.int64())]), {"n": count()}, keys=["ID"], retention=0)
    shown = readable(named.result_schema().empty_table(), "results", 0, 0, 0).schema.names
    assert len({name.lower() for name in shown}) == len(shown), "a and A are one to Spark"
    with pytest.raises(ValueError, match=r"keys: .id_?. is taken already"):
        window_spec(tumbling(1000), schema, {"n": count()}, keys=["id", "id_"], retention=0)
    with pytest.raises(ValueError, match="aggregates: the result name 'id_' is taken already"):
        window_spec(tumbling(1000), schema, {"id_": count()}, keys=["id"], retention=0)
    with pytest.raises(ValueError, match="two columns of the results would be called 'id_'"):
        join_spec(schema, schema, on=["id", "id_"], left_retention=1, right_retention=1)
    for left, right in (("x", "X"), ("y", "Reason")):
        sides = [pa.schema([("k", pa.int64()), (name, pa.int64())]) for name in (left, right)]
        with pytest.raises(ValueError, match="two columns of the results would be called"):
            join_spec(*sides, on="k", left_retention=1, right_retention=1)


@pytest.mark.parametrize("scheme", ["file://", "file:", "file:/"])
def test_a_file_uri_is_the_directory_that_it_is_elsewhere(tmp_path: Path, scheme: str) -> None:
    """Nothing of it is a query, a fragment or a host."""
    given = {"results": f"{scheme}{tmp_path}/a#1/r?x", "errors": f"{scheme}{tmp_path}/a#1/e%20"}
    made = ParquetSink(**given)
    assert made.places() == {option: real_place(place) for option, place in given.items()}
    made.open("q")
    assert sorted(path.name for path in (tmp_path / "a#1").iterdir()) == ["e%20", "r?x"]


def test_a_place_that_is_no_directory_or_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", f"file://{tmp_path}/file"):
        with pytest.raises(ValueError, match=r"errors=.*must be a directory"):
            ParquetSink(tmp_path / "out", place)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "out")

    sink = ParquetSink(tmp_path / "out", tmp_path / "err")
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageFailed, match="does not let this process read or write"):
        sink.open("q")


@pytest.mark.slow
def test_a_task_loads_what_writing_needs_before_it_asks_for_rows():
    script = """
import sys
from backend.sinks.kafka.sink import produce_frames

assert "pandas" not in sys.modules, "then this test shows nothing"

def asked():
    print("pandas" in sys.modules)
    return
    yield

list(produce_frames(asked(), version=0, to=None))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]
