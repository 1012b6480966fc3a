"""Scratch directories: gone at the end, and gone after a SIGKILL once the next one comes; never while they are used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from recovery.commit.scratch import scratch_directory, sweep

USER = """
import sys
from pathlib import Path
from recovery.commit.scratch import scratch_directory

with scratch_directory(Path(sys.argv[1]), "copy") as path:
    (path / "rows.sst").write_bytes(b"x")
    print(path, flush=True)
    sys.stdin.read()
"""


def test_a_scratch_directory_is_gone_at_the_end(tmp_path: Path) -> None:
    with scratch_directory(tmp_path / "home", "copy") as path:
        (path / "rows.sst").write_bytes(b"x")
        assert path.parent == tmp_path / "home"
        assert path.stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "home").iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_and_nothing_else(tmp_path: Path) -> None:
    user = subprocess.Popen(
        [sys.executable, "-c", USER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert user.stdout is not None and user.stdin is not None
    left = Path(user.stdout.readline().strip())
    (tmp_path / "other-1").mkdir()
    with scratch_directory(tmp_path, "copy") as mine:
        assert left.is_dir()
        assert sweep(tmp_path, "copy") == []
        user.kill()
        user.wait()
        assert (left / "rows.sst").exists()
        assert sweep(tmp_path, "copy") == [left]
        assert mine.is_dir()
    user.stdin.close()
    user.stdout.close()
    assert [path.name for path in tmp_path.iterdir()] == ["other-1"]
