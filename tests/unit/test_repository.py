"""What a fresh clone relies on: locked dependencies that name no registry, and scripts that can be run."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def locked() -> set[str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines if "==" in line}


def test_every_dependency_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *extras["kafka"], *project["dependency-groups"]["dev"]]
    names = {re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", line)[0]).lower() for line in wanted}  # type: ignore[index]
    assert names - locked() == set()


def test_the_lock_names_no_host() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert not [line for line in lines if "://" in line or line.startswith("-")]


def test_without_java_the_first_line_says_what_to_install() -> None:
    done = subprocess.run(
        [ROOT / ".ci" / "java"],
        env={**os.environ, "JAVA_HOME": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Java 17 or newer is needed")
    assert "apt install openjdk" in done.stderr.splitlines()[0]


def test_without_a_suitable_python_the_first_line_says_so(tmp_path: Path) -> None:
    copy = tmp_path / ".ci"
    copy.mkdir()
    (copy / "setup").write_bytes((ROOT / ".ci" / "setup").read_bytes())
    (tmp_path / "requirements.lock").touch()
    environment = {**os.environ, "PYTHON": "no-such-python"}
    done = subprocess.run(["sh", copy / "setup"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Python 3.11 or newer with venv is needed")
    assert not (tmp_path / ".venv").exists()
