"""Memory that a Python worker frees stays with it, for its next micro-batch; what it has loaded is not looked through.

A micro-batch of a million messages takes some hundred megabytes of columns and gives them back at its end. By default
glibc and Arrow's mimalloc return much of that to the kernel, which zeroes every page of it again in the next one:
measured for a million messages of full state, 0.2 to 0.3 of the 0.6 to 0.7 s of a task. So glibc is to keep what will
be needed again, and Arrow to use glibc's heap: columns and everything else reuse the same memory, and the peak is what
it was. Spark ends workers that were idle for a minute, and what they kept with them.

Whoever chooses an allocator or its thresholds in the environment keeps that choice.

Behind each task Spark's worker has Python's collector look at every object there is: all of the modules, 46 ms of a
core (measured with 105,000 objects), four times in a micro-batch of two shards. What is frozen is passed over: 1.3 ms.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
from functools import cache
from pathlib import Path

import pyarrow as pa

MOST_BYTES = 1 << 30
"""A worker that takes more between two tasks gives back all that is unused, wherever in its heap."""
SINGLE_BYTES = 1 << 25
"""A single allocation of this size goes back when it is freed: glibc takes no larger number."""
MANY_OBJECTS, MANY_MODULES = 20_000, 50
"""A worker that has so many new objects, and so many new modules, freezes them; what it has of its task then stays."""
CHOICES = ("ARROW_DEFAULT_MEMORY_POOL", "GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Variables of the environment that choose."""
_frozen: list[int] = []  # how many modules there were
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h


def begin_task() -> None:
    """Let a worker keep what it frees, and not look through what it has loaded; for the beginning of each task."""
    reuse_memory()
    if len(sys.modules) - max(_frozen, default=0) >= MANY_MODULES and len(gc.get_objects()) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()  # a user's function is there by now, as the task brought it: not again with each task's copy
        _frozen.append(len(sys.modules))


def reuse_memory() -> bool:
    """Let this process keep what it frees, and the processes that it forks.

    Returns:
        Whether it does: not without glibc, nor where the environment chooses (`CHOICES`).
    """
    reuses = _set()
    if reuses and _resident_bytes() > MOST_BYTES:
        ctypes.CDLL(None).malloc_trim(0)
    return reuses


@cache
def _set() -> bool:
    libc = ctypes.CDLL(None)
    if any(os.environ.get(name) for name in CHOICES) or not hasattr(libc, "gnu_get_libc_version"):
        return False
    if not (libc.mallopt(_MMAP_THRESHOLD, SINGLE_BYTES) and libc.mallopt(_TRIM_THRESHOLD, MOST_BYTES)):
        return False
    pa.set_memory_pool(pa.system_memory_pool())
    return True


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE
