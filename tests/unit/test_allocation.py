"""A worker keeps what it frees for its next micro-batch, up to a bound; a choice in the environment stays."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from backend.allocation import CHOICES, MANY_MODULES, MANY_OBJECTS
from tests.conftest import ROOT

pytestmark = [
    pytest.mark.slow,  # each starts a Python of its own
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's settings, and /proc to see them work"),
]
PROGRAM = """
import json, sys
import numpy as np
import pyarrow as pa
from backend.allocation import reuse_memory
from tests.support.memory import peak_mb

def columns(megabytes):  # of 16 MB each, half of numpy, half of Arrow
    made = []
    for number in range(megabytes // 16):
        if number % 2:
            made.append(np.ones(1 << 21))
        else:
            made.append(pa.allocate_buffer(1 << 24))
            np.frombuffer(made[-1], np.uint8)[:] = 1
    return made

reuses = reuse_memory() if sys.argv[1] == "reuse" else None
columns(16)
before = peak_mb("VmRSS")
left = []
for megabytes in (320, 320, 1600):
    taken = columns(megabytes)
    del taken
    left.append(peak_mb("VmRSS") - before)
if reuses:
    reuse_memory()
left.append(peak_mb("VmRSS") - before)
print(json.dumps({"reuses": reuses, "pool": pa.default_memory_pool().backend_name, "left": left}))
"""


def run(what: str, **environment: str) -> dict[str, object]:
    plain = {name: value for name, value in os.environ.items() if name not in CHOICES}
    given = {**plain, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", PROGRAM, what]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=given, timeout=120)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_what_was_freed_stays_up_to_a_bound() -> None:
    found = run("reuse")
    assert (found["reuses"], found["pool"]) == (True, "system")
    first, second, _, after = found["left"]  # type: ignore[misc]
    assert first > 250, "320 MB were freed and are needed again"
    assert second < first + 160, "the second time took what the first one left"
    assert after < 250, "1,600 MB were freed: at the beginning of the next task they went back"


def test_without_it_nothing_stays() -> None:
    """What the other test measures is there to be measured."""
    found = run("not")
    assert found["pool"] != "system"
    first, second, *_ = found["left"]  # type: ignore[misc]
    assert max(first, second) < 250


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_in_the_environment_stays(name: str) -> None:
    value = {"ARROW_DEFAULT_MEMORY_POOL": "system", "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}
    found = run("reuse", **{name: value.get(name, "131072")})
    assert found["reuses"] is False
    assert (found["pool"] == "system") == (name == "ARROW_DEFAULT_MEMORY_POOL")


FREEZING = """
import gc, json, sys, types, weakref
import pandas, pyarrow.compute, pyspark.worker
from backend.allocation import begin_task

class Node:
    def __init__(self):
        self.itself = self

def looked_at():
    return len(gc.get_objects())

loaded = looked_at()
begin_task()
after, kept, frozen = looked_at(), [], []
node = Node()
seen = weakref.ref(node)
del node
gc.collect()
for number in range(2):
    kept.append([[] for _ in range(int(sys.argv[1]))])
    begin_task()
    frozen.append(gc.get_freeze_count())
for number in range(int(sys.argv[2])):
    sys.modules[f"loaded_{number}"] = types.ModuleType(f"loaded_{number}")
begin_task()
frozen.append(gc.get_freeze_count())
print(json.dumps({"loaded": loaded, "after": after, "let go": seen() is None, "frozen": frozen}))
"""


def test_what_a_worker_has_loaded_is_not_looked_through_after_each_task() -> None:
    command = [sys.executable, "-c", FREEZING, str(MANY_OBJECTS), str(MANY_MODULES)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["loaded"] > 2 * MANY_OBJECTS, "what the other figures are about is there"
    assert found["after"] < MANY_OBJECTS
    assert found["let go"], "what a task leaves is collected"
    first, second, third = found["frozen"]
    assert first == second, "what tasks bring, such as a user's function, is not frozen anew with each"
    assert third > second + MANY_OBJECTS, "with more modules it is"
