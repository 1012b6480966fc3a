"""`rewind reset` killed after each single deletion can be called again; until then nothing takes what is left."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backend.errors import CheckpointTaken, ManifestMismatch, ResetInterrupted, StateUnavailable
from backend.sinks.directory import VersionedDirectory
from backend.sinks.parquet import ParquetSink
from recovery.cli import app
from recovery.commit import lease
from recovery.commit import reset_mark as half_reset
from recovery.commit.manifest import Manifest, read_manifest, write_manifest
from recovery.commit.outputs import forget_outputs, output_id, write_outputs
from recovery.files import LocalFiles, RemoteFiles, open_files
from recovery.inspect import reset
from recovery.inspect.reset import carry_out, plan_reset
from tests.support.windows import QUERY

OWN = "f" * 32


class Killed(BaseException):
    """The process is gone: nothing that would run afterwards counts."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a checkpoint with local state and outputs of its own, small but with a file in every place."""
    home = tmp_path_factory.mktemp("reset")
    location = home / "checkpoint"
    write_manifest(str(location), Manifest(1, (0,), {"operator": {}, "query": OWN}))
    (location / "metadata").write_text(json.dumps({"id": QUERY}))
    inside = (
        "state/0/1/0",
        "offsets/0",
        "rewind/snapshots/0/shared/0.sst",
        "rewind/control/d.json",
        "rewind/changelog/0/0",
    )
    for name in (*(f"checkpoint/{one}" for one in inside), f"local/{QUERY}/0/LOCK", f"local/{QUERY}/0/g/db/1.sst"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("0")
    return home


def copied(template: Path, home: Path) -> Path:
    shutil.copytree(template, home)
    sink = ParquetSink(home / "results", home / "errors")
    sink.open(OWN)
    for name in ("results", "errors"):
        (home / name / "batch=0").mkdir()
        (home / name / "batch=0" / "a.parquet").write_text("rows")
    write_outputs(str(home / "checkpoint"), sink)
    return home


def killed_after(deletions: int, monkeypatch: pytest.MonkeyPatch, what: Callable[[], None]) -> bool:
    """Run something that dies right after a number of files and folders were deleted; tell whether it got there."""
    left = deletions

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def delete(path: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left < 0:
                raise Killed
            made = call(path, *args, **kwargs)
            left -= 1
            if left < 0:
                raise Killed
            return made

        return delete

    with monkeypatch.context() as patched:
        for name in ("unlink", "rmdir"):
            patched.setattr(os, name, dying(getattr(os, name)))
        patched.setattr(shutil, "_use_fd_functions", False)
        patched.setattr(lease.Lease, "release", lambda self, *, forget=False: self._ended.set())
        try:
            what()
        except Killed:
            lease._ours.clear()
            return True
    lease._ours.clear()
    return False


def left_in(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


@pytest.mark.slow
def test_reset_killed_after_every_deletion_can_be_called_again(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = 0
    refused = 0
    while True:
        home = copied(template, tmp_path / str(kills))
        location = str(home / "checkpoint")
        plan = plan_reset(location, home / "local", outputs=True)
        if not killed_after(kills, monkeypatch, lambda plan=plan: carry_out(plan)):
            break
        kills += 1
        try:
            again = plan_reset(location, home / "local", outputs=True)
        except StateUnavailable:
            assert [name for name in left_in(home) if not name.startswith("checkpoint/rewind/lease/")] == []
            continue
        if half_reset.read_mark(location) is not None:
            with pytest.raises(ResetInterrupted, match="rewind reset"):
                read_manifest(location)
            refused += 1
        else:
            assert read_manifest(location) is not None, "before the mark nothing is deleted"
        carry_out(again)
        assert left_in(home) == []
        shutil.rmtree(home)
    assert all("/lease/" in name for name in left_in(tmp_path / str(kills))), "which nobody gave back"
    assert refused > 20
    assert kills > 30


def test_a_reset_that_goes_on_leaves_what_another_query_has_begun_meanwhile(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = copied(template, tmp_path / "one")
    location = str(home / "checkpoint")

    def die(files: Any) -> None:
        raise Killed

    plan = plan_reset(location, home / "local", outputs=True)
    with monkeypatch.context() as patch:
        patch.setattr(reset, "_delete_checkpoint", die)
        with pytest.raises(Killed):
            carry_out(plan)
    assert not (home / "errors").exists()
    ParquetSink(home / "results", home / "errors").open("a" * 32)
    for name in ("results", "errors"):
        (home / name / "batch=0").mkdir()
        (home / name / "batch=0" / "a.parquet").write_text("another's")
    again = plan_reset(location, home / "local", outputs=True)
    assert again.outputs == {}
    assert f"{home / 'results'}: query {'a' * 32} writes there" in again.stays
    carry_out(again)
    assert (home / "results" / "batch=0" / "a.parquet").read_text() == "another's"
    assert not (home / "checkpoint" / "rewind" / "manifest.json").exists()


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_output_that_another_query_takes_while_the_user_is_asked_stops_a_reset(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    home = copied(template, tmp_path / "one")
    location = str(home / "checkpoint")

    def die(files: Any) -> None:
        raise Killed

    if interrupted:
        with monkeypatch.context() as patch:
            patch.setattr(reset, "_delete_checkpoint", die)
            with pytest.raises(Killed):
                carry_out(plan_reset(location, home / "local", outputs=True))
    plan = plan_reset(location, home / "local", outputs=True)
    shutil.rmtree(home / "results", ignore_errors=True)
    VersionedDirectory(home / "results", "results").open("a" * 32)
    (home / "results" / "batch=0").mkdir()
    with pytest.raises(ManifestMismatch, match="another query's since the reset listed it"):
        carry_out(plan)
    assert (home / "results" / "batch=0").exists()
    assert (home / "checkpoint" / "rewind" / "manifest.json").exists()
    if interrupted:  # called again it leaves what is another's, whoever was asked in between
        carry_out(plan_reset(location, home / "local", outputs=True))
        assert (home / "results" / "batch=0").exists()


def test_reset_leaves_a_query_alone_that_begins_right_after_it(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = copied(template, tmp_path / "one")
    location = str(home / "checkpoint")
    release, begun = lease.Lease.release, list[lease.Lease]()

    def begin(held: lease.Lease, *, forget: bool = False) -> None:
        release(held, forget=forget)
        if not begun:
            begun.append(lease.take(location, "a query"))

    monkeypatch.setattr(lease.Lease, "release", begin)
    carry_out(plan_reset(location, home / "local"))
    begun[0].check()
    release(begun[0])


def test_a_query_that_begins_while_the_empty_folders_go_keeps_what_it_makes(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = copied(template, tmp_path / "one")
    location = str(home / "checkpoint")
    listed, begun, looks = LocalFiles.list, list[Any](), list[str]()

    def look(files: LocalFiles, folder: str = "", *, temporary: bool = False) -> dict[str, int]:
        found = listed(files, folder, temporary=temporary)
        if folder == lease.DIRECTORY and not found and not looks and not read_manifest(location):
            looks.append(folder)
            begun.append(lease.take(location, "a query"))
            (home / "checkpoint" / "offsets").mkdir(exist_ok=True)
            (home / "checkpoint" / "offsets" / "0").write_text("v1")
        return found

    monkeypatch.setattr(LocalFiles, "list", look)
    carry_out(plan_reset(location, home / "local"))
    assert begun, "it began between the look and the removal"
    begun[0].check()
    assert (home / "checkpoint" / "offsets" / "0").exists()
    begun[0].release(forget=False)


def run(home: Path, *words: str, code: int = 0) -> Any:
    told = [words[0], str(home / "checkpoint"), *words[1:], "--json", "--local-dir", str(home / "local")]
    result = CliRunner().invoke(app, told)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if result.stdout else None


def test_reset_says_what_becomes_of_the_outputs_and_deletes_them_if_asked(template: Path, tmp_path: Path) -> None:
    home = copied(template, tmp_path / "one")
    told = run(home, "reset", "--dry-run")
    assert any(str(home / "results") in one and "rewind reset" in one and "--outputs" in one for one in told["kept"])
    run(home, "reset", "--yes", "--outputs", "--local-only", code=2)
    told = run(home, "reset", "--yes", "--outputs")
    assert {one["path"] for one in told["deleted"]} == {
        str(home / name) for name in ("checkpoint", f"local/{QUERY}", "results", "errors")
    }
    assert left_in(home) == []


@pytest.mark.parametrize("number", [errno.EBUSY, errno.ENOTDIR])
def test_an_output_whose_root_cannot_go_stays_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It is a mount, or a link."""
    output = VersionedDirectory(tmp_path / "out")
    if number == errno.ENOTDIR:
        (tmp_path / "disk").mkdir()
        output.root.symlink_to(tmp_path / "disk")
    else:

        def refuse(path: Path) -> None:
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(Path, "rmdir", refuse)
    output.open("a" * 32)
    output.delete()
    assert list(output.root.iterdir()) == []


def reset_copy(home: Path, copy: Path, *words: str, code: int = 0) -> Any:
    told = ["reset", str(copy), *words, "--json", "--local-dir", str(home / "local")]
    result = CliRunner().invoke(app, told)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_reset_of_a_copy_leaves_what_is_its_originals(template: Path, tmp_path: Path) -> None:
    """A copy is the same query: it names the same outputs, and its local state has the same name."""
    home, copy = copied(template, tmp_path / "one"), tmp_path / "copy"
    place = str(home / "checkpoint")
    write_manifest(place, Manifest(1, (0,), {"operator": {}, "query": OWN, "place": place}))
    shutil.copytree(home / "checkpoint", copy)
    before, said = left_in(home), f"the same query's checkpoint at {place}"
    told = reset_copy(home, copy, "--dry-run")
    for own in (home / "results", home / "errors"):
        assert f"{own}: it may be the output of {said}; where not, delete it by hand" in told["kept"]
    local = f"local state: {home / 'local' / QUERY}: it may be that of {said}; where it is not, delete it by hand"
    assert local in told["kept"]
    result = CliRunner().invoke(app, ["reset", str(copy), "--yes", "--outputs", "--local-dir", str(home / "local")])
    assert result.exit_code == 2
    assert "it may be the output of the same query's checkpoint at" in " ".join(result.output.split())
    forget_outputs(str(copy))
    second = ParquetSink(tmp_path / "second", tmp_path / "second-errors")
    second.open(output_id(str(copy), OWN))
    write_outputs(str(copy), second)
    told = reset_copy(home, copy, "--yes", "--outputs")
    assert {one["path"] for one in told["deleted"]} == {
        str(copy),
        str(second.places()["results"]),
        f"{tmp_path}/second-errors",
    }
    assert left_in(home) == before
    assert not copy.exists()


def test_reset_of_a_copy_whose_metadata_is_gone_deletes_the_copy_alone(template: Path, tmp_path: Path) -> None:
    home, copy = copied(template, tmp_path / "one"), tmp_path / "copy"
    place = str(home / "checkpoint")
    write_manifest(place, Manifest(1, (0,), {"operator": {}, "query": OWN, "place": place}))
    shutil.copytree(home / "checkpoint", copy)
    (copy / "metadata").unlink()
    before = left_in(home)
    told = reset_copy(home, copy, "--yes")
    assert "local state: the checkpoint does not say which it is" in told["kept"]
    assert (told["deleted"], told["offsets"]) == ([{"path": str(copy), "bytes": None}], [])
    assert left_in(home) == before
    assert not copy.exists()


def test_reset_by_a_relative_path_means_the_same(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = copied(template, tmp_path / "one")
    whole = plan_reset(str(home / "checkpoint"), home / "local", outputs=True)
    monkeypatch.chdir(home)
    assert plan_reset("checkpoint/", home / "local", outputs=True) == whole


def test_reset_of_what_was_moved_takes_all_that_is_its_own(template: Path, tmp_path: Path) -> None:
    home, moved = copied(template, tmp_path / "one"), tmp_path / "moved"
    place = str(home / "checkpoint")
    write_manifest(place, Manifest(1, (0,), {"operator": {}, "query": OWN, "place": place}))
    shutil.move(place, moved)
    reset_copy(home, moved, "--yes", "--outputs")
    assert left_in(home) == []


def test_reset_says_of_a_place_that_does_not_answer_what_it_leaves(template: Path, tmp_path: Path) -> None:
    home = copied(template, tmp_path / "one")
    place = "nowhere-at-all://gone/c"
    write_manifest(str(home / "checkpoint"), Manifest(1, (0,), {"operator": {}, "query": OWN, "place": place}))
    told = run(home, "reset", "--yes")
    assert any(f"checkpoint at {place}, which does not answer" in one for one in told["kept"])
    assert (home / "local" / QUERY).is_dir()


def test_a_deletion_of_a_link_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    for name in ("a", "b"):
        (there / name).mkdir(parents=True)
        (there / name / "file").write_text("0")
    (tmp_path / "link").symlink_to(there)
    unlink, left = os.unlink, [1]

    def dies(*args: Any, **kwargs: Any) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        unlink(*args, **kwargs)

    files = LocalFiles(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", dies)
        with pytest.raises(Killed):
            files.delete_folder("link")
    assert files.folders() == ["link", "there"], "it still leads to what is left"
    files.delete_folder("link")
    assert files.folders() == []


def test_reset_follows_folders_that_are_links_to_another_disk(template: Path, tmp_path: Path) -> None:
    home, disk = copied(template, tmp_path / "one"), tmp_path / "disk"
    disk.mkdir()
    for name in ("checkpoint/state", "checkpoint/rewind/snapshots", f"local/{QUERY}"):
        there = disk / name.replace("/", "-")
        (home / name).rename(there)
        (home / name).symlink_to(there)
    (disk / "mine").mkdir()
    (disk / "mine" / "thesis.txt").write_text("mine")
    (home / "checkpoint" / "notes").symlink_to(disk / "mine")
    run(home, "reset", "--yes", "--local-only")
    assert not (home / "local" / QUERY).is_symlink()
    run(home, "reset", "--yes", "--outputs")
    assert left_in(home) == []
    assert left_in(disk) == ["mine/thesis.txt"], "a link of somebody else's goes, and nothing that it leads to"
    assert not (home / "checkpoint").exists()


def test_reset_elsewhere_leaves_what_a_query_has_begun_right_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    location = f"memory://reset-{uuid.uuid4().hex}/c"
    write_manifest(location, Manifest(1, (0,), {"operator": {}, "query": OWN}))
    listed = RemoteFiles.list

    def look(files: RemoteFiles, folder: str = "", *, temporary: bool = False) -> dict[str, int]:
        found = listed(files, folder, temporary=temporary)
        if folder == lease.DIRECTORY and not found and read_manifest(location) is None:
            write_manifest(location, Manifest(2, (0, 1), {"operator": {}, "query": "e" * 32}))
        return found

    release = lease.Lease.release

    def begin(held: lease.Lease, *, forget: bool = False) -> None:
        release(held, forget=forget)
        look(open_files(location), lease.DIRECTORY)  # type: ignore[arg-type]

    monkeypatch.setattr(RemoteFiles, "list", look)
    monkeypatch.setattr(lease.Lease, "release", begin)
    carry_out(plan_reset(location))
    found = read_manifest(location)
    assert found is not None
    assert found.shards == 2


def test_reset_leaves_what_the_query_did_not_write(template: Path, tmp_path: Path) -> None:
    home = copied(template, tmp_path / "one")
    mine = ["batch=notes", "thesis.txt", *(f"z{number}" for number in range(5))]
    for name in mine:
        (home / "results" / name).write_text("mine")
    told = run(home, "reset", "--dry-run", "--outputs")
    kept = f"{home / 'results'}: batch=notes, thesis.txt, z0, z1, z2 and 2 more: not written by the query"
    assert kept in told["kept"]
    sizes = {one["path"]: one["bytes"] for one in told["deleted"]}
    owner = (home / "results" / "_rewind" / "owner.json").stat().st_size
    assert sizes[str(home / "results")] == owner + len("rows"), "what stays is not counted"
    assert sizes[str(home / "errors")] == (home / "errors" / "_rewind" / "owner.json").stat().st_size + len("rows")
    run(home, "reset", "--yes", "--outputs")
    assert left_in(home) == [f"results/{name}" for name in mine]
    ParquetSink(home / "results", home / "errors").open("b" * 32)  # a new query may begin there


def test_reset_knows_the_outputs_that_were_left_for_others(template: Path, tmp_path: Path) -> None:
    home = copied(template, tmp_path / "one")
    checkpoint = str(home / "checkpoint")
    forget_outputs(checkpoint)
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    second = ParquetSink(home / "second", home / "second-errors")
    second.open(output_id(checkpoint, manifest.entries["query"]))
    write_outputs(checkpoint, second)
    forget_outputs(checkpoint)
    told = run(home, "reset", "--yes", "--outputs")
    assert {one["path"] for one in told["deleted"]} == {
        str(home / name) for name in ("checkpoint", f"local/{QUERY}", "results", "errors", "second", "second-errors")
    }
    assert left_in(home) == []


def test_reset_deletes_the_directories_and_names_the_tables_that_followed_them(template: Path, tmp_path: Path) -> None:
    home = copied(template, tmp_path / "one")
    checkpoint, path = str(home / "checkpoint"), home / "checkpoint" / "rewind" / "outputs.json"
    forget_outputs(checkpoint)
    outputs = {"kind": "sql", "url": "postgresql://h/d", "schema": "s", "results": "r", "errors": "e", "mode": "append"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"outputs": outputs}))
    told = run(home, "reset", "--yes", "--outputs")
    assert str(home / "results") in {one["path"] for one in told["deleted"]}
    text = "sql (url postgresql://h/d, schema s, results r, errors e, mode append): refuse a new query"
    assert any(one.startswith(text) for one in told["kept"])


def test_reset_keeps_outputs_that_are_anothers(template: Path, tmp_path: Path) -> None:
    home = copied(template, tmp_path / "one")
    shutil.rmtree(home / "results")
    ParquetSink(home / "results", home / "elsewhere").open("a" * 32)
    told = run(home, "reset", "--yes", "--outputs")
    assert str(home / "results") not in {one["path"] for one in told["deleted"]}
    assert left_in(home / "results") == ["_rewind/owner.json"]
    assert not (home / "errors").exists()


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ({"kind": "kafka", "results": "r", "errors": "e", "commits": "r-commits"}, "topics r, e, r-commits"),
        (
            {"kind": "delta", "results": "s3://a/r", "errors": "s3://a/e", "mode": "append"},
            "delta (results s3://a/r, errors s3://a/e, mode append): refuse a new query",
        ),
        ({"kind": "parquet", "results": "s3://a/r", "errors": "s3://a/e"}, "delete both where they are"),
        ({"kind": "foreach", "function": "f"}, "give that one others"),
        (None, "give that one others"),
    ],
)
def test_reset_says_what_becomes_of_other_outputs(template: Path, tmp_path: Path, outputs: Any, said: str) -> None:
    home = copied(template, tmp_path / "one")
    path = home / "checkpoint" / "rewind" / "outputs.json"
    path.unlink()
    if outputs is not None:
        path.write_text(json.dumps({"format": 1, "number": 1, "outputs": outputs}))
    assert any(said in one for one in run(home, "reset", "--dry-run")["kept"])
    assert run(home, "reset", "--yes", "--outputs", code=2) is None
    assert read_manifest(str(home / "checkpoint")) is not None


def test_reset_takes_a_checkpoint_whose_outputs_are_not_known(template: Path, tmp_path: Path) -> None:
    home = copied(template, tmp_path / "one")
    (home / "checkpoint" / "rewind" / "outputs.json").write_text("{")
    assert run(home, "reset", "--yes", "--outputs", code=1)["error"]["code"] == "StateCorrupted"
    assert any("which they are is not known" in one for one in run(home, "reset", "--yes")["kept"])
    assert not (home / "checkpoint").exists()
    assert (home / "results").exists()


def test_reset_takes_a_checkpoint_that_never_ran(template: Path, tmp_path: Path) -> None:
    home = copied(template, tmp_path / "one")
    (home / "checkpoint" / "metadata").unlink()
    assert any("local state" in one for one in run(home, "reset", "--yes")["kept"])
    assert not (home / "checkpoint").exists()


def test_reset_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "thesis.txt").write_text("mine")
    assert run(tmp_path, "reset", "--yes", code=1)["error"]["code"] == "StateUnavailable"
    assert left_in(tmp_path) == ["checkpoint/thesis.txt"]


@pytest.mark.parametrize("words", [("reset", "--yes"), ("reset", "--yes", "--local-only"), ("outputs", "--new")])
def test_commands_that_change_a_checkpoint_are_refused_while_it_is_held(
    template: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    home = copied(template, tmp_path / "one")
    before = left_in(home)
    told = [words[0], str(home / "checkpoint"), *words[1:], "--json"]
    with lease.leased(str(home / "checkpoint"), "query 'clicks'"):
        found = CliRunner().invoke(app, told)
        assert found.exit_code == 1
        error = json.loads(found.stdout)["error"]
        assert error["code"] == "CheckpointInUse"
        assert "query 'clicks', process" in error["why"]
        assert [name for name in left_in(home) if "/lease/" not in name] == before


def test_a_reset_that_has_lost_the_checkpoint_to_a_start_at_the_same_moment_deletes_nothing(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(template, tmp_path / "home")
    location, take = str(tmp_path / "home" / "checkpoint"), lease.take

    def late(checkpoint: str, what: str) -> lease.Lease:
        taken = take(checkpoint, what)
        open_files(checkpoint).write(f"{lease.DIRECTORY}/{9:012d}-{'a' * 32}.json", [b"{}"])
        return taken

    plan = plan_reset(location, tmp_path / "home" / "local")
    before = {path for path in (tmp_path / "home").rglob("*") if lease.DIRECTORY not in str(path)}
    monkeypatch.setattr(lease, "take", late)
    with pytest.raises(CheckpointTaken):
        carry_out(plan)
    assert {path for path in (tmp_path / "home").rglob("*") if lease.DIRECTORY not in str(path)} == before
