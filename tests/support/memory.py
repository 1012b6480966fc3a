"""Memory of this process, as Linux tells it."""

from __future__ import annotations

from pathlib import Path


def peak_mb(name: str) -> float:
    """Give a figure of this process's memory: `VmHWM` or `VmRSS`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status does not tell {name}")
