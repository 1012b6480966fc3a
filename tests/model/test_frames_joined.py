"""A join of a topic with a DataFrame, micro-batch after micro-batch, with lost disks: as if nothing had been lost.

The topic's messages are replayed from the topic, the DataFrame's come from the message log; pairs are two plain loops.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest

from backend.batch import OFFSET, PARTITION, STREAM, TIME, Positions
from backend.errors import ChangelogDamaged, RestoreMismatch
from backend.joins.operator import JoinOperator
from backend.joins.spec import join_spec
from backend.spark.pack import frames
from backend.spark.pack.assembling import Packed, assemble
from backend.spark.pack.packing import PackPlan, pack
from recovery.attempt import run_attempt
from recovery.changelog import FileChangelog
from recovery.changelog.message_log import MessageLog
from recovery.commit.pointer import Pointer
from recovery.jobs import ShardJob, snapshots
from recovery.restore import replay
from recovery.share import ShardInput

FIELDS = pa.schema([pa.field("k", pa.int64()), pa.field("n", pa.int64())])
SPEC = join_spec(
    FIELDS, FIELDS, on="k", within=20, left_retention=40, right_retention=40, max_ahead=None, idle_after=None
)
TOPIC, FRAME = 0, 1
Row = tuple[int, int, int]
"""Event time, k, n."""


@dataclass
class Cluster:
    """One shard, and what its sources delivered."""

    root: Path
    log: MessageLog
    pointer: Pointer | None = None
    topic: list[Row] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def job(self) -> ShardJob:
        operator = JoinOperator(SPEC)
        return ShardJob(
            "q",
            0,
            self.root / "local",
            operator,
            tuple(pa.field(f.name, f.type) for f in SPEC.message_schema if f.name in SPEC.input_fields),
            FileChangelog(str(self.root / "changelog")),
            snapshots=snapshots(str(self.root)),
            message_log=self.log,
        )

    def arrow(self, stream: int, rows: list[Row], first: int) -> pa.RecordBatch:
        count = len(rows)
        offsets = list(range(first, first + count)) if stream == TOPIC else [0] * count
        columns = {
            STREAM: pa.array([stream] * count, pa.int32()),
            PARTITION: pa.array([0] * count, pa.int32()),
            OFFSET: pa.array(offsets, pa.int64()),
            TIME: pa.array([time for time, _, _ in rows], pa.int64()),
            frames.SHARD_IN: pa.array([0] * count, pa.int32()),
            frames.TIMESTAMP_IN: pa.nulls(count, pa.int64()),
            frames.KEY_IN: pa.nulls(count, pa.binary()),
            frames.RAW_IN: pa.nulls(count, pa.binary()),
            frames.MALFORMED_IN: pa.nulls(count, pa.string()),
        }
        for name in SPEC.input_fields:
            side, _, own = name.partition(".")
            if side == ("left", "right")[stream]:
                values = [row[("k", "n").index(own) + 1] for row in rows]
                columns[frames.column_name(name)] = pa.array(values, pa.int64())
        return pa.RecordBatch.from_pydict(columns)

    def micro_batch(self, version: int, topic: list[Row], frame: list[Row], rng: random.Random) -> None:
        plan = PackPlan((0,), self.job.message_fields, False, None, {TOPIC: "topic", FRAME: "frame"})
        batches = [self.arrow(TOPIC, topic, len(self.topic))] if topic else []
        for piece in (frame[: len(frame) // 2], frame[len(frame) // 2 :]):
            batches += [self.arrow(FRAME, rng.sample(piece, len(piece)), 0)] if piece else []
        packed = [row for batch in batches for row in pack(batch, plan, 1).to_pylist()]
        packed += [{"header": frames.encode_header(frames.Header(frames.FORMAT, 1, [])), "frame": None, "errors": None}]
        rng.shuffle(packed)

        def read(before: Positions) -> ShardInput:
            rows = [Packed(row["header"], row["frame"], row["errors"]) for row in packed]
            found = assemble(rows, before, fields=self.job.message_fields, ranked={FRAME}, version=version)
            return ShardInput(found.time_ms, found.messages, found.after)

        run_attempt(self.job, self.pointer, version, read)  # an attempt that Spark does not commit
        done = run_attempt(self.job, self.pointer, version, read)
        self.pointer = done.pointer
        self.topic += topic
        self.pairs += [(row["left_n"], row["right_n"]) for row in done.outcome.results.to_pylist()]

    def lose_disk(self) -> None:
        assert self.pointer is not None
        shutil.rmtree(self.root / "local")
        job, record = self.job, self.job.changelog.read(0, self.pointer.commit).record
        write = replay.chunk_writer(job.operator, job.message_fields, {0: record}, str(self.root), "rewind/replay/run")
        ranges = {key: bounds for key, bounds in replay.replay_ranges(record).items() if key[0] == TOPIC}
        batches = [self.arrow(TOPIC, self.topic[low:high], low) for low, high in ranges.values()]
        names = [report["name"] for batch in write(iter(batches)) for report in batch.to_pylist()]
        restored = replay.build_snapshot(job, self.pointer.commit, str(self.root), names)
        assert restored.messages == record.message_count, "count and digest were proven on the way"


def made(rng: random.Random, newest: int, numbers: int) -> list[Row]:
    return [(newest + rng.randint(0, 12), rng.randrange(4), numbers + at) for at in range(rng.randint(0, 9))]


def near(one: Row, other: Row) -> bool:
    return abs(one[0] - other[0]) <= 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_pairs_come_once_and_a_lost_disk_changes_nothing(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backend.joins.liveness.MIN_BUCKET_MS", 1)
    rng = random.Random(seed)
    cluster = Cluster(tmp_path, MessageLog(str(tmp_path / "messages"), frozenset({FRAME})))
    sides: tuple[list[Row], list[Row]] = ([], [])
    for version in range(10):
        new = [made(rng, 10 * version, len(side)) for side in sides]
        if cluster.pointer is not None and rng.random() < 0.4:
            cluster.lose_disk()
        cluster.micro_batch(version, sorted(new[TOPIC]), new[FRAME], rng)
        for side, rows in zip(sides, new, strict=True):
            side.extend(rows)
    left, right = sides
    expected = [(mine[2], other[2]) for mine in left for other in right if mine[1] == other[1] and near(mine, other)]
    assert sorted(cluster.pairs) == sorted(expected)
    assert cluster.pointer is not None
    record = cluster.job.changelog.read(0, cluster.pointer.commit).record
    assert all(segment.commit.version >= 3 for segment in record.segments), "what has expired is free"
    assert record.segments


def test_a_refused_row_stays_refused_after_a_restore(tmp_path: Path) -> None:
    """The topic is far behind, so no bound hides the late row: the commit's list of refused offsets does."""
    cluster = Cluster(tmp_path, MessageLog(str(tmp_path / "messages"), frozenset({FRAME})))
    cluster.micro_batch(0, [(0, 1, 0)], [(100, 1, 0), (300, 1, 1)], random.Random(0))
    cluster.micro_batch(1, [(1, 1, 1)], [(100, 1, 2)], random.Random(0))
    assert cluster.pointer is not None
    record = cluster.job.changelog.read(0, cluster.pointer.commit).record
    assert record.rejected == [(FRAME, 0, 1 << 32)]
    cluster.lose_disk()


def test_a_lost_segment_is_named_and_nothing_is_restored(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, MessageLog(str(tmp_path / "messages"), frozenset({FRAME})))
    cluster.micro_batch(0, [(5, 1, 0)], [(6, 1, 0)], random.Random(0))
    for path in (tmp_path / "messages").glob("*/*"):
        path.unlink()
    with pytest.raises(ChangelogDamaged, match="a segment of the message log is missing"):
        cluster.lose_disk()


def test_a_message_that_was_not_logged_is_missed(tmp_path: Path) -> None:
    class Forgetful(MessageLog):
        def of(self, messages: pa.Table) -> pa.Table:
            return MessageLog.of(self, messages).slice(1)

    cluster = Cluster(tmp_path, Forgetful(str(tmp_path / "messages"), frozenset({FRAME})))
    cluster.micro_batch(0, [(5, 1, 0)], [(6, 1, 0), (7, 1, 1)], random.Random(0))
    with pytest.raises(RestoreMismatch, match="in all 2 messages, 3 were committed"):
        cluster.lose_disk()
