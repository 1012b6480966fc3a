"""The join operator by hand: SAMZA-552's own outputs, then what a crash, a lost disk or a dead side may not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from backend.batch import BEFORE, OFFSET, PARTITION, STREAM, TIME
from backend.joins import liveness, match
from backend.joins import state as join_state
from backend.joins.operator import JoinOperator
from backend.joins.rows import JoinRows
from backend.joins.spec import JoinSpec, join_spec
from backend.spark.pack import frames
from backend.spark.pack.assembling import Packed, assemble
from backend.spark.pack.packing import PackPlan, pack
from backend.store.memory import MemoryStore
from backend.store.protocol import Changes, Region
from backend.store.workspace import Workspace
from backend.windows.definitions import session, sliding, tumbling
from recovery.attempt import run_attempt
from recovery.changelog import FileChangelog
from recovery.commit.pointer import Pointer
from recovery.jobs import ShardJob
from recovery.testing import OperatorTester
from tests.model import test_join_model as model
from tests.model.join_driver import SCHEMA, JoinDriver, place_of, told
from tests.oracle.joins import LEFT, RIGHT, JoinOracle, Pair
from tests.oracle.windows import Message

MINUTE = 60_000
ORDERS = pa.schema([("id", pa.int64()), ("value", pa.int64())])
SHIPMENTS = pa.schema([("id", pa.int64()), ("cost", pa.int64())])


def at(clock: str) -> int:
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return ((hours * 60 + minutes) * 60 + seconds) * 1000


def order(offset: int, value: int, number: int, time: str) -> Message:
    return Message(offset, at(time), {"value": value, "id": number}, stream=LEFT)


def shipment(offset: int, cost: int, number: int, time: str) -> Message:
    return Message(offset, at(time), {"cost": cost, "id": number}, stream=RIGHT)


class Rows(JoinDriver):
    def rows_of(self, results: pa.Table) -> list[Any]:
        return results.select(["id", "value", "cost"]).to_pylist()


def rows(*values: tuple[int | None, ...]) -> list[dict[str, int | None]]:
    return [dict(zip(("id", "value", "cost"), row, strict=True)) for row in values]


@pytest.mark.parametrize("message_key", ["auto", "join_fields"])
@pytest.mark.parametrize("by", ["tuple windows", "time windows"])
def test_samza_orders_and_shipments(by, message_key):
    """The document's outputs, in its order; Orders come first. Orders.offset = Shipments.offset - 999 is recorded."""
    if by == "tuple windows":
        options = {"left_window": tumbling(messages=3), "right_retention_messages": 1000}
    else:
        options = {"left_window": tumbling("2 min", origin=at("8:59:00")), "within": (0, "2 min")}
        options |= {"left_retention": "2 min", "right_retention": "1 h"}
    spec = join_spec(ORDERS, SHIPMENTS, on="id", max_ahead=None, message_key=message_key, **options)
    driver = Rows(spec, [(LEFT, 0), (RIGHT, 0)])
    early = [order(1, 0, 1, "8:59:10"), order(2, 5, 3, "9:00:00")]
    early += [shipment(1000, 0, 3, "9:00:10"), shipment(1001, 2, 1, "9:00:10")]
    assert driver.batch(early, at("9:01:00")).rows == rows((3, 5, 0), (1, 0, 2))
    later = [shipment(1002, 3, 1, "9:01:10"), shipment(1003, 1, 9, "9:01:20")]
    assert driver.batch(later, at("9:02:00")).rows == rows((1, 0, 3))
    assert driver.batch([order(3, 9, 9, "8:59:30")], at("9:03:00")).rows == rows((9, 9, 1))


def test_tuple_windows_are_aligned_by_the_first_offsets():
    """Left window [0, 2] and 3 numbers more: joinable up to the right number 5, whatever its offset."""
    options = {"left_window": tumbling(messages=3), "right_retention_messages": 99, "max_ahead": None}
    first = {(LEFT, 0): 7, (RIGHT, 0): 500}
    driver = Rows(join_spec(ORDERS, SHIPMENTS, on="id", first_offsets=first, **options), [(LEFT, 0), (RIGHT, 0)])
    messages = [order(7, 1, 1, "9:00:00"), *(shipment(500 + n, n, 1, "9:00:00") for n in range(8))]
    assert driver.batch(messages, 0).rows == rows(*((1, 1, n) for n in range(6)))


def behind_the_pack_stage(
    tmp_path: Path,
    spec: JoinSpec,
    parts: Sequence[Sequence[Message]],
    bad: Message | None,
    sources: Sequence[tuple[int, int]],
) -> list[Pair]:
    """Run micro-batches on two shards, messages of even keys on the first, as what the pack stage makes of them."""
    operator, fields = JoinOperator(spec), tuple(map(spec.message_schema.field, spec.input_fields))
    plan = PackPlan((0, 1), fields, False, None, {LEFT: "l", RIGHT: "r"})

    def arrow(part: Sequence[Message], side: int) -> pa.RecordBatch:
        columns = {STREAM: [m.stream for m in part], PARTITION: [m.partition for m in part]}
        columns |= {OFFSET: [m.offset for m in part], TIME: [m.time for m in part]}
        columns |= {frames.SHARD_IN: [m.fields["k"] % 2 for m in part]}
        own = {"k": [m.fields["k"] for m in part], "place": [told(m) for m in part]}
        texts = {frames.MALFORMED_IN: ["no" if m == bad else None for m in part]}
        empty = {frames.KEY_IN: pa.binary(), frames.RAW_IN: pa.binary(), frames.TIMESTAMP_IN: pa.int64()}
        return pa.RecordBatch.from_pydict(
            {name: pa.array(values, pa.int64()) for name, values in columns.items()}
            | {name: pa.array(values, pa.string()) for name, values in texts.items()}
            | {name: pa.nulls(len(part), kind) for name, kind in empty.items()}
            | {
                frames.column_name(f.name): pa.array(own[f.name.partition(".")[2]], f.type)
                for f in fields
                if f.name.startswith(("left", "right")[side])
            }
        )

    pairs, pointers = [], dict[int, Pointer | None](((0, None), (1, None)))
    for version, part in enumerate(parts):
        batches = [arrow([m for m in part if m.stream == side], side) for side in (LEFT, RIGHT)]
        packed = [row for batch in batches if batch.num_rows for row in pack(batch, plan, 1).to_pylist()]
        for shard, pointer in pointers.items():
            changelog = FileChangelog(str(tmp_path / "changelog"))
            job = ShardJob("q", shard, tmp_path / "local", operator, fields, changelog)
            mine = [Packed(row["header"], row["frame"], row["errors"]) for row in packed if row["shard"] == shard]
            known = partial(assemble, mine, sources=sources, fields=fields, by_offset=True)
            done = run_attempt(job, pointer, version, known)
            pointers[shard] = done.pointer
            results = done.outcome.results.to_pylist()
            pairs += [Pair(row["reason"], place_of(row["left_place"]), place_of(row["right_place"])) for row in results]
    return sorted(pairs, key=str)


@pytest.mark.parametrize("sources", [[], [(RIGHT, 0)]], ids=["unknown", "silent"])
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 3, 10])
def test_a_source_partition_that_comes_later_begins_with_its_first_offset_in_all_shards(tmp_path, cut, broken, sources):
    """The second shard gets none of its first rows; perhaps nobody gets the first one, which is malformed."""
    options = {"left_window": tumbling(messages=3), "right_retention_messages": 99, "max_ahead": None}
    spec = join_spec(SCHEMA, SCHEMA, on="k", first_offsets={(LEFT, 0): 0}, **options)
    mine = [Message(n, n, {"k": n % 2}, stream=LEFT) for n in range(3)]
    others = [Message(5 + n, n, {"k": k}, stream=RIGHT) for n, k in enumerate((0, 0, 0, 1, 0, 1, 1, 1, 0, 1))]
    bad = others[0] if broken else None
    judge = JoinOracle(model.judged(spec), ((LEFT, 0),), first_offset={(LEFT, 0): 0, (RIGHT, 0): 5})
    wanted = judge.batch([m for m in (*mine, *others) if m != bad], 1)
    assert {pair.right[2] for pair in wanted if pair.right is not None} == set(range(5 + broken, 11))
    parts = [part for part in ([*mine, *others[:cut]], others[cut:]) if part]
    assert behind_the_pack_stage(tmp_path, spec, parts, bad, sources) == sorted(wanted, key=str)


# -- crash and restore --------------------------------------------------------------------------------------------

SIDE = pa.schema([("k", pa.int64()), ("n", pa.int64())])


def outer(**options: Any) -> JoinSpec:
    given = {"on": "k", "within": 10, "how": "outer", "left_retention": 20, "right_retention": 20, "max_ahead": None}
    return join_spec(SIDE, SIDE, **{**given, **options})


def one_shard(spec: JoinSpec, tmp_path: Any) -> OperatorTester:
    return OperatorTester(JoinOperator(spec), pa.schema([f for s in spec.sides for f in s.columns]), tmp_path)


def left(time: int, key: int | None, n: int) -> dict[str, Any]:
    return {TIME: time, "left.k": key, "left.n": n}


def right(time: int, key: int | None, n: int) -> dict[str, Any]:
    return {TIME: time, "right.k": key, "right.n": n}


def numbers(table: pa.Table) -> list[tuple[str, int | None, int | None]]:
    return [(row["reason"], row["left_n"], row["right_n"]) for row in table.to_pylist()]


@pytest.mark.parametrize("message_key", ["time", "join_fields"])
def test_a_crash_and_a_lost_disk_change_nothing(tmp_path, message_key):
    shard = one_shard(outer(message_key=message_key, left_retention=40), tmp_path)
    shard.send([right(0, 1, 0), right(1, 9, 1)], stream=RIGHT)
    first = shard.batch([left(0, 1, 0), left(2, 2, 1), left(3, None, 2)])
    assert numbers(first.results) == [("full", 0, 0)]
    shard.crash([left(4, 9, 3)])
    shard.lose_disk()
    restored = shard.restore()
    assert restored.messages == 5
    assert numbers(shard.batch().results) == [("full", 3, 1)]
    shard.lose_disk()
    shard.restore()
    # the left rows of 2 and 3 wait for partners up to 12 and 13, which live until the right clock is 32 and 33
    shard.send([right(32, 7, 2)], stream=RIGHT)
    assert numbers(shard.batch([left(32, 8, 4)]).results) == [("full", 1, None)]
    shard.lose_disk()
    shard.restore()
    shard.send([right(33, 7, 3)], stream=RIGHT)
    assert numbers(shard.batch([left(32, 8, 5)]).results) == [("full", 2, None)]
    shard.lose_disk()
    shard.restore()
    drained = [("drain", 4, None), ("drain", 5, None), ("drain", None, 2), ("drain", None, 3)]
    assert numbers(shard.drain().results) == drained
    assert numbers(shard.drain().results) == []


def test_a_source_partition_begins_with_its_first_message_though_that_is_refused(tmp_path):
    """Number 0 is out of range; the left window [0, 2] and 3 numbers more end with number 5."""
    options = {"left_window": tumbling(messages=3), "right_retention_messages": 99}
    shard = one_shard(join_spec(SIDE, SIDE, on="k", max_ahead=None, **options), tmp_path)
    shard.send([right(2**61, 1, 0)], stream=RIGHT)
    shard.batch([left(0, 1, 0)])
    shard.send([right(n, 1, n) for n in range(1, 8)], stream=RIGHT)
    assert numbers(shard.batch().results) == [("full", 0, n) for n in range(1, 6)]


def test_a_changed_source_is_noticed(tmp_path):
    shard = one_shard(outer(), tmp_path)
    shard.batch([left(0, 1, 0)])
    shard.tamper(0, left(0, 1, 99))
    shard.lose_disk()
    with pytest.raises(Exception, match="not the ones that were committed"):
        shard.restore()


def test_what_is_out_of_retention_stays_out_after_a_restore(tmp_path, monkeypatch):
    monkeypatch.setattr(liveness, "MIN_BUCKET_MS", 1)
    shard = one_shard(outer(left_retention=5), tmp_path)
    shard.send([right(0, 1, 0)], stream=RIGHT)
    done = shard.batch([left(20, 1, 0), left(15, 1, 1), left(16, 1, 2)])
    assert [row["reason"] for row in done.errors.to_pylist()] == ["out_of_retention"]
    assert done.errors.to_pylist()[0]["value"] == b'{"k":1,"n":1}'
    shard.lose_disk()
    assert shard.restore().messages == 2  # the right one is expired, too


def test_held_back_pairs_come_when_their_period_has_passed(tmp_path):
    spec = join_spec(
        SIDE,
        SIDE,
        on="k",
        left_retention=50,
        right_retention=50,
        max_ahead=None,
        on_time_update_period="10 s",
        late_update_period="2 s",
        left_window=sliding(5),
    )
    shard = one_shard(spec, tmp_path)
    shard.send([right(0, 1, 0)], stream=RIGHT)
    assert numbers(shard.batch([left(0, 1, 0)]).results) == []
    shard.lose_disk()
    shard.restore()
    shard.now_ms = 9_000
    assert numbers(shard.batch([left(9, 1, 1), left(3, 1, 2)]).results) == []
    assert shard.pointer.next_due_ms == 10_000
    due = shard.advance("1 s")
    assert numbers(due.results) == [("full", 0, 0), ("full", 1, 0)]
    assert numbers(shard.advance("1 s").results) == [("late", 2, 0)]
    assert shard.pointer.next_due_ms is None


def test_a_silent_side_does_not_hold_for_ever(tmp_path):
    shard = one_shard(outer(how="left"), tmp_path)
    assert numbers(shard.batch([left(0, 1, 0), left(500, 1, 1)]).results) == []
    assert shard.advance("59 s") is None
    assert numbers(shard.batch([left(501, 1, 2)]).results) == []
    assert numbers(shard.advance("1 s").results) == [("full", 0, None)]


@pytest.mark.parametrize("first", [LEFT, RIGHT])
@pytest.mark.parametrize("message_key", ["time", "join_fields"])
def test_retention_falls_between_whichever_side_comes_first_and_after_a_restore(tmp_path, first, message_key):
    """The clock of right 1 is 10, so left 0 (time 0, kept for 10) was gone for it, though not for right 0."""
    spec = outer(how="inner", within=50, left_retention=10, right_retention=100, message_key=message_key)
    shard = one_shard(spec, tmp_path)
    shard.send([right(1, 8, 8)], stream=RIGHT)
    assert numbers(shard.batch([left(1, 9, 9)]).results) == []
    messages = {LEFT: [left(0, 1, 0)], RIGHT: [right(10, 1, 0), right(5, 1, 1)]}
    found = numbers(shard.batch(messages[first], stream=first).results)
    shard.lose_disk()
    shard.restore()
    found += numbers(shard.batch(messages[1 - first], stream=1 - first).results)
    assert found == [("full", 0, 0)]


# -- layouts and changes ------------------------------------------------------------------------------------------

HOUR = {"left_retention": 40, "right_retention": 40}
MANY = {"left_retention_messages": 9, "right_retention_messages": 9}


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("offset", {"within": 9, "left_window": tumbling(messages=2), **MANY}),
        ("offset", {"on": "k", "within": 9, "left_window": tumbling(messages=2), **MANY}),
        ("equal_offset", {"on": "k", "left_window": tumbling(messages=2), "message_key": "join_fields", **MANY}),
        ("session_offset", {"on": "k", "left_window": session(messages=2), **MANY}),
        ("session_equal_offset", {"on": "k", "left_window": session(messages=2), "message_key": "join_fields", **MANY}),
        ("time_offset", {"within": 9, **HOUR}),
        ("time_equal_offset", {"on": "k", "within": 9, **HOUR}),
        ("equal_time_offset", {"on": "k", **HOUR}),
        ("equal_time_offset", {"on": "k", "within": 9, "message_key": "join_fields", **HOUR}),
        ("session_time_equal_offset", {"on": "k", "within": 9, "left_window": session(4), **HOUR}),
        ("session_equal_time_offset", {"on": "k", "left_window": session(4), **HOUR}),
    ],
)
def test_every_row_of_the_matrix_gives_the_rows_of_nested_loops(layout, options):
    spec = join_spec(
        model.SCHEMA, model.SCHEMA, how="outer", max_ahead=None, idle_after=None, first_offsets=model.FIRST, **options
    )
    assert spec.layout.name == layout
    times = [0, 3, 1, 8, 8, 20, 12, 30, 29, 41, 35, 60, 58, 90, 85, 99]
    keys = [1, 1, 2, None, 1, 2, 1, 1]
    sides = [0, 1, 1, 0, 0, 1]
    offsets = [0, 10]
    messages = []
    for n in range(48):
        side = sides[n % 6]
        messages.append(Message(offsets[side], times[n % 16] + n, {"k": keys[n % 8]}, stream=side))
        offsets[side] += 1
    parts = [messages[low : low + 8] for low in range(0, 48, 8)]
    model.compare(spec, parts, [1000 * n for n in range(6)], model.ONE)


@pytest.mark.parametrize("session_key", [None, "k", "g", ["g", "k"]])
@pytest.mark.parametrize("within", [None, 5])
def test_sessions_over_two_equal_fields_give_the_rows_of_nested_loops(within, session_key):
    options = {"on": ["k", "g"], "within": within, "left_window": session(4), "session_key": session_key, **HOUR}
    spec = join_spec(
        model.WIDER, model.WIDER, how="outer", max_ahead=None, idle_after=None, first_offsets=model.FIRST, **options
    )
    fields = [{"k": n % 5 or None, "g": model.GROUPS[n % 3]} for n in range(12)]
    parts = [[Message(0, 0, fields[0], stream=LEFT)]]
    for n in range(1, 12):  # the right message meets the left one of the micro-batch before
        right = Message(9 + n, 3 * n - 1, fields[n - 1], stream=RIGHT)
        parts.append([Message(n, 3 * n, fields[n], stream=LEFT), right])
    model.compare(spec, parts, [1000 * n for n in range(12)], model.ONE)


@pytest.mark.parametrize("session_key", [None, "day", "item"])
def test_times_are_read_back_behind_any_session_key(session_key):
    """Days that Python has no date for, texts of any length, null."""
    side = pa.schema([("day", pa.date32()), ("item", pa.string())])
    spec = join_spec(
        side, side, on=["day", "item"], within=5, left_window=session(9), session_key=session_key, how="left",
        left_retention=99, right_retention=99,
    )  # fmt: skip
    assert spec.layout.name == "session_time_equal_offset"
    count = 4
    table = pa.table(
        {
            STREAM: pa.array([0] * count, pa.uint16()),
            PARTITION: pa.array([0] * count, pa.int32()),
            OFFSET: range(count),
            TIME: [7, -5, 2**40, 0],
            BEFORE: [0] * count,
            "day": pa.array([0, 10_000_000, -10_000_000, None], pa.date32()),
            "item": ["", "a\0", "abcdefghijk", None],
        }
    )
    codec = JoinRows(spec)
    found, _, _ = codec.encode(codec.arrived(table, spec.left))
    left, right = codec.split(*found.lists())
    assert (left.offset.tolist(), left.time.tolist(), len(right)) == ([0, 1, 2, 3], [7, -5, 2**40, 0], 0)


def test_a_longer_retention_later_never_reopens():
    """The left row of 3 is gone when the right clock is 503; what it is counted with is not."""
    short, long = (outer(left_retention=kept, right_retention=500, within=900, how="left") for kept in (500, 5000))
    driver = JoinDriver(model_spec(short), model.ONE)
    assert driver.batch([place(0, 0, 1, 3), place(1, 0, 9)], 0).rows == []
    assert driver.batch([place(1, 1, 9, 503)], 1).rows == [Pair("full", (0, 0, 0), None)]
    assert driver.shards[0].outcome.message_count == 3
    driver.operator = JoinOperator(model_spec(long))
    assert driver.batch([place(1, 2, 1, 450)], 2).rows == []
    driver.check_restore()


def test_a_shorter_retention_later_shows_what_waits_once():
    long, short = (outer(left_retention=kept, right_retention=500, how="left") for kept in (500, 5))
    driver = JoinDriver(model_spec(long), model.ONE)
    assert driver.batch([place(0, 0, 1), place(1, 0, 9)], 0).rows == []
    assert driver.batch([place(1, 1, 9, 6)], 1).rows == []
    driver.operator = JoinOperator(model_spec(short))
    assert driver.batch([place(1, 2, 9, 7)], 2).rows == [Pair("full", (0, 0, 0), None)]
    assert driver.batch([place(1, 3, 1, 7)], 3).rows == []
    driver.check_restore()


def model_spec(spec: JoinSpec) -> JoinSpec:
    """Give the same join over the driver's fields."""
    sides = [replace(side, schema=model.SCHEMA, out=("k", "place")) for side in spec.sides]
    return replace(spec, left=sides[LEFT], right=sides[RIGHT])


def place(side: int, offset: int, key: int | None, time: int = 0) -> Message:
    return Message(offset, time, {"k": key}, stream=side)


def test_fields_that_may_not_be_null_are_joined_like_others():
    strict = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.int64(), nullable=False)])
    spec = join_spec(strict, SHIPMENTS, on="id", left_retention=99, right_retention=99, max_ahead=None)
    driver = Rows(spec, [(LEFT, 0), (RIGHT, 0)])
    assert driver.batch([order(0, 7, 1, "0:00:00")], 0).rows == []
    assert driver.batch([order(1, 8, 1, "0:00:00"), shipment(0, 3, 1, "0:00:00")], 0).rows == rows((1, 7, 3), (1, 8, 3))


def test_clocks_of_messages_that_are_gone_are_forgotten_though_a_source_partition_never_says_anything():
    spec = join_spec(
        SCHEMA, SCHEMA, on="k", left_retention=640, right_retention=640, idle_after="10 ms", max_ahead=None
    )
    driver = JoinDriver(spec, ((LEFT, 0), (RIGHT, 0), (RIGHT, 1)))
    (shard,) = driver.shards
    for now in range(60):
        come = [Message(now * 20 + n, now * 200 + n * 10, {"k": n}, stream=LEFT) for n in range(20)]
        driver.batch([*come, Message(now, now * 200, {"k": 0}, stream=RIGHT)], now * 20)
        stored = shard.outcome.message_count
        marks = len(list(shard.store.scan(join_state._MARK, join_state._MARK + b"\xff")))
        assert stored <= marks * 2 <= stored * 4, "a clock for each message that is there, and for hardly another"
    assert stored < 200
    driver.check_restore()


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"within": "1 s", "left_retention": "1 s", "right_retention": "1 s"}, 1001),
        ({"on": "k", "left_window": tumbling(messages=10), "right_retention_messages": 10}, 41),
    ],
)
def test_a_side_that_leads_is_counted_in_few_rows(options, most):
    driver = JoinDriver(join_spec(SCHEMA, SCHEMA, max_ahead=None, **options), model.ONE, shortest=None)
    ahead = [Message(n, 100 * n, {"k": 2}, stream=RIGHT) for n in range(10_000)]
    driver.batch([Message(0, 0, {"k": 1}, stream=LEFT), *ahead], 0)
    store = driver.shards[0].store
    assert driver.shards[0].outcome.message_count >= 10_000
    assert len(list(store.scan(bytes([Region.WINDOWS]), bytes([Region.WINDOWS + 1])))) <= most


class Texts(JoinDriver):
    def rows_of(self, results: pa.Table) -> list[Any]:
        return [(row["left_x"], row["right_x"]) for row in results.to_pylist()]


@pytest.mark.parametrize("order", [[(LEFT, RIGHT)], [(LEFT,), (RIGHT,)], [(RIGHT,), (LEFT,)]], ids=str)
def test_the_fields_of_many_pairs_are_laid_out_in_pieces(monkeypatch, order):
    """Arrow's arrays of texts have less than 2 GiB: 800 pairs with a text of 3 MB ended the job."""
    texts = pa.schema([("k", pa.int64()), ("x", pa.string())])
    spec = join_spec(texts, texts, on="k", left_retention=99, right_retention=99, max_ahead=None)
    counts, long = {LEFT: 3, RIGHT: 8}, 300
    sides = {
        side: [Message(n, n, {"k": 1, "x": str(n) * (long if side == LEFT else 1)}, stream=side) for n in range(count)]
        for side, count in counts.items()
    }
    taken: list[int] = []
    fields = JoinRows.fields

    def measured(self: JoinRows, *given: Any) -> pa.Table:
        table = fields(self, *given)
        taken.append(pc.sum(pc.binary_length(table["x"])).as_py() or 0)
        return table

    monkeypatch.setattr(JoinRows, "fields", measured)
    found = []
    for most in (match.CHUNK_BYTES, 1000, 1):
        monkeypatch.setattr(match, "CHUNK_BYTES", most)
        driver = Texts(spec, model.ONE)
        taken.clear()
        found.append([row for some in order for row in driver.batch([m for s in some for m in sides[s]], 0).rows])
        assert max(taken) <= max(most, long)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 24


def test_messages_of_an_older_copy_that_went_since_are_taken_out_of_a_join_by_number():
    """As in a restore that catches up: metadata of the newer commit, messages of both."""
    spec = join_spec(
        SCHEMA, SCHEMA, on="k", left_window=tumbling(messages=4), right_window=tumbling(messages=4),
        left_retention_messages=8, right_retention_messages=8, max_ahead=None,
    )  # fmt: skip
    driver = JoinDriver(spec, ((LEFT, 0), (RIGHT, 0)))
    (shard,) = driver.shards

    def messages() -> dict[bytes, bytes]:
        return dict(shard.store.scan(bytes([Region.MESSAGES]), bytes([Region.MESSAGE_INDEX + 1])))

    older = messages()
    for at in range(0, 60, 5):
        come = [
            Message(offset, 0, {"k": offset % 3}, stream=side) for side in (LEFT, RIGHT) for offset in range(at, at + 5)
        ]
        older = messages() if at <= 30 else older
        driver.batch(come, at)
    left_over = {key: value for key, value in older.items() if key not in messages()}
    assert left_over
    caught_up = MemoryStore()
    whole = {**dict(shard.store.scan(b"\x00", None)), **left_over}
    caught_up.write(Changes(sorted(whole), [whole[key] for key in sorted(whole)]))
    work = Workspace(caught_up, shard.bounds)
    driver.operator.settle(work)
    caught_up.write(work.changes())
    assert dict(caught_up.scan(b"\x00", None)) == dict(shard.store.scan(b"\x00", None))
