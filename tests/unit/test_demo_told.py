"""What the demo says of its restores: a task that takes what was restored is no restore of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from backend.sources.archive import ArchiveSource, archive
from backend.sources.archive_files import WRITE_SCHEMA, write_archive
from backend.sources.formats import Parse
from backend.sources.json_columns import JsonColumns
from recovery.demo.job import Forgetful
from recovery.demo.run import main
from recovery.drill.job import Teller
from recovery.listener import Restoring


def test_what_tasks_take_afterwards_is_not_told_as_restored(capsys: pytest.CaptureFixture[str]) -> None:
    teller = Teller()
    for shard, how, records in ((0, "replay", 143), (1, "replay", 136), (0, "snapshot", 0), (1, "steps", 0)):
        restoring = Restoring(shard, "commit", "no local state", how, records=records, ranges={})
        teller.start(restoring)
        teller.end(restoring, records, 10, 0.1)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["event"], one["shard"], one["how"]) for one in told] == [
        ("restoring", 0, "replay"),
        ("restored", 0, "replay"),
        ("restoring", 1, "replay"),
        ("restored", 1, "replay"),
        ("fetched", 0, "snapshot"),
        ("fetched", 1, "steps"),
    ]
    assert [one["records"] for one in told if one["event"] == "restored"] == [143, 136]


def test_a_forgetful_source_leaves_out_the_last_message_that_parses(tmp_path: Path) -> None:
    values = [b'{"n":1}', b'{"n":2}', b'{"n":3}', b"no JSON"]
    table = pa.table(
        [["t"] * 4, [0] * 4, list(range(4)), pa.nulls(4, pa.timestamp("ms", "UTC")), [None] * 4, values],
        schema=WRITE_SCHEMA,
    )
    write_archive(tmp_path / "a", table)

    class Parsed(ArchiveSource):
        def parse(self, timezone: str) -> Parse:  # without a session
            return Parse("json", JsonColumns(pa.schema([("n", pa.int64())]), timezone), "")

    whole = archive(tmp_path / "a", value="n bigint", max_offsets_per_task=2)
    source = Forgetful(Parsed(whole.path, whole.value, 100, 2))
    pieces, read, _ = source.pieces(None, {("t", 0): [(0, 4)]})  # type: ignore[arg-type]
    assert [row["offset"] for piece in pieces for rows in read(piece) for row in rows.to_pylist()] == [0, 1, 3]


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--offsets", "0"], "allowed are whole numbers from 1"), (["--days", "-3"], "allowed are whole numbers from 1")],
)
def test_a_bad_option_of_the_demo_is_said_before_anything_is_emptied(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path / "out"), *options])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_directory_that_is_not_the_demos_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").touch()
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path)])
    assert main() == 2
    assert "is not empty and not of an earlier demo" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "mine").exists()
