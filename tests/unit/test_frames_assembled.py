"""Frames of one micro-batch put together in the shard: in whatever order and form they come."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from backend.batch import BEFORE, NO_TIME, OFFSET, PARTITION, STREAM, TIME
from backend.spark.pack import assembling, frames
from backend.spark.pack.assembling import Packed, assemble
from backend.spark.pack.packing import PackPlan, pack

FIELDS = (pa.field("key", pa.string()), pa.field("note", pa.string()))
PLAN = PackPlan((0,), FIELDS, False, None)
Row = tuple[int, int, int, str | None, str]
"""Source partition, offset, event time, key, note."""


def rows(partition: int, first: int, count: int, keys: int) -> list[Row]:
    """The event times fall back again and again."""
    return [
        (
            partition,
            first + n,
            1_000 + first * 10 + n * 7 % 90,
            f"customer-{n % keys}" if n % 11 else None,
            f"{partition}/{n}",
        )
        for n in range(count)
    ]


def packed(given: list[Row]) -> Packed:
    [row] = pack(batch(given), PLAN, 1).to_pylist()
    return Packed(row["header"], row["frame"], row["errors"])


def batch(given: list[Row]) -> pa.RecordBatch:
    columns = list(zip(*given, strict=True))
    count = len(given)
    return pa.RecordBatch.from_pydict(
        {
            STREAM: pa.array([0] * count, pa.int32()),
            PARTITION: pa.array(columns[0], pa.int32()),
            OFFSET: pa.array(columns[1], pa.int64()),
            TIME: pa.array(columns[2], pa.int64()),
            frames.SHARD_IN: pa.array([0] * count, pa.int32()),
            frames.TIMESTAMP_IN: pa.array(columns[2], pa.int64()),
            frames.KEY_IN: pa.nulls(count, pa.binary()),
            frames.RAW_IN: pa.nulls(count, pa.binary()),
            frames.MALFORMED_IN: pa.nulls(count, pa.string()),
            "key": pa.array(columns[3], pa.string()),
            "note": pa.array(columns[4], pa.string()),
        }
    )


def expected(pieces: list[list[Row]]) -> list[dict[str, object]]:
    """By a plain loop: each message once, in order of its place, with the newest event time before it."""
    newest: dict[int, int] = {}
    found = []
    for partition, offset, time, key, note in sorted({row for piece in pieces for row in piece}, key=lambda r: r[:2]):
        found.append({STREAM: 0, PARTITION: partition, OFFSET: offset, TIME: time,
                      BEFORE: newest.get(partition, NO_TIME), "key": key, "note": note})  # fmt: skip
        newest[partition] = max(newest.get(partition, NO_TIME), time)
    return found


MANY = [rows(0, 0, 400, 3), rows(0, 400, 300, 50), rows(1, 50, 500, 400), rows(1, 550, 2, 1), rows(2, 7, 200, 2)]
"""Frames with few keys, which are numbers, and with many, which are texts."""
CASES = {
    "texts as numbers in each": [rows(0, 0, 300, 3), rows(0, 300, 300, 4), rows(1, 0, 300, 5)],
    "in some": MANY,
    "in none": [rows(0, 0, 300, 300), rows(1, 0, 300, 300)],
    "two source partitions in one": [rows(0, 0, 200, 3) + rows(1, 0, 200, 3), rows(2, 0, 200, 3)],
    "one between others": [rows(0, 0, 100, 3) + rows(2, 0, 100, 3), rows(1, 0, 200, 3)],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("most", [2**31 - 1, 20])
def test_frames_in_any_order_are_one_table(case: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts that would not fit one array, too."""
    monkeypatch.setattr(assembling, "MOST_BYTES", most)
    given = [packed(piece) for piece in CASES[case]]
    for seed in range(4):
        found = assemble(random.Random(seed).sample(given, len(given)), {}, fields=FIELDS).messages
        assert found is not None
        assert found.schema.field("key").type == pa.string()
        assert found.to_pylist() == expected(CASES[case])


def test_a_message_that_comes_twice_is_taken_once() -> None:
    pieces = [rows(0, 0, 300, 3), rows(0, 0, 300, 3)[100:200], rows(1, 0, 50, 3)]
    found = assemble([packed(piece) for piece in pieces], {}).messages
    assert found is not None
    places = list(zip(found[PARTITION].to_pylist(), found[OFFSET].to_pylist(), strict=True))
    assert places == [(0, n) for n in range(300)] + [(1, n) for n in range(50)]


def test_frames_with_few_keys_carry_each_once() -> None:
    few, many = packed(rows(0, 0, 2_000, 3)).frame, packed(rows(0, 0, 2_000, 2_000)).frame
    assert few is not None
    assert many is not None
    assert len(few) < len(many) - 2_000 * 12  # of a key of about 13 bytes and its end one is left
    plan = PackPlan(tuple(range(400)), FIELDS, False, None)  # each shard's frame would have all the keys
    [spread] = {row["frame"] for row in pack(batch(rows(0, 0, 2_000, 100)), plan, 1).to_pylist()} - {None}
    assert assembling.from_ipc(spread).schema.field("key").type == pa.string()
    assert np.array_equal(*(assembling.from_ipc(one)[OFFSET].to_numpy() for one in (few, many)))
