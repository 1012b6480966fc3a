"""Which PySpark and which session are refused, and what the errors say."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backend import archive, count, stream, tumbling
from backend.errors import JarsUnavailable
from backend.spark.session import jars
from backend.spark.session.versions import check_not_connect, check_pyspark

ROOT = Path(__file__).resolve().parents[2]


class Remote:
    """A class that says of itself what Spark Connect's session does: that one needs grpc to be imported."""

    __module__ = "pyspark.sql.connect.session"
    __qualname__ = "SparkSession"


@pytest.mark.parametrize("version", ["4.1.0", "4.1.2", "4.0.1", "3.5.6", "3.10.0"])
def test_an_older_pyspark_is_refused_by_name(version: str) -> None:
    with pytest.raises(ImportError, match=f"PySpark {version} is too old"):
        check_pyspark(version)


@pytest.mark.parametrize("version", ["4.2.0", "4.2.1", "4.3.0", "4.10.0", "5.0.0.dev1"])
def test_a_newer_one_is_not(version: str) -> None:
    check_pyspark(version)


def test_importing_the_spark_part_checks(tmp_path: Path) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text("__version__ = '4.1.0'\n")
    done = subprocess.run(
        [sys.executable, "-c", "import backend; print('core'); from backend import stream"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "core\n"
    assert done.stderr.splitlines()[-1].startswith("ImportError: PySpark 4.1.0 is too old")


def test_spark_connect_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    windows = stream(archive("in", value="at timestamp"), event_time="at").window(tumbling("1 minute"), retention="1h")
    with pytest.raises(ValueError, match=r"spark=pyspark\.sql\.connect\.session\.SparkSession: a Spark Connect"):
        windows.aggregate(n=count()).start(Remote(), checkpoint="c", results="r", errors="e")
    assert list(tmp_path.iterdir()) == []
    check_not_connect(object())


def test_a_version_without_a_connector_names_the_client_reader() -> None:
    with pytest.raises(JarsUnavailable, match=r"PySpark 4\.3\.0.*known: 4\.2.*reader=\"client\""):
        jars.connector("4.3.0")
    assert jars.connector("4.2.1").name == "spark-kafka-4.2"


@pytest.mark.slow
def test_what_only_a_classic_session_has_is_used_in_one_module() -> None:
    names = {"_jvm", "_jsc", "_jdf", "_jsparkSession", "_gateway", "sparkContext", "SparkContext"}
    users = set()
    for path in [*(ROOT / "backend").rglob("*.py"), *(ROOT / "recovery").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            used = {node.attr} if isinstance(node, ast.Attribute) else set()
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                used = {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
            if used & names:
                users.add(str(path.relative_to(ROOT)))
    assert users == {"backend/spark/session/jvm.py"}
