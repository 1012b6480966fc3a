"""What the pack stage combines, by hand."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from backend.aggregates import collect_list, count, median, reducer, sum_
from backend.batch import ERROR_SCHEMA, MESSAGE_FIELDS, NO_TIME, OFFSET, MicroBatch, Position
from backend.errors import FrameDamaged
from backend.spark.pack.assembling import Packed, assemble, leaps, located
from backend.spark.pack.frames import CODES_IN
from backend.spark.pack.packing import PackPlan, pack
from backend.store.memory import MemoryStore
from backend.store.workspace import Workspace
from backend.windows.aligned import combining
from backend.windows.aligned.combining import Combining, combines
from backend.windows.combined_rows import COUNT, LAST, LAYOUT, PLACES, messages_of
from backend.windows.definitions import hopping, session, sliding, tumbling
from backend.windows.operator import WindowOperator, combining_of
from backend.windows.spec import WindowSpec, window_spec
from recovery.share import ShardInput

SCHEMA = pa.schema([pa.field("key", pa.string()), pa.field("x", pa.int64())])


def spec(**more: object) -> WindowSpec:
    options = {"keys": ["key"], "retention": 5, "max_ahead": None, **more}
    window = options.pop("window", tumbling(10))
    aggregates = options.pop("aggregates", {"n": count(), "s": sum_("x")})
    return window_spec(window, SCHEMA, aggregates, **options)  # type: ignore[arg-type]


def rows(*given: tuple[int, int, str, int], stamps: int = 1_000) -> pa.RecordBatch:
    """Lay out (offset, time, key, x) as the pack stage reads them; a record's own timestamp is its offset and more."""
    offset, time, key, x = (list(column) for column in zip(*given, strict=True))
    many = len(given)
    return pa.RecordBatch.from_pydict(
        {
            "_stream": pa.array([0] * many, pa.int32()),
            "_partition": pa.array([0] * many, pa.int32()),
            "_offset": pa.array(offset, pa.int64()),
            "_time": pa.array(time, pa.int64()),
            "_shard": pa.array([0] * many, pa.int32()),
            "_timestamp": pa.array([stamps + o for o in offset], pa.int64()),
            "_key": pa.nulls(many, pa.binary()),
            "_raw": pa.nulls(many, pa.binary()),
            "_malformed": pa.nulls(many, pa.string()),
            "key": pa.array(key),
            "x": pa.array(x, pa.int64()),
        }
    )


def assembled(job: WindowSpec, *batches: pa.RecordBatch, before: Any = None, fewer: int = 0) -> ShardInput:
    return assemble(packed(job, *batches, fewer=fewer), before or {}, topics={0: "t"}, combining=Combining(job, fewer))


def packed(job: WindowSpec, *batches: pa.RecordBatch, fewer: int = 0) -> list[Packed]:
    plan = PackPlan((0,), tuple(SCHEMA), False, None, {0: "t"}, combining=Combining(job, fewer))
    found = [row for batch in batches for row in pack(batch, plan, 50).to_pylist()]
    return [Packed(row["header"], row["frame"], row["errors"]) for row in found]


def test_messages_of_one_pane_key_and_cell_are_one_row() -> None:
    given = rows((0, 1, "a", 1), (1, 2, "a", 2), (2, 3, "b", 4), (4, 2, "a", 8), (5, 12, "a", 16), (6, 4, "a", 32))
    messages = assembled(spec(), given).messages
    assert messages is not None
    # offset 0 is the first of its slice; 6 comes after time 12, when the end of [0, 10) has passed
    found = {row[OFFSET]: row for row in messages.to_pylist()}
    assert list(found) == [0, 1, 2, 5, 6]
    assert (found[1][COUNT], found[1][LAST]) == (2, 4)
    # three offsets and as many of the timestamp further, at the same time: 1 byte each
    assert (found[1][LAYOUT], found[1][PLACES]) == (1110, bytes([0, 0, 0, 3, 0, 3]))
    assert [found[at]["_before"] for at in found] == [NO_TIME, 1, 2, 3, 12]


def test_what_is_refused_comes_out_message_by_message() -> None:
    before = {(0, 0): Position(10, 30, 0)}
    given = assembled(spec(), rows((10, 1, "a", 1), (11, 2, "a", 2), (12, 2, "a", 4), (13, 7, "b", 8)), before=before)
    batch = MicroBatch(1, 50, given.messages, before, given.after)
    outcome = WindowOperator(spec()).process(batch, Workspace(MemoryStore(), {}))
    assert outcome.results.num_rows == 0
    errors = located(outcome.errors, {0: "t"}, given)
    assert errors.schema == ERROR_SCHEMA
    told = [(e["topic"], e["offset"], e["event_time"], e["timestamp"], e["reason"]) for e in errors.to_pylist()]
    assert told == [("t", o, t, 1_000 + o, "out_of_retention") for o, t in ((10, 1), (11, 2), (12, 2), (13, 7))]


def test_a_message_that_moves_the_watermark_far_stands_alone() -> None:
    job = spec(window=tumbling(1_000_000), max_ahead=100)
    batch = rows((0, 1, "a", 1), (1, 2, "a", 1), (2, 900, "a", 1), (3, 901, "a", 1), (4, 901, "a", 1))
    before = {(0, 0): Position(0, 1, 0)}
    given = assembled(job, batch, before=before)
    assert leaps(given, before, 100, {0: "t"}) == (1, "t-0, offset 2: by 898 ms")


@pytest.mark.parametrize("seed", range(20))
def test_numbers_of_keys_that_are_known_change_nothing(seed: int) -> None:
    """Whatever the order, with bad rows and with some that came twice, over two source partitions and two panes."""
    chance = random.Random(seed)
    given = [(chance.randrange(30), chance.randrange(20), chance.choice("abc"), chance.randrange(9)) for _ in range(40)]
    batch = rows(*given)
    batch = batch.set_column(1, "_partition", pa.array([chance.choice((0, 0, seed % 2)) for _ in given], pa.int32()))
    bad = pa.array([chance.choice((None, None, "not JSON")) for _ in given], pa.string())
    batch = batch.set_column(batch.column_names.index("_malformed"), "_malformed", bad)
    codes = pa.array([{"a": 7, "b": 3, "c": 0}[key] for _, _, key, _ in given], pa.int32())
    frames = [packed(spec(), one) for one in (batch, batch.append_column(CODES_IN, codes))]
    assert frames[0] == frames[1]
    assert any(row.frame is not None for row in frames[0])
    unlike = batch.append_column(CODES_IN, pa.array(range(len(given)), pa.int32()))
    assert packed(spec(), unlike) != frames[0]  # they are what is gone by


def test_frames_that_were_combined_and_others_stand_beside_one_another() -> None:
    alike = rows(*((n, 5, "a", 1) for n in range(6)))
    unlike = rows(*((n, 5, f"k{n}", 1) for n in range(6, 12)))
    given = assembled(spec(), alike, unlike, fewer=2)
    assert given.messages is not None
    assert given.messages[COUNT].to_pylist() == [1, 5, 1, 1, 1, 1, 1, 1]
    only = assembled(spec(), unlike, fewer=2)
    assert only.messages is not None
    assert COUNT not in only.messages.column_names


FAR = 2**40
PLACED = [  # (offset, time, own timestamp), and what their records are laid out in
    pytest.param([(1, 2, 9), (2, 2, 9), (5, 4, 11)], 1100, id="timestamps as event times"),
    pytest.param([(1, 2, 9), (129, 1, 9), (130, 4, 9)], 2110, id="128 offsets"),
    pytest.param([(1, 1_002, 9), (2, 700, 9), (3, 40_000, 9)], 1410, id="out of order, and far"),
    pytest.param([(1, 2, 9), (FAR, 3, -FAR), (FAR + 1, 3, FAR)], 8180, id="farther than 32 bits"),
    pytest.param([(1, 2, 9), (2, 2**31 + 1, 9), (3, 2, 9)], 1410, id="as far as 32 bits"),
    pytest.param([(1, 2, 9), (2, 2**31 + 2, 9), (3, 2, 9)], 1810, id="one farther than 32 bits"),
    pytest.param([(1, 2, None), (2, 3, 10), (3, 4, None)], 1111, id="without timestamp"),
    pytest.param([(1, 2, 2**63 - 1), (2, 3, -(2**63)), (3, 4, 7)], 1180, id="the farthest timestamps"),
]


@pytest.mark.parametrize(("messages", "layout"), PLACED)
def test_each_message_comes_out_with_its_place_and_times(
    messages: list[tuple[int, int, int | None]], layout: int
) -> None:
    given = rows(*((offset, time, "a", 1) for offset, time, _ in [(0, 0, 0), *messages]))
    given = given.set_column(
        given.column_names.index("_timestamp"), "_timestamp", pa.array([0, *(s for _, _, s in messages)], pa.int64())
    )
    found = assembled(spec(window=tumbling("100 days"), retention="100 days"), given).messages
    assert found is not None
    assert found[COUNT].to_pylist() == [1, 3]  # the first one of a slice stands alone
    assert found[LAYOUT].to_pylist() == [layout] * 2
    told = [(m["offset"], m["event_time"], m["timestamp"]) for m in messages_of(found).to_pylist()]
    assert told == [(0, 0, 0), *messages]


def test_rows_of_several_frames_come_out_each_by_its_own_layout() -> None:
    job = spec(window=tumbling("100 days"), retention="100 days")
    near, far = rows(*((n, n, "a", 1) for n in range(4))), rows((9, 5, "a", 1), (10, 5, "a", 1), (400, 5, "a", 1))
    found = assembled(job, near, far).messages
    assert found is not None
    assert sorted(set(found[LAYOUT].to_pylist())) == [1100, 2120]
    assert messages_of(found)["offset"].to_pylist() == [0, 1, 2, 3, 9, 10, 400]


def test_errors_have_no_value_whether_combined_or_not() -> None:
    before = {(0, 0): Position(10, 30, 0)}
    for fewer in (0, 10**9):
        given = assembled(spec(), rows((10, 1, "a", 1), (11, 2, "a", 2)), before=before, fewer=fewer)
        batch = MicroBatch(1, 50, given.messages, before, given.after)
        errors = located(WindowOperator(spec()).process(batch, Workspace(MemoryStore(), {})).errors, {0: "t"}, given)
        assert errors["value"].to_pylist() == [None, None]
        assert errors["timestamp"].to_pylist() == [1_010, 1_011]


def test_a_slice_that_was_read_twice_is_an_error() -> None:
    twice = rows((0, 1, "a", 1), (1, 2, "a", 1))
    with pytest.raises(FrameDamaged, match="t partition 0 was read twice"):
        assembled(spec(), twice, twice)


def test_a_message_twice_in_a_slice_counts_once() -> None:
    given = assembled(spec(), rows((0, 1, "a", 1), (1, 2, "a", 2), (1, 2, "a", 2), (2, 2, "a", 4)))
    assert given.messages is not None
    assert sum(given.messages[COUNT].to_pylist()) == 3


def test_rows_are_not_combined_where_that_saves_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combining, "SAMPLE", 4)
    alike = rows(*((n, 5, "a", 1) for n in range(20)))
    unlike = rows(*((n, 5, f"k{n}", 1) for n in range(20)))
    first_ones_unlike = rows(*((n, 5, f"k{n}" if n < 4 else "a", 1) for n in range(20)))
    for batch, expected in ((alike, 2), (unlike, 20), (first_ones_unlike, 20)):
        messages = assembled(spec(), batch, fewer=2).messages
        assert messages is not None
        assert messages.num_rows == expected


@pytest.mark.parametrize(
    "more",
    [
        {"window": sliding(10)},
        {"window": session(10)},
        {"window": tumbling(messages=3), "retention": None},
        {"retention_messages": 5},
        {"aggregates": {"n": count(), "m": median("x")}},
        {"aggregates": {"l": collect_list("x")}},
        {
            "aggregates": {
                "r": reducer("x", init=lambda: 0, add=lambda a, x: a + x, merge=lambda a, b: a + b, output=pa.int64())
            }
        },
    ],
)
def test_what_is_never_combined(more: dict[str, object]) -> None:
    job = spec(**more)
    assert not combines(job)
    assert combining_of(WindowOperator(job)) is None
    assert combines(spec(window=hopping(10, 5)))


def test_the_operators_plan_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = spec()
    operator, own = WindowOperator(job), Combining(job)
    monkeypatch.setattr(type(job), "plans", None)
    found = combining_of(operator)
    assert found is not None
    assert found.schema == own.schema


def test_the_columns_do_not_clash_with_fields_of_any_name() -> None:
    schema = pa.schema([pa.field("n.count", pa.string()), pa.field("x", pa.int64())])
    job = window_spec(tumbling(10), schema, {"n": count()}, keys=["n.count"], retention=5, max_ahead=None)
    names = Combining(job).schema.names
    assert len(names) == len(set(names)) == len(MESSAGE_FIELDS) + 1 + 1 + 5
