"""A start compares the changelog with the committed pointers: what it lost is mended from the state here, or named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend.errors import HistoryLost
from recovery.changelog import FileChangelog
from recovery.commit.pointer import Pointer
from recovery.restore import lineage
from recovery.restore.probe import Unusable
from tests.contracts.changelog import changes, commit, record


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "metadata").write_text(json.dumps({"id": "spark-query"}))
    return str(tmp_path)


@pytest.fixture
def log(tmp_path: Path) -> FileChangelog:
    made = FileChangelog(tmp_path / "log")
    for shard in (0, 1):
        made.append(record(4, shard=shard), changes({b"\x03a": b"1"}))
    return made


def check(monkeypatch: pytest.MonkeyPatch, checkpoint: str, log: FileChangelog, here: dict[int, Unusable]) -> Any:
    pointers = {
        shard: Pointer(shard, commit(4), None, 1, "", [], {}, f"{shard}/{commit(4).name}.delta") for shard in (0, 1)
    }
    probed: list[set[int]] = []

    def probe(_spark: Any, pointers: dict[int, Pointer], _make: Any) -> dict[int, Unusable]:
        probed.append(set(pointers))
        return {shard: found for shard, found in here.items() if shard in pointers}

    monkeypatch.setattr(lineage, "probe", probe)
    return lineage.check_lineage(None, checkpoint, log, pointers, lambda *_: None), probed  # type: ignore[arg-type]


def test_where_all_is_there_nobody_looks_at_the_state(monkeypatch, checkpoint, log, caplog):
    assert check(monkeypatch, checkpoint, log, {0: Unusable("gone"), 1: Unusable("gone")}) == ({}, [])
    assert caplog.text == ""


def test_what_the_changelog_lost_and_the_state_has_is_said(monkeypatch, checkpoint, log, caplog):
    log.files.delete_folder("1")
    lost, probed = check(monkeypatch, checkpoint, log, {0: Unusable("not asked for")})
    assert set(lost) == {1}
    assert probed == [{1}]
    assert "the changelog cannot give shard 1 back: its state is here" in caplog.text


def test_a_torn_record_is_a_lost_one_at_a_start(monkeypatch, checkpoint, log):
    name = f"0/{commit(4).name}.delta"
    log.files.write(name, [log.files.read(name)[:-3]])
    assert set(check(monkeypatch, checkpoint, log, {})[0]) == {0}


def test_what_neither_has_ends_the_start_by_name(monkeypatch, checkpoint, log):
    log.files.delete_folder("1")
    with pytest.raises(HistoryLost, match="the state itself is not here") as caught:
        check(monkeypatch, checkpoint, log, {1: Unusable("no database")})
    assert caught.value.where == "shard 1"
    assert "no database" in caught.value.why
    assert f"rewind reset {checkpoint}" in caught.value.command
