"""Named points at which a process can be made to die by SIGKILL, or to stop there for a while: free when off.

`REWIND_KILL=<file>` names an order that may come later: a file that says `<point>` or `<point> <micro-batch>`. The
first process that passes that point takes the order (renames it to `<file>.taken`, so that only one dies) and kills
itself. If the order ends with `stop`, it writes its process id into `<file>.taken` and stops itself by SIGSTOP instead;
whoever gave the order lets it go on.
`REWIND_KILL_TRACE=<file>` appends each point passed, so that a suite can show that it hit every one.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

POINTS = (
    "open",
    "fetch",
    "during_fetch",
    "after_fetch",
    "before_ingest",
    "after_ingest",
    "before_stage",
    "during_stage",
    "after_stage",
    "before_changelog",
    "before_base",
    "upload",
    "during_upload",
    "after_changelog",
    "prune",
    "before_pointer",
    "after_pointer",
    "before_publish",
    "during_publish",
    "after_publish",
    "prune_changelog",
    "prune_packages",
    "restore_replay",
    "during_replay",
    "restore_changelog",
    "restore_proof",
    "restore_commit",
    "restore_publish",
)
"""Every point, in the order in which a micro-batch, what the driver tidies up behind it, and a restore pass them.

`during_fetch` and `during_upload` lie behind every file of a snapshot, the last one before its manifest or its use;
`prune_changelog` and `prune_packages` behind every file that the driver deletes; `during_replay` behind every chunk.
"""

QUEUE_POINTS = (
    "before_queue",
    "after_queue",
    "before_seal",
    "after_seal",
    "before_ask",
    "after_ask",
    "before_adopt",
)
"""What is passed besides where shards queue their input (`recovery.queue`): the entry, the seal, the restore's end."""

_ORDER = os.environ.get("REWIND_KILL", "")
_TRACE = os.environ.get("REWIND_KILL_TRACE")
_STOP = " stop"


def kill_point(name: str, version: int | None = None) -> None:
    """Die here if an order says so; do nothing otherwise."""
    if not _ORDER and not _TRACE:
        return
    if _TRACE:
        with Path(_TRACE).open("a") as trace:
            trace.write(f"{name} {version}\n")
    if _ORDER and _asks(Path(_ORDER), name, version):
        _obey(Path(_ORDER), name, version)


def _asks(path: Path, name: str, version: int | None) -> bool:
    try:
        point, _, wanted = path.read_text().removesuffix(_STOP).partition(" ")
    except FileNotFoundError:
        return False
    return point == name and (not wanted or version is None or int(wanted) == version)


def _obey(path: Path, name: str, version: int | None) -> None:
    """Take an order and do what it says; one that came since the order was looked at is put back.

    Nothing is read once it is seen to be taken: whoever gave it may delete it then.
    """
    mine = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        path.rename(mine)
    except FileNotFoundError:  # another process has it
        return
    if not _asks(mine, name, version):
        with suppress(FileExistsError):  # a newer one is there already
            os.link(mine, path)
        mine.unlink()
        return
    stops = mine.read_text().endswith(_STOP)
    if stops:
        mine.write_text(str(os.getpid()))
    mine.rename(taken(path))
    os.kill(os.getpid(), signal.SIGSTOP if stops else signal.SIGKILL)


def passing(things: Iterable[T], name: str, version: int | None = None) -> Iterator[T]:
    """Give things one by one, with a point behind each: for what deletes or copies many of them."""
    for thing in things:
        yield thing
        kill_point(name, version)


def order(path: Path, point: str, version: int | None = None, *, stop: bool = False) -> None:
    """Order the death of the first process that passes a point, in a micro-batch or in any; or that it stops there.

    Raises:
        ValueError: There is no such point.
    """
    allowed = (*POINTS, *QUEUE_POINTS)
    if point not in allowed:
        raise ValueError(f"point={point!r}: allowed are {', '.join(allowed)}")
    taken(path).unlink(missing_ok=True)
    draft = path.with_name(f".{path.name}")
    draft.write_text((point if version is None else f"{point} {version}") + (_STOP if stop else ""))
    draft.replace(path)


def taken(path: Path) -> Path:
    """Give the name that an order has once a process has taken it."""
    return path.with_name(f"{path.name}.taken")
