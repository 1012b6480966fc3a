"""The benchmarks as tests of correctness: each checks what it computed against its peer, in its small form.

No time is looked at. Run here are those that need no more than a local session; `changelog_kafka` is in `tests/kafka`.
Only the options are tested of `failover` (starts a cluster), `snapshots` (four stores for each kind of window),
`latency` (takes its windows' own time), `sinks` (starts a broker), and `kafka` (needs Quix Streams): `make bench-quick`
runs them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import bench
from bench.__main__ import BENCHES, SHARED
from bench.restore import without_fixed
from tests.support.benches import run_quick

NO_BENCHES = {"__init__", "__main__", "data", "figures", "floor", "quix_peer", "session", "table"}


@pytest.mark.parametrize("name", BENCHES)
def test_it_can_be_imported_and_tells_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(f"bench.{name}").main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: python -m bench.{name} ")
    assert "--quick" in told
    assert "--results" in told


def test_every_bench_is_run_by_make_bench() -> None:
    modules = {path.stem for path in Path(bench.__path__[0]).glob("*.py")}
    assert modules - NO_BENCHES == set(BENCHES)
    assert set(BENCHES) > SHARED


def test_without_spark(tmp_path: Path) -> None:
    rows = run_quick("stores,panes,growth", tmp_path / "out")
    assert len(rows["stores"]) > 20
    assert [row["results"] > 0 for row in rows["panes"]] == [True, True]
    grown = [(row["messages kept"], row["shards"]) for row in rows["growth"]]
    assert grown == [(25_000, 1), (100_000, 1), *((50_000, shards) for shards in (1, 2, 4, 8))]


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(900)
def test_on_spark_beside_sparks_own_operators(tmp_path: Path) -> None:
    rows = run_quick("fixed,windows,join,restore,beside", tmp_path / "out")
    assert [row["shards"] for row in rows["fixed"]] == [2]
    assert [row["case"] for row in rows["windows"]] == ["hopping", "median"]
    assert [bool(row["Spark's Python / ours"]) for row in rows["windows"]] == [False, True]
    assert [bool(row["empty operator ms"]) for row in rows["windows"]] == [True, False]
    assert [row["join"] for row in rows["join"]] == ["ours", "Spark's own", "Spark's own, state format 4"]
    assert [row["what"] for row in rows["restore"]] == ["JSON"]
    assert all(row["rows restored"] >= row["messages"] > 0 for row in rows["restore"])
    assert [row["query"] for row in rows["beside"]] == ["queues", "stops"]


def test_the_fixed_cost_falls_out_of_the_difference_of_two_restores() -> None:
    small = {"messages": 1_000_000, "s to restore": 3.0}
    large = {"messages": 5_000_000, "s to restore": 11.0}
    assert without_fixed(small, large).startswith("without the fixed cost of 1.0 s: 500,000 messages/s")
    assert without_fixed(large, large).startswith("too few")
