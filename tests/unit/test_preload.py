"""The daemon that forks Python workers has imported what their tasks need, and nothing that forbids a fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recovery.daemon import MODULES, OF_KAFKA

pytestmark = pytest.mark.slow  # each starts a Python of its own
ROOT = Path(__file__).resolve().parents[2]
WORKER = """
import os, sys, tempfile
from pathlib import Path
from recovery.daemon import preload
preload()
at_first = set(sys.modules)
if os.fork():
    _, status = os.wait()
    sys.exit(os.waitstatus_to_exitcode(status))
sys.argv = ["big_shard", "make", "-", "500"]
from tests.crash import big_shard
with tempfile.TemporaryDirectory() as name:
    for step in (big_shard.make, big_shard.restore_chunks, big_shard.build):
        step(Path(name), 500)
heavy = ("pandas", "pyarrow", "numpy", "pyspark", "backend", "recovery", "rocksdict", "fsspec", "msgspec", "xxhash")
late = [name for name in set(sys.modules) - at_first if name.partition(".")[0] in heavy]
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
square = np.arange(250_000.0).reshape(500, 500)
assert (square @ np.eye(500) == square).all(), "OpenBLAS's threads did not come back"
table = pa.table({"key": np.arange(100_000) % 10, "one": np.ones(100_000)})
assert table.group_by("key", use_threads=True).aggregate([("one", "sum")]).num_rows == 10
print(sorted(late), flush=True)
os._exit(0)
"""


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    given = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=120, check=False)


def test_a_forked_worker_has_what_it_needs_and_works() -> None:
    run = python(WORKER)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "[]\n"


def with_module(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "extra_module.py").write_text(text)
    program = "from recovery import daemon; daemon.MODULES = ('extra_module',); daemon.preload()"
    return python(program, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")


def test_standard_output_stays_spark_s(tmp_path: Path) -> None:
    run = with_module(tmp_path, "print('hello')")
    assert (run.returncode, run.stdout) == (0, "")
    assert run.stderr == "hello\n"


def test_a_thread_forbids_it(tmp_path: Path) -> None:
    waits = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='waits', daemon=True).start()"
    run = with_module(tmp_path, waits)
    assert run.returncode == 1
    assert "RuntimeError: threads run before workers are forked: waits" in run.stderr


def test_what_is_an_extra_may_be_missing() -> None:
    extras = ("confluent_kafka", "deltalake", "fastavro", "pyiceberg", "pytest", "s3fs", "sqlalchemy", "testcontainers")
    without = f"import sys; sys.modules.update(dict.fromkeys({extras!r}))"  # importing None fails
    run = python(f"{without}; from recovery.daemon import preload; preload(); print(sys.modules['confluent_kafka'])")
    assert (run.returncode, run.stdout) == (0, "None\n"), run.stderr


def test_spark_s_processes_on_the_driver_import_no_pandas() -> None:
    """They are new at every start of a query, look at sources and call `init`: pandas would double what they take."""
    both = (*MODULES, *OF_KAFKA)
    ours = [name for name in both if name.startswith(("backend.", "recovery.")) and ".sinks." not in name]
    assert len(ours) > 8
    run = python(f"import sys, {', '.join(ours)}; print([name for name in sys.modules if name == 'pandas'])")
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr
