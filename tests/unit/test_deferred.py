"""What Spark's processes on the driver are sent and never use is not made there: their imports are counted."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle

from backend import archive
from backend.kafka_client.settings import KafkaSettings
from backend.sources.archive_files import write_archive
from backend.sources.kafka_reader import KafkaStreamReader
from backend.spark import reading
from backend.spark.control import control_rows
from backend.spark.deferred import Deferred
from backend.spark.pack import frames
from backend.spark.pack.packing import PackPlan, packer
from backend.spark.processor import ShardProcessor
from backend.spark.shard_task import ProcessorPlan
from bench.data import START_MS, topic_rows
from recovery.commit.option_sets import ByVersion
from tests.support.windows import windows_operator

ROOT = Path(__file__).resolve().parents[2]
READ = """
import sys
from pyspark import cloudpickle
from pyspark.sql.streaming import python_streaming_source_runner, transform_with_state_driver_worker
before = set(sys.modules)
given = cloudpickle.loads(sys.stdin.buffer.read())
{what}
ours = ("backend", "recovery", "fsspec", "pandas", "pyarrow")
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] in ours))
"""


def imports(sent: bytes, what: str = "") -> list[str]:
    """Give what an interpreter of its own imports of ours for what it is sent."""
    run = subprocess.run(
        [sys.executable, "-c", READ.replace("{what}", what)],
        check=False,
        input=sent,
        capture_output=True,
        cwd=ROOT,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr.decode()
    found: list[str] = ast.literal_eval(run.stdout.decode())
    return found


class Made:
    """Counts how often it is made of what was sent."""

    count = 0

    def __reduce__(self) -> tuple[object, ...]:
        return _make, ()


def _make() -> Made:
    Made.count += 1
    return Made()


def test_it_is_made_at_its_first_use_and_once() -> None:
    Made.count = 0
    here = Deferred(Made())
    assert here() is here()
    there = cloudpickle.loads(cloudpickle.dumps(here))
    assert Made.count == 0
    onwards = cloudpickle.loads(cloudpickle.dumps(there))  # as it came: nobody asked for it
    assert Made.count == 0
    assert isinstance(onwards(), Made)
    assert onwards() is onwards()
    assert Made.count == 1
    assert isinstance(cloudpickle.loads(cloudpickle.dumps(onwards))(), Made)
    assert Made.count == 2


@pytest.mark.slow
def test_what_the_driver_asks_for_the_states_schema_imports_next_to_nothing() -> None:
    operator, _ = windows_operator()
    plan = ProcessorPlan({12: 0}, lambda *_: operator)  # type: ignore[arg-type]
    sent = cloudpickle.dumps(ShardProcessor(plan))
    found = imports(sent, "class H:\n    def getValueState(self, name, schema): return name, schema\ngiven.init(H())")
    assert "backend.spark.processor" in found
    assert len(found) <= 8, found
    assert "backend.windows.operator" in imports(sent, "given._plan()")


class Session:
    """Takes the data source that `streamed` registers."""

    def __init__(self) -> None:
        self.dataSource = self.readStream = self._jsparkSession = self
        self.taken: type[Any] = type(self)

    def register(self, source: type[Any]) -> None:
        self.taken = source

    def sessionUUID(self) -> str:
        return "a-b"

    def format(self, name: str) -> Session:
        assert name == self.taken.name()
        return self

    def options(self, **_: str) -> Session:
        return self

    def load(self) -> None:
        """Nothing is read here."""


@pytest.mark.slow
def test_what_plans_micro_batches_imports_no_stage(tmp_path: Path) -> None:
    rows = topic_rows(0, 0, np.arange(3) + START_MS, pa.array([b"{}"] * 3))
    write_archive(tmp_path, rows)
    reader = archive(str(tmp_path), value="x long").stream_reader(None, None)
    plan = PackPlan((12,), (), False, None, {0: "t"})
    spark = Session()
    reading.streamed(spark, reader, frames.PACKED_SCHEMA, packer(ByVersion.always(plan), int))
    sent = cloudpickle.dumps(spark.taken)
    ask = "reader = given({}).streamReader(None)\nassert reader.initialOffset()"
    found = imports(sent, ask)
    assert "backend.sources.archive_reader" in found
    assert not [name for name in found if name.startswith("backend.spark.pack")], found


@pytest.mark.slow
def test_the_control_stream_imports_no_arrow_functions() -> None:
    spark = Session()
    control_rows(cast(Any, spark), "/nowhere")
    sent = cloudpickle.dumps(spark.taken)
    ask = "reader = given({}).streamReader(None)\nassert reader.initialOffset()"
    found = imports(sent, ask)
    assert "backend.spark.control" in found
    assert not {"fsspec", "pandas", "pyarrow.compute"}.intersection(found)


@pytest.mark.slow
def test_what_plans_ranges_of_topics_imports_no_parser() -> None:
    settings = KafkaSettings("nowhere:9092")
    sent = cloudpickle.dumps(KafkaStreamReader(settings, ("t",), "read_committed", None, 1000))
    found = imports(sent)
    assert "backend.sources.kafka_reader" in found
    assert not {"backend.sources.formats", "fsspec", "pandas", "pyarrow.compute"}.intersection(found)
