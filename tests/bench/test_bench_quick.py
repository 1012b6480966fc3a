"""The benchmarks' options and what they have in common; `make bench-quick` runs their small forms, where each checks
what it computed against its peer.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import bench
from bench.__main__ import BENCHES, SHARED
from bench.restore import without_fixed

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


def test_the_fixed_cost_falls_out_of_the_difference_of_two_restores() -> None:
    small = {"messages": 1_000_000, "s to restore": 3.0}
    large = {"messages": 5_000_000, "s to restore": 11.0}
    assert without_fixed(small, large).startswith("without the fixed cost of 1.0 s: 500,000 messages/s")
    assert without_fixed(large, large).startswith("too few")
