"""Messages that somebody made to hurt: whatever comes, each is counted once or refused with its reason, and it goes on.

`python -m tests.crash.hostile <first>-<last> [<keys>]` runs a fuzzed job per seed through the pack stage, its inverse
and an attempt on a shard, and then one micro-batch of so many distinct keys. What is checked needs no model of windows:
with tumbling windows a message is in one window, so the last revisions' counts and the errors add up to what was sent.
"""

from __future__ import annotations

import random
import resource
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from backend import aggregates as agg
from backend.batch import MAX_EVENT_TIME, MIN_EVENT_TIME, OFFSET, PARTITION, STREAM, TIME
from backend.spark.pack import assembling, frames, packing
from backend.windows.definitions import tumbling
from backend.windows.operator import WindowOperator
from backend.windows.policies import Policies
from backend.windows.spec import window_spec
from recovery.attempt import run_attempt
from recovery.changelog.file import FileChangelog
from recovery.commit.pointer import Pointer, decode, encode
from recovery.jobs import ShardJob
from recovery.operate import Done
from recovery.share import ShardInput
from tests.support.bases import based

SCHEMA = pa.schema([pa.field("k", pa.string()), pa.field("f", pa.float64()), pa.field("x", pa.float64())])
YEAR_1, YEAR_9999 = -62_135_596_800_000, 253_402_300_799_999
NOW = 1_700_000_000_000
ENDS = (
    -(2**63),
    -(2**63) + 1,
    2**63 - 1,
    2**63 - 2,
    MIN_EVENT_TIME,
    MIN_EVENT_TIME - 1,
    MAX_EVENT_TIME,
    MAX_EVENT_TIME + 1,
    0,
    -1,
)
KEYS = ("", "\0", "\0\1", "\x7f", "é" * 300, "\U0010ffff", "a" * 2_000, "null", "NaN", " ", "\n", "🦆", "a\0b")
FLOATS = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 5e-324, 1.7e308, -1.7e308, 1.5)
RAW = (
    b"",
    b"{",
    b"[" * 5_000,
    b'{"a":1,"a":2}',
    b"\xff\xfe",
    b'{"x":' + b"9" * 400 + b"}",
    b"null",
    b"NaN",
    b"\x00" * 99,
)


@dataclass(frozen=True)
class Sent:
    """A message: event time (None: it has none), why it is malformed, fields, bytes of key and value."""

    partition: int
    offset: int
    time: int | None
    malformed: str | None
    k: str | None
    f: float | None
    x: float | None
    key: bytes
    raw: bytes


@dataclass
class Hostile:
    """One job of one shard on a stream of such messages."""

    home: Path
    max_ahead_ms: int | None = 86_400_000
    sent: dict[tuple[int, int], Sent] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    counted: dict[tuple[Any, ...], tuple[int, int]] = field(default_factory=dict)
    pointer: bytes | None = None
    version: int = 0

    def __post_init__(self) -> None:
        spec = window_spec(
            tumbling("10 s"),
            SCHEMA,
            {"n": agg.count(), "top": agg.max_("x"), "mean": agg.mean("x"), "mid": agg.median("x")},
            keys=["k", "f"],
            retention="1 hour",
            policies=Policies(None, True, 0),
            max_ahead=self.max_ahead_ms,
        )
        self.operator = WindowOperator(spec)
        self.fields = tuple(SCHEMA.field(name) for name in self.operator.input_fields)
        self.job = ShardJob(
            query_id="hostile",
            shard=0,
            local_dir=self.home / "local",
            operator=self.operator,
            message_fields=self.fields,
            changelog=based(FileChangelog(self.home / "changelog")),
        )

    def batch(self, messages: list[Sent], time_ms: int, *, drain: bool = False) -> None:
        """Run and commit a micro-batch: packed, put together, folded, staged, logged."""
        for message in messages:
            self.sent[message.partition, message.offset] = message
        plan = packing.PackPlan((0,), self.fields, False, self.max_ahead_ms, {0: "topic"})
        packed = []
        for partition in sorted({m.partition for m in messages}):
            rows = [m for m in messages if m.partition == partition]
            packed += packing.pack(self._arrow(rows), plan, time_ms).to_pylist()
        control = pa.record_batch({"drain": [drain], "adopt": ["{}"]})
        packed += packing.pack_control(control, plan.grouping, time_ms).to_pylist()
        rows = [assembling.Packed(row["header"], row["frame"], row["errors"]) for row in packed]
        bad: list[dict[str, Any]] = []

        def read(before: Any) -> ShardInput:
            given = assembling.assemble(rows, before, fields=self.fields)
            bad[:] = given.errors.to_pylist()
            ahead = tuple((e["stream"], e["partition"], e["offset"]) for e in bad if e["reason"] == "in_future")
            return ShardInput(given.time_ms, given.messages, given.after, ahead, drain=given.drain)

        pointer: Pointer | None = decode(self.pointer) if self.pointer is not None else None
        done: Done = run_attempt(self.job, pointer, self.version, read)
        self.pointer, self.version = encode(done.pointer), self.version + 1
        self.errors += bad + done.outcome.errors.to_pylist()
        results = done.outcome.results
        group = [repr(value) for value in results["k"].to_pylist()], [repr(v) for v in results["f"].to_pylist()]
        starts, revisions, counts = (results[name].to_pylist() for name in ("window_start", "revision", "n"))
        for at, start in enumerate(starts):
            window = start, group[0][at], group[1][at]
            self.counted[window] = max(self.counted.get(window, (-1, 0)), (revisions[at], counts[at]))

    def check(self) -> None:
        """Each message is in a window or in the errors, once, under its place and with its bytes."""
        places = Counter((e["partition"], e["offset"]) for e in self.errors)
        assert set(places) <= set(self.sent), "an error of a message that was never sent"
        assert not [place for place, times in places.items() if times > 1], "a message is refused twice"
        total = sum(count for _, count in self.counted.values())
        assert total + len(self.errors) == len(self.sent), (
            f"{total} counted, {len(self.errors)} refused, {len(self.sent)} sent"
        )
        for error in self.errors:
            message = self.sent[error["partition"], error["offset"]]
            if message.malformed is not None:
                assert (error["reason"], error["detail"]) == ("malformed", message.malformed)
                assert (error["topic"], error["key"], error["value"]) == ("topic", message.key, message.raw)
            elif message.time is None:
                assert error["reason"] == "no_event_time"
            elif not MIN_EVENT_TIME <= message.time <= MAX_EVENT_TIME:
                assert error["reason"] == "out_of_range"
            else:
                assert error["reason"] in ("in_future", "out_of_retention"), error["reason"]
        refused = {(e["partition"], e["offset"]) for e in self.errors}
        for place, message in self.sent.items():
            bad = (
                message.malformed is not None
                or message.time is None
                or not MIN_EVENT_TIME <= message.time <= MAX_EVENT_TIME
            )
            assert not bad or place in refused, f"{message} was counted"

    def _arrow(self, rows: list[Sent]) -> pa.RecordBatch:
        count = len(rows)
        columns: dict[str, pa.Array] = {
            STREAM: pa.array([0] * count, pa.int32()),
            PARTITION: pa.array([m.partition for m in rows], pa.int32()),
            OFFSET: pa.array([m.offset for m in rows], pa.int64()),
            TIME: pa.array([m.time for m in rows], pa.int64()),
            frames.SHARD_IN: pa.array([0] * count, pa.int32()),
            frames.TIMESTAMP_IN: pa.nulls(count, pa.int64()),
            frames.KEY_IN: pa.array([m.key for m in rows], pa.binary()),
            frames.RAW_IN: pa.array([m.raw for m in rows], pa.binary()),
            frames.MALFORMED_IN: pa.array([m.malformed for m in rows], pa.string()),
        }
        for entry in self.fields:
            columns[entry.name] = pa.array([getattr(m, entry.name) for m in rows], entry.type)
        return pa.RecordBatch.from_pydict(columns)


def fuzzed(home: Path, seed: int) -> Counter[str]:
    """Run one job on a stream from a seed; give the reasons of what was refused."""
    rng = random.Random(seed)
    job = Hostile(home, rng.choice((86_400_000, None, 0)))
    offsets = [rng.choice((0, 2**40)) for _ in range(rng.choice((1, 3)))]
    now = NOW
    for _ in range(rng.randint(2, 6)):
        now += rng.choice((0, 1_000, 3_600_000, -1_000, -86_400_000))  # clocks go back
        batch = []
        for _ in range(rng.randint(0, 60)):
            partition = rng.randrange(len(offsets))
            batch.append(message(rng, partition, offsets[partition], now))
            offsets[partition] += rng.choice((1, 1, 1, 5))
        job.batch(batch, now)
    job.batch([], now, drain=True)
    job.check()
    return Counter(error["reason"] for error in job.errors)


def message(rng: random.Random, partition: int, offset: int, now: int) -> Sent:
    """Make a message: half of them as they should be."""
    near = now - rng.randrange(0, 20_000)
    time: int | None = near
    kind = rng.random()
    if kind < 0.1:
        time = rng.choice(ENDS)
    elif kind < 0.2:
        time = rng.choice((None, YEAR_1, YEAR_9999, rng.randrange(-(2**63), 2**63)))
    elif kind < 0.3:
        time = now + rng.randrange(-7_200_000, 200_000_000)
    return Sent(
        partition,
        offset,
        time,
        rng.choice(("not JSON", "invalid UTF-8", "")) if rng.random() < 0.1 else None,
        rng.choice((*KEYS, None)),
        rng.choice((*FLOATS, None)) if rng.random() < 0.3 else None,
        rng.choice((*FLOATS, None)),
        rng.randbytes(rng.randrange(0, 9)),
        rng.choice(RAW),
    )


def plain(offset: int, time: int | None, **changed: Any) -> Sent:
    """Make a message like any other."""
    values: dict[str, Any] = {"malformed": None, "k": "k", "f": None, "x": 1.0, "key": b"key", "raw": b"{}", **changed}
    return Sent(0, offset, time, **values)


def many_keys(home: Path, keys: int) -> float:
    """Run one micro-batch with so many distinct keys; give by how many MB the process grew at its highest."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    job = Hostile(home)
    rows = [plain(at, NOW + at % 1_000, k=f"key-{at:07d}") for at in range(keys)]
    job.batch(rows, NOW)
    job.batch([plain(keys, NOW + 60_000)], NOW)
    job.batch([], NOW, drain=True)
    job.check()
    assert len(job.counted) == keys + 1
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main(arguments: list[str]) -> int:
    """Run from the command line."""
    first, _, last = arguments[0].partition("-")
    seeds, keys = range(int(first), int(last or first) + 1), int(arguments[1]) if len(arguments) > 1 else 0
    refused: Counter[str] = Counter()
    home = Path(tempfile.mkdtemp(prefix="rewind-hostile-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        for seed in seeds:
            refused += fuzzed(home / str(seed), seed)
            shutil.rmtree(home / str(seed))
        print(f"{len(seeds)} streams; refused: " + ", ".join(f"{n} {reason}" for reason, n in sorted(refused.items())))
        if keys:
            print(f"{keys} distinct keys in one micro-batch: {many_keys(home / 'keys', keys):.0f} MB at the highest")
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
