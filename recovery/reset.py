"""Begin anew: delete a job's checkpoint and local state, or its local state alone. Results are never touched.

What is deleted is listed first, path by path, and nothing is while a task holds a shard's lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from backend.errors import StoreLocked
from recovery.survey import CHANGELOG, Checkpoint


@dataclass(frozen=True, slots=True)
class Reset:
    """What a reset deletes.

    Attributes:
        paths: Everything that is deleted, with its bytes where they are known.
        kept: What a reader might expect to go, and stays.
        offsets: Source offsets that are consumed already and will be read again, or are lost: one sentence each.
    """

    paths: tuple[tuple[str, int | None], ...]
    kept: tuple[str, ...]
    offsets: tuple[str, ...]


def plan_reset(checkpoint: Checkpoint, *, local_only: bool) -> Reset:
    """List what a reset would delete; touches nothing."""
    home = checkpoint.local_dir / checkpoint.query_id
    paths: list[tuple[str, int | None]] = []
    if home.is_dir():
        paths.append((str(home), sum(path.stat().st_size for path in home.rglob("*") if path.is_file())))
    kept = ["results and errors"]
    offsets: list[str] = []
    if local_only:
        kept.append(f"{checkpoint.location}: the next start restores from it")
        return Reset(tuple(paths), tuple(kept), ())
    paths.append((checkpoint.location, None))
    if checkpoint.changelog_uri != f"{checkpoint.location}/{CHANGELOG}":
        kept.append(f"{checkpoint.changelog_uri}: delete it where it is, once nothing else uses it")
    for shard in checkpoint.shards:
        record = checkpoint.survey(shard).record
        for stream, partition, position in record.positions if record is not None else []:
            offsets.append(
                f"stream {stream} partition {partition}, shard {shard}: offsets below {position.next_offset} are read"
                " again as far as the source still has them, and lost where it has not"
            )
    return Reset(tuple(paths), tuple(kept), tuple(offsets))


def carry_out(checkpoint: Checkpoint, *, local_only: bool) -> None:
    """Delete what `plan_reset` lists.

    Raises:
        StoreLocked: A task works on a shard on this host; nothing was deleted.
    """
    home = checkpoint.local_dir / checkpoint.query_id
    with _locks(home):
        if not local_only:
            checkpoint.files.delete_folder("")
        if home.is_dir():
            shutil.rmtree(home)


@contextmanager
def _locks(home: Path) -> Iterator[None]:
    """Hold the lock of every shard on this host, or say who does."""
    with ExitStack() as stack:
        for lock in sorted(home.glob("*/LOCK")):
            handle = os.open(lock, os.O_RDWR)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(handle, 100, 0).decode(errors="replace") or "an unknown process"
                raise StoreLocked(
                    "the job is running",
                    where=str(lock.parent),
                    why=f"locked by {holder}",
                    command="stop the query, then run the command again",
                ) from error
        yield
