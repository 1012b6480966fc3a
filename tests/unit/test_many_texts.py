"""Columns with more texts than one array of Arrow has 32-bit offsets for: in small by lowered bounds, and really."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from backend import chunks
from backend.batch import MESSAGE_FIELDS
from backend.chunks import one_chunk, taken_rows
from backend.spark.ranking import rank

KINDS = {
    "t": pa.string(),
    "b": pa.binary(),
    "n": pa.int64(),
    "l": pa.list_(pa.string()),
    "d": pa.dictionary(pa.int32(), pa.string()),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MOST_BYTES", 1)
    monkeypatch.setattr(chunks, "PIECE_BYTES", 100)


def some_rows(count: int, chance: random.Random) -> pa.Table:
    def text() -> str | None:
        return chance.choice([None, "", "x" * chance.randrange(60), str(chance.randrange(99))])

    rows = [{"t": text(), "b": (text() or "").encode(), "n": at, "l": [text()] * 2, "d": text()} for at in range(count)]
    return pa.Table.from_pylist(rows, pa.schema(list(KINDS.items())))


@pytest.mark.parametrize("seed", range(5))
def test_pieces_are_what_taking_all_at_once_gives(small: None, seed: int) -> None:
    chance = random.Random(seed)
    table = pa.concat_tables([some_rows(count, chance) for count in (7, 0, 1, 20)]).slice(2)
    for rows in (
        np.random.default_rng(seed).integers(0, len(table), 40),
        np.arange(len(table))[::-1],
        np.array([], int),
    ):
        found = taken_rows(table, rows)
        assert found.schema == table.schema
        assert found.to_pylist() == table.take(pa.array(rows, pa.int64())).to_pylist()
        assert (found.column("t").num_chunks > 1) == (len(rows) > 0)


def test_rows_are_taken_of_more_than_two_gigabytes() -> None:
    one = pa.array(["x" * 2**28, "near"])
    table = pa.table({"a": pa.chunked_array([one] * 9), "n": np.arange(18)})
    with pytest.raises(pa.ArrowInvalid, match="offset overflow"):
        table.take(pa.array([1]))
    assert taken_rows(table, np.array([17, 1])).to_pylist() == [{"a": "near", "n": 17}, {"a": "near", "n": 1}]


def test_a_column_of_too_many_texts_becomes_a_large_one(small: None) -> None:
    assert one_chunk(pa.chunked_array([["a"], ["b", None]])).equals(pa.array(["a", "b", None], pa.large_string()))
    assert one_chunk(pa.chunked_array([[b"a"], [b"b"]])).type == pa.large_binary()
    assert one_chunk(pa.chunked_array([["a"]])).type == pa.string()


def test_rows_of_a_dataframe_are_ranked_as_if_all_were_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(1)
    fields = some_rows(40, chance)
    place = [pa.array([chance.randrange(9) for _ in range(40)], field.type) for field in MESSAGE_FIELDS]
    table = pa.table([*place, *fields.columns], pa.schema([*MESSAGE_FIELDS, *fields.schema]))
    frames = [table.slice(at, 8) for at in range(0, 40, 8)]
    whole = rank(frames, 3, 0)
    monkeypatch.setattr(chunks, "MOST_BYTES", 1)
    monkeypatch.setattr(chunks, "PIECE_BYTES", 100)
    assert rank(frames, 3, 0).equals(whole)
