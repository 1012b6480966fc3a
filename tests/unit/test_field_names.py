"""A field may have the name of a column that Rewind adds on the way to the shard: what is counted is the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from backend import count, max_, tumbling
from backend.batch import MicroBatch
from backend.process import ProcessOperator
from backend.spark.pack import frames
from backend.spark.pack.assembling import Packed, assemble
from backend.spark.pack.pack_input import PackInput, selecting
from backend.spark.pack.packing import PackPlan, pack
from backend.steps import COORDINATES, Step
from backend.store.memory import MemoryStore
from backend.store.workspace import Workspace
from backend.windows import combined_rows
from backend.windows.operator import WindowOperator, combining_of
from backend.windows.spec import window_spec

COLUMNS = [text for name, text in vars(frames).items() if name.endswith("_IN")]
NAMES = sorted({*COLUMNS, *combined_rows.OWN_NAMES, "_partial_0", "_x6b6579", "key", "n.count", "topic", "value"})
MESSAGES = [("abcd"[number % 4 if number < 12 else 0], number) for number in range(40)]


def batches(name: str, kind: pa.DataType, key: bool, sizes: list[int]) -> list[pa.RecordBatch]:
    """What a source's parser gives: the field is the key, or beside one."""
    found, at = [], 0
    for size in sizes:
        rows = MESSAGES[at : at + size]
        values: list[Any] = [letter if key else (number if kind == pa.int64() else "p") for letter, number in rows]
        columns = {name: pa.array(values, kind)}
        if not key:
            columns["who"] = pa.array([letter for letter, _ in rows])
        columns["at"] = pa.array([number for _, number in rows])
        found.append(
            pa.RecordBatch.from_pydict(
                {
                    "topic": pa.array(["t"] * size),
                    "partition": pa.array([0] * size, pa.int32()),
                    "offset": pa.array(range(at, at + size)),
                    "timestamp": pa.array([None] * size, pa.timestamp("us", "UTC")),
                    "key": pa.nulls(size, pa.binary()),
                    "fields": pa.StructArray.from_arrays(list(columns.values()), list(columns)),
                    "raw": pa.nulls(size),
                    "malformed": pa.nulls(size, pa.string()),
                }
            )
        )
        at += size
    return found


@pytest.mark.parametrize("sizes", [[40], [13, 27]])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("use", ["key", "number", "text"])
@pytest.mark.parametrize("name", NAMES)
def test_a_field_of_this_name_is_a_field(name: str, use: str, shards: int, sizes: list[int]) -> None:
    key = use == "key"
    kind = pa.int64() if use == "number" else pa.string()
    who = name if key else "who"
    schema = pa.schema([pa.field(name, kind), *([] if key else [pa.field("who", pa.string())])])
    aggregates = {"n": count(), **({"newest": max_(name)} if use == "number" else {})}
    operator = WindowOperator(window_spec(tumbling(100), schema, aggregates, keys=[who], retention=5, max_ahead=None))
    fields = tuple((field, field.name) for field in schema)
    what = PackInput({"t": 0}, "at", (who,), False, shards, fields, widen=False)
    combining = combining_of(operator)
    plan = PackPlan(tuple(range(shards)), tuple(schema), False, None, {0: "t"}, combining=combining)
    stage = selecting(lambda rows: rows, what, lambda given: (pack(rows, plan, 1) for rows in given))
    rows = [row for batch in stage(iter(batches(name, kind, key, sizes))) for row in batch.to_pylist()]
    assert not any(row["errors"] for row in rows)
    counted: Counter[str] = Counter()
    newest = {}
    for shard in range(shards):
        own = [Packed(row["header"], row["frame"], row["errors"]) for row in rows if row["shard"] == shard]
        share = assemble(own, {}, topics={0: "t"}, combining=combining)
        if share.messages is None:
            continue
        given = MicroBatch(0, 1, share.messages, {}, share.after, True, share.timestamps)
        for found in operator.process(given, Workspace(MemoryStore(), {})).results.to_pylist():
            counted[found[who]] += found["n"]
            newest[found[who]] = found.get("newest")
    assert counted == Counter(letter for letter, _ in MESSAGES)
    if use == "number":
        assert newest == dict(MESSAGES)  # the last one of each


def test_fields_that_only_combined_rows_have_together_are_refused() -> None:
    schema = pa.schema([pa.field(name, pa.int64()) for name in (*combined_rows.MARKS, "key")])
    with pytest.raises(ValueError, match="'_count', '_last', '_stamp'"):
        window_spec(tumbling(100), schema, {"n": count()}, keys=["key"], retention=5)
    with pytest.raises(ValueError, match="'_count', '_last', '_stamp'"):
        ProcessOperator(lambda messages, context: None, pa.schema([]), fields=schema.names)


@pytest.mark.parametrize("kind", ["where", "with_columns", "select", "map_batches"])
@pytest.mark.parametrize("name", sorted(COORDINATES))
def test_steps_refuse_a_field_that_is_named_as_a_coordinate(name: str, kind: str) -> None:
    what = {"where": {"": pc.field("a") > 1}, "map_batches": {"": lambda table: table}}.get(kind, {"a": pc.field("a")})
    step = Step(kind, what, version="1")
    with pytest.raises(ValueError, match=f"'{name}'.*named as coordinates"):
        step.schema_after(pa.schema([pa.field("a", pa.int64()), pa.field(name, pa.string())]), "steps")
