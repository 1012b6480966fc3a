"""The benchmarks' options and what they have in common; `make bench-quick` runs their small forms, where each checks
what it computed against its peer.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from threading import Barrier

import pytest

import bench
from bench import __main__ as every
from bench.__main__ import BENCHES, LONGEST, SHARED
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
    assert sorted(LONGEST) == sorted(set(BENCHES) - SHARED)


def test_the_quick_form_runs_each_once_on_two_lanes_and_names_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    both, ran = Barrier(2), []

    def run(name: str, _arguments: object, *, whole: bool) -> int:
        assert whole
        ran.append(name)
        if name in LONGEST[:2]:
            both.wait(60)  # each has begun while the other one ran
        return name in LONGEST[1:3]

    def run_here(names: list[str], _arguments: object) -> list[str]:
        ran.extend(names)
        return names[:1]

    monkeypatch.setattr(every, "run", run)
    monkeypatch.setattr(every, "run_here", run_here)
    failed = every.run_quick(["join", "fixed"], LONGEST, [])
    assert sorted(ran) == sorted(["join", "fixed", *LONGEST])
    assert sorted(failed) == sorted(["join", *LONGEST[1:3]])


def test_the_fixed_cost_falls_out_of_the_difference_of_two_restores() -> None:
    small = {"messages": 1_000_000, "s to restore": 3.0}
    large = {"messages": 5_000_000, "s to restore": 11.0}
    assert without_fixed(small, large).startswith("without the fixed cost of 1.0 s: 500,000 messages/s")
    assert without_fixed(large, large).startswith("too few")
