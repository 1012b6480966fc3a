"""Damages to bytes, and a job of one shard that goes on with whatever is left of it, without Spark.

`Job.finish` does what Spark and the supervisor do: runs the micro-batches from the pointer on, restores the shard when
an attempt says that its state is missing or damaged, and gives the end state: results, errors, all rows.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from backend.batch import MESSAGE_FIELDS, NO_TIME, OFFSET, PARTITION, STREAM, TIME, Position
from backend.errors import RestoreFailed, StateAhead, StateCorrupted, StateUnavailable
from backend.spark.pack import frames
from backend.store.protocol import Region
from recovery.attempt import run_attempt
from recovery.changelog.file import FileChangelog
from recovery.commit.pointer import Commit, Pointer, decode, encode
from recovery.commit.shard_directory import ShardDirectory
from recovery.jobs import ShardJob, snapshots
from recovery.restore import probe, replay
from recovery.restore.open_shard import OpenShard
from recovery.share import ShardInput
from recovery.snapshots import uploads
from tests.support.bases import based
from tests.support.windows import windows_operator

QUERY = "11111111-0000-4000-8000-000000000000"
BATCH_ROWS = 120
LAST = 6
"""Version of the last micro-batch; the templates end before it."""


def messages(count: int, seed: int) -> list[tuple[int, str, float]]:
    """Give (event time in ms, group key, value) by offset: disorder, wide keys, so that files have several blocks."""
    rng = random.Random(seed)
    out = []
    for offset in range(count):
        key = f"user-{rng.randrange(40)}-{rng.randbytes(40).hex()}"
        out.append((100 * offset + rng.randrange(-3_000, 3_000), key, rng.random()))
    return out


@dataclass
class Job:
    """A job of one shard below a directory.

    Attributes:
        home: Holds `local` and `checkpoint`.
        seed: Of its messages.
        pointers: What Spark's state held after each micro-batch, as bytes.
        outputs: (results, errors) of each micro-batch.
        hook: Called with the names of replayed chunks before they are used.
        restores: Restores made.
    """

    home: Path
    seed: int = 0
    pointers: list[bytes] = field(default_factory=list)
    outputs: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    hook: Callable[[Sequence[Path]], None] | None = None
    restores: int = 0

    def __post_init__(self) -> None:
        self.operator, self.fields = windows_operator()
        self.messages = messages(BATCH_ROWS * (LAST + 1), self.seed)
        self.checkpoint = str(self.home / "checkpoint")

    def shard_job(self) -> ShardJob:
        return ShardJob(
            query_id=QUERY,
            shard=0,
            local_dir=self.home / "local",
            operator=self.operator,
            message_fields=self.fields,
            changelog=based(FileChangelog(f"{self.checkpoint}/rewind/changelog")),
            snapshots=snapshots(self.checkpoint),
            snapshot_every=2,
            lock_wait_s=0.0,
        )

    def batch(self) -> None:
        """Run and commit the next micro-batch."""
        version = len(self.pointers)
        done = run_attempt(self.shard_job(), self.pointer(), version, lambda before: self._input(version))
        with uploads._busy:  # a snapshot that is being uploaded is there when this returns
            pass
        self.pointers.append(encode(done.pointer))
        self.outputs[version] = (done.outcome.results.to_pylist(), done.outcome.errors.to_pylist())

    def pointer(self) -> Pointer | None:
        return decode(self.pointers[-1]) if self.pointers else None

    def finish(self) -> tuple[dict[int, tuple[Any, Any]], dict[bytes, bytes]]:
        """Run to the end, restoring as the supervisor does; give the outputs made here and the end state."""
        tries = 0
        while True:
            try:
                while len(self.pointers) <= LAST:
                    self.batch()
                return self.outputs, self._rows()
            except (StateUnavailable, StateCorrupted, StateAhead) as error:
                tries += 1
                if tries > 4:
                    raise RestoreFailed(
                        "no progress", where=self.checkpoint, why=str(error), command="rewind verify"
                    ) from error
                self._restore()

    def _rows(self) -> dict[bytes, bytes]:
        job = self.shard_job()
        directory = ShardDirectory(job.local_dir, QUERY, 0)
        with directory.lock(0.0):
            opened = OpenShard(directory, job.where, job.snapshots).at(self.pointer())
            with opened.store as store:
                return dict(store.scan(bytes([Region.COMMIT + 1]), None))

    def _restore(self) -> None:
        pointer, job = self.pointer(), self.shard_job()
        if probe.unusable(job, pointer) is None or pointer is None:
            return
        self.restores += 1
        record = job.changelog.read(0, pointer.commit).record
        ranges = replay.replay_ranges(record)
        rows = [(offset, self.messages[offset]) for low, high in ranges.values() for offset in range(low, high)]
        write = replay.chunk_writer(self.operator, self.fields, {0: record}, self.checkpoint, "rewind/replay/run")
        names = [r["name"] for out in write(iter([_arrow(rows, self.fields)])) for r in out.to_pylist()]
        if self.hook is not None:
            self.hook([Path(self.checkpoint) / name for name in names])
        replay.build_snapshot(job, pointer.commit, self.checkpoint, names)

    def _input(self, version: int) -> ShardInput:
        first = BATCH_ROWS * version
        rows = []
        for offset in range(first, first + BATCH_ROWS):
            time, key, x = self.messages[offset]
            before = max((m[0] for m in self.messages[:offset]), default=NO_TIME)
            values = {"k": key, "x": x}
            place = {"_stream": 0, "_partition": 0, "_offset": offset, "_time": time, "_before": before}
            rows.append({**place, **{f.name: values[f.name] for f in self.fields}})
        newest = max(m[0] for m in self.messages[: first + BATCH_ROWS])
        after = {(0, 0): Position(first + BATCH_ROWS, newest, 9_000)}
        table = pa.Table.from_pylist(rows, pa.schema([*MESSAGE_FIELDS, *self.fields]))
        return ShardInput(9_000 + version, table, after)


def _arrow(rows: Sequence[tuple[int, tuple[int, str, float]]], fields: Sequence[pa.Field]) -> pa.RecordBatch:
    """Lay out messages as a replay gets them from the source."""
    count = len(rows)
    columns: dict[str, pa.Array] = {
        STREAM: pa.array([0] * count, pa.int32()),
        PARTITION: pa.array([0] * count, pa.int32()),
        OFFSET: pa.array([offset for offset, _ in rows], pa.int64()),
        TIME: pa.array([m[0] for _, m in rows], pa.int64()),
        frames.SHARD_IN: pa.array([0] * count, pa.int32()),
        frames.MALFORMED_IN: pa.nulls(count, pa.string()),
    }
    values = {"k": [m[1] for _, m in rows], "x": [m[2] for _, m in rows]}
    for entry in fields:
        columns[entry.name] = pa.array(values[entry.name], entry.type)
    return pa.RecordBatch.from_pydict(columns)


def commit_of(data: bytes) -> Commit:
    """Give the commit that a pointer names."""
    return decode(data).commit


# -- damages: (bytes, random) -> bytes --------------------------------------------------------------------------------

PAGE = 512


def flip(data: bytes, rng: random.Random) -> bytes:
    """Flip a bit."""
    out = bytearray(data)
    out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut(data: bytes, rng: random.Random) -> bytes:
    """Lose the end."""
    return data[: rng.randrange(1, len(data))] if len(data) > 1 else b""


def empty(data: bytes, rng: random.Random) -> bytes:
    """Lose everything but the name."""
    return b""


def zero(data: bytes, rng: random.Random) -> bytes:
    """Write zeros over a page."""
    at = rng.randrange(0, len(data), PAGE)
    return data[:at] + bytes(len(data[at : at + PAGE])) + data[at + PAGE :]


PLACES = int(os.environ.get("DAMAGE_PLACES", "1"))
DAMAGES: dict[str, tuple[Callable[[bytes, random.Random], bytes], int]] = {
    "flip": (flip, 3 * PLACES),
    "cut": (cut, PLACES),
    "empty": (empty, 1),
    "zero": (zero, PLACES),
}
"""Name -> what is done, and at how many seeded places."""


def replaced(path: Path, data: bytes) -> None:
    """Give a file other bytes; hard links of it keep theirs."""
    path.unlink()
    path.write_bytes(data)
