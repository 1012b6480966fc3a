"""What a drill does to a database must be damage that can be noticed."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backend.rocks import RocksStore
from backend.store.protocol import Changes
from recovery.commit.pointer import Commit
from recovery.drill import damage as drill_damage
from recovery.drill.job import CHECKPOINT, LOCAL


@pytest.fixture
def out(tmp_path: Path) -> Path:
    database = tmp_path / LOCAL / "query" / "0" / "generation" / "db"
    database.parent.mkdir(parents=True)
    rng = random.Random(1)
    with RocksStore.open(database) as store:
        keys = [b"\x03%04d" % number for number in range(2000)]
        store.confirm(store.stage(Changes(keys, [rng.randbytes(50) for _ in keys]), tmp_path / "staged.sst"))
        list(store.scan(b"", None))  # what is in the cache is of the sound file
    return tmp_path


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_byte_is_one_that_a_check_finds(out: Path, seed: int) -> None:
    told, shards, _ = drill_damage.corrupt_database(out, random.Random(seed))
    assert "flipped; a check names it: StateCorrupted" in told
    assert shards == (0,)


def test_a_file_that_no_read_touches_is_put_back_and_another_one_damaged(out: Path) -> None:
    (database,) = out.glob(f"{LOCAL}/*/*/*/db")
    live = max(database.glob("*.sst"), key=lambda file: file.stat().st_size)
    left = database / "999999.sst"  # of a process that was killed before it deleted what it had merged
    left.write_bytes(random.Random(2).randbytes(2 * live.stat().st_size))
    before, length = left.read_bytes(), live.stat().st_size
    told, *_ = drill_damage.corrupt_database(out, random.Random(0))
    assert f"of {live} flipped; a check names it: StateCorrupted" in told
    assert left.read_bytes() == before
    assert live.stat().st_size == length


def test_a_damage_that_nobody_can_notice_is_no_drill(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill_damage, "_flip", lambda *_: "nothing flipped")
    with pytest.raises(ValueError, match="does not find it"):
        drill_damage.corrupt_database(out, random.Random(0))


class Log:
    """A changelog of one shard, whose newest commit builds on all others."""

    shards = (0,)
    changelog_uri = "kafka://here:9092/log"
    commits = tuple(Commit(version, f"{version:032x}") for version in range(6))

    @property
    def changelog(self) -> Any:
        return self

    def committed(self, shard: int) -> Commit:
        return self.commits[-1]

    def read(self, shard: int, commit: Commit) -> Any:
        return SimpleNamespace(record=SimpleNamespace(ancestors=self.commits[-2::-1]))


def test_a_record_of_the_changelog_is_damaged_that_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill_damage, "_checkpoint", lambda out: Log())
    with pytest.raises(ValueError, match="the changelog is at kafka://here:9092/log"):
        drill_damage.corrupt_changelog(tmp_path, random.Random(0))
    folder = tmp_path / CHECKPOINT / "rewind" / "changelog" / "0"
    folder.mkdir(parents=True)
    for commit in Log.commits[2:]:
        (folder / f"{commit.name}.delta").write_bytes(b"record")
    (folder / f"{Log.commits[3].name}.base").write_bytes(b"base")
    chosen = {drill_damage._record(tmp_path, random.Random(seed), newest=False) for seed in range(40)}
    assert chosen == {folder / f"{commit.name}.delta" for commit in Log.commits[4:]}
    (folder / f"{Log.commits[5].name}.base").write_bytes(b"base")
    with pytest.raises(ValueError, match="try another seed"):
        drill_damage.corrupt_changelog(tmp_path, random.Random(0))
