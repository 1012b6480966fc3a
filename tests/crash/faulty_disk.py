"""A job on a disk that fails: it stops by name, and goes on to the control's end when the disk is well.

`python -m tests.crash.faulty_disk limit <bytes>...` limits the size of files in this process (RLIMIT_FSIZE: EFBIG, also
for what RocksDB writes) and prints what came of it. `python -m tests.crash.faulty_disk full <kilobytes>...` mounts a
filesystem with so much room left (`unshare`, `mount -t tmpfs`), where that is allowed, and makes it larger when the job
has stopped; exit code 77 where it is not. `python -m tests.crash.faulty_disk preload <count> [<seed>]`
compiles `faulty_io.c` and lets as many jobs run with a write or sync that fails, of RocksDB or of ours.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from backend.errors import RewindError, StorageFailed
from tests.crash.damage import LAST, Job

HERE = Path(__file__).parent
BATCHES = 4
"""Micro-batches before the disk fails."""
NOT_ALLOWED = 77


def scratch() -> Path:
    """Make a directory; `REWIND_FAULTY_DIR` says where."""
    base = os.environ.get("REWIND_FAULTY_DIR") or ("/dev/shm" if Path("/dev/shm").is_dir() else None)
    return Path(tempfile.mkdtemp(prefix="rewind-disk-", dir=base))


def control(root: Path) -> tuple[Job, Any]:
    """Make a job of some micro-batches, and the end that it must come to."""
    job = Job(root / "sound")
    while len(job.pointers) < BATCHES:
        job.batch()
    shutil.copytree(job.home, root / "control")
    return job, Job(root / "control", pointers=list(job.pointers)).finish()


def try_on(job: Job) -> RewindError | None:
    """Go on with a disk that may fail; give the error by name that stopped it, None when nothing did."""
    try:
        while len(job.pointers) <= LAST:
            job.batch()
    except RewindError as error:
        assert isinstance(error, StorageFailed), f"not said that it is the disk: {error}"
        assert error.where, error
        assert error.why, error
        assert "start the query again" in error.command, error
        return error
    return None


def no_draft_counts(job: Job) -> None:
    """What was written by half lies under no name that anybody reads: all that is there is whole."""
    shard_job = job.shard_job()
    assert shard_job.snapshots is not None
    assert [*shard_job.changelog.verify(0), *shard_job.snapshots.verify(0)] == []


def limited(sizes: list[int]) -> int:
    """Run with each limit; the job must stop by name, and then come to the control's end."""
    root = scratch()
    try:
        job, expected = control(root)
        for size in sizes:
            home = root / f"limit{size}"
            shutil.copytree(job.home, home)
            one = Job(home, pointers=list(job.pointers))
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            try:
                error = try_on(one)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            no_draft_counts(one)
            assert one.finish() == compared(expected, one), f"limit {size}: another end"
            print(f"{size}: {error if error is not None else 'nothing was refused'}", flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 0


def full(rooms: list[int]) -> int:
    """Run on filesystems with so many kilobytes left; the job must stop by name, and go on when there is room."""
    root = scratch()
    disk = root / "disk"
    disk.mkdir()
    try:
        job, expected = control(root)
        used = sum(path.stat().st_blocks * 512 for path in job.home.rglob("*")) // 1024
        for room in rooms:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={used + room}k", "tmpfs", disk], check=True)
            try:
                one = Job(disk / "job", pointers=list(job.pointers))
                shutil.copytree(job.home, one.home)
                error = try_on(one)
                subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
                no_draft_counts(one)
                assert one.finish() == compared(expected, one), f"{room} kB: another end"
            finally:
                subprocess.run(["umount", "--lazy", disk], check=True)  # `error` still holds a file
            print(f"{room} kB: {error if error is not None else 'it had room enough'}", flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 0


def in_a_namespace(arguments: list[str]) -> int:
    """Run `full` where this process may mount, which leaves nothing behind."""
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    may = f"mount -t tmpfs tmpfs {tempfile.gettempdir()}"
    try:
        subprocess.run([*namespace, "sh", "-c", may], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"mounting is not allowed here: {error}")
        return NOT_ALLOWED
    return subprocess.run(
        [*namespace, sys.executable, "-m", "tests.crash.faulty_disk", *arguments], check=False
    ).returncode


def compared(expected: Any, job: Job) -> Any:
    """Give the control's end; its outputs are those made after the template."""
    outputs, rows = expected
    return {version: outputs[version] for version in job.outputs}, rows


# -- RocksDB's own writes ---------------------------------------------------------------------------------------------


def child() -> int:
    """One job with the shim in place: prints `refused` or `through`, fails on anything else."""
    root = Path(os.environ["FAULTY_IO_HOME"])
    switch = Path(os.environ["FAULTY_IO_WHILE"])
    job, expected = control(root)
    job.outputs.clear()
    switch.touch()
    error = try_on(job)
    switch.unlink()
    no_draft_counts(job)
    assert job.finish() == compared(expected, job), "another end"
    print(f"refused {error.where}: {error.why}" if error is not None else "through")
    return 0


def preloaded(count: int, seed: int) -> int:
    """Compile the shim and run jobs under it."""
    root = scratch()
    shim = root / "faulty_io.so"
    told = {"refused": 0, "through": 0}
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, HERE / "faulty_io.c", "-ldl"], check=True)
        for number in range(seed, seed + count):
            rng = random.Random(number)
            home = root / f"job{number}"
            home.mkdir()
            below = rng.choice(("/sound/local/", "/sound/checkpoint/", "/db/", "/staged/", "/sound/"))
            environment = {
                "LD_PRELOAD": str(shim),
                "FAULTY_IO_BELOW": below,
                "FAULTY_IO_WHILE": str(root / f"on{number}"),
                "FAULTY_IO_AT": str(rng.randrange(30)),
                "FAULTY_IO_ERRNO": str(rng.choice((errno.ENOSPC, errno.EIO))),
                "FAULTY_IO_HOME": str(home),
                **({"FAULTY_IO_SHORT": "1"} if rng.random() < 0.5 else {}),
            }
            command = [sys.executable, "-m", "tests.crash.faulty_disk", "child"]
            done = subprocess.run(
                command, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
            )
            if done.returncode:
                print(f"seed {number} fails ({below}, {environment['FAULTY_IO_AT']}):\n{done.stderr[-3000:]}")
                print(f"again: python -m tests.crash.faulty_disk preload 1 {number}")
                return 1
            told[done.stdout.split()[0]] += 1
            shutil.rmtree(home, ignore_errors=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(
        f"{count} jobs on a failing disk: {told['refused']} stopped by name, {told['through']} did without;"
        " all came to the control's end"
    )
    return 0 if told["refused"] else 1


def main(arguments: list[str]) -> int:
    """Run from the command line."""
    if arguments[0] == "child":
        return child()
    if arguments[0] == "full":
        return in_a_namespace(["mounted", *arguments[1:]])
    if arguments[0] == "mounted":
        return full([int(room) for room in arguments[1:]])
    if arguments[0] == "limit":
        return limited([int(size) for size in arguments[1:]])
    if shutil.which("cc") is None:
        print("no cc here: RocksDB's own writes are not made to fail")
        return 0
    return preloaded(int(arguments[1]), int(arguments[2]) if len(arguments) > 2 else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
