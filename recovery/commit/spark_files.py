"""Files that Spark writes into a checkpoint, read as Spark reads them: with the checksum that Hadoop keeps beside each.

On a local filesystem, and nowhere else, `.<name>.crc` lies beside `<name>`: `crc` and a zero byte, the bytes of a block
as four bytes, then the CRC-32 of each block (Hadoop, `ChecksumFileSystem`). A file without one is read as it is.

Spark reads some of them before any task runs, and would try one that is damaged again and again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from backend.errors import PointerDamaged
from recovery.commit.option_sets import versions_in
from recovery.files import LocalFiles, open_files

METADATA = "metadata"
"""Spark's file with the query's id."""
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
    data = files.read(name)
    folder, slash, own = name.rpartition("/")
    beside = f".{own}.crc"
    if isinstance(files, LocalFiles) and beside in files.list(folder):
        sums = files.read(f"{folder}{slash}{beside}")
        block = int.from_bytes(sums[4:_HEAD]) if sums.startswith(_MAGIC) else 0
        found = b"".join(zlib.crc32(data[at : at + block]).to_bytes(4) for at in range(0, len(data), block or 1))
        if not block or found != sums[_HEAD:]:
            raise PointerDamaged(
                "a file that Spark wrote into the checkpoint is damaged",
                where=f"{checkpoint}/{name}",
                why=f"its checksum is not the one in {beside}",
                command=_command(checkpoint, folder, own, beside),
            )
    return data


def _command(checkpoint: str, folder: str, own: str, beside: str) -> str:
    back = f"with no query running, put this file and {beside} back from a copy of the checkpoint, and leave the rest"
    if folder == "offsets" and int(own) > max(versions_in(checkpoint, "commits"), default=-1):
        return (
            f"{back}; or, because its micro-batch is not committed, remove both: it is planned anew, and a sink that"
            " has brought out rows of it compares"
        )
    return f"{back}; or go back to an older copy of the whole checkpoint"


def damaged_spark_files(checkpoint: str, *, newest: int | None = None) -> Iterator[PointerDamaged]:
    """Compare what Spark goes on from with its checksums; gives what `read_spark_file` raises.

    Args:
        checkpoint: Spark's checkpoint location; no query runs there.
        newest: So many files of each log; None for all of them.
    """
    names = [METADATA] if METADATA in open_files(checkpoint).list() else []
    for log in ("offsets", "commits"):
        names += [f"{log}/{version}" for version in versions_in(checkpoint, log)[-(newest or 0) :]]
    for name in names:
        try:
            read_spark_file(checkpoint, name)
        except PointerDamaged as error:
            yield error
        except FileNotFoundError:  # a query runs after all, and has let go of it
            continue
