"""What a filesystem refuses has a name, with the place and what to do; what is missing or there already is no error."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from backend.errors import RewindError, StorageFailed
from backend.store.storage import storage
from recovery.files import open_files


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "no room"),
        (errno.EDQUOT, "no room"),
        (errno.EROFS, "does not let this process write"),
        (errno.EACCES, "does not let this process write"),
        (errno.EISDIR, "a file lies where a directory must be, or the reverse"),
        (errno.ENOTDIR, "a file lies where a directory must be, or the reverse"),
        (errno.EIO, "a disk or filesystem failed"),
    ],
)
def test_what_it_refuses_is_named(number: int, says: str) -> None:
    with pytest.raises(StorageFailed, match=says) as caught, storage("/there/x"):
        raise OSError(number, os.strerror(number))
    assert caught.value.where == "/there/x"
    assert os.strerror(number) in caught.value.why
    assert "start the query again" in caught.value.command


@pytest.mark.parametrize("kind", [FileNotFoundError, FileExistsError])
def test_a_missing_file_is_the_callers_to_judge(kind: type[OSError]) -> None:
    with pytest.raises(kind), storage("x"):
        raise kind


def test_a_directory_where_a_file_must_be(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(StorageFailed, match="a file lies where a directory must be") as caught:
        files.read("a")
    assert caught.value.where == f"{tmp_path}/a"
    with pytest.raises(StorageFailed, match="a file lies where a directory must be"):
        files.write("a", [b"x"])
    assert not [path for path in tmp_path.iterdir() if path.name != "a"]
    (tmp_path / "b").write_text("")
    with pytest.raises(RewindError, match="a file lies where a directory must be"):
        files.write("b/c", [json.dumps(1).encode()])
