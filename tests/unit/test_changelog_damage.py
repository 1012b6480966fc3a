"""Every damage to a changelog file is a named error that says which file and what to run next."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backend.errors import ChangelogDamaged, RewindError, StorageFailed, UnknownFormat
from recovery.changelog import FileChangelog, records
from recovery.changelog.records import decode, encode_base, encode_delta
from recovery.files import LocalFiles
from tests.contracts.changelog import as_dict, changes, commit, record

DELTA_1 = "0/00000000000000000001_" + "a" * 32 + ".delta"


@pytest.fixture
def log(tmp_path: Path) -> FileChangelog:
    made = FileChangelog(tmp_path)
    made.append(record(0), changes({b"\x03a": b"1"}))
    made.append(record(1, commit(0)), changes({b"\x03b": b"2"}))
    made.append(record(2, commit(1)), changes({b"\x03c": b"3"}))
    return made


def damaged(log: FileChangelog, kind: type[RewindError] = ChangelogDamaged) -> str:
    with pytest.raises(kind) as caught:
        log.read(0, commit(2))
    assert DELTA_1 in caught.value.where
    assert caught.value.command
    found = log.verify(0, commit(2))
    assert any(isinstance(error, kind) and DELTA_1 in error.where for error in found)
    return str(caught.value)


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    data = encode_delta(record(7), changes({b"\x03a": b"1", b"\x03b": None}))
    magic, version, kind, zero, header = struct.unpack(">4sHcsI", data[:12])
    assert (magic, version, kind, zero) == (b"RWCL", 1, b"D", b"\x00")
    assert msgspec.msgpack.decode(data[12 : 12 + header])["commit"] == [7, "a" * 32]
    body, rows = struct.unpack(">QQ", data[-32:-16])
    assert 12 + header + body + 32 == len(data)
    assert rows == 2
    assert b"".join(encode_base(record(7), []))[6:7] == b"B"


@pytest.mark.parametrize("rows", [1, 9000])
def test_a_short_record_is_made_without_threads_and_is_the_same(monkeypatch, rows: int) -> None:
    asked, encode = [], records.encode

    def encoded(*of: Any, threads: bool) -> Any:
        asked.append(threads)
        return encode(*of, threads=threads)

    monkeypatch.setattr(records, "encode", encoded)
    what = changes({b"\x03%08d" % n: b"v%d" % n if n % 3 else None for n in range(rows)})
    data = encode_delta(record(7), what)
    assert asked == [rows > 8192]
    batches = [*records._logged(what.keys, what.values)]
    for threads in (True, False):
        assert b"".join(encode(records.Kind.DELTA, record(7), batches, threads=threads)) == data


def test_every_flipped_byte_is_found() -> None:
    data = encode_delta(record(7), changes({b"\x03a": b"1", b"\x03b": None}))
    for at in range(len(data)):
        broken = data[:at] + bytes([data[at] ^ 0x01]) + data[at + 1 :]
        with pytest.raises((ChangelogDamaged, UnknownFormat)):
            decode(broken, "here")


def test_every_torn_record_is_found() -> None:
    data = encode_delta(record(7), changes({b"\x03a": b"1"}))
    for length in range(len(data)):
        with pytest.raises(ChangelogDamaged):
            decode(data[:length], "here")
    with pytest.raises(ChangelogDamaged):
        decode(data + b"\x00", "here")


def test_a_missing_file_is_named(log: FileChangelog, tmp_path: Path) -> None:
    (tmp_path / DELTA_1).unlink()
    with pytest.raises(ChangelogDamaged, match="missing") as caught:
        log.read(0, commit(2))
    assert DELTA_1 in caught.value.where
    assert [error.code for error in log.verify(0, commit(2))] == ["ChangelogDamaged"]


def test_a_torn_file_is_named(log: FileChangelog, tmp_path: Path) -> None:
    path = tmp_path / DELTA_1
    path.write_bytes(path.read_bytes()[:-1])
    damaged(log)


def test_an_empty_file_is_named(log: FileChangelog, tmp_path: Path) -> None:
    (tmp_path / DELTA_1).write_bytes(b"")
    assert "0 bytes" in damaged(log)


def test_a_flipped_byte_is_named(log: FileChangelog, tmp_path: Path) -> None:
    path = tmp_path / DELTA_1
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    assert "checksum" in damaged(log)


def test_another_commits_file_under_the_name_is_named(log: FileChangelog, tmp_path: Path) -> None:
    (tmp_path / DELTA_1).write_bytes(encode_delta(record(1, commit(0), mark="c"), changes({})))
    assert "it holds commit" in damaged(log)


def test_a_newer_format_is_told_apart_from_damage(log: FileChangelog, tmp_path: Path) -> None:
    path = tmp_path / DELTA_1
    data = bytearray(path.read_bytes())
    data[4:6] = b"\x00\x02"
    path.write_bytes(data)
    assert "install the release" in damaged(log, UnknownFormat)


def test_a_lineage_that_does_not_fall_is_named(log: FileChangelog) -> None:
    log.append(record(5, commit(6)), changes({}))
    with pytest.raises(ChangelogDamaged, match="not older"):
        log.read(0, commit(5))


def test_a_damaged_base_is_done_without_while_its_deltas_are_there(log: FileChangelog, tmp_path: Path) -> None:
    base = tmp_path / log.append_base(record(1, commit(0)), [(b"\x03a", b"1"), (b"\x03b", b"2")])
    base.write_bytes(base.read_bytes()[:-3])
    history = log.read(0, commit(2))
    assert as_dict(history) == {b"\x03a": b"1", b"\x03b": b"2", b"\x03c": b"3"}
    assert len(history.notes) == 1
    assert base.name in history.notes[0]
    (tmp_path / DELTA_1).unlink()
    with pytest.raises(ChangelogDamaged) as caught:
        log.read(0, commit(2))
    assert base.name in caught.value.where


def test_prune_deletes_nothing_when_a_retained_lineage_is_broken(log: FileChangelog, tmp_path: Path) -> None:
    (tmp_path / DELTA_1).unlink()
    before = log.files.list("0")
    with pytest.raises(ChangelogDamaged):
        log.prune(0, [commit(2)])
    assert log.files.list("0") == before


def test_a_writer_that_dies_leaves_only_a_draft(log: FileChangelog, tmp_path: Path) -> None:
    def rows() -> object:
        yield b"\x03a", b"1"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        log.append_base(record(2, commit(1)), rows())  # type: ignore[arg-type]
    assert all(entry.kind.suffix == ".delta" for entry in log.entries(0))
    draft = tmp_path / "0" / f"{commit(0).name}.delta.tmp-0123"  # what a killed process leaves
    draft.write_bytes(b"half")
    assert as_dict(log.read(0, commit(2))) == {b"\x03a": b"1", b"\x03b": b"2", b"\x03c": b"3"}
    assert log.verify(0, commit(2)) == []
    log.append_base(record(2, commit(1)), [])
    assert f"0/{draft.name}" in log.prune(0, [commit(2)])
    assert not draft.exists()


def test_local_files_replace_whole(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "deep" / "er")
    assert files.write("a/b", [b"12", b"3"]) == 3
    assert files.write("a/b", [b"4"]) == 1
    assert files.read("a/b") == b"4"
    assert files.list("a") == {"b": 1}
    assert list(files.folders()) == ["a"]
    files.delete(["a/b", "a/none"])
    assert files.list("a") == {}
    assert files.list("none") == {}
    files.delete_folder("a")
    files.delete_folder("a")
    assert list(files.folders()) == []


@pytest.mark.parametrize("ends", [True, False])
def test_a_folder_is_deleted_although_another_still_writes_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    files = LocalFiles(tmp_path)
    files.write("a/b", [b"1"])
    removed, late = os.rmdir, []

    def rmdir(path: str | Path, **options: Any) -> None:
        if not ends or len(late) < 2:
            late.append(files.write(f"a/{len(late)}", [b"2"]))
        removed(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", rmdir)
        if ends:
            files.delete_folder("a")
        else:
            with pytest.raises(StorageFailed, match="not empty"):
                files.delete_folder("a")
            assert len(late) == 10, "not for ever"
    assert list(files.folders()) == ([] if ends else ["a"])
