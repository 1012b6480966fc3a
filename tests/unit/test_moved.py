"""Spark's operator metadata in a checkpoint that was copied or moved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from backend.errors import ManifestMismatch, PointerDamaged, StateUnavailable, StorageFailed
from recovery.commit import relocation
from recovery.commit.manifest import Manifest, write_manifest
from recovery.commit.relocation import check_alone, check_settled, originals, settle_in
from recovery.files import LocalFiles

SCHEMA = "state/0/_stateSchema/default/0_4333821a-0c65-4a0a-842e-7b8f4e5867cf"


def metadata(path: Path) -> Path:
    return path / "state/0/_metadata/v2/0"


def named(path: Path) -> list[str]:
    """As Spark 4.2 writes it: a line with the version, then JSON."""
    version, text = metadata(path).read_text().split("\n")
    assert version == "v2"
    return json.loads(text)["stateStoreInfo"][0]["stateSchemaFilePaths"]


@pytest.fixture
def original(tmp_path):
    path = tmp_path / "original"
    for file in (metadata(path), path / SCHEMA):
        file.parent.mkdir(parents=True)
    (path / SCHEMA).write_text("the schema")
    store = {"storeName": "default", "numPartitions": 2, "stateSchemaFilePaths": [f"file:{path}/{SCHEMA}"]}
    operator = {"operatorInfo": {"operatorId": 0}, "stateStoreInfo": [store], "operatorPropertiesJson": "{}"}
    metadata(path).write_text("v2\n" + json.dumps(operator))
    (metadata(path).parent / ".0.crc").write_bytes(b"crc\x00\x00\x00\x02\x00\xdf\x9a")
    return path


def test_at_its_place_nothing_is_touched(original):
    before = metadata(original).read_bytes()
    assert settle_in(str(original)) == 0
    assert settle_in(f"file://{original}") == 0
    check_settled(str(original))
    assert metadata(original).read_bytes() == before
    assert (metadata(original).parent / ".0.crc").exists()


def test_a_copy_names_its_own_schema_and_nothing_else_changes(original, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(original, copy)
    assert settle_in(str(copy)) == 1
    assert named(copy) == [f"{copy}/{SCHEMA}"]
    assert not (metadata(copy).parent / ".0.crc").exists()  # of the old text: Spark would refuse the new one
    assert metadata(copy).read_text().replace(f"{copy}/", f"file:{original}/") == metadata(original).read_text()
    assert settle_in(str(copy)) == 0


def test_readers_change_nothing_and_say_what_mends_it(original, tmp_path):
    copy = tmp_path / "a copy"
    shutil.copytree(original, copy)
    check_settled(str(copy))  # the original is still there, and Spark reads it
    shutil.rmtree(original)
    before = metadata(copy).read_bytes()
    with pytest.raises(StateUnavailable, match="copied or moved") as error:
        check_settled(str(copy))
    assert error.value.command.startswith(f"rewind restore '{copy}' <")  # a shell reads it as one word
    assert metadata(copy).read_bytes() == before
    settle_in(str(copy))
    check_settled(str(copy))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "v2",
        "v2\n",
        'v2\n{"operatorInfo"',
        "v2\n[]",
        "v2\n{}",
        'v2\n{"stateStoreInfo": [1]}',
        'v2\n{"stateStoreInfo": [{"stateSchemaFilePaths": null}]}',
        'v2\n{"stateStoreInfo": [{"stateSchemaFilePaths": [1]}]}',
    ],
)
def test_a_damaged_file_is_named_and_nothing_else_is_to_be_put_back(original, content):
    metadata(original).write_text(content)
    for use in (settle_in, check_settled):
        with pytest.raises(PointerDamaged) as caught:
            use(str(original))
        assert caught.value.where.endswith(str(metadata(original)))
        assert ".0.crc" in caught.value.command
        assert "leave the rest" in caught.value.command


def test_a_file_that_a_running_query_has_let_go_of_is_passed_over(original, monkeypatch):
    monkeypatch.setattr(LocalFiles, "read", lambda *_: (_ for _ in ()).throw(FileNotFoundError("gone")))
    check_settled(str(original))


def test_another_version_is_left_to_spark(original):
    metadata(original).write_text("v3\nwhatever")
    assert settle_in(str(original)) == 0


def test_a_copy_without_the_schema_is_left_to_spark(original, tmp_path):
    """Spark names the missing file; pointing at a file that is not there would hide where it was."""
    copy = tmp_path / "copy"
    shutil.copytree(original, copy)
    (copy / SCHEMA).unlink()
    assert settle_in(str(copy)) == 0
    assert named(copy) == [f"file:{original}/{SCHEMA}"]


def test_metadata_of_another_version_is_left_alone(original, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(original, copy)
    metadata(copy).write_text("v3\nnobody knows")
    assert settle_in(str(copy)) == 0
    assert metadata(copy).read_text() == "v3\nnobody knows"


def manifest(place: Path, query: str, changelog: str = "kafka://h:1/log") -> Manifest:
    return Manifest(1, (0,), {"query": query, "changelog": changelog, "place": str(place)})


def test_a_copy_does_not_share_a_changelog_with_its_original_as_long_as_that_is_there(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    stored = manifest(one, "q")
    write_manifest(str(one), stored)
    write_manifest(str(two), stored)  # copied: it says where it was
    check_alone(str(one), stored, "kafka://h:1/log")
    check_alone(str(one), None, "kafka://h:1/log")
    with pytest.raises(ManifestMismatch, match="the checkpoint is a copy") as caught:
        check_alone(str(two), stored, "kafka://h:1/log")
    assert str(one) in caught.value.why
    check_alone(str(two), stored, "kafka://h:1/another")
    beside = manifest(one, "q", "rewind/changelog")
    check_alone(str(two), beside, "rewind/changelog")  # copied with it
    write_manifest(str(one), manifest(one, "another query took the place"))
    check_alone(str(two), stored, "kafka://h:1/log")
    shutil.rmtree(one)
    check_alone(str(two), stored, "kafka://h:1/log")  # moved


def test_a_copy_that_ran_with_a_changelog_of_its_own_may_not_take_its_originals_later(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    stored = manifest(one, "q")
    write_manifest(str(one), stored)
    places = check_alone(str(two), stored, "kafka://h:1/own")
    assert places == [str(one)]
    entries = {"query": "q", "changelog": "kafka://h:1/own", "place": str(two), "places": places}
    second = Manifest(1, (0,), entries)
    with pytest.raises(ManifestMismatch, match="the checkpoint is a copy"):
        check_alone(str(two), second, "kafka://h:1/log")
    assert check_alone(str(two), second, "kafka://h:1/own") == [str(one)]
    third = tmp_path / "three"  # a copy of the copy
    assert check_alone(str(third), second, "kafka://h:1/another") == [str(one)]
    write_manifest(str(two), second)
    assert check_alone(str(third), second, "kafka://h:1/another") == [str(one), str(two)]
    shutil.rmtree(one)
    assert check_alone(str(two), second, "kafka://h:1/log") == [], "it was moved"


def test_an_original_that_does_not_answer_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    stored = manifest(one, "q")
    write_manifest(str(one), stored)

    def refuse(*_: object) -> None:
        raise StorageFailed("it does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(relocation, "read_manifest", refuse)
        places = check_alone(str(two), stored, "kafka://h:1/log")
    assert places == [str(one)]
    entries = {"query": "q", "changelog": "kafka://h:1/log", "place": str(two), "places": places}
    with pytest.raises(ManifestMismatch, match="the checkpoint is a copy"):
        check_alone(str(two), Manifest(1, (0,), entries), "kafka://h:1/log")


def test_a_checkpoint_that_is_reached_by_another_path_is_no_copy(tmp_path: Path) -> None:
    """A link, a bind mount, a second mount of one share: to delete the original would be to delete the only one."""
    one, two = tmp_path / "one", tmp_path / "two"
    stored = manifest(one / "c", "q")
    write_manifest(str(one / "c"), stored)
    two.symlink_to(one)
    for place in (two / "c", f"file://{two}/c"):
        assert check_alone(str(place), stored, "kafka://h:1/log") == []
        assert originals(str(place), stored) == {}


def test_where_the_changelog_lies_beside_no_other_place_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be on a filesystem that was switched off: each start would wait for it."""
    places = [f"hdfs://gone/{number}" for number in range(40)]
    entries = {"query": "q", "changelog": "rewind/changelog", "place": places[-1], "places": places[:-1]}
    monkeypatch.setattr(relocation, "read_manifest", None)
    monkeypatch.setattr(relocation, "is_same", None)
    found = check_alone(str(tmp_path / "here"), Manifest(1, (0,), entries), "rewind/changelog")
    assert found == places[-relocation.MAX_PLACES :]
