"""What `make test` starts JVMs with: an archive of loaded classes that this Java maps, and does not need."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pyspark
import pytest

from recovery.testing.broker import LocalBroker
from tests.support import quick_java

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


def loaded(command: list[str], archive: Path, scratch: Path) -> str:
    """Run a command that ends at once; return what its JVMs say of the places that their classes come from."""
    log = f"-Xlog:class+load:file={scratch / '%p.log'}"  # not to stdout, which is Spark's launcher's answer
    with quick_java.told("JAVA_TOOL_OPTIONS", f"-XX:SharedArchiveFile={archive} {quick_java.QUIET} {log}"):
        subprocess.run(command, capture_output=True, check=True, timeout=300)
    said = "".join(file.read_text() for file in scratch.glob("*.log"))
    for file in scratch.glob("*.log"):
        file.unlink()
    return said


def test_classes_come_from_the_archive_and_from_the_jars_where_it_does_not_fit(tmp_path: Path) -> None:
    quick_java.make()
    place = quick_java.folder()
    assert place is not None
    with quick_java.told("JAVA_TOOL_OPTIONS", ""), quick_java.told("KAFKA_OPTS", "-Dmine=1"):
        quick = quick_java.environment()
    assert quick["JAVA_TOOL_OPTIONS"].startswith(
        f"{quick_java.SHORT_LIVED} -XX:SharedArchiveFile={place / 'spark.jsa'} "
    )
    assert quick["KAFKA_OPTS"].startswith(f"-Dmine=1 -XX:SharedArchiveFile={place / 'kafka.jsa'} ")

    submit = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--version"]
    name = "org.apache.spark.deploy.SparkSubmit source:"
    assert f"{name} shared objects file (top)" in loaded(submit, place / "spark.jsa", tmp_path)
    assert f"{name} file:" in loaded(submit, place / "kafka.jsa", tmp_path)

    with quick_java.told("KAFKA_OPTS", ""):
        tool = [*LocalBroker()._java("kafka.tools.StorageTool"), "random-uuid"]
    assert "kafka.server.KafkaConfig source: shared objects file (top)" in loaded(tool, place / "kafka.jsa", tmp_path)
