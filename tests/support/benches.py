"""Run quick forms of the benchmarks and read what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import figures

ROOT = Path(__file__).parent.parent.parent


def run_quick(names: str, results: Path, environment: Mapping[str, str] | None = None) -> dict[str, list[Any]]:
    """Run benchmarks, which check what they computed; give the rows of each, with a line in the table of figures."""
    command = [sys.executable, "-m", "bench", "--quick", "--only", names, "--results", str(results)]
    told = results.parent / "told.txt"
    with told.open("w") as out:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYSPARK_PYTHON": sys.executable, **(environment or {})},
            stdout=out, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    assert done.returncode == 0, told.read_text()[-8000:]
    assert sorted(path.name for path in results.iterdir()) == sorted(
        f"{name.replace('_', '-')}-quick.json" for name in names.split(",")
    )
    lines = figures.table(results, "-quick")
    for name in names.split(","):
        assert any(f"`python -m bench.{name} --quick`" in line for line in lines), lines
    files = {path.stem.removesuffix("-quick"): path for path in results.iterdir()}
    return {name: json.loads(path.read_text())["rows"] for name, path in files.items()}
