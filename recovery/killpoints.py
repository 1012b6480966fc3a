"""Named points at which a process can be made to die by SIGKILL: free when off.

`REWIND_KILL=<point>@<file>` arms one point for one death: the first process that passes the point creates the file
(exclusively, so that only one dies) and kills itself. `REWIND_KILL_VERSION=<n>` waits for that micro-batch.
`REWIND_KILL_TRACE=<file>` appends each point passed, so that a suite can show that it hit every one.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

POINTS = (
    "open",
    "before_ingest",
    "after_ingest",
    "before_stage",
    "during_stage",
    "after_stage",
    "before_changelog",
    "after_changelog",
    "before_pointer",
    "after_pointer",
    "before_publish",
    "during_publish",
    "after_publish",
    "prune",
    "fetch",
    "restore_changelog",
    "restore_replay",
    "restore_proof",
    "restore_commit",
    "restore_publish",
    "upload",
)
"""Every point, in the order in which a micro-batch and then a restore passes them."""

_ARMED = os.environ.get("REWIND_KILL", "")
_VERSION = os.environ.get("REWIND_KILL_VERSION")
_TRACE = os.environ.get("REWIND_KILL_TRACE")


def kill_point(name: str, version: int | None = None) -> None:
    """Die here if this point is armed; do nothing otherwise."""
    if not _ARMED and not _TRACE:
        return
    if _TRACE:
        with Path(_TRACE).open("a") as trace:
            trace.write(f"{name} {version}\n")
    point, _, once = _ARMED.partition("@")
    if point != name or (_VERSION is not None and version is not None and int(_VERSION) != version):
        return
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
