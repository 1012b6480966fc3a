"""Frames: what the pack stage and its inverse must give, against plain loops over the same rows."""

from __future__ import annotations

from itertools import permutations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.aggregates import count
from backend.batch import ERROR_SCHEMA, NO_TIME, MicroBatch, Position
from backend.errors import SourceWentBack, UnknownFormat
from backend.spark.pack import frames, packing
from backend.spark.pack.assembling import Packed, assemble, leaps, located
from backend.spark.pack.frames import from_ipc
from backend.spark.pack.narrow import widen
from backend.spark.pack.packing import PackPlan
from backend.store.memory import MemoryStore
from backend.store.workspace import Workspace
from backend.windows.definitions import tumbling
from backend.windows.operator import WindowOperator
from backend.windows.spec import window_spec
from recovery.commit.option_sets import ByVersion
from recovery.share import ShardInput

KEY = (pa.field("key", pa.string()),)


def pack(batch, plan, time_ms=1_000_000):
    return packing.pack(batch, plan, time_ms)


def source_rows(rows, *, shards=2, timestamps=None):
    """rows: (partition, offset, time or None, malformed or None); the record's own timestamp is none by default."""
    n = len(rows)
    partition, offset, time, malformed = (list(column) for column in zip(*rows, strict=True))
    return pa.RecordBatch.from_pydict(
        {
            "_stream": pa.array([0] * n, pa.int32()),
            "_partition": pa.array(partition, pa.int32()),
            "_offset": pa.array(offset, pa.int64()),
            "_time": pa.array(time, pa.int64()),
            "_shard": pa.array([o % shards for o in offset], pa.int32()),
            "_timestamp": pa.array(timestamps or [None] * n, pa.int64()),
            "_key": pa.array([b"k"] * n, pa.binary()),
            "_raw": pa.array([b"raw" if m else None for m in malformed], pa.binary()),
            "_malformed": pa.array(malformed, pa.string()),
            "key": pa.array([f"k{o}" for o in offset]),
        }
    )


def plan(shards=2, **more):
    return PackPlan(
        tuple(range(shards)), KEY, more.get("by_partition", False), more.get("max_ahead_ms"), {0: "t", 1: "t"}
    )


def of_shard(batches, shard):
    return [
        Packed(row["header"], row["frame"], row["errors"])
        for batch in batches
        for row in batch.to_pylist()
        if row["shard"] == shard
    ]


messages = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-50, 50) | st.none(), st.sampled_from([None, None, None, "broken"])),
    min_size=1,
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(messages, st.integers(1, 3), st.lists(st.integers(1, 7), min_size=1, max_size=6), st.randoms())
def test_every_cut_and_order_gives_what_a_plain_loop_gives(rows, shards, sizes, chance):
    counters, numbered = {}, []
    for partition, time, malformed in rows:
        offset = counters.get(partition, 0)
        counters[partition] = offset + 1
        numbered.append((partition, offset, time, malformed))
    before = {(0, 0): Position(0, -20, 7)}

    # the oracle: one message at a time
    newest = {0: -20}
    expected, bad = {}, {}
    for partition, offset, time, malformed in numbered:
        good = time is not None and malformed is None
        if good:
            expected[(partition, offset)] = (time, newest.get(partition, NO_TIME))
            newest[partition] = max(newest.get(partition, NO_TIME), time)
        else:
            bad[(partition, offset)] = "malformed" if malformed else "no_event_time"

    # Arrow batches are cut anywhere along each partition, and arrive in any order
    pieces, rest = [], sorted(numbered)
    while rest:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(pack(source_rows(rest[:size], shards=shards), plan(shards)))
        rest = rest[size:]
    chance.shuffle(pieces)
    found, errors = {}, {}
    for shard in range(shards):
        got = assemble(of_shard(pieces, shard), before)
        accepted = {partition for partition, _ in expected}  # one that brought nothing else is as idle as before
        active = {p: 7 if p == 0 and p not in accepted else 1_000_000 for p in counters}
        assert got.after == {(0, p): Position(counters[p], newest.get(p, NO_TIME), active[p]) for p in counters} | (
            {} if 0 in counters else before
        )
        if got.messages is not None:
            table = got.messages.to_pylist()
            assert [(r["_partition"], r["_offset"]) for r in table] == sorted(
                (r["_partition"], r["_offset"]) for r in table
            )
            for row in table:
                assert row["_offset"] % shards == shard
                assert row["key"] == f"k{row['_offset']}"
                found[(row["_partition"], row["_offset"])] = (row["_time"], row["_before"])
        for row in got.errors.to_pylist():
            errors[(row["partition"], row["offset"])] = row["reason"]
    assert found == expected
    assert errors == bad


def test_malformed_rows_keep_their_bytes():
    packed = pack(source_rows([(0, 0, 5, None), (0, 1, None, "not JSON")], shards=1), plan(1))
    [row] = assemble(of_shard([packed], 0), {}).errors.to_pylist()
    assert (row["topic"], row["partition"], row["offset"], row["reason"]) == ("t", 0, 1, "malformed")
    assert (row["detail"], row["value"], row["key"]) == ("not JSON", b"raw", b"k")


def test_one_message_from_the_future_does_not_move_the_clock():
    rows = [(0, 0, 100, None), (0, 1, 10**15, None), (0, 2, 101, None), (0, 3, 2**62 + 1, None)]
    packed = pack(source_rows(rows, shards=1), plan(1, max_ahead_ms=86_400_000), 1_000)
    got = assemble(of_shard([packed], 0), {})
    assert got.messages["_before"].to_pylist() == [NO_TIME, 100]
    assert got.after[(0, 0)] == Position(4, 101, 1_000)
    assert got.errors["reason"].to_pylist() == ["in_future", "out_of_range"]


def test_the_last_millisecond_that_is_not_too_far_ahead():
    rows = [(0, 0, 1_000 + 50, None), (0, 1, 1_000 + 51, None)]
    packed = pack(source_rows(rows, shards=1), plan(1, max_ahead_ms=50), 1_000)
    assert assemble(of_shard([packed], 0), {}).errors["offset"].to_pylist() == [1]


@pytest.mark.parametrize(
    ("own", "last"),
    [
        (None, 1_050),  # batch time 1,000 plus 50
        (-1, 1_050),  # Kafka's "none"
        (0, 50),
        (400, 450),
        (1_000, 1_050),
        (5_000, 1_050),  # a record from the future is judged by the batch time
    ],
)
def test_too_far_ahead_of_when_it_was_written_or_of_the_batch_time(own, last):
    rows = [(0, 0, last, None), (0, 1, last + 1, None), (0, 2, None, None)]
    packed = pack(source_rows(rows, shards=1, timestamps=[own] * 3), plan(1, max_ahead_ms=50), 1_000)
    got = assemble(of_shard([packed], 0), {})
    assert got.errors.select(["offset", "reason", "timestamp", "event_time"]).to_pylist() == [
        {"offset": 1, "reason": "in_future", "timestamp": own, "event_time": last + 1},
        {"offset": 2, "reason": "no_event_time", "timestamp": own, "event_time": None},
    ]
    assert f"later than {last} ms" in got.errors["detail"][0].as_py()
    assert got.after[(0, 0)] == Position(3, last, 1_000)
    off = pack(source_rows(rows, shards=1, timestamps=[own] * 3), plan(1), 1_000)
    assert assemble(of_shard([off], 0), {}).errors["reason"].to_pylist() == ["no_event_time"]


TOPICS, NONE = {0: "t"}, (0, "")


def test_an_archive_of_february_read_in_november():
    """One wrong clock is refused, what follows it is not: as when the topic was live."""
    february, november, day = 1_770_000_000_000, 1_793_000_000_000, 86_400_000
    written = [february + minute * 60_000 for minute in range(4)]
    times = [written[0], written[1] + 90 * day, written[2], written[3]]  # the second clock is three months ahead
    rows = [(0, offset, time, None) for offset, time in enumerate(times)]
    packed = pack(source_rows(rows, shards=1, timestamps=written), plan(1, max_ahead_ms=day), november)
    got = assemble(of_shard([packed], 0), {})
    assert [(row["offset"], row["reason"]) for row in got.errors.to_pylist()] == [(1, "in_future")]
    assert got.messages["_before"].to_pylist() == [NO_TIME, written[0], written[2]]
    assert leaps(got, {}, day, TOPICS) == NONE
    # a record whose own timestamp is as wrong passes in an archive: it is told
    told = pack(source_rows(rows, shards=1, timestamps=times), plan(1, max_ahead_ms=day), november)
    passed = assemble(of_shard([told], 0), {})
    assert passed.errors.num_rows == 0
    assert leaps(passed, {}, day, TOPICS) == (1, f"t-0, offset 1: by {times[1] - times[0]} ms")


def test_a_leap_is_more_than_max_ahead_and_the_first_message_makes_none():
    rows = [
        (0, 0, 10, None),
        (0, 1, 30, None),
        (0, 2, 20, None),
        (0, 3, 81, None),
        (1, 0, 500, None),
        (1, 1, 551, None),
    ]
    packed = [pack(source_rows(rows, shards=1), plan(1))]
    got = assemble(of_shard(packed, 0), {})
    assert leaps(got, {}, 50, TOPICS) == (2, "t-0, offset 3: by 51 ms")
    assert leaps(got, {}, 51, TOPICS) == NONE
    assert leaps(got, {}, None, TOPICS) == NONE
    assert leaps(ShardInput(0, None, {}), {}, 50, TOPICS) == NONE
    for committed, many, farthest in (
        (-90, 3, "t-0, offset 0: by 100 ms"),
        (30, 2, "t-0, offset 3: by 51 ms"),
        (31, 1, "t-1, offset 1: by 51 ms"),
    ):
        before = {(0, 0): Position(0, committed, 7), (0, 1): Position(0, 490, 7)}
        assert leaps(assemble(of_shard(packed, 0), before), before, 50, TOPICS) == (many, farthest)
    before = {(0, 0): Position(0, 31, 7), (0, 1): Position(0, 501, 7)}
    assert leaps(assemble(of_shard(packed, 0), before), before, 50, TOPICS) == NONE


def test_errors_of_the_operator_get_topic_and_timestamp():
    """However the rows are cut and however many partitions there are; others stay without."""
    rows = [(p, o, 100 - o, None) for p in (0, 1) for o in range(4)]
    stamps = [1_000 * p + o for p in (0, 1) for o in range(4)]
    parts = [(rows[at : at + 3], stamps[at : at + 3]) for at in (3, 0, 6)]
    packed = [pack(source_rows(some, shards=1, timestamps=own), plan(1)) for some, own in parts]
    got = assemble(of_shard(packed, 0), {})
    assert got.messages.schema.names[-1] == "key"
    places = [(0, 3), (1, 0), (1, 3), (0, 99), (2, 0)]
    refused = [{"stream": 0, "partition": p, "offset": o, "reason": "out_of_retention"} for p, o in places]
    found = located(pa.Table.from_pylist(refused, ERROR_SCHEMA), {0: "orders"}, got)
    assert found.schema == ERROR_SCHEMA
    assert found["topic"].to_pylist() == ["orders"] * 5
    assert found["timestamp"].to_pylist() == [3, 1_000, 1_003, None, None]
    known = found.set_column(4, found.schema.field(4), pa.array([77, 78, 79, 80, None]))
    assert located(known, {0: "orders"}, got)["timestamp"].to_pylist() == [77, 78, 79, 80, None]
    timer = ShardInput(0, None, {})
    assert located(known, {0: "orders"}, timer)["timestamp"].to_pylist() == [77, 78, 79, 80, None]
    assert located(found, {0: "orders"}, timer)["topic"].to_pylist() == ["orders"] * 5
    assert located(ERROR_SCHEMA.empty_table(), {}, got).num_rows == 0


def test_a_micro_batch_that_runs_again_refuses_what_it_refused_before(monkeypatch):
    """`max_ahead` was 50 up to version 6 and is off from version 7 on."""
    given = source_rows([(0, 0, 1_050, None), (0, 1, 1_051, None)], shards=1)
    clocks = iter([1_000] * 3)  # read once for all that comes to a stage
    stage = packing.packer(ByVersion(((0, plan(1, max_ahead_ms=50)), (7, plan(1)))), lambda: next(clocks))
    for version, refused in ((5, [1, 1]), (6, [1, 1]), (7, [])):
        monkeypatch.setattr(packing, "_version", lambda version=version: version)
        assert assemble(of_shard(stage(iter([given, given])), 0), {}).errors["offset"].to_pylist() == refused


def test_errors_have_the_same_order_whatever_the_order_of_the_packed_rows():
    """Sequence numbers and ids rest on it: Spark gives packed rows in another order when a micro-batch runs again."""
    packed = [pack(source_rows([(p, o, 5, "broken") for o in (0, 1)], shards=1), plan(1)) for p in (0, 1, 2)]
    for order in permutations(packed):
        errors = assemble(of_shard(order, 0), {}).errors
        assert list(zip(errors["partition"].to_pylist(), errors["offset"].to_pylist(), strict=True)) == [
            (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
        ]  # fmt: skip


def test_duplicates_inside_a_micro_batch_are_dropped():
    packed = [pack(source_rows([(0, 0, 1, None), (0, 1, 2, None)], shards=1), plan(1)) for _ in range(2)]
    got = assemble(of_shard(packed, 0), {})
    assert got.messages["_offset"].to_pylist() == [0, 1]


def test_an_offset_below_the_position_is_a_source_that_went_back():
    packed = pack(source_rows([(0, 4, 1, None)], shards=1), plan(1))
    with pytest.raises(SourceWentBack, match=r"offset 4.*position 5"):
        assemble(of_shard([packed], 0), {(0, 0): Position(5, 0, 0)})
    assert assemble(of_shard([packed], 0), {(0, 0): Position(4, 0, 0)}).messages.num_rows == 1


def test_with_routing_by_partition_other_shards_hear_nothing():
    batch = source_rows([(0, 0, 1, None), (0, 2, 2, None)], shards=2)
    packed = pack(batch, plan(2, by_partition=True))
    assert packed["shard"].to_pylist() == [0]


def test_a_shard_without_rows_still_learns_how_far_the_source_is():
    packed = pack(source_rows([(0, 0, 1, None), (0, 2, 2, None)], shards=2), plan(2))
    got = assemble(of_shard([packed], 1), {})
    assert got.messages is None
    assert got.after == {(0, 0): Position(3, 2, 1_000_000)}


def micro_batches(minutes, *, silent=False, by_offset=False):
    """Partition 0 brings a message each minute, partition 1 one at first and then what is malformed, or nothing.

    Gives what each micro-batch sent, reasons and window starts, and the positions at the end.
    """
    options = {"keys": "key", "retention": 0, "idle_after": "3 minutes"}
    operator = WindowOperator(window_spec(tumbling("1 minute"), pa.schema(KEY), {"n": count()}, **options))
    store, bounds, positions, found = MemoryStore(), {}, {}, []
    for minute in range(minutes):
        rows = [(0, minute, minute * 60_000, None)]
        rows += [(1, minute, 0, "not JSON" if minute else None)] * (not minute or not silent)
        packed = pack(source_rows(rows, shards=1), plan(1), 1_000_000 + minute * 60_000)
        given = assemble(of_shard([packed], 0), positions, sources=[(0, 0), (0, 1)], by_offset=by_offset)
        work = Workspace(store, bounds)
        batch = MicroBatch(minute, given.time_ms, given.messages, positions, given.after)
        outcome = operator.process(batch, work)
        store.write(work.changes())
        bounds, positions = dict(work.bounds), given.after
        found.append([(row["reason"], row["window_start"]) for row in outcome.results.to_pylist()])
    return found, positions


@pytest.mark.parametrize("silent", [False, True])
def test_a_source_partition_of_which_nothing_is_accepted_becomes_idle(silent):
    """It brings something in each micro-batch, and holds windows open no longer than one that is silent."""
    found, positions = micro_batches(6, silent=silent)
    full = [[("full", start * 60_000) for start in starts] for starts in ([], [], [], [0, 1, 2], [3], [4])]
    assert found == full, "three minutes after its last message it is passed over"
    assert positions[0, 1] == Position(1 if silent else 6, 0, 1_000_000)


def test_what_is_not_accepted_counts_where_clocks_are_offsets():
    _, positions = micro_batches(4, by_offset=True)
    assert positions[0, 1] == Position(4, 0, 1_180_000)


def test_a_source_partition_that_is_new_is_active_whatever_it_brings():
    packed = pack(source_rows([(0, 0, None, None), (1, 3, 5, "broken")], shards=1), plan(1))
    found = assemble(of_shard([packed], 0), {}, sources=[(0, 1)]).after
    assert found == {(0, 0): Position(1, NO_TIME, 1_000_000), (0, 1): Position(4, NO_TIME, 1_000_000)}


def test_frames_of_another_format_are_refused():
    import msgspec
    import xxhash

    header = msgspec.msgpack.encode([99, 0, [], False])
    packed = Packed(header + xxhash.xxh3_64_digest(header), None, None)
    with pytest.raises(UnknownFormat, match="99"):
        assemble([packed], {})


def test_ipc_is_its_own_inverse():
    table = pa.table({"a": [1, None], "b": ["x", "y"]})
    assert from_ipc(frames.to_ipc(table)) == table


@pytest.mark.parametrize("rows", [0, 1, 100])
def test_small_tables_have_the_bytes_that_they_would_have_if_they_were_large(rows, monkeypatch):
    texts = pa.array(["x", None, "yz"] * 40)
    table = pa.table({"a": pa.array(range(120)), "b": texts, "c": texts.dictionary_encode()}).slice(7, rows)
    assert table.get_total_buffer_size() < frames.SMALL_BYTES
    small = frames.to_ipc(table)
    monkeypatch.setattr(frames, "SMALL_BYTES", 0)
    assert small == frames.to_ipc(table)
    assert from_ipc(small) == table


SIDES = PackPlan(
    (0,),
    (pa.field("left.key", pa.string()), pa.field("right.cost", pa.int64())),
    False,
    None,
    {0: "l", 1: "r"},
)


def side_rows(stream, offsets):
    n = len(offsets)
    rows = source_rows([(0, offset, offset, None) for offset in offsets], shards=1).to_pydict()
    del rows["key"]
    batch = pa.RecordBatch.from_pydict(rows, source_rows([(0, 0, 0, None)]).schema.remove(9))
    batch = batch.set_column(0, "_stream", pa.array([stream] * n, pa.int32()))
    if stream == 0:
        return batch.append_column(frames.column_name("left.key"), pa.array([f"k{o}" for o in offsets], pa.string()))
    return batch.append_column(frames.column_name("right.cost"), pa.array([o * 10 for o in offsets], pa.int64()))


def test_a_frame_carries_its_own_sides_columns_and_the_others_come_back_as_nulls():
    packed = [pack(side_rows(1, [5, 6]), SIDES), pack(side_rows(0, [7]), SIDES)]
    assert [widen(from_ipc(p["frame"][0].as_py())).schema.names[5:-1] for p in packed] == [["right.cost"], ["left.key"]]
    got = assemble(of_shard(packed, 0), {}, fields=SIDES.fields).messages
    assert got.schema.names[5:] == ["left.key", "right.cost"]
    assert [(r["_stream"], r["left.key"], r["right.cost"]) for r in got.to_pylist()] == [
        (0, "k7", None),
        (1, None, 50),
        (1, None, 60),
    ]
    only = assemble(of_shard(packed[1:], 0), {}, fields=SIDES.fields).messages
    assert only.schema == got.schema
    assert only.to_pylist()[0]["right.cost"] is None
