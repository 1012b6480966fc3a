"""Resolving jars: from the cache, from a folder, from a registry that fails at first. Ivy is a script here."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from backend.errors import JarsUnavailable
from backend.spark.session import jars

ONE = jars.JarSet("one", (jars.Artifact("org.x", "alpha", "1.0"),), transitive=False, marker="org.x.Alpha")
TREE = jars.JarSet("tree", (jars.Artifact("org.x", "alpha", "1.0"),), transitive=True, marker="org.x.Alpha")


@pytest.fixture
def java(tmp_path, monkeypatch):
    """Write a `java` that runs the given shell text with `$out` the folder to retrieve into."""
    home = tmp_path / "java-home"
    (home / "bin").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "whole.jar", "w") as jar:
        jar.writestr("a", "a")
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setenv("REWIND_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("REWIND_JARS", raising=False)
    monkeypatch.setattr(jars.time, "sleep", lambda _s: None)

    def install(text: str) -> Path:
        program = home / "bin" / "java"
        program.write_text(
            f'#!/bin/sh\nfor last; do :; done\nout=$(dirname "$last")\nwhole={tmp_path}/whole.jar\n'
            f"echo run >> {tmp_path}/runs\nruns=$(wc -l < {tmp_path}/runs)\n{text}\n"
        )
        program.chmod(0o755)
        return tmp_path / "runs"

    return install


def test_a_failed_request_is_asked_again_and_the_answer_is_kept(java, tmp_path):
    runs = java('[ "$runs" -lt 3 ] && { echo "WARN: timed out"; exit 1; }; cp "$whole" "$out/alpha-1.0.jar"')
    found = jars.resolve(ONE)
    assert [path.name for path in found] == ["alpha-1.0.jar"]
    assert found[0].is_relative_to(tmp_path / "cache" / "jars")
    assert jars.resolve(ONE) == found
    assert runs.read_text().count("run") == 3


def test_tries_are_bounded_and_the_error_tells_what_was_said(java, tmp_path):
    runs = java('echo "WARN: no route"; exit 1')
    with pytest.raises(JarsUnavailable, match="no route") as caught:
        jars.resolve(ONE, tries=2)
    assert "org.x:alpha:1.0" in str(caught.value)
    assert runs.read_text().count("run") == 2
    assert list((tmp_path / "cache" / "jars").iterdir()) == []


def test_a_truncated_jar_is_not_kept(java, tmp_path):
    java(
        'if [ "$runs" = 1 ]; then head -c 20 "$whole" > "$out/alpha-1.0.jar"; else cp "$whole" "$out/alpha-1.0.jar"; fi'
    )
    assert zipfile.is_zipfile(jars.resolve(ONE)[0])


def test_a_missing_artifact_is_named(java):
    java("exit 0")
    with pytest.raises(JarsUnavailable, match=r"missing: org\.x:alpha:1\.0"):
        jars.resolve(ONE, tries=1)


def test_a_registry_that_hangs_is_given_up(java):
    java("exec sleep 20")
    with pytest.raises(JarsUnavailable, match="no answer"):
        jars.resolve(ONE, tries=1, timeout_s=0.2)


def test_an_offline_folder_is_enough_and_nothing_runs(java, tmp_path, monkeypatch):
    runs = java("exit 1")
    monkeypatch.setenv("REWIND_JARS", str(tmp_path / "offline"))
    (tmp_path / "offline" / "deep").mkdir(parents=True)
    with pytest.raises(JarsUnavailable, match=r"missing: org\.x:alpha:1\.0"):
        jars.resolve(ONE)
    jar = tmp_path / "offline" / "deep" / "alpha-1.0.jar"
    jar.touch()
    assert jars.resolve(ONE) == [jar]
    with pytest.raises(JarsUnavailable, match="offline folder"):
        jars.resolve(TREE)
    (tmp_path / "offline" / "tree").mkdir()
    (tmp_path / "offline" / "tree" / "beta.jar").touch()
    assert [path.name for path in jars.resolve(TREE)] == ["beta.jar"]
    assert not runs.exists()


def test_no_java_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JarsUnavailable, match="Java was not found"):
        jars.java()


def test_the_connector_is_chosen_by_version(monkeypatch):
    named = {artifact.file_name for artifact in jars.connector("4.2.1").artifacts}
    assert {"spark-sql-kafka-0-10_2.13-4.2.0.jar", "kafka-clients-3.9.2.jar"} <= named
    monkeypatch.setattr("pyspark.__version__", "4.2.1")
    assert jars.connector() == jars.connector("4.2.1")
    monkeypatch.setattr("pyspark.__version__", "4.3.0")
    with pytest.raises(JarsUnavailable, match=r"PySpark 4\.3\.0.*reader=.client"):
        jars.connector()
    with pytest.raises(JarsUnavailable, match=r"PySpark 9\.9\.9"):
        jars.connector("9.9.9")
