"""The table of figures in README.md is what the files of the benchmarks say."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

import bench.figures
from bench.figures import BEGIN, END, FILES, README, replaced, table

NAMES = {
    "windows": {"case": "median", "keys": 1000, "messages per micro-batch": 500_000, "ours ms": 812.0,
                "Spark / ours": 0.949, "Spark's Python / ours": 7.31, "empty operator ms": 640.4},
    "growth": {"messages kept": 10_000_000, "messages per micro-batch": 25_000, "CPU us per message": 4.2,
               "peak MB": 180.0},
}  # fmt: skip


def write(directory: Path, name: str, *rows: dict[str, Any], **more: str) -> None:
    (directory / f"{name}.json").write_text(json.dumps({"title": "", "rows": rows, **more}))


def test_the_readme_has_the_table_that_the_files_give() -> None:
    text = README.read_text()
    assert replaced(text, table()) == text, "run python -m bench.figures"


def test_a_file_that_is_not_there_has_no_line(tmp_path: Path) -> None:
    assert table(tmp_path) == ["| what | beside | figure | command |", "|---|---|---|---|"]


def test_lines_have_ratios_and_the_command_that_made_the_file(tmp_path: Path) -> None:
    write(tmp_path, "windows", NAMES["windows"], command="python -m bench.windows")
    fewest = {**NAMES["growth"], "messages kept": 100_000, "CPU us per message": 4.0, "peak MB": 170.0}
    one = {**NAMES["growth"], "messages per micro-batch": 200_000, "shards": 1, "CPU us per message": 2.0}
    eight = {**one, "shards": 8, "CPU us per message": 2.2}
    command = "python -m bench.growth --messages 10000000"
    write(tmp_path, "growth", fewest, NAMES["growth"], one, eight, command=command)
    assert table(tmp_path)[2:] == [
        "| median of tumbling windows of 10 s, every message kept, 1,000 keys, 500,000 messages per micro-batch"
        " | Spark's own windows, and its stateful Python API"
        " | Spark takes 0.95 times our 812 ms per micro-batch, its Python API 7.31 times; a Python operator that does"
        " nothing takes 640 ms | `python -m bench.windows` |",
        "| 10 million messages in retention | 100,000 of them | 1.05 times the CPU per new message,"
        " 180 MB at most instead of 170 | `python -m bench.growth --messages 10000000` |",
        "| 200,000 messages per micro-batch on 8 shards | on 1 | 1.10 times the CPU per message"
        " | `python -m bench.growth --messages 10000000` |",
    ]


def test_only_what_lies_between_the_markers_is_replaced() -> None:
    assert replaced(f"a\n{BEGIN}\nold\n{END}\nb\n", ["new"]) == f"a\n{BEGIN}\n\nnew\n\n{END}\nb\n"
    for wrong in ("a", f"{END}{BEGIN}"):
        with pytest.raises(ValueError, match="README"):
            replaced(wrong, [])


def test_examples() -> None:
    assert doctest.testmod(bench.figures).failed == 0


def test_no_file_of_results_is_unknown_or_of_a_quick_run() -> None:
    found = {path.stem for path in (README.parent / "bench" / "results").glob("*.json")}
    assert {name for name in found if not name.endswith("-quick")} <= FILES.keys()
