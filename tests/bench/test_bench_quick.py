"""The benchmarks' options and what they have in common; `make bench-quick` runs their small forms, where each checks
what it computed against its peer.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest

import bench
from bench import __main__ as every
from bench.__main__ import BENCHES, LONGEST, ON_A_BROKER, SHARED
from bench.restore import without_fixed

NO_BENCHES = {"__init__", "__main__", "data", "figures", "floor", "quix_peer", "session", "table", "warm"}


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
    others = [name for unit in LONGEST for name in unit.split(",")]
    assert sorted(others) == sorted(set(BENCHES) - SHARED)
    assert set(others) > ON_A_BROKER


def test_one_broker_is_there_for_all_that_need_one_and_given_to_their_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[object] = []

    def ran(command: list[str], env: dict[str, str], **_options: object) -> SimpleNamespace:
        assert env is not os.environ
        told.append((command[2:], env.get("KAFKA_BOOTSTRAP_SERVERS")))
        return SimpleNamespace(returncode=0)

    broker = SimpleNamespace(settings=SimpleNamespace(servers="one:1"))
    monkeypatch.delenv("KAFKA_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.setattr(every, "open_broker", lambda: (broker, lambda: told.append("closed")))
    monkeypatch.setattr(every.subprocess, "run", ran)
    common = ["--results", str(tmp_path), "--quick"]
    monkeypatch.setattr("sys.argv", ["bench", "--only", "latency,stores,kafka", *common])
    assert every.main() == 0
    monkeypatch.setattr("sys.argv", ["bench", "--only", "panes", *common])
    assert every.main() == 0
    assert sorted(told[:2]) == [
        (["bench", "--together", "--only", "kafka,latency", *common], "one:1"),
        (["bench.stores", *common], "one:1"),
    ]
    assert told[2:] == ["closed", (["bench.panes", *common], None)]


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
    small = {"what": "typed", "messages": 1_000_000, "s to restore": 3.0}
    large = {"what": "typed", "messages": 5_000_000, "s to restore": 11.0}
    assert without_fixed(small, large).startswith("typed without the fixed cost of 1.0 s: 500,000 messages/s")
    assert without_fixed(large, large).startswith("too few")
