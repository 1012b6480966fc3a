"""Files that Spark writes into a checkpoint, compared with the checksum that Hadoop keeps beside each.

On a local filesystem, and nowhere else, `.<name>.crc` lies beside `<name>`: `crc` and a zero byte, the bytes of a block
as four bytes, then the CRC-32 of each block (Hadoop, `ChecksumFileSystem`). A file without one is read as it is.

Spark reads some of them before any task runs, and would try one that is damaged again and again.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator

from backend.errors import UNDECODABLE, PointerDamaged
from recovery.commit.option_sets import newest_in, versions_in
from recovery.files import LocalFiles, open_files

METADATA = "metadata"
"""Spark's file with the query's id."""
STATE = "state/0"
"""Of the query's one stateful operator: a folder per shard, and the operator's metadata."""
_MAGIC = b"crc\0"
_HEAD = 8


def read_spark_file(checkpoint: str, name: str) -> bytes:
    """Read a file that Spark wrote.

    Args:
        checkpoint: Spark's checkpoint location.
        name: Of the file within it.

    Raises:
        PointerDamaged: Its checksum is another one.
        FileNotFoundError: It is not there.
    """
    files = open_files(checkpoint)
    folder, slash, own = name.rpartition("/")
    beside = f".{own}.crc"
    for _ in range(2):  # a query that runs puts a file in its place, then the checksum
        data = files.read(name)
        try:
            sums = files.read(f"{folder}{slash}{beside}") if isinstance(files, LocalFiles) else b""
        except FileNotFoundError:
            sums = b""
        if _fits(data, sums):
            return data
    raise PointerDamaged(
        "a file that Spark wrote into the checkpoint is damaged",
        where=f"{checkpoint}/{name}",
        why=f"its checksum is not the one in {beside}",
        command=_command(checkpoint, folder, own, beside),
    )


def planned_time(checkpoint: str, version: int) -> int | None:
    """Return the batch time that Spark planned a micro-batch with; None where its log does not say so any more.

    Every record of a micro-batch has it, also where it ran again: one that was planned anew has another one.
    """
    try:
        return int(json.loads(read_spark_file(checkpoint, f"offsets/{version}").splitlines()[1])["batchTimestampMs"])
    except (FileNotFoundError, PointerDamaged, IndexError, *UNDECODABLE):
        return None


def _fits(data: bytes, sums: bytes) -> bool:
    """Compare all sums with all blocks; what is no file of checksums is left out, as Hadoop does."""
    if not sums.startswith(_MAGIC) or len(sums) < _HEAD:
        return True
    block = int.from_bytes(sums[4:_HEAD])
    found = b"".join(zlib.crc32(data[at : at + block]).to_bytes(4) for at in range(0, len(data), block or 1))
    return block > 0 and sums[_HEAD:] == found  # Hadoop looks no further than the last block: not at a file cut there


def _command(checkpoint: str, folder: str, own: str, beside: str) -> str:
    back = (
        f"with no query running, put this file and {beside} back from a copy of the checkpoint, and leave the rest"
        f" (where you know that the file is whole, remove {beside})"
    )
    if folder == "offsets" and int(own) > newest_in(checkpoint, "commits"):
        return (
            f"{back}; or, because its micro-batch is not committed, remove both: it is planned anew, and a sink that"
            " has brought out rows of it compares"
        )
    return f"{back}; or go back to an older copy of the whole checkpoint"


def damaged_spark_files(checkpoint: str, *, every: bool = False) -> Iterator[PointerDamaged]:
    """Compare what Spark goes on from with its checksums; gives what `read_spark_file` raises.

    Args:
        checkpoint: Spark's checkpoint location.
        every: Also what is there for going back only: all but the newest files of its logs.
    """
    names = [METADATA] if METADATA in open_files(checkpoint).list() else []
    for log, newest in (("offsets", 2), ("commits", 1)):
        names += [f"{log}/{version}" for version in versions_in(checkpoint, log)[0 if every else -newest :]]
    for name in names:
        try:
            read_spark_file(checkpoint, name)
        except PointerDamaged as error:
            yield error
        except FileNotFoundError:  # a query runs, and has let go of it
            continue


def check_state(checkpoint: str, shards: int) -> None:
    """Check that Spark's state has its parts, once a micro-batch is committed: Spark names no folder that is gone.

    Args:
        checkpoint: Spark's checkpoint location.
        shards: Number of shards.

    Raises:
        PointerDamaged: A part is not there.
    """
    if not versions_in(checkpoint, "commits"):
        return
    there = open_files(checkpoint).folders(STATE)
    gone = [name for name in ("_metadata", *map(str, range(shards))) if name not in there]
    if gone:
        raise PointerDamaged(
            "parts of Spark's state, which has the pointers, are gone",
            where=f"{checkpoint}/{STATE}",
            why=f"{len(gone)} of its folders are not there: {', '.join(gone[:5])}{', ...' if len(gone) > 5 else ''}",
            command="with no query running, put the checkpoint's folder state back from a copy of the checkpoint, made"
            " at its newest micro-batch; or go back to an older copy of the whole checkpoint",
        )
