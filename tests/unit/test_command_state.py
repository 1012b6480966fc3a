"""`rewind show`, `export` and `reset` on windows that real attempts made."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from backend.errors import ChangelogDamaged, HistoryLost
from backend.rocks import RocksOptions, RocksStore
from backend.spark.start import release
from backend.store.protocol import Changes, Region, region_range
from recovery.cli import app
from recovery.commit.pointer import Commit
from recovery.inspect import tables
from recovery.inspect.checkpoint_view import Checkpoint
from recovery.inspect.verify import PROBLEM, SOUND
from tests.support.windows import QUERY, make_windows


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("windows")
    make_windows(home)
    return home


def run(home: Path, command: str, *options: str, code: int = 0) -> Any:
    local = ("--local-dir", str(home / "local"))
    result = CliRunner().invoke(app, [command, str(home / "checkpoint"), *options, *local, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if result.stdout else None


def test_inspect_knows_open_windows_and_the_next_to_close(home: Path) -> None:
    (shard,) = run(home, "inspect")["shards"]
    assert shard["windows"] == {
        "retained": 3,
        "open": 1,
        "closing_next": "1970-01-01T00:00:30.000Z",
        "oldest": "1970-01-01T00:00:00.000Z",
    }
    assert shard["messages"] == 5
    assert shard["rows"]["windows"] == 3


def test_verify_counts_messages(home: Path) -> None:
    assert {finding["level"] for finding in run(home, "verify")} == {"sound"}


def test_show_windows(home: Path) -> None:
    data = run(home, "show", "windows")
    assert data["more"] is False
    place = {"topic": "orders", "partition": 0, "next_offset": 5}  # five messages, at offsets 0 to 4
    assert data["as_of"] == [{"shard": 0, "version": 1, "positions": [place], "newest": 1, "queued": 0}]
    assert [(row["start"], row["end"], row["messages"], row["group_keys"], row["offsets"]) for row in data["rows"]] == [
        ("1970-01-01T00:00:00.000Z", "1970-01-01T00:00:10.000Z", 2, 2, "0/0:0-1"),
        ("1970-01-01T00:00:10.000Z", "1970-01-01T00:00:20.000Z", 1, 1, "0/0:2-2"),
        ("1970-01-01T00:00:20.000Z", "1970-01-01T00:00:30.000Z", 2, 2, "0/0:3-4"),
    ]


def test_a_relative_place_means_what_it_meant_where_it_was_given(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recovery.inspect.data_source import RewindStateSource

    monkeypatch.chdir(home)
    opened = Checkpoint("checkpoint/", Path("local"))
    assert (opened.location, opened.local_dir) == (str(home / "checkpoint"), home / "local")
    assert Checkpoint("checkpoint", Path("$HERE/local")).local_dir == Path("$HERE/local")
    reader = RewindStateSource({"Path": "checkpoint", "table": "windows"}).reader(None)
    monkeypatch.chdir("/")
    assert sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part)) == 3


def test_show_by_time_range(home: Path) -> None:
    one = run(home, "show", "windows", "--from", "1970-01-01T00:00:10", "--to", "1970-01-01T00:00:20")
    assert [row["start"] for row in one["rows"]] == ["1970-01-01T00:00:10.000Z"]
    assert len(run(home, "show", "windows", "--to", "1970-01-01T00:00:20")["rows"]) == 2


def test_show_aggregates_by_key(home: Path) -> None:
    rows = run(home, "show", "aggregates", "--key", "bert")["rows"]
    assert [(row["start"], row["k"]) for row in rows] == [
        ("1970-01-01T00:00:00.000Z", "bert"),
        ("1970-01-01T00:00:20.000Z", "bert"),
    ]


def test_show_messages_are_those_of_the_confirmed_commit(home: Path) -> None:
    rows = run(home, "show", "messages")["rows"]
    assert [(row["_offset"], row["k"], row["x"]) for row in rows] == [
        (0, "anna", 1.0),
        (1, "bert", 2.0),
        (2, "anna", 3.0),
    ]
    assert {row["commit"][:20] for row in rows} == {f"{0:020d}"}
    later = run(home, "show", "messages", "--from", "1970-01-01T00:00:02")["rows"]
    assert [row["_offset"] for row in later] == [1, 2]


def test_show_messages_beside_compactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_windows(tmp_path)
    expected = run(tmp_path, "show", "messages")["rows"]
    database = next(tmp_path.glob("local/*/0/*/db"))
    many = RocksOptions(level0_files=1000, merged_files=1000)
    with RocksStore.open(database, options=many) as writer:
        keys, values = writer.scan_arrays(*region_range(Region.MESSAGES))

        def more_files() -> None:  # than a reader opens at once
            for number in range(40):
                staged = tmp_path / f"{number}.sst"
                writer.confirm(writer.stage(Changes(keys, values), staged))
                staged.unlink()

        more_files()
        real, left = tables._message_rows, 2

        def compacted(*given: Any) -> pa.Table:
            nonlocal left
            left -= 1
            if left >= 0:
                writer._open.compact_range(None, None)
                more_files()
            return real(*given)

        monkeypatch.setattr(tables, "_message_rows", compacted)
        assert run(tmp_path, "show", "messages")["rows"] == expected
        assert left == -1, "twice a file was gone"
    for file in database.glob("*.sst"):
        file.write_bytes(b"damaged")
    assert "StateCorrupted" in run(tmp_path, "show", "messages", code=1)["error"]["why"]


def test_show_says_when_there_is_more(home: Path) -> None:
    data = run(home, "show", "windows", "--limit", "2")
    assert len(data["rows"]) == 2
    assert data["more"] is True
    told = CliRunner().invoke(app, ["show", str(home / "checkpoint"), "windows", "--limit", "2"])
    said, more = told.stderr.split("\n", 1)
    assert said == "shard 0 as of micro-batch 1: orders/0 before offset 5"
    assert "there are more rows" in more
    assert "there are more rows" not in told.stdout


def test_show_refuses_what_there_is_not(home: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["show", str(home / "checkpoint"), "lions"]).exit_code == 2
    result = CliRunner().invoke(
        app, ["show", str(home / "checkpoint"), "messages", "--local-dir", str(tmp_path), "--json"]
    )
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["code"] == "StateUnavailable"


def test_export_writes_parquet(home: Path, tmp_path: Path) -> None:
    (written,) = run(home, "export", str(tmp_path / "out"), "--table", "windows")
    table = pq.read_table(written["path"])
    assert table["start"].to_pylist() == [0, 10_000, 20_000]
    assert written["rows"] == 3
    (everything,) = run(home, "export", str(tmp_path / "rows"))
    regions = pq.read_table(everything["path"])["region"].to_pylist()
    assert regions.count("windows") == 3
    assert "messages" not in regions
    assert run(home, "export", str(tmp_path / "out"), code=2) is None


def test_nothing_is_exported_into_a_checkpoint(home: Path) -> None:
    for location in (str(home / "checkpoint"), f"file://{home}/checkpoint"):
        result = CliRunner().invoke(app, ["export", location, str(home / "checkpoint" / "out")])
        assert result.exit_code == 2
        assert "lies in the checkpoint" in " ".join(result.output.split())
    assert not (home / "checkpoint" / "out").exists()


def test_an_older_version_can_be_shown(home: Path) -> None:
    rows = run(home, "show", "windows", "--version", "0")["rows"]
    assert [row["messages"] for row in rows] == [2, 1]
    assert run(home, "show", "windows", "--version", "-1", code=2) is None
    with pytest.raises(HistoryLost) as caught:
        Checkpoint(str(home / "checkpoint"), home / "local").committed(0, -1)
    assert "0, 1" in caught.value.why
    assert run(home, "show", "messages", "--version", "0", code=2) is None


def files(path: Path) -> set[str]:
    return {str(one.relative_to(path)) for one in path.rglob("*") if one.is_file()}


def test_reset_names_everything_and_touches_nothing_before(home: Path, tmp_path: Path) -> None:
    before = files(home)
    data = run(home, "reset", "--dry-run")
    assert [one["path"] for one in data["deleted"]] == [str(home / "local" / QUERY), str(home / "checkpoint")]
    assert ["orders partition 0, shard 0: offsets below 5" in said for said in data["offsets"]] == [True]
    assert ["results and errors" in said and "refuse a new one" in said for said in data["kept"]] == [True]
    assert run(home, "reset", code=2) is None, "without --yes nothing happens"
    assert files(home) == before


def test_reset_deletes(home: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(home, tmp_path / "copy")
    copy = tmp_path / "copy"
    lock = os.open(copy / "local" / QUERY / "0" / "LOCK", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    error = run(copy, "reset", "--yes", code=1)["error"]
    assert error["code"] == "StoreLocked"
    assert (copy / "checkpoint").exists()
    os.close(lock)
    kept = run(copy, "reset", "--yes", "--local-only")["kept"]
    assert any("the next start restores" in one for one in kept)
    assert not (copy / "local" / QUERY).exists()
    assert (copy / "checkpoint" / "rewind" / "manifest.json").exists()
    run(copy, "reset", "--yes")
    assert not (copy / "checkpoint").exists()


@pytest.mark.parametrize(
    "words",
    [("restore", "nowhere:job"), ("inspect", "--job", "nowhere:job"), ("verify", "--against-source", "nowhere:job")],
)
def test_a_job_that_is_not_there_is_said_before_spark_is_started(
    home: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr("recovery.inspect.user_job.session", started)
    result = CliRunner().invoke(app, [words[0], str(home / "checkpoint"), *words[1:]])
    assert result.exit_code == 2
    assert "nowhere:job" in result.output


def test_a_job_that_is_given_by_its_file_or_fails_when_it_is_imported_is_a_wrong_call(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torn_job_module.py").write_text("def job(:\n")
    (tmp_path / "poor_job_module.py").write_text("{}['settings']\n")
    for job, why in (
        ("./job.py:orders", "must be module:function"),
        (".job:orders", "must be module:function"),
        ("torn_job_module:job", "SyntaxError"),
        ("poor_job_module:job", "KeyError: 'settings'"),
    ):
        result = CliRunner().invoke(app, ["restore", str(home / "checkpoint"), job])
        assert (result.exit_code, job in result.stderr, why in result.stderr) == (2, True, True), result.output


def test_a_master_on_other_hosts_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recovery.inspect.user_job.session", lambda *_: pytest.fail("Spark was started"))
    words = ["inspect", str(home / "checkpoint"), "--spark", "--master", "spark://other:7077"]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, "spark://other:7077" in result.stderr) == (2, True), result.output


def test_days_of_a_drill_are_of_its_own_job() -> None:
    result = CliRunner().invoke(app, ["drill", "--days", "2", "--job", "json:loads", "--list"])
    assert (result.exit_code, "days=2" in result.stderr) == (2, True), result.output


def test_what_cannot_be_read_of_one_shard_hides_no_other(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recovery.inspect import user_job
    from recovery.restore import replay

    class Changelog:
        def read(self, shard: int, commit: Commit) -> Any:
            if shard == 0:
                raise ChangelogDamaged("a record is damaged", command="rewind verify <checkpoint>")
            none = pa.array([], pa.large_binary())
            return SimpleNamespace(record=SimpleNamespace(commit=commit), keys=none, values=none)

    commit = Commit(3, "a" * 32)
    checkpoint: Any = SimpleNamespace(
        shards=[0, 1],
        committed=lambda _: commit,
        changelog=Changelog(),
        location=str(home / "checkpoint"),
        manifest=None,
    )
    monkeypatch.setattr(user_job, "job_of", lambda *_: SimpleNamespace(operator=None))
    monkeypatch.setattr(user_job, "shard_maker", lambda *_: lambda *_: None)
    monkeypatch.setattr(user_job, "restore_shard", lambda *_: SimpleNamespace(messages=7, proofs=2))
    monkeypatch.setattr(replay, "write_chunks", lambda *_: {})
    monkeypatch.setattr(replay, "logged_chunks", lambda *_: [])

    def levels() -> list[tuple[str, str]]:
        found = user_job.verify_against_source(checkpoint, None, None)  # type: ignore[arg-type]
        return [(one.level, one.where.partition(",")[0]) for one in found]

    assert levels() == [(PROBLEM, "shard 0"), (SOUND, "shard 1")]

    def aged(*_: Any) -> Any:
        raise HistoryLost("the source no longer has the messages", where="departures partition 1")

    monkeypatch.setattr(replay, "write_chunks", aged)
    assert levels() == [(PROBLEM, "shard 0"), (PROBLEM, "departures partition 1")]


@pytest.mark.parametrize("job", ["nowhere:job", "os:getcwd", "os:sep", "json"])
def test_a_drill_of_no_job_is_refused_before_spark_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    monkeypatch.setattr("recovery.drill.drill.Drill.__enter__", lambda *_: pytest.fail("it began"))
    result = CliRunner().invoke(app, ["drill", "--job", job, "--out", str(tmp_path / "out")])
    assert (result.exit_code, job in result.stderr) == (2, True), result.output


@pytest.mark.parametrize("days", ["0", "-1"])
def test_a_drill_has_a_day_at_least(days: str) -> None:
    result = CliRunner().invoke(app, ["drill", "--days", days, "--list"])
    assert (result.exit_code, "--days" in result.stderr) == (2, True), result.output


@pytest.mark.parametrize("command", ["inspect", "verify", "show", "export", "restore", "reset", "outputs"])
@pytest.mark.parametrize("place", ["", "/"])
def test_an_empty_place_is_not_the_current_directory(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, place: str
) -> None:
    monkeypatch.chdir(home / "checkpoint")
    more = {"export": [str(tmp_path / "out")], "restore": ["json:loads"], "reset": ["--yes"]}.get(command, [])
    result = CliRunner().invoke(app, [command, place, *more])
    assert result.exit_code == (1 if place else 2), result.output
    said = "this is not a checkpoint of Rewind; where: /; " if place else "location '': must be a path or URI"
    assert said in result.stderr
    assert (home / "checkpoint" / "rewind" / "manifest.json").exists()


def test_a_restore_of_what_is_no_checkpoint_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recovery.inspect.user_job.session", lambda *_: pytest.fail("Spark was started"))
    result = CliRunner().invoke(app, ["restore", str(tmp_path / "none"), "json:loads"])
    assert (result.exit_code, "StateUnavailable" in result.stderr) == (1, True), result.output
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_local_dir(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in ("inspect", "verify", "show", "reset"):
        words = [command, str(home / "checkpoint"), "--local-dir", str(tmp_path / "file")]
        result = CliRunner().invoke(app, words)
        assert (result.exit_code, "local_dir=" in result.stderr) == (2, True), result.output


@pytest.mark.parametrize("words", [["--local-only"], []])
def test_a_reset_that_finds_no_local_state_says_where_it_looked(home: Path, tmp_path: Path, words: list[str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    asked = ["reset", str(home / "checkpoint"), "--local-dir", str(elsewhere), "--dry-run", *words]
    result = CliRunner().invoke(app, asked)
    said = " ".join(result.stdout.split())
    assert f"local state: there is none of this query: {elsewhere}" in said.replace("- ", "-"), said


def test_no_is_an_answer(home: Path) -> None:
    words = ["reset", str(home / "checkpoint"), "--local-dir", str(home / "local")]
    result = CliRunner().invoke(app, words, input="n\n")
    assert (result.exit_code, "nothing was touched" in result.stdout) == (1, True), result.output
    assert CliRunner().invoke(app, [*words, "--json"]).exit_code == 2
    assert (home / "checkpoint" / "rewind" / "manifest.json").exists()


def test_what_cannot_be_written_is_named(home: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(home / "checkpoint"), "/proc/none", "--table", "windows"])
    assert (result.exit_code, "StorageFailed" in result.stderr) == (1, True), result.output
    out = home / "checkpoint" / "out"
    result = CliRunner().invoke(app, ["export", str(home / "checkpoint"), str(out), "--table", "windows"])
    assert (result.exit_code, "lies in the checkpoint" in result.stderr, out.exists()) == (2, True, False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shard", "9"], "--shard=9: allowed are 0 to 0"),
        (["--shard", "-1"], "--shard=-1: allowed are 0 to 0"),
        (["--columns", "start,start"], "a column twice"),
        (["--format", "csv", "--json"], "--format=csv: not with --json"),
    ],
)
def test_show_names_the_option_that_is_wrong(home: Path, words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["show", str(home / "checkpoint"), *words])
    assert (result.exit_code, said in result.stderr) == (2, True), result.output


def test_the_release_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout.strip()) == (0, release())
