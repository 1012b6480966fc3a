"""One shard with more messages than a worker may take memory for: made, replayed, built, each in a process of its own.

`python -m tests.crash.big_shard make|replay|build <directory> <messages> [<scale>]` does one step and prints, as JSON,
how much its memory grew: the peak of resident memory (VmHWM) less what it was before the step began. With a scale,
every bound of the product is that many times smaller, so that fewer messages show the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from backend import aggregates as agg
from backend.batch import MESSAGE_FIELDS, NO_TIME, OFFSET, PARTITION, STREAM, TIME, Position
from backend.rocks import RocksOptions, store
from backend.spark.pack import frames
from backend.spark.session.settings import ARROW_BYTES
from backend.windows.definitions import tumbling
from backend.windows.operator import WindowOperator
from backend.windows.spec import window_spec
from recovery.attempt import run_attempt
from recovery.changelog import open_changelog
from recovery.commit.pointer import decode, encode
from recovery.jobs import ShardJob, snapshots
from recovery.restore import build as restore
from recovery.restore import prove as proof
from recovery.restore import replay
from recovery.share import ShardInput
from tests.support.memory import peak_mb

VALUE_BYTES = 1000
EVERY_MS = 100
FIELDS = pa.schema([pa.field("key", pa.string()), pa.field("x", pa.int64()), pa.field("note", pa.string())])
AFTER = "pointer.msgpack"
SCALE = int(sys.argv[4]) if len(sys.argv) > 4 else 1
BLOCK_ROWS = 4096
BLOCKS = max(1, ARROW_BYTES // SCALE // VALUE_BYTES // BLOCK_ROWS)
"""A batch has as many as Spark puts into an Arrow batch of its bounded size."""


def job(directory: Path) -> ShardJob:
    spec = window_spec(
        tumbling("1 hour"),
        FIELDS,
        {"n": agg.count(), "mid": agg.median("x"), "notes": agg.collect_set("note")},
        keys=["key"],
        retention="400 days",
        max_ahead=None,
    )
    operator = WindowOperator(spec)
    fields = tuple(FIELDS.field(name) for name in operator.input_fields)
    log = open_changelog(str(directory / "checkpoint" / "rewind" / "changelog"))
    return ShardJob("big", 0, directory / "local", operator, fields, log, snapshots(str(directory / "checkpoint")))


def batches(messages: int) -> Iterator[pa.Table]:
    """Give the messages as a source has them: the same ones however they are cut, with texts that do not compress."""
    for first in range(0, messages, BLOCKS * BLOCK_ROWS):
        last = min(messages, first + BLOCKS * BLOCK_ROWS)
        starts = range(first, last, BLOCK_ROWS)
        yield pa.concat_tables([block(start, min(BLOCK_ROWS, last - start)) for start in starts]).combine_chunks()


def block(first: int, count: int) -> pa.Table:
    random = np.random.default_rng(first)
    offsets = np.arange(first, first + count)
    text = random.integers(97, 123, count * VALUE_BYTES, dtype=np.uint8)
    ends = np.arange(0, (count + 1) * VALUE_BYTES, VALUE_BYTES, dtype=np.int32)
    return pa.table(
        {
            STREAM: pa.array(np.zeros(count), pa.uint16()),
            PARTITION: pa.array(np.zeros(count), pa.int32()),
            OFFSET: pa.array(offsets),
            TIME: pa.array(offsets * EVERY_MS),
            "key": pa.array([f"k{number % 50}" for number in offsets.tolist()]),
            "x": pa.array(random.integers(0, 1000, count)),
            "note": pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(text)),
        }
    )


def make(directory: Path, messages: int) -> None:
    """Run the job as attempts do, and commit each."""
    shard, pointer, newest, end = job(directory), None, NO_TIME, 0
    for version, rows in enumerate(batches(messages)):
        before = np.maximum.accumulate(np.concatenate([[newest], np.asarray(rows[TIME])[:-1]]))
        columns = {**{name: rows[name] for name in rows.column_names}, "_before": pa.array(before, pa.int64())}
        schema = pa.schema([*MESSAGE_FIELDS, *shard.message_fields])
        table = pa.table([columns[field.name].cast(field.type) for field in schema], schema=schema)
        newest, end = int(np.asarray(rows[TIME])[-1]), end + rows.num_rows
        after = {(0, 0): Position(end, newest, 1)}
        given = ShardInput(1, table, after)
        pointer = run_attempt(shard, pointer, version, lambda before, it=given: it).pointer  # type: ignore[misc]
    assert pointer is not None
    (directory / AFTER).write_bytes(encode(pointer))


def source_rows(messages: int, fields: tuple[pa.Field, ...]) -> Iterator[pa.RecordBatch]:
    """Give the messages as the pack stage reads them in a replay."""
    for rows in batches(messages):
        count = rows.num_rows
        columns: dict[str, Any] = {
            **{name: rows[name].combine_chunks() for name in (STREAM, PARTITION, OFFSET, TIME)},
            frames.SHARD_IN: pa.array(np.zeros(count), pa.int32()),
            frames.TIMESTAMP_IN: pa.nulls(count, pa.int64()),
            frames.KEY_IN: pa.nulls(count, pa.binary()),
            frames.RAW_IN: pa.nulls(count, pa.binary()),
            frames.MALFORMED_IN: pa.nulls(count, pa.string()),
            **{field.name: rows[field.name].combine_chunks() for field in fields},
        }
        yield pa.RecordBatch.from_pydict(columns)


def restore_chunks(directory: Path, messages: int) -> None:
    """Write the chunks of a replay, as the workers of its first Spark job do."""
    shard = job(directory)
    commit = decode((directory / AFTER).read_bytes()).commit
    record = shard.changelog.read(0, commit).record
    write = replay.chunk_writer(
        shard.operator, shard.message_fields, {0: record}, str(directory / "checkpoint"), "rewind/replay/run"
    )
    names = [row["name"] for told in write(source_rows(messages, shard.message_fields)) for row in told.to_pylist()]
    (directory / "chunks.json").write_text(json.dumps(names))


def build(directory: Path, messages: int) -> None:
    """Build and prove the shard, as a worker of the second one does; with nothing of the old local state."""
    shard = replace(job(directory), local_dir=directory / "new")
    commit = decode((directory / AFTER).read_bytes()).commit
    names = json.loads((directory / "chunks.json").read_text())
    restored = replay.build_snapshot(shard, commit, str(directory / "checkpoint"), names)
    assert restored.messages == messages


def scale() -> None:
    """Make every bound smaller."""
    replay.PIECE_BYTES //= SCALE
    proof.PAGE_BYTES //= SCALE
    sound = RocksOptions()
    cache, buffers = sound.block_cache_bytes // SCALE, sound.write_buffer_bytes // SCALE
    smaller = partial(RocksOptions, block_cache_bytes=cache, write_buffer_bytes=buffers)
    store.RocksOptions = smaller  # type: ignore[assignment,misc]
    restore.OPTIONS = smaller(merged_files=restore.OPTIONS.merged_files)
    replay.restore_shard = partial(restore.restore_shard, run_bytes=restore.RUN_BYTES // SCALE)  # type: ignore[assignment]


def main() -> None:
    step, directory, messages = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    scale()
    before = peak_mb("VmRSS")
    {"make": make, "replay": restore_chunks, "build": build}[step](directory, messages)
    peak = peak_mb("VmHWM")
    print(json.dumps({"before_mb": round(before), "peak_mb": round(peak), "grown_mb": round(peak - before)}))


if __name__ == "__main__":
    main()
