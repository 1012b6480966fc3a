"""Who may read what lies on disk, which names are refused, and what never runs what it reads."""

from __future__ import annotations

import ast
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from backend.errors import PointerDamaged, StateCorrupted, StorageFailed, UnknownFormat
from backend.rocks import RocksStore
from backend.spark.start import StartOptions
from recovery.changelog import FileChangelog
from recovery.commit.manifest import MAX_SHARDS, NAME, Manifest, read_manifest, write_manifest
from recovery.commit.pointer import Commit, Pointer, decode, decode_record, encode, encode_record
from recovery.commit.shard_directory import ShardDirectory
from recovery.files import LocalFiles, RemoteFiles, open_files
from recovery.jobs import shard_job, snapshots
from tests.support.windows import QUERY, make_windows, windows_operator

ROOT = Path(__file__).resolve().parents[2]

# -- what never runs what it reads ------------------------------------------------------------------------------------

RUNS_CODE = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml", "runpy", "code"}


def sources() -> Iterator[Path]:
    for package in ("backend", "recovery"):
        yield from sorted((ROOT / package).rglob("*.py"))


def findings(tree: ast.AST) -> list[str]:
    """Name calls and imports in a module that could run what was stored."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module or ""] if (node.module or "").split(".")[0] in MODULES else []
            found += [name.name for name in node.names if name.name.endswith("PickleSerializer")]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RUNS_CODE:
            found.append(node.func.id)
        elif isinstance(node, ast.Call):
            told = {keyword.arg: keyword.value for keyword in node.keywords}
            if isinstance(pickled := told.get("allow_pickle"), ast.Constant) and pickled.value:
                found.append("allow_pickle")
            if isinstance(shell := told.get("shell"), ast.Constant) and shell.value:
                found.append("shell=True")
    return found


@pytest.mark.slow
def test_nothing_unpickles_or_evaluates() -> None:
    paths = list(sources())
    assert len(paths) > 150
    found = {path.relative_to(ROOT).as_posix(): findings(ast.parse(path.read_text())) for path in paths}
    # parts of the functions that Spark sends to its workers, which are pickles
    assert found.pop("backend/spark/deferred.py") == ["CloudPickleSerializer"]
    assert {path: names for path, names in found.items() if names} == {}


def test_the_search_finds_what_it_looks_for() -> None:
    bad = "import pickle\nfrom marshal import loads\neval('1')\nnp.load(x, allow_pickle=True)\nrun(x, shell=True)"
    assert findings(ast.parse(bad)) == ["pickle", "marshal", "eval", "allow_pickle", "shell=True"]


# -- names ------------------------------------------------------------------------------------------------------------

COMMIT = Commit(3, "a" * 32)
UPWARDS = ["../../../../etc/cron.d/x", "/etc/passwd", "a" * 31, "a" * 32 + "\n", "A" * 32, "a" * 30 + "/x", ""]


@pytest.mark.parametrize("name", UPWARDS)
def test_a_commit_whose_name_would_leave_its_directory(name: str) -> None:
    pointer = Pointer(0, Commit(3, name), None, 1, "d" * 32, [], {}, "x")
    with pytest.raises(PointerDamaged):
        decode(encode(pointer))
    with pytest.raises(PointerDamaged):
        decode(encode(msgspec.structs.replace(pointer, commit=COMMIT, parent=Commit(2, name))))


def test_a_commit_record_that_names_such_ancestors(tmp_path: Path) -> None:
    make_windows(tmp_path)
    record = job_of(tmp_path).changelog.read(0, newest_commit(tmp_path)).record
    decode_record(encode_record(record))
    for bad in (Commit(0, name) for name in UPWARDS):
        for changed in ({"ancestors": [bad]}, {"parent": bad}, {"commit": bad}):
            with pytest.raises(StateCorrupted):
                decode_record(encode_record(msgspec.structs.replace(record, **changed)))


def test_foreign_files_among_the_staged_ones(tmp_path: Path) -> None:
    directory = ShardDirectory(tmp_path, "q", 0)
    with directory.lock():
        generation = directory.new_generation()
    for name in ("junk.sst", "1_2.sst", "..sst", f"{COMMIT.name}.sst.part"):
        (generation.path / "staged" / name).write_bytes(b"")
    generation.staged(COMMIT).write_bytes(b"")
    assert generation.staged_commits() == [COMMIT]


# -- the manifest -----------------------------------------------------------------------------------------------------


def test_a_digit_of_the_manifest_that_changed(tmp_path: Path) -> None:
    write_manifest(str(tmp_path), Manifest(2, (11, 12), {"operator": {"retention_ms": 60_000}}))
    path = tmp_path / NAME
    sound = path.read_text()
    for old, new in (("11", "13"), ("60000", "60001"), ('"shards": 2', '"shards": 1')):
        path.write_text(sound.replace(old, new))
        with pytest.raises(StateCorrupted) as caught:
            read_manifest(str(tmp_path))
        assert caught.value.where.endswith("manifest.json")
        assert "checksum" in caught.value.why
    path.write_text(sound)
    found = read_manifest(str(tmp_path))
    assert found is not None
    assert (found.shards, found.grouping) == (2, (11, 12))
    assert "checksum" not in found.entries


@pytest.mark.parametrize(
    "content",
    [
        {"shards": 10**12, "grouping": [1]},
        {"shards": MAX_SHARDS + 1, "grouping": list(range(MAX_SHARDS + 1))},
        {"shards": 2, "grouping": [1]},
        {"shards": 2, "grouping": [1, 1]},
        {"shards": 0, "grouping": []},
        {"shards": True, "grouping": [1]},
        {"shards": 1.0, "grouping": [1]},
    ],
)
def test_a_manifest_with_shards_that_cannot_be(tmp_path: Path, content: dict[str, object]) -> None:
    (tmp_path / "rewind").mkdir()
    (tmp_path / NAME).write_text(json.dumps({"format": 1, **content}))
    with pytest.raises(StateCorrupted):
        read_manifest(str(tmp_path))


def test_a_manifest_without_a_checksum_is_of_the_first_ones(tmp_path: Path) -> None:
    (tmp_path / "rewind").mkdir()
    (tmp_path / NAME).write_text('{"format": 1, "shards": 1, "grouping": [0], "route": "key"}')
    assert read_manifest(str(tmp_path)) == Manifest(1, (0,), {"route": "key"})
    (tmp_path / NAME).write_text('{"format": 3, "shards": 1, "grouping": [0], "checksum": "of another kind"}')
    with pytest.raises(UnknownFormat):
        read_manifest(str(tmp_path))


# -- who may read -----------------------------------------------------------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def job_of(home: Path):
    operator, fields = windows_operator()
    checkpoint = str(home / "checkpoint")
    return shard_job(home / "local", checkpoint, f"{checkpoint}/rewind/changelog", operator, fields, 2, None, QUERY, 0)


def newest_commit(home: Path) -> Commit:
    (newest,) = (home / "local" / QUERY / "0").glob("*/staged/*1_*.sst")
    return Commit.of_name(newest.stem)


def test_directories_are_this_user_s_alone_and_so_are_files_at_the_checkpoint(tmp_path: Path) -> None:
    before = os.umask(0)  # nothing is left to the mask
    try:
        make_windows(tmp_path)
        job = job_of(tmp_path)
        (database,) = (tmp_path / "local" / QUERY / "0").glob("*/db")
        record = job.changelog.read(0, newest_commit(tmp_path)).record
        with RocksStore.open(database) as store:
            store.checkpoint(tmp_path / "copy")
        snapshots(str(tmp_path / "checkpoint")).publish(record, tmp_path / "copy")
    finally:
        os.umask(before)
    local = [path for path in (tmp_path / "local").rglob("*") if path.is_dir()]
    assert {"db", "staged", QUERY, "0"} < {path.name for path in local}
    assert [str(path) for path in [tmp_path / "local", *local] if mode(path) != 0o700] == []
    ours = list((tmp_path / "checkpoint" / "rewind").rglob("*"))
    assert {".delta", ".json", ".sst"} < {path.suffix for path in ours}
    assert [str(path) for path in ours if mode(path) != (0o700 if path.is_dir() else 0o600)] == []
    for name in ("CURRENT", "LOCK"):
        assert mode(tmp_path / "local" / QUERY / "0" / name) == 0o600


def test_files_that_are_fetched_are_this_user_s_alone(tmp_path: Path) -> None:
    LocalFiles(tmp_path / "from").write("a", [b"1"])
    (tmp_path / "from" / "a").chmod(0o644)
    for number, files in enumerate((LocalFiles(tmp_path / "from"), RemoteFiles(f"file://{tmp_path}/from"))):
        for link in (True, False):
            files.get("a", target := tmp_path / f"{number}{link}", link=link)
            assert mode(target) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_a_local_directory_that_somebody_else_made_is_refused(tmp_path: Path) -> None:
    everybody = tmp_path / "tmp"
    everybody.mkdir()
    everybody.chmod(0o1777)
    local = everybody / "rewind"
    local.mkdir(mode=0o777)
    os.chown(local, 12345, 12345)
    with pytest.raises(StorageFailed, match="12345"), ShardDirectory(local, "q", 0).lock():
        raise AssertionError("it was locked")
    everybody.chmod(0o755)  # not shared: its owner let us in
    with ShardDirectory(local, "q", 0).lock():
        pass
    os.chown(local / "q", 12345, 12345)
    with pytest.raises(StorageFailed, match="12345"), ShardDirectory(local, "q", 0).lock():
        raise AssertionError("it was locked")


def test_a_shard_that_is_a_link_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "local" / "q").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "local" / "q" / "0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageFailed), ShardDirectory(tmp_path / "local", "q", 0).lock():
        raise AssertionError("it was locked")
    assert list((tmp_path / "elsewhere").iterdir()) == []


# -- secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "uri", ["sftp://ann:s3cret@host/path", "kafka://ann:s3cret@host:9092/topic", "s3://k:s3cret@b/c"]
)
def test_a_location_with_a_password_is_refused_without_telling_it(uri: str) -> None:
    for use in (open_files, lambda uri: StartOptions(changelog=uri), FileChangelog):
        with pytest.raises(ValueError, match="password") as caught:
            use(uri)
        assert "s3cret" not in str(caught.value)
        assert "ann" in str(caught.value) or "k:" in str(caught.value)


def test_locations_without_one_are_fine() -> None:
    for uri in ("/a/b@c:d/e", "memory://a@b/c", "file:///x:y@z/p"):
        open_files(uri)
    StartOptions(changelog="kafka://host:9092/topic")
