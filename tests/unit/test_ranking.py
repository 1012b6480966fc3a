"""Rows of a DataFrame get the same offsets in whatever order they come, and are late by earlier ones only."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from backend.batch import BEFORE, NO_TIME, OFFSET, PARTITION, STREAM, TIME, Position
from backend.errors import ValueInvalid
from backend.spark.pack import frames
from backend.spark.pack.assembling import Packed, assemble
from backend.spark.pack.packing import PackPlan, pack
from backend.spark.ranking import check_ranks
from recovery.share import ShardInput

FIELDS = (pa.field("key", pa.string()), pa.field("tags", pa.list_(pa.int64())))
PLAN = PackPlan((0, 1), FIELDS, False, 1_000, {0: "clicks"})

Row = tuple[int | None, str | None, list[int] | None]


def arrow(rows: list[Row]) -> pa.RecordBatch:
    count = len(rows)
    fields = pa.StructArray.from_arrays(
        [pa.array([r[1] for r in rows], pa.string()), pa.array([r[2] for r in rows], FIELDS[1].type)], ["key", "tags"]
    )
    return pa.RecordBatch.from_pydict(
        {
            STREAM: pa.array([0] * count, pa.int32()),
            PARTITION: pa.array([0] * count, pa.int32()),
            OFFSET: pa.array([0] * count, pa.int64()),
            TIME: pa.array([r[0] for r in rows], pa.int64()),
            frames.SHARD_IN: pa.array([0 if r[1] == "a" else 1 for r in rows], pa.int32()),
            frames.TIMESTAMP_IN: pa.nulls(count, pa.int64()),
            frames.KEY_IN: pa.nulls(count, pa.binary()),
            frames.RAW_IN: fields,
            frames.MALFORMED_IN: pa.nulls(count, pa.string()),
            "key": fields.field("key"),
            "tags": fields.field("tags"),
        }
    )


def assembled(pieces: list[list[Row]], shard: int = 0, version: int = 7, before: Any = None) -> ShardInput:
    rows = [row for piece in pieces if piece for row in pack(arrow(piece), PLAN, 500).to_pylist()]
    mine = [Packed(row["header"], row["frame"], row["errors"]) for row in rows if row["shard"] == shard]
    return assemble(mine, before or {}, fields=FIELDS, topics={0: "clicks"}, ranked={0}, version=version)


ROWS: list[Row] = [
    (30, "a", [1]),
    (10, "a", None),
    (20, "a", [2]),
    (20, "a", [3, 4]),
    (20, "a", [2]),
    (20, "a", []),
    (90, "b", None),
    (None, "a", [9]),
    (9_999, "a", [8]),
    (None, "a", [7]),
]


def cut(rng: random.Random, rows: list[Row]) -> list[list[Row]]:
    rows = rng.sample(rows, len(rows))
    edges = sorted(rng.sample(range(len(rows) + 1), 3))
    return [rows[low:high] for low, high in zip([0, *edges], [*edges, len(rows)], strict=True)]


def test_offsets_are_micro_batch_and_rank_by_event_time() -> None:
    given = assembled([ROWS])
    assert given.messages is not None
    assert given.messages[TIME].to_pylist() == [10, 20, 20, 20, 20, 30]
    assert given.messages[OFFSET].to_pylist() == [7 * 2**32 + rank for rank in range(6)]
    assert given.messages[BEFORE].to_pylist() == [NO_TIME, 10, 20, 20, 20, 20]
    assert given.after == {(0, 0): Position(8 * 2**32, 90, 500)}, "the other shard's row moves stream time, too"
    errors = given.errors.select(["topic", "partition", "offset", "event_time", "reason"]).to_pylist()
    assert [tuple(error.values()) for error in errors] == [
        ("clicks", 0, 7 * 2**32 + 6, 9_999, "in_future"),
        ("clicks", 0, 7 * 2**32 + 7, None, "no_event_time"),
        ("clicks", 0, 7 * 2**32 + 8, None, "no_event_time"),
    ]
    values = [b'{"key":"a","tags":[8]}', b'{"key":"a","tags":[7]}', b'{"key":"a","tags":[9]}']
    assert given.errors["value"].to_pylist() == values


def test_any_order_and_any_cuts_give_the_same() -> None:
    first = assembled([ROWS])
    for seed in range(40):
        again = assembled(cut(random.Random(seed), ROWS))
        assert again.messages.equals(first.messages)
        assert again.errors.equals(first.errors)
        assert again.after == first.after


def test_a_row_is_late_by_earlier_micro_batches_only() -> None:
    before = {(0, 0): Position(7 * 2**32, 25, 400)}
    given = assembled([ROWS], before=before)
    assert given.messages is not None
    assert given.messages[BEFORE].to_pylist() == [25, 25, 25, 25, 25, 25]


def test_a_micro_batch_without_rows_moves_nothing() -> None:
    header = frames.encode_header(frames.Header(frames.FORMAT, 600, []))
    before = {(0, 0): Position(3 * 2**32, 25, 400)}
    given = assemble([Packed(header, None, None)], before, fields=FIELDS, ranked={0}, version=7)
    assert (given.messages, given.after) == (None, before)


def test_more_rows_than_there_are_offsets_are_refused_by_name() -> None:
    check_ranks(2**31 - 1, 2**32, "shard 0")
    for version, count in ((1, 2**32 + 1), (2**31, 1)):
        with pytest.raises(ValueInvalid, match="at most 4294967296 rows"):
            check_ranks(version, count, "shard 0")
