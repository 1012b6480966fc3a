"""`rewind inspect` and `rewind verify` on a checkpoint that real attempts made, sound and damaged in every place."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import random
import re
import shutil
import time
import zlib
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from rich.console import Console
from typer.testing import CliRunner, Result

from backend.batch import MESSAGE_FIELDS, NO_TIME, Position
from backend.errors import PointerDamaged, StateCorrupted, StateUnavailable
from backend.rocks import RocksStore
from backend.spark.queueing import incarnation_of
from backend.store.protocol import LOGGED_FROM, Changes, Region, region_range
from recovery.attempt import run_attempt
from recovery.changelog import Changelog, open_changelog
from recovery.changelog.protocol import place_and_growth
from recovery.cli import app
from recovery.commit.manifest import Manifest, write_manifest
from recovery.commit.option_sets import ByVersion
from recovery.commit.pointer import Commit, CommitRecord
from recovery.commit.shard_directory import ShardDirectory
from recovery.commit.spark_files import check_state
from recovery.drill import damage as drill_damage
from recovery.drill.drill import Drill, Verdict
from recovery.drill.run import Run
from recovery.drill.scenarios import Scenario
from recovery.inspect import report, screen, tables
from recovery.inspect.checkpoint_view import Checkpoint, Undecided
from recovery.inspect.compare import local_differences
from recovery.inspect.report import moment
from recovery.jobs import ShardJob, next_incarnation, planned_at, queue_files
from recovery.operate import Done
from recovery.queue.entries import DIRECTORY, Queue, entry_name
from recovery.restore.open_shard import OpenShard
from recovery.share import ShardInput
from tests.support import shape
from tests.support.counting import CountingOperator

KEY = (pa.field("key", pa.string()),)
QUERY = "0b7c5b1e-0000-4000-8000-000000000000"


class Little:
    """A checkpoint of two shards with four committed micro-batches, as a query that was just stopped leaves it."""

    def __init__(self, home: Path, done: dict[int, list[Done]] | None = None) -> None:
        self.location, self.local = home / "checkpoint", home / "local"
        self.operator = CountingOperator()
        self.done: dict[int, list[Done]] = {0: [], 1: []}
        if done is not None:
            self.done = {shard: list(made) for shard, made in done.items()}
            return
        streams = [["input", "orders", 0]]
        entries = {"operator": self.operator.describe(), "changelog": "rewind/changelog", "streams": streams}
        write_manifest(
            str(self.location),
            Manifest(2, (0, 1), entries),
        )
        (self.location / "metadata").write_text(json.dumps({"id": QUERY}))
        for name in ("_metadata", "0", "1"):
            (self.location / "state" / "0" / name).mkdir(parents=True)
        for version in range(4):
            for shard in self.done:
                self.attempt(shard, version)
            self.committed(version)

    def committed(self, version: int, time_ms: int | None = None) -> None:
        """Write what Spark does; without the batch time in its log unless given."""
        for log in ("offsets", "commits"):
            (self.location / log).mkdir(exist_ok=True)
            (self.location / log / str(version)).write_text("v1")
        if time_ms is not None:
            (self.location / "offsets" / str(version)).write_text(f'v1\n{{"batchTimestampMs":{time_ms}}}')

    def job(self, shard: int) -> ShardJob:
        changelog = open_changelog(str(self.location / "rewind" / "changelog"))
        return ShardJob(QUERY, shard, self.local, self.operator, KEY, changelog)

    def attempt(self, shard: int, version: int, *, kept: bool = True) -> Done:
        pointer = self.done[shard][-1].pointer if self.done[shard] else None
        row = {"_stream": 0, "_partition": shard, "_offset": version, "_time": version * 1000, "_before": NO_TIME}
        table = pa.Table.from_pylist([{**row, "key": "a"}], pa.schema([*MESSAGE_FIELDS, *KEY]))
        after = {(0, shard): Position(version + 1, version * 1000, 5000)}
        done = run_attempt(self.job(shard), pointer, version, lambda before: ShardInput(5000 + version, table, after))
        if kept:
            self.done[shard].append(done)
        return done

    def commit(self, shard: int, version: int = -1) -> Commit:
        return self.done[shard][version].pointer.commit

    def delta(self, shard: int, version: int = -1) -> Path:
        return self.location / "rewind" / "changelog" / str(shard) / f"{self.commit(shard, version).name}.delta"

    def run(self, command: str, *options: str, code: int = 0) -> Any:
        local = ("--local-dir", str(self.local))
        result: Result = CliRunner().invoke(app, [command, str(self.location), *local, "--json", *options])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Little:
    return Little(tmp_path_factory.mktemp("little"))


@pytest.fixture
def little(template: Little, tmp_path: Path) -> Little:
    """Give a copy of its own to each test: attempts cost more than files."""
    shutil.copytree(template.location.parent, tmp_path, dirs_exist_ok=True)
    return Little(tmp_path, template.done)


def flip(path: Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3 if at is None else at] ^= 1
    path.unlink()
    path.write_bytes(data)


def levels(found: Any, level: str) -> list[Any]:
    return [finding for finding in found if finding["level"] == level]


def test_inspect_tells_what_is_committed(little: Little) -> None:
    data = little.run("inspect")
    assert data["query_id"] == QUERY
    assert data["committed_micro_batches"] == {"first": 0, "last": 3}
    assert [shard["version"] for shard in data["shards"]] == [3, 3]
    first = data["shards"][0]
    assert first["commit"] == little.commit(0).name
    assert first["positions"] == [
        {"stream": 0, "topic": "orders", "partition": 0, "next_offset": 4, "stream_time": "1970-01-01T00:00:03.000Z"}
    ]
    assert first["messages"] == little.done[0][-1].outcome.message_count
    assert first["changelog"]["records"] == 4
    assert first["local"]["commit"] == little.commit(0, -2).name, "the last commit is staged, not confirmed"
    assert first["local"]["staged"][-1] == little.commit(0).name
    assert first["problem"] is None
    assert data["lag"] is None


def shown(little: Little, *options: str, code: int = 0) -> Result:
    result = CliRunner().invoke(
        app, [*options[:1], str(little.location), "--local-dir", str(little.local), *options[1:]]
    )
    assert result.exit_code == code, result.output
    return result


def test_in_a_pipe_of_80_columns_nothing_is_broken_in_the_middle(
    little: Little, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    text = shown(little, "inspect").stdout
    assert max(map(len, text.splitlines()[2:])) <= 80
    assert "1970-01-01 00:00:05 " in text, "a batch time on one line"
    out = io.StringIO()
    report.show_rows(Console(file=out), report.restore_plans(Checkpoint(str(little.location), little.local)))
    assert len(little.commit(0).name) == 53
    assert f"  commit: {little.commit(0).name}\n" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_show_gives_the_columns_that_are_asked_for(little: Little) -> None:
    found = little.run("show", "rows", "--columns", "region, shard", "--limit", "1")
    assert [list(row) for row in found["rows"]] == [["region", "shard"]]
    assert found["more"]
    wrong = shown(little, "show", "rows", "--columns", "shard,regio", code=2)
    assert "--columns='shard,regio': no column 'regio'; allowed are shard, region, key, value" in wrong.stderr


def test_show_writes_csv_and_parquet(little: Little) -> None:
    rows = little.run("show", "rows", "--format", "json", "--limit", "3")["rows"]
    written = shown(little, "show", "rows", "--format", "csv", "--limit", "3")
    assert list(csv.DictReader(io.StringIO(written.stdout))) == [{**row, "shard": str(row["shard"])} for row in rows]
    assert "more rows" in written.stderr
    binary = shown(little, "show", "rows", "--format", "parquet", "--limit", "3").stdout_bytes
    table = pq.read_table(pa.BufferReader(binary))
    assert [{**row, "key": row["key"].hex(), "value": row["value"].hex()} for row in table.to_pylist()] == rows


def test_the_shell_completes_scenarios_and_tables(little: Little) -> None:
    def offered(line: str) -> list[str]:
        env = {"_REWIND_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        return CliRunner().invoke(app, env=env, prog_name="rewind").stdout.split()

    assert sorted(offered("rewind drill lose")) == [
        "lose-all",
        "lose-executor-with-snapshots",
        "lose-shard",
        "lose-tail",
    ]
    assert sorted(offered("rewind drill lose-all lose")) == ["lose-executor-with-snapshots", "lose-shard", "lose-tail"]
    assert offered(f"rewind show {little.location} ro") == ["rows"]
    assert offered(f"rewind export {little.location} out --table ro") == ["rows"]
    assert offered("rewind show /nowhere ro") == []
    assert "export" in offered("rewind ex")


@pytest.mark.slow
def test_a_bar_is_drawn_only_late_and_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(after_s: float, terminal: bool) -> str:
        monkeypatch.setattr(screen, "BAR_AFTER_S", after_s)
        out = io.StringIO()
        for _ in screen.tracked(range(2), "shards", Console(file=out, force_terminal=terminal, width=80)):
            time.sleep(0.15)
        return out.getvalue()

    assert "shards" in drawn(0.01, True)
    assert drawn(60, True) == ""
    assert drawn(0.01, False) == ""


def test_inspect_tells_what_a_shard_has_queued(little: Little) -> None:
    queue = little.location / "rewind/queue/1"
    queue.mkdir(parents=True)
    newest = int(little.commit(1).name[:20])
    for version, length in ((newest - 1, 5), (newest + 1, 10), (newest + 2, 20)):
        (queue / f"{version:020d}_{'a' * 32}.entry").write_bytes(b"x" * length)
    shards = little.run("inspect")["shards"]
    assert [shard["queue"]["micro_batches"] for shard in shards] == [0, 2]
    assert shards[1]["queue"]["bytes"] == 30
    text = shown(little, "inspect").stdout
    assert f"shard 1 queues its input: 2 micro-batches behind version {newest}, 30 B" in text
    told = shown(little, "show", "rows").stderr.splitlines()
    assert [line.endswith("2 micro-batches are queued behind it") for line in told] == [False, True]
    shutil.rmtree(queue)


def test_inspect_for_people_shows_no_sentinels(little: Little) -> None:
    text = CliRunner().invoke(app, ["inspect", str(little.location), "--local-dir", str(little.local)]).stdout
    assert "0 to 3" in text
    assert not re.search(r"(?<!\S)(None|-1|nan|-9223372036854775808)(?!\S)", text)


def test_a_running_attempt_is_not_committed(little: Little) -> None:
    little.attempt(0, 4, kept=False)
    assert little.run("inspect")["shards"][0]["commit"] == little.commit(0).name


def test_two_attempts_of_the_committed_version_need_spark(little: Little) -> None:
    little.done[0].pop()
    little.attempt(0, 3)  # the driver died and its micro-batch ran again
    with pytest.raises(Undecided) as caught:
        Checkpoint(str(little.location), little.local).committed(0)
    assert "--spark" in caught.value.command
    known = Checkpoint(str(little.location), little.local, {0: little.commit(0), 1: little.commit(1)})
    assert known.committed(0) == little.commit(0)
    assert known.view(0).problem is None
    little.attempt(0, 4)
    little.committed("4")
    assert Checkpoint(str(little.location), little.local).committed(0) == little.commit(0), "a later commit decides"


def test_before_an_undecided_micro_batch_a_version_is_known_where_all_attempts_were_made_on_it(little: Little) -> None:
    little.done[0].pop()
    little.attempt(0, 3)
    checkpoint = Checkpoint(str(little.location), little.local)
    assert [checkpoint.committed(0, version) for version in range(3)] == [little.commit(0, at) for at in range(3)]
    assert {row["shard"] for row in little.run("show", "rows", "--version", "2")["rows"]} == {0, 1}
    with pytest.raises(Undecided):
        checkpoint.committed(0, 3)
    records = [checkpoint.changelog.read(0, little.commit(0, version)).record for version in (1, 3)]
    ancestors = [records[0].commit, *records[0].ancestors]
    other = replace(records[1], commit=Commit(3, "f" * 32), parent=ancestors[0], ancestors=ancestors)
    checkpoint.changelog.append(other, Changes([], []))
    assert [checkpoint.committed(0, version) for version in range(2)] == [little.commit(0, at) for at in range(2)]
    with pytest.raises(Undecided, match="3 attempts logged micro-batch 3"):
        checkpoint.committed(0, 2)
    flip(checkpoint.changelog.files.root / "0" / f"{other.commit.name}.delta")
    with pytest.raises(Undecided):
        checkpoint.committed(0, 0)


def test_attempts_that_ran_again_are_no_damage(little: Little) -> None:
    little.done[0].pop()
    little.attempt(0, 3)
    found = little.run("verify")
    assert levels(found, "problem") == []
    [note] = levels(found, "note")
    assert (note["check"], note["where"], "2 attempts logged micro-batch 3" in note["what"]) == (
        "lineage",
        "shard 0",
        True,
    )
    assert note["next"] == f"rewind verify {little.location} --spark"


def test_show_and_export_ask_spark_where_only_it_knows(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little.done[0].pop()
    little.attempt(0, 3)
    pointers = {shard: done[-1].pointer for shard, done in little.done.items()}
    monkeypatch.setattr("recovery.inspect.user_job.session", nullcontext)
    monkeypatch.setattr("recovery.restore.replay.read_pointers", lambda spark, location, shards: pointers)
    asked = ("--spark", "--master", "local[1]")
    assert little.run("show", "rows", code=1)["error"]["code"] == "Undecided"
    assert [shard["version"] for shard in little.run("show", "rows", *asked)["as_of"]] == [3, 3]
    assert little.run("export", str(tmp_path / "out"), code=1)["error"]["code"] == "Undecided"
    assert len(little.run("export", str(tmp_path / "out"), *asked)) == 2


@pytest.mark.parametrize("command", ["export", "show"])
def test_all_shards_are_read_as_of_one_micro_batch(
    little: Little, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(checkpoint: Checkpoint, shard: int, wanted: tables.Wanted) -> pa.Table:
        found = read_table(checkpoint, shard, wanted)
        if shard == 0:  # the query goes on
            for one in little.done:
                little.attempt(one, 4)
            little.committed(4)
        return found

    read_table = tables.read_table
    monkeypatch.setattr(tables, "read_table", read)
    if command == "show":
        found = little.run("show", "rows")["as_of"]
    else:
        found = little.run("export", str(tmp_path / "out"))
        assert [Path(one["path"]).name for one in found] == ["shard=00000.parquet", "shard=00001.parquet"]
    assert [one["version"] for one in found] == [3, 3]


def test_an_attempt_that_logged_what_another_one_queued_is_not_taken_for_committed(little: Little) -> None:
    """Its executor died behind its record; the attempt that Spark committed found no state, and queued."""
    little.attempt(0, 4, kept=False)
    little.committed(4)
    folder = little.location / "rewind" / "queue" / "0"
    folder.mkdir(parents=True)
    (folder / f"{4:020d}_{'b' * 32}.entry").write_bytes(b"-")
    with pytest.raises(Undecided, match="2 attempts logged micro-batch 4, one of them as queued"):
        Checkpoint(str(little.location), little.local).committed(0)


def append_to(log: Changelog, on: CommitRecord, digit: str, incarnation: int, time_ms: int = 0) -> CommitRecord:
    """Log one more micro-batch, in which nothing changed."""
    commit, ancestors = Commit(on.commit.version + 1, digit * 32), [on.commit, *on.ancestors]
    made = replace(on, commit=commit, parent=on.commit, ancestors=ancestors, incarnation=incarnation, time_ms=time_ms)
    log.append(made, Changes([], []))
    return made


def test_records_of_micro_batches_that_were_taken_back_are_not_committed(little: Little) -> None:
    """After micro-batch 5 somebody went back to 3: shard 0 has logged one since, shard 1 none."""
    place, operators = str(little.location), ByVersion.always(little.operator)
    log = open_changelog(f"{place}/rewind/changelog")
    append = partial(append_to, log)
    sound = [log.read(shard, little.commit(shard)).record for shard in (0, 1)]
    first = incarnation_of(place, operators, False).number
    gone = [append(append(record, "a", first), "b", first).commit for record in sound]
    second = incarnation_of(place, operators, False).number
    again = append(sound[0], "c", second).commit
    for version in range(4, 8):
        little.committed(version)
    [staged] = (little.local / QUERY / "1").glob("*/staged")
    (staged / f"{gone[1].name}.sst").touch()
    checkpoint = Checkpoint(place, little.local)
    assert [checkpoint.committed(shard) for shard in (0, 1)] == [again, little.commit(1)]
    assert [checkpoint.committed(shard, 3) for shard in (0, 1)] == [little.commit(0), little.commit(1)]
    assert levels(little.run("verify"), "problem") == []
    incarnation_of(place, operators, False)  # micro-batches that this start found do not go
    assert [checkpoint.committed(shard) for shard in (0, 1)] == [again, little.commit(1)]
    (little.location / "rewind" / "launches.json").write_text('{"format": 1, "launch": 2}')
    assert checkpoint.committed(0) == gone[0], "of release 0.1: nobody knows"


def test_micro_batches_that_were_taken_back_and_put_back_are_committed_again(
    little: Little, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 5 somebody went back to 3; the sink refused 4, of which shard 0 has a record; then the files came back."""
    place, operators = str(little.location), ByVersion.always(little.operator)
    log = open_changelog(f"{place}/rewind/changelog")
    sound = [log.read(shard, little.commit(shard)).record for shard in (0, 1)]

    def start(at_ms: int) -> int:
        monkeypatch.setattr("recovery.jobs.time.time_ns", lambda: at_ms * 1_000_000)
        return incarnation_of(place, operators, False).number

    def put_back() -> None:
        little.committed(4, 8000)
        little.committed(5, 9000)

    first = start(7000)
    again = [append_to(log, append_to(log, one, "a", first, 8000), "b", first, 9000).commit for one in sound]
    second = start(10_000)
    refused = append_to(log, sound[0], "c", second, 11_000).commit
    put_back()
    for number, commit in enumerate(again):
        [staged] = (little.local / QUERY / str(number)).glob("*/staged")
        (staged / f"{commit.name}.sst").touch()
    checkpoint = Checkpoint(place, little.local)
    assert [checkpoint.committed(shard) for shard in (0, 1)] == again
    assert [checkpoint.committed(shard, 4) for shard in (0, 1)] == [Commit(4, "a" * 32)] * 2
    found = little.run("verify")
    assert [(one["check"], one["where"]) for one in found if one["level"] == "problem"] == []
    assert not [one for one in found if one["check"] == "lineage" and "not of" in one["what"]]
    record = little.location / "rewind" / "changelog" / "0" / f"{again[0].name}.delta"
    data = record.read_bytes()
    record.unlink()
    [lost] = levels(little.run("verify", code=1), "problem")
    assert "it ends at micro-batch 4" in lost["what"]
    record.write_bytes(data)

    start(12_000)  # it finds 4 and 5, which were planned before the second start: that one's going back did not last
    for version in (6, 7):
        little.committed(version, 13_000)
    for version in (4, 5):
        (little.location / "offsets" / str(version)).unlink()  # Spark retains some
    assert [checkpoint.committed(shard) for shard in (0, 1)] == again

    little.committed(4, 11_000)  # the same where the second start has gone on instead
    little.committed(5, 11_500)
    assert [checkpoint.committed(shard) for shard in (0, 1)] == [refused, little.commit(1)]
    for commit in (Commit(4, "d" * 32), Commit(4, "e" * 32)):
        log.append(replace(sound[1], commit=commit, parent=sound[1].commit, time_ms=11_000), Changes([], []))
    with pytest.raises(Undecided):  # two attempts of one micro-batch have one time
        checkpoint.committed(1)


def test_a_start_that_went_on_after_going_back_stays_known(little: Little, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(little.location)
    monkeypatch.setattr("recovery.jobs.time.time_ns", lambda: 10_000 * 1_000_000)
    little.committed(4, 9000)
    assert next_incarnation(place, 3) == 1  # it plans 4 itself
    for time_ms, known in ((10_000, [(1, 3), (2, 4)]), (9_999, [(3, 4)])):
        little.committed(4, time_ms)
        next_incarnation(place, 4)
        assert planned_at(place) == known


@pytest.mark.parametrize("asked", [True, False])
def test_what_was_staged_for_a_micro_batch_that_is_queued_is_no_problem(
    little: Little, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first attempt died on this host; the next one found no state elsewhere, and queued."""
    pointers = {shard: done[-1].pointer for shard, done in little.done.items()}
    given = ShardInput(5000, None, {(0, 1): Position(5, 4000, 5000)})
    queue = Queue(queue_files(str(little.location)), ByVersion(()))
    pointers[1] = queue.put(pointers[1], 4, given, Commit(4, "4" * 32))
    little.committed(4)
    [staged] = (little.local / QUERY / "1").glob("*/staged")
    (staged / f"{Commit(4, 'a' * 32).name}.sst").touch()
    monkeypatch.setattr("recovery.inspect.user_job.session", nullcontext)
    monkeypatch.setattr("recovery.restore.replay.read_pointers", lambda spark, location, shards: pointers)
    found = little.run("verify", *(["--spark"] if asked else []))
    assert levels(found, "problem") == []
    [waiting] = [one for one in found if one["check"] == "queue"]
    assert (waiting["where"], waiting["level"]) == ("shard 1", "sound" if asked else "note")


@pytest.mark.parametrize(("kind", "level", "code"), [("dataframe", "problem", 1), ("kafka", "note", 0)])
def test_verify_reads_what_is_queued(
    little: Little, kind: str, level: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Checkpoint(str(little.location)).manifest
    sources = [{"source": {"kind": kind, "name": "orders"}}]
    write_manifest(str(little.location), dataclasses.replace(manifest, entries={**manifest.entries, "inputs": sources}))
    pointers = {shard: done[-1].pointer for shard, done in little.done.items()}
    queue = Queue(queue_files(str(little.location)), ByVersion(()))
    for version in (4, 5):
        after = {(0, 1): Position(version + 1, version * 1000, 5000)}
        pointers[1] = queue.put(pointers[1], version, ShardInput(5000, None, after), Commit(version, f"{version}" * 32))
        little.committed(version)
    monkeypatch.setattr("recovery.inspect.user_job.session", nullcontext)
    monkeypatch.setattr("recovery.restore.replay.read_pointers", lambda spark, location, shards: pointers)
    [note] = [found for found in little.run("verify") if found["check"] == "queue"]
    assert (note["level"], note["where"], note["what"]) == (
        "note", "shard 1", "2 micro-batches are queued: not checked"
    )  # fmt: skip
    assert note["next"].endswith(" --spark")
    [found] = [found for found in little.run("verify", "--spark") if found["check"] == "queue"]
    assert (found["level"], "2 micro-batches" in found["what"]) == ("sound", True)
    name = entry_name(1, Commit(4, "4" * 32))
    flip(little.location / DIRECTORY / name)
    [found] = [found for found in little.run("verify", "--spark", code=code) if found["check"] == "queue"]
    assert (found["level"], found["where"].endswith(f"/rewind/queue/{name}")) == (level, True)
    assert "do not match the digest" in found["what"]
    pointers[1] = replace(pointers[1], entries=[])  # of too many source partitions to know how to make them again
    [found] = [found for found in little.run("verify", "--spark", code=1) if found["check"] == "queue"]
    assert found["level"] == "problem"


def test_not_a_checkpoint(tmp_path: Path) -> None:
    for command in ("inspect", "verify"):
        result = CliRunner().invoke(app, [command, str(tmp_path), "--json"])
        assert result.exit_code == 1
        error = json.loads(result.stdout)["error"]
        assert error["code"] == "StateUnavailable"
        (people,) = CliRunner().invoke(app, [command, str(tmp_path)]).stderr.splitlines()
        assert people.startswith(f"[rewind:StateUnavailable] {error['what']}; ")
        assert f"; where: {error['where']}" in people
        assert people.endswith(f"; next: {error['next']}")


@pytest.mark.parametrize(
    ("commits", "problem", "count", "said"),
    [
        ([None, None], None, 0, "nothing is committed: the next start begins anew"),
        ([None, None], "its record is damaged", 0, "nothing had to be restored; what is wrong with 2 of them"),
        (["a", None], None, 0, "nothing had to be restored: .* snapshots$"),
        (["a", "b"], None, 1, "1 of 2 shards are in the checkpoint's snapshots now: [^;]*$"),
    ],
)
def test_what_a_restore_says_that_it_did(commits: list[str | None], problem: str | None, count: int, said: str) -> None:
    plans = [{"commit": commit, "problem": problem} for commit in commits]
    assert re.match(said, report.restored(count, plans))


def test_verify_of_a_sound_checkpoint(little: Little) -> None:
    found = little.run("verify")
    assert levels(found, "problem") == []
    assert levels(found, "note") == []
    assert {finding["check"] for finding in found} == {"changelog", "local state"}


@pytest.mark.parametrize(
    ("gone", "damaged", "where", "what"),
    [
        ("offsets", None, "offsets/3", "it is gone, and the micro-batch is committed"),
        ("offsets/3", None, "offsets/3", "it is gone, and the micro-batch is committed"),
        ("commits", None, "commits", "there are traces up to micro-batch 3"),
        (None, "commits/3", "commits/3", "it begins with 'rubbish', not with a version"),
        (None, "offsets/3", "offsets/3", "it begins with 'rubbish', not with a version"),
    ],
)
def test_verify_looks_at_what_spark_goes_on_from(
    little: Little, gone: str | None, damaged: str | None, where: str, what: str
) -> None:
    if gone is not None:
        path = little.location / gone
        path.unlink() if path.is_file() else shutil.rmtree(path)
    if damaged is not None:
        (little.location / damaged).write_text("rubbish\n")
    [problem] = levels(little.run("verify", code=1), "problem")
    assert problem["where"] == f"{little.location}/{where}"
    assert what in problem["what"]
    assert "rewind reset" in problem["next"]


@pytest.mark.parametrize(
    ("gone", "said"), [("state", "3 of its folders .* _metadata, 0, 1"), ("state/0/1", "1 of its .*: 1"),
                       ("state/0/_metadata", "1 of its .*: _metadata")],
)  # fmt: skip
def test_parts_of_sparks_state_that_are_gone_are_a_problem_by_name(little: Little, gone: str, said: str) -> None:
    """Spark says of it: requirement failed, assertion failed."""
    shutil.rmtree(little.location / gone)
    [problem] = levels(little.run("verify", code=1), "problem")
    assert (problem["check"], problem["where"]) == ("Spark's state", f"{little.location}/state/0")
    assert re.search(said, problem["what"])
    assert "put the checkpoint's folder state back" in problem["next"]
    with pytest.raises(PointerDamaged, match=said):
        check_state(str(little.location), 2)
    shutil.rmtree(little.location / "commits")
    check_state(str(little.location), 2)  # nothing is committed


def test_a_changelog_without_a_record_is_not_called_sound(little: Little) -> None:
    shutil.rmtree(little.location / "rewind" / "changelog" / "0")
    shutil.rmtree(little.local)
    found = little.run("verify")
    [note] = [one for one in levels(found, "note") if one["check"] == "changelog"]
    assert note["where"] == "shard 0"
    assert "it has no record" in note["what"]
    assert [one["where"] for one in levels(found, "sound")] == ["shard 1"]


@pytest.mark.parametrize("name", ["metadata", "offsets/3", "commits/2"])
def test_verify_compares_sparks_files_with_their_checksums(little: Little, name: str) -> None:
    file = little.location / name
    beside = file.with_name(f".{file.name}.crc")
    blocks = [zlib.crc32(file.read_bytes()[at : at + 512]) for at in range(0, file.stat().st_size, 512)]
    beside.write_bytes(b"crc\0" + (512).to_bytes(4) + b"".join(block.to_bytes(4) for block in blocks))
    assert levels(little.run("verify"), "problem") == []
    flip(file, file.stat().st_size - 3)
    for _ in range(2):
        [problem] = levels(little.run("verify", code=1), "problem")
        assert (problem["check"], problem["where"]) == ("Spark's logs", str(file))
        assert "from a copy of the checkpoint" in problem["next"]
        if name != "metadata":
            break
        beside.unlink(missing_ok=True)  # what is no JSON is seen without it
        file.write_text("{")


def test_verify_names_what_says_nothing_of_the_outputs(little: Little) -> None:
    file = little.location / "rewind" / "outputs.json"
    file.write_bytes(b"\xff\x00{[")
    [problem] = levels(little.run("verify", code=1), "problem")
    assert (problem["check"], problem["where"]) == ("outputs", str(file))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1, "first": [], "checksum": "no"}'])
def test_verify_names_what_says_nothing_of_an_archive(little: Little, content: bytes) -> None:
    file = little.location / "rewind" / "archive" / "0.json"
    file.parent.mkdir()
    file.write_bytes(content)
    [problem] = levels(little.run("verify", code=1), "problem")
    assert (problem["check"], problem["where"]) == ("archive", str(file))


def test_a_directory_where_the_local_state_has_a_file_is_a_note(little: Little) -> None:
    current = little.local / QUERY / "0" / "CURRENT"
    current.unlink()
    current.mkdir()
    [note] = levels(little.run("verify"), "note")
    assert (note["check"], "a file lies where a directory must be" in note["what"]) == ("local state", True)


@pytest.mark.parametrize("version", [-1, 0])
def test_verify_names_a_damaged_record(little: Little, version: int) -> None:
    flip(little.delta(1, version))
    problems = levels(little.run("verify", code=1), "problem")
    assert problems
    assert all(little.delta(1, version).name in problem["where"] for problem in problems)
    assert all(problem["next"] for problem in problems)
    shard = little.run("inspect", code=1)["shards"][1]
    assert shard["problem"]["code"] == "ChangelogDamaged"
    assert little.delta(1, version).name in shard["problem"]["where"]
    plan = report.restore_plans(Checkpoint(str(little.location), little.local))[1]
    assert (plan["here"], plan["commit"]) == ("unknown", None)


def test_verify_names_a_lost_record(little: Little) -> None:
    little.delta(0, 1).unlink()
    problems = levels(little.run("verify", code=1), "problem")
    assert ["missing" in problem["what"] for problem in problems] == [True]


def test_inspect_says_that_sparks_commits_are_gone(little: Little) -> None:
    shutil.rmtree(little.location / "commits")
    for shard in little.run("inspect", code=1)["shards"]:
        assert "names no micro-batch" in shard["problem"]["what"]
        assert "put it back" in shard["problem"]["next"]


def test_the_newest_records_that_are_gone_are_missed_where_they_were_staged(little: Little) -> None:
    little.delta(0).unlink()
    [problem] = levels(little.run("verify", code=1), "problem")
    assert (
        problem["what"] == f"it ends at micro-batch 2, and {little.commit(0).name}, which is committed, was staged here"
    )
    assert (problem["where"], "--spark" in problem["next"]) == ("shard 0", True)
    shutil.rmtree(little.local)
    [note] = levels(little.run("verify"), "note")
    assert (note["where"], "not checked" in note["what"]) == (str(little.local), True)


def test_what_is_staged_for_a_micro_batch_that_is_not_committed_is_no_problem(little: Little) -> None:
    little.attempt(0, 4, kept=False)
    assert levels(little.run("verify"), "problem") == []


def test_a_damaged_orphan_is_a_note(little: Little) -> None:
    orphan = little.attempt(0, 4, kept=False).pointer
    flip(little.location / "rewind" / "changelog" / place_and_growth(orphan.changelog)[0])
    found = little.run("verify")
    assert len(levels(found, "note")) == 1


@pytest.mark.parametrize("part", ["rows", "properties"])
def test_a_damaged_database_is_a_note(little: Little, part: str) -> None:
    path = max((little.local / QUERY / "0").glob("*/db/*.sst"), key=lambda file: file.stat().st_size)
    at = {"rows": 20, "properties": path.read_bytes().index(b"rocksdb.")}[part]
    with RocksStore.open(path.parent) as store:
        assert list(store.scan(b"", None)), "this process has it all in its block cache now"
    flip(path, at)
    notes = levels(little.run("verify"), "note")
    assert [note["check"] for note in notes] == ["local state"]
    assert "shard 0" in notes[0]["where"] or path.parent.parent.name in notes[0]["where"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda store, key: store.write(Changes([key], [None])), "0 rows, the changelog has 1"),
        (lambda store, key: store.write(Changes([key + b"x"], [b"1"])), "2 rows, the changelog has 1"),
        (lambda store, key: store.write(Changes([key], [b"other"])), "1 rows, as in the changelog, but others"),
        (lambda store, _: store.delete_range(*region_range(Region.MESSAGES)), "in all 0 messages, "),
    ],
    ids=["fewer", "more", "other", "messages"],
)
def test_rows_that_are_not_those_of_the_changelog_are_a_problem(little: Little, change: Any, what: str) -> None:
    """No later micro-batch may ever read such a row: the drill looks for it in the same way."""
    checkpoint = Checkpoint(str(little.location), little.local)
    assert local_differences(checkpoint) == []
    with RocksStore.open(checkpoint.local(0).path / "db", create=False) as store:
        change(store, next(store.scan(bytes([LOGGED_FROM]), None))[0])
    [found] = local_differences(checkpoint)
    assert found.startswith("shard 0, local state: ")
    assert what in found
    assert local_differences(checkpoint, [0]) == []
    [wrong] = levels(little.run("verify", code=1), "problem")
    assert (wrong["check"], wrong["what"]) == ("local state", found.removeprefix("shard 0, local state: "))
    assert f"move {little.local / QUERY / '0'} aside" in wrong["next"]


def test_files_that_a_running_job_deletes_meanwhile_are_no_damage(
    little: Little, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, calls = RocksStore.check_files, []

    def first_gone(store: RocksStore) -> None:
        calls.append(store.path)
        if calls.count(store.path) == 1:
            raise StateCorrupted("a file of the database is missing", where=str(store.path), command="-")
        check(store)

    monkeypatch.setattr(RocksStore, "check_files", first_gone)
    assert levels(little.run("verify"), "note") == []
    assert len(calls) == 2 * len(set(calls)) > 0


def test_a_damaged_package_is_a_note(little: Little, tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(little.location), little.local)
    history = checkpoint.changelog.read(0, little.commit(0, -2))
    checkpoint.snapshots.publish(history.record, checkpoint.local(0).path / "db")
    assert levels(little.run("verify"), "note") == []
    shared = next((little.location / "rewind" / "snapshots" / "0" / "shared").iterdir())
    flip(shared)
    notes = levels(little.run("verify"), "note")
    assert [shared.name in note["where"] for note in notes] == [True]
    elsewhere = ShardDirectory(tmp_path / "elsewhere", QUERY, 0)
    with pytest.raises(StateUnavailable, match=shared.name):
        OpenShard(elsewhere, "elsewhere", checkpoint.snapshots).at(little.done[0][-2].pointer)


def test_a_stale_copy_is_a_note(little: Little, tmp_path: Path) -> None:
    stale = tmp_path / "stale"
    shutil.copytree(little.local / QUERY / "1", stale)  # another host's copy, two commits behind
    for version in (4, 5):
        little.attempt(1, version)
        little.committed(str(version))
    assert levels(little.run("verify"), "note") == []
    shutil.rmtree(little.local / QUERY / "1")
    stale.rename(little.local / QUERY / "1")
    notes = levels(little.run("verify"), "note")
    assert [note["check"] for note in notes] == ["lineage"]
    assert "behind" in notes[0]["what"]


def test_a_damaged_manifest_is_named(little: Little) -> None:
    for content, why in (("{", "Expecting property name"), ("[]", "it is no JSON object")):
        (little.location / "rewind" / "manifest.json").write_text(content)
        for command in ("inspect", "verify"):
            error = little.run(command, code=1)["error"]
            assert (error["code"], why in error["why"]) == ("StateCorrupted", True)
            assert error["next"].startswith("put the file back from a copy of the checkpoint; without one, delete the")
    (little.location / "rewind" / "manifest.json").write_text('{"format": 99}')
    assert little.run("inspect", code=1)["error"]["code"] == "UnknownFormat"


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (-1, "1969-12-31T23:59:59.999Z"),
        (NO_TIME, None),
        (253_370_764_800_001, "9999-01-01T00:00:00.001Z"),  # more digits than a float has
        (2**62, str(2**62)),
    ],
)
def test_moments(time: int, text: str | None) -> None:
    assert moment(time) == text


def next_attempt(little: Little, shard: int) -> None:
    done = little.done[shard][-1]
    run_attempt(little.job(shard), done.pointer, 4, lambda before: ShardInput(9_000, None, before))


@pytest.mark.parametrize("damage", [drill_damage.corrupt_staged, drill_damage.lose_shard])
@pytest.mark.parametrize("seed", range(2))
def test_a_drills_damage_to_local_state_is_noticed(little: Little, seed: int, damage: drill_damage.Damage) -> None:
    """A damage that no attempt would meet proves nothing."""
    told, shards, _ = damage(little.location.parent, random.Random(seed))
    noticed = []
    for shard in little.done:
        try:
            next_attempt(little, shard)
        except (StateUnavailable, StateCorrupted):
            noticed.append(shard)
    assert noticed == list(shards), told
    assert f"shard {noticed[0]}" in told or f"/{noticed[0]}/" in told


@pytest.mark.parametrize("seed", range(3))
def test_a_drills_damage_to_the_changelog_is_noticed(little: Little, seed: int) -> None:
    home = little.location.parent
    told, *_ = drill_damage.corrupt_changelog(home, random.Random(seed))
    problems = levels(little.run("verify", code=1), "problem")
    assert any(Path(problem["where"]).name in told for problem in problems)


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_a_drill_exits_with_0_only_if_every_scenario_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed: bool, code: int
) -> None:
    def judged(self: Drill, scenario: Scenario) -> Verdict:
        good = passed or scenario.name != "lose-all"
        return Verdict(scenario, good, "" if good else "differs", Run(), None)

    monkeypatch.setattr(Drill, "control", lambda self: None)
    monkeypatch.setattr(Drill, "run", judged)
    out = tmp_path / "out"
    command = ["drill", "kill-driver", "lose-all", "--job", "recovery.drill.job:tell", "--out", str(out), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == code, done.output
    told = json.loads(done.stdout)
    assert (told["passed"], [one["name"] for one in told["scenarios"]]) == (passed, ["kill-driver", "lose-all"])
    assert ("differs" in (out / "report.html").read_text()) is not passed


def test_a_command_that_an_error_names_can_be_pasted_whatever_the_place_is_called() -> None:
    bare = {str(path): re.findall(r"rewind [a-z]+ \{(?!quote\()[^}]*", path.read_text()) for path in shape.modules()}
    assert {path: found for path, found in bare.items() if found} == {}
