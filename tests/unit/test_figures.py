"""The table of figures in docs/figures.md is what the files of the benchmarks say."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

import bench.figures
from bench.figures import BEGIN, END, FILES, PAGE, PAGES, replaced, table, table_beside, table_of_sinks

NAMES = {
    "windows": {"case": "median", "keys": 1000, "messages per micro-batch": 500_000, "ours ms": 812.0,
                "Spark / ours": 0.949, "Spark's Python / ours": 7.31, "empty operator ms": 640.4},
    "growth": {"messages kept": 10_000_000, "messages per micro-batch": 25_000, "CPU us per message": 4.2,
               "peak MB": 180.0},
}  # fmt: skip


def write(directory: Path, name: str, *rows: dict[str, Any], **more: str) -> None:
    (directory / f"{name}.json").write_text(json.dumps({"title": "", "rows": rows, **more}))


def test_the_pages_have_the_tables_that_the_files_give() -> None:
    for page, lines in PAGES.items():
        text = page.read_text()
        assert replaced(text, lines()) == text, "run python -m bench.figures"


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


def test_a_death_costs_what_lies_above_an_undisturbed_micro_batch(tmp_path: Path) -> None:
    old = {"locality wait": "0s", "case": "tumbling", "keys": 1000, "messages before the death": 300_000,
           "ours min-max": "1.7-2.6", "Spark's own s": 1.2, "Spark min-max": "0.9-1.5",
           "ours / Spark": 1.76}  # fmt: skip
    new = {**old, "who": "ours, standby=1", "ours above s": 1.34, "ours above min-max": "0.7-1.6",
           "Spark above s": 0.61, "Spark above min-max": "0.3-0.9"}  # fmt: skip
    write(tmp_path, "failover", old, new, command="python -m bench.failover")
    first, second = table(tmp_path)[2:]
    windows = "tumbling windows of 10 s, 1,000 keys, 300,000 messages before, `spark.locality.wait` 0s"
    until = "1.76 times Spark's 1.2 s until the micro-batch is committed (ours 1.7-2.6, Spark's 0.9-1.5)"
    command = "`python -m bench.failover` |"
    assert first == f"| an executor dies with its disk: {windows} | Spark's own store | {until} | {command}"
    assert second == (
        f"| an executor dies with its disk, and a standby has copies: {windows} | Spark's own store | {until}; above an"
        f" undisturbed micro-batch: ours 1.3 s (0.7-1.6), Spark's 0.6 s (0.3-0.9) | {command}"
    )


def test_the_readme_has_sparks_own_beside_each_line(tmp_path: Path) -> None:
    write(tmp_path, "windows", {**NAMES["windows"], "Spark's own ms": 1_624.0})
    rates = {"Rewind": 600_000.0, "Spark's own windows": 400_000.0, "Quix Streams": 20_000.0}
    write(tmp_path, "kafka", *({"what": "count", "who": who, "messages/s": rate} for who, rate in rates.items()))
    names = ("ours, trigger 0 s", "ours to Kafka, trigger 0 s", "Spark's own, append to files",
             "Spark's own, update to Kafka")  # fmt: skip
    late = zip(names, (200.0, 250.0, 500.0, 200.0), strict=True)
    write(tmp_path, "latency", *({"who": who, "p50 ms": p50, "p99 ms": 2 * p50} for who, p50 in late))
    joins = (("ours", 1_000.0), ("Spark's own", 5_000.0), ("Spark's own, state format 4", 3_000.0))
    write(tmp_path, "join", *({"join": name, "ms per micro-batch": ms} for name, ms in joins))
    row = {"ours ms": 200.0, "Spark's own ms": 100.0, "until committed: ours ms": 3_000.0,
           "until committed: Spark's own ms": 1_500.0}  # fmt: skip
    write(tmp_path, "fixed", {"shards": 1, **row}, {"shards": 2, **row, "ours ms": 400.0})
    death = {"locality wait": "3s", "case": "tumbling", "ours s": 1.04, "Spark's own s": 5.2}
    write(tmp_path, "failover", {**death, "who": "ours"}, {**death, "who": "ours, standby=1"})
    until = "a window's end to its readable row, p50 / p99"
    assert table_beside(tmp_path) == [
        "| what | Rewind | Spark's own | times as fast |",
        "|---|---|---|---|",
        "| median of tumbling windows of 10 s, every message kept, 1,000 keys, 500,000 messages per micro-batch"
        " | 812 ms | 1,624 ms | 2.00 |",
        "| JSON from Kafka to windows: count | 600,000 messages/s | 400,000 messages/s | 1.50 |",
        f"| {until}, into files | 200 / 400 ms | 500 / 1,000 ms | 2.50 / 2.50 |",
        f"| {until}, into Kafka, beside update mode | 250 / 500 ms | 200 / 400 ms | 0.80 / 0.80 |",
        "| an interval join | 1,000 ms | 5,000 ms | 5.00 |",
        "| an interval join, beside state format 4 | 1,000 ms | 3,000 ms | 3.00 |",
        "| a micro-batch of 200 messages, 1 / 2 shards | 200 / 400 ms | 100 / 100 ms | 0.50 / 0.25 |",
        "| `start()` to the first commit, 1 / 2 shards | 3,000 / 3,000 ms | 1,500 / 1,500 ms | 0.50 / 0.50 |",
        "| an executor dies with its disk: tumbling windows of 10 s, until committed, `spark.locality.wait` 3s"
        " | 1.0 s | 5.2 s | 5.00 |",
    ]


def test_the_sinks_have_a_table_of_their_own(tmp_path: Path) -> None:
    rows = [
        {"sink": what, "rows per micro-batch": 100_000, "rows/s": rate, "ms per micro-batch": 1e8 / rate}
        for what, rate in (("nothing", 250_000), ("Parquet, local", 200_000), ("SQL, SQLite, log", 48_123))
    ]
    assert table_of_sinks(tmp_path) == []
    write(tmp_path, "sinks", *rows)
    assert table_of_sinks(tmp_path)[2:] == [
        "| nothing | 250,000 | 400 |",
        "| Parquet, local | 200,000 | 500 |",
        "| SQL, SQLite, log | 48,000 | 2,078 |",
    ]
    assert table(tmp_path)[2:] == [
        "| a micro-batch of 100,000 results through a sink | the same rows, made and thrown away"
        " | 200,000 rows a second (Parquet, local) to 48,000 (SQL, SQLite, log); thrown away: 250,000"
        " | `python -m bench.sinks` |"
    ]


def test_only_what_lies_between_the_markers_is_replaced() -> None:
    assert replaced(f"a\n{BEGIN}\nold\n{END}\nb\n", ["new"]) == f"a\n{BEGIN}\n\nnew\n\n{END}\nb\n"
    for wrong in ("a", f"{END}{BEGIN}"):
        with pytest.raises(ValueError, match="figures"):
            replaced(wrong, [])


def test_examples() -> None:
    assert doctest.testmod(bench.figures).failed == 0


def test_no_file_of_results_is_unknown_or_of_a_quick_run() -> None:
    found = {path.stem for path in (PAGE.parent.parent / "bench" / "results").glob("*.json")}
    assert {name for name in found if not name.endswith("-quick")} <= FILES.keys()
