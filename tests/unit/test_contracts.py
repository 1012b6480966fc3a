"""The import contracts name every module of the core, so that a new one cannot slip past them."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_contract_of_the_core_names_every_module():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = set(contracts[0]["source_modules"])
    outside = {"spark", "sources", "sinks", "kafka_client"}
    there = {
        f"backend.{path.stem}"
        for path in (ROOT / "backend").iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists()) and path.stem not in {"__init__", *outside}
    }
    assert named == there


def test_test_modules_have_names_of_their_own():
    """Without packages pytest imports test modules by their base name: two of one name stop the whole run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
