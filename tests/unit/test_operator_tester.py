"""The operator tester, as a user's test would use it; expected values by hand."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from backend import (
    archive,
    collect_list,
    count,
    hopping,
    join,
    median,
    policies,
    session,
    sliding,
    stream,
    sum_,
    tumbling,
)
from backend.batch import NO_TIME
from backend.errors import RestoreMismatch, StateUnavailable, UserCodeFailed
from backend.joins.operator import JoinOperator
from backend.joins.spec import join_spec
from backend.windows.operator import WindowOperator
from backend.windows.spec import window_spec
from recovery.testing import OperatorTester

SCHEMA = pa.schema([("at", pa.int64()), ("who", pa.string()), ("n", pa.int64())])


NOWHERE = archive("nowhere", format="raw")
"""A tester reads no source."""
NOWHERE_JSON = {
    at: archive("nowhere", value=f"k string, {at} bigint, v bigint", topics=["t"]) for at in ("sent", "seen")
}


def after_silence(messages, context):
    """Send the batch time an hour after the newest message: it asks for that where messages come, and only there."""
    if messages.num_rows:
        context.run_again_at(context.time_ms + 3_600_000)
        return None
    return pa.table({"closed": [context.time_ms]})


@pytest.fixture
def tester(tmp_path):
    job = (
        stream(NOWHERE, event_time="at", key="who")
        .window(tumbling(100), retention=1_000)
        .aggregate(count=count(), total=sum_("n"), middle=median("n"))
    )
    return OperatorTester(job, SCHEMA, tmp_path)


def row(at: int, n: int, who: str = "ann") -> dict[str, object]:
    return {"at": at, "who": who, "n": n}


def told(emitted) -> list[tuple[object, ...]]:
    names = ("reason", "window_start", "who", "count", "total", "middle")
    return [tuple(result[name] for name in names) for result in emitted.results.to_pylist()]


def test_windows_are_emitted_when_a_message_passes_their_end(tester):
    assert told(tester.batch([row(0, 1), row(99, 5)])) == []
    assert told(tester.batch([row(100, 9)])) == [("full", 0, "ann", 2, 6, 3.0)]
    assert told(tester.drain()) == [("drain", 100, "ann", 1, 9, 9.0)]


def test_what_a_crash_left_does_not_count_and_its_rows_come_again(tester):
    tester.batch([row(0, 1)])
    tester.crash([row(10, 2)])
    tester.crash()
    assert told(tester.batch([row(100, 0)])) == [("full", 0, "ann", 2, 3, 1.5)]


@pytest.mark.parametrize("own", [True, False])
def test_a_timestamp_that_is_a_field_is_not_the_records_own(tmp_path, own):
    schema = SCHEMA if own else SCHEMA.append(pa.field("_timestamp", pa.int64()))
    windows = stream(NOWHERE, event_time="at", key="who").window(tumbling(100), retention=0, max_ahead=10)
    given = OperatorTester(windows.aggregate(count=count()), schema, tmp_path, now_ms=10_000)
    emitted = given.batch([{**row(5_000, 1), "_timestamp": 100}])
    reasons = [error["reason"] for error in emitted.errors.to_pylist()]
    assert reasons == (["in_future"] if own else [])


def test_a_lost_disk_is_noticed_restored_and_proven(tester):
    tester.batch([row(0, 1), row(1, 2), row(2, 6)])
    tester.crash([row(3, 100)])
    tester.lose_disk()
    with pytest.raises(StateUnavailable):
        tester.batch()
    restored = tester.restore()
    assert (restored.messages, restored.record.commit) == (3, tester.pointer.commit)
    assert told(tester.batch([row(150, 0)])) == [("full", 0, "ann", 4, 109, 4.0)]


def test_a_source_that_gives_something_else_is_noticed(tester):
    tester.batch([row(0, 1), row(1, 2)])
    tester.lose_disk()
    tester.tamper(1, row(1, 3))
    with pytest.raises(RestoreMismatch):
        tester.restore()
    tester.tamper(1, row(1, 2))
    assert tester.restore().messages == 2


def test_late_updates_wait_for_the_clock(tester):
    tester.batch([row(0, 1)])
    tester.batch([row(100, 1)])
    assert told(tester.batch([row(50, 3)])) == []  # pending: late updates are emitted every ten seconds
    assert tester.advance("9 seconds") is None
    assert told(tester.advance("1 second")) == [("late", 0, "ann", 2, 4, 2.0)]
    assert tester.advance("1 hour") is None


def test_partitions_have_offsets_and_clocks_of_their_own(tester):
    tester.batch([row(0, 1)])
    tester.batch([row(10, 2)], partition=1)
    assert told(tester.batch([row(500, 0)])) == []  # partition 1 has not passed the window's end
    assert told(tester.batch([row(101, 0)], partition=1)) == [("full", 0, "ann", 2, 3, 1.5)]
    assert tester.pointer.positions[0][2].next_offset == tester.pointer.positions[1][2].next_offset == 2


def test_messages_beyond_retention_go_to_the_errors(tester):
    emitted = tester.batch([row(5_000, 1), row(10, 2)])
    assert [(error["offset"], error["reason"]) for error in emitted.errors.to_pylist()] == [(1, "out_of_retention")]


def test_before_anything_is_committed_there_is_nothing_to_restore(tester):
    with pytest.raises(ValueError, match="nothing was committed"):
        tester.restore()
    with pytest.raises(ValueError, match="'at' must be the event time"):
        tester.batch([{"at": "noon", "who": "x", "n": 1}])


def test_the_plugin_is_light():
    code = (
        "import sys, recovery.testing;"
        "print([m for m in ('pyspark', 'confluent_kafka', 'rocksdict', 'pyarrow') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


@pytest.mark.parametrize(
    ("window", "options"),
    [
        (session(30), {"retention": 10}),
        (tumbling(messages=3), {"retention": 100, "retention_messages": 5}),
        (hopping(messages=4, every=2), {"retention": 100}),
        (session(messages=3), {"retention": 100}),
    ],
    ids=lambda value: f"{value.kind} {value.unit}" if hasattr(value, "kind") else "",
)
def test_a_restore_of_windows_of_a_key_goes_on_as_if_nothing_had_happened(tmp_path, window, options):
    """Disorder, refused messages inside of sessions, keys that fell out: the disk is lost on the way."""
    times = [0, 20, 45, 5, 70, 12, 96, 33, 130, 88, 60, 131, 10, 190, 185, 100, 260, 120, 262, 263, 5, 264, 265, 290]
    rows = [row(at, n, "abbac"[n * 7 % 5]) for n, at in enumerate(times)]
    job = (
        stream(NOWHERE, event_time="at", key="who")
        .window(window, **options)
        .aggregate(count=count(), all=collect_list("n"))
    )
    straight, broken = (OperatorTester(job, SCHEMA, tmp_path / name) for name in ("straight", "broken"))
    refused = 0
    for at in range(0, len(rows), 4):
        wanted, emitted = (tester.batch(rows[at : at + 4]) for tester in (straight, broken))
        assert emitted.results.equals(wanted.results)
        assert emitted.errors.equals(wanted.errors)
        refused += emitted.errors.num_rows
        if at in (8, 16):
            broken.lose_disk()
            broken.restore()
    assert refused


LEFT, RIGHT = (pa.schema([("k", pa.string()), (at, pa.int64()), ("v", pa.int64())]) for at in ("sent", "seen"))


def test_a_join_is_fed_by_its_sides_and_comes_back(tmp_path):
    left, right = (stream(NOWHERE_JSON[at], event_time=at) for at in ("sent", "seen"))
    job = join(left, right, on="k", within=10, how="outer", left_retention=1_000, right_retention=1_000)
    given = OperatorTester(job, [LEFT, RIGHT], tmp_path)
    given.batch([{"k": "a", "sent": 100, "v": 1}])
    given.crash([{"k": "a", "seen": 105, "v": 2}], stream=1)
    given.lose_disk()
    given.restore()
    emitted = given.batch([{"k": "a", "seen": 111, "v": 3}, {"k": None, "seen": 90, "v": 4}], stream=1)
    columns = ("reason", "left_time", "right_time", "k", "left_v", "right_v")
    assert [tuple(row[name] for name in columns) for row in emitted.results.to_pylist()] == [
        ("full", 100, 105, "a", 1, 2)
    ]
    alone = given.drain().results.to_pylist()
    assert [(row["left_v"], row["right_v"], row["reason"]) for row in alone] == [(None, 3, "drain"), (None, 4, "drain")]


def joined(left=NOWHERE_JSON["sent"], right=NOWHERE_JSON["seen"], **options):
    sides = stream(left, event_time="sent"), stream(right, event_time="seen")
    return join(*sides, on="k", within=10, left_retention=1_000, right_retention=1_000, **options)


def test_a_join_of_equal_sides_takes_one_schema_and_refuses_three(tmp_path):
    side = stream(NOWHERE_JSON["sent"], event_time="sent")
    job = join(side, side, on="k", within=10, left_retention=1_000, right_retention=1_000)
    given = OperatorTester(job, LEFT, tmp_path)
    given.send([{"k": "a", "sent": 100, "v": 1}], stream=1)
    assert given.batch([{"k": "a", "sent": 100, "v": 2}]).results.num_rows == 1


TWICE = pa.schema([("k", pa.string()), ("k", pa.string())])
SCHEMAS = [
    [LEFT] * 3,
    {"left": LEFT, "right": RIGHT},
    {LEFT, RIGHT},
    "lr",
    [("k", pa.string()), ("v", pa.int64())],
    None,
]


@pytest.mark.parametrize("schema", [*SCHEMAS, [LEFT, TWICE]], ids=range(len(SCHEMAS) + 1))
def test_schemas_of_a_join_are_one_or_a_list_of_two(tmp_path, schema):
    said = "a field stands twice" if schema == [LEFT, TWICE] else "a pyarrow.Schema, or a list of two, left and right"
    with pytest.raises(ValueError, match=f"^schema.*{said}"):
        OperatorTester(joined(), schema, tmp_path)


def test_the_right_side_begins_after_the_topics_of_the_left_one(tmp_path):
    both = archive("nowhere", value="k string, sent bigint, v bigint", topics=["s", "t"])
    given = OperatorTester(joined(both), [LEFT, RIGHT], tmp_path)
    given.send([{"k": "a", "sent": 100, "v": 1}], stream=1)
    with pytest.raises(ValueError, match="'sent' must be the event time"):
        given.send([{"k": "a", "seen": 100, "v": 2}], stream=1)
    emitted = given.batch([{"k": "a", "seen": 100, "v": 2}], stream=2)
    assert [(row["left_v"], row["right_v"]) for row in emitted.results.to_pylist()] == [(1, 2)]
    with pytest.raises(ValueError, match=r"stream=3: allowed are 0 to 2"):
        given.batch([{"k": "a", "seen": 100, "v": 2}], stream=3)


def test_an_operator_has_one_schema_with_the_names_that_it_reads(tmp_path):
    spec = join_spec(LEFT, RIGHT, on="k", within=10, left_retention=1_000, right_retention=1_000)
    with pytest.raises(ValueError, match=r"allowed is a pyarrow.Schema$"):
        OperatorTester(JoinOperator(spec), [LEFT, RIGHT], tmp_path)
    with pytest.raises(ValueError, match=r"the job reads \['left.k'"):
        OperatorTester(JoinOperator(spec), LEFT, tmp_path)
    both = pa.schema([f.with_name(f"{side}.{f.name}") for side, one in (("left", LEFT), ("right", RIGHT)) for f in one])
    given = OperatorTester(JoinOperator(spec), both, tmp_path)
    given.send([{"left.k": "a", "_time": 100, "left.v": 1}])
    assert given.batch([{"right.k": "a", "_time": 105, "right.v": 2}], stream=1).results.num_rows == 1


@pytest.mark.parametrize("event_time", ["v", ["v", "v"]])
def test_the_event_time_of_a_tester_is_one_for_both_sides_or_a_list_of_two(tmp_path, event_time):
    given = OperatorTester(joined(), [LEFT, RIGHT], tmp_path, event_time=event_time)
    given.send([{"k": "a", "v": 100}])
    assert given.batch([{"k": "a", "v": 105}], stream=1).results.num_rows == 1
    with pytest.raises(ValueError, match=r"event_time=.*a list of one per side"):
        OperatorTester(joined(), [LEFT, RIGHT], tmp_path, event_time=["sent", "seen", "sent"])


def test_what_the_pack_stage_would_refuse_of_a_join_has_the_fields_of_its_side(tmp_path):
    given = OperatorTester(joined(max_ahead=10), [LEFT, RIGHT], tmp_path, now_ms=1_000)
    errors = given.batch([{"k": "a", "seen": 1_011, "v": 3}, {"k": "b", "seen": 2**62 + 1, "v": 4}], stream=1).errors
    assert [(row["offset"], row["reason"], row["value"]) for row in errors.to_pylist()] == [
        (0, "in_future", b'{"k":"a","seen":1011,"v":3}'),
        (1, "out_of_range", b'{"k":"b","seen":4611686018427387905,"v":4}'),
    ]
    assert given.pointer.positions[0][2].stream_time == NO_TIME
    given.lose_disk()
    given.restore()
    given.change(joined(max_ahead=100))
    given.send([{"k": "a", "sent": 1_050, "v": 1}])
    assert given.batch([{"k": "a", "seen": 1_050, "v": 2}], stream=1).results.num_rows == 1
    with pytest.raises(ValueError, match=r"^job="):
        given.change(stream(NOWHERE, event_time="at").window(tumbling(100), retention=0).aggregate(count=count()))


@pytest.mark.parametrize(
    ("options", "message", "said"),
    [
        ({"stream": -1}, {}, "stream=-1: allowed are 0 to 65535"),
        ({"stream": "1"}, {}, "stream='1'"),
        ({"stream": True}, {}, "stream=True"),
        ({"partition": -1}, {}, "partition=-1: allowed are 0 to 2147483647"),
        ({"partition": 1.5}, {}, "partition=1.5"),
        ({}, {"at": 2**70}, "'at' must be the event time"),
        ({}, {"who": 5}, "field 'who' of type string"),
        ({}, {"_timestamp": "x"}, "'_timestamp' is the record's own timestamp"),
        ({}, {"_timestamp": 2**70}, "'_timestamp' is the record's own timestamp"),
        ({}, {"_offset": 7}, "a message has none of .*'_offset'"),
    ],
)
def test_a_message_that_cannot_be_is_refused_by_name_and_not_sent(tester, options, message, said):
    with pytest.raises(ValueError, match=said):
        tester.batch([row(0, 1), {**row(0, 1), **message}], **options)
    tester.batch([row(0, 1)])
    assert told(tester.batch([row(100, 1)])) == [("full", 0, "ann", 1, 1, 1.0)]


@pytest.mark.parametrize("rows", [[5], None, [["at", 0]], {"at": 0}, "at", 5])
def test_messages_are_a_list_of_dicts(tester, rows):
    with pytest.raises(ValueError, match=r"^rows=.*a list of messages"):
        tester.send(rows)


@pytest.mark.parametrize(("options", "said"), [({"now_ms": "x"}, "now_ms='x'"), ({"directory": 5}, "directory=5")])
def test_options_of_a_tester_are_looked_at_before_anything_is_made(tester, options, said, tmp_path):
    with pytest.raises(ValueError, match=f"^{said}: allowed"):
        OperatorTester(tester.operator, **{"schema": SCHEMA, "directory": tmp_path / "other", **options})
    assert not (tmp_path / "other").exists()


def test_a_directory_may_be_text(tmp_path):
    windows = stream(NOWHERE, event_time="at").window(tumbling(100), retention=0, max_ahead=None)
    given = OperatorTester(windows.aggregate(n=count()), SCHEMA, str(tmp_path / "own"))
    given.batch([row(0, 1)])
    given.lose_disk()
    given.restore()
    assert [found["n"] for found in given.drain().results.to_pylist()] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_what_is_no_job_is_refused_and_a_refused_change_changes_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"^job=5: "):
        OperatorTester(5, SCHEMA, tmp_path)
    windows = stream(NOWHERE, event_time="at", key="who").window(tumbling(100), retention=0, max_ahead=10)
    given = OperatorTester(windows.aggregate(n=count()), SCHEMA, tmp_path, now_ms=100)
    whole = given.operator
    other = OperatorTester(joined(), [LEFT, RIGHT], tmp_path / "other").operator
    with pytest.raises(ValueError, match="the job reads"):
        given.change(other)
    with pytest.raises(ValueError, match=r"^job=5: "):
        given.change(5)
    assert given.operator is whole
    assert [error["reason"] for error in given.batch([row(111, 1)]).errors.to_pylist()] == ["in_future"]


@pytest.mark.parametrize(("offset", "stream"), [(1, 0), (-1, 0), (0, 1)])
def test_only_what_was_sent_can_be_tampered_with(tester, offset, stream):
    tester.batch([row(0, 1)])
    with pytest.raises(ValueError, match=f"offset={offset}: [01] messages were sent to partition 0 of stream {stream}"):
        tester.tamper(offset, row(0, 2), stream=stream)


@pytest.mark.parametrize("window", [tumbling(1), sliding(1), sliding("1 day"), hopping(2, 1), session(1)])
def test_the_latest_event_times_are_in_windows_and_later_ones_in_the_errors(window, tmp_path):
    last = 2**60
    windows = stream(archive("nowhere", value="at long, n long"), event_time="at").window(
        window, retention=1000, max_ahead=None, policies=policies(late="each")
    )
    tester = OperatorTester(
        windows.aggregate(ns=collect_list("n")), pa.schema([("at", pa.int64()), ("n", pa.int64())]), tmp_path
    )
    times = [-last, last - 2, last - 1, last, -last - 1, last + 1]
    done = [tester.batch([{"at": at, "n": n}]) for n, at in enumerate(times)] + [tester.drain()]
    assert [one["offset"] for each in done for one in each.errors.to_pylist()] == [4, 5]
    assert {n for each in done for one in each.results.to_pylist() for n in one["ns"] or ()} == {0, 1, 2, 3}


FIELDS = pa.schema([("at", pa.int64()), ("n", pa.int64())])


def stepped(step, **aggregates):
    source = step(stream(archive("nowhere", value="at long, n long"), event_time="at"))
    return source.window(tumbling(100), retention=10, max_ahead=None).aggregate(ns=collect_list("n"), **aggregates)


def test_steps_are_run_when_messages_are_read_and_when_they_are_replayed(tmp_path):
    job = stepped(
        lambda source: source.where(pc.field("n") > 3).with_columns(
            at=pc.field("at") + 100, n=lambda t: pc.multiply(t["n"], 2)
        )
    )
    tester = OperatorTester(job, FIELDS, tmp_path)
    tester.crash([{"at": 0, "n": 1}, {"at": 1, "n": 5}])
    tester.batch([{"at": 2, "n": 3}, {"at": 3, "n": 4}])
    tester.lose_disk()
    assert tester.restore().messages == 2
    assert tester.drain().results.select(["window_start", "ns"]).to_pylist() == [{"window_start": 100, "ns": [10, 8]}]
    tester.tamper(2, {"at": 2, "n": 4})  # it was dropped, and would come through now
    tester.lose_disk()
    with pytest.raises(RestoreMismatch):
        tester.restore()


def test_a_source_partition_whose_messages_steps_drop_becomes_idle(tmp_path):
    job = stepped(lambda source: source.where(pc.field("n") > 3))  # idle_after is a minute
    tester = OperatorTester(job, FIELDS, tmp_path)
    tester.send([{"at": 0, "n": 4}], partition=1)
    tester.batch([{"at": 0, "n": 4}])
    for offset in (1, 2):
        tester.now_ms += 30_000
        tester.send([{"at": 0, "n": 1}], partition=1)
        sent = tester.batch([{"at": offset * 100, "n": 4}]).results.to_pylist()
    assert [(one["reason"], one["window_start"]) for one in sent] == [("full", 0), ("full", 100)]


@pytest.mark.parametrize(
    ("options", "active_ms"),
    [
        ({"within": 10, "left_retention": 1_000, "right_retention": 1_000}, 0),
        ({"left_window": tumbling(messages=3), "right_retention_messages": 1_000}, 7),
    ],
    ids=["by time", "by number"],
)
def test_what_steps_drop_keeps_only_sides_awake_that_count_it(options, active_ms, tmp_path):
    left, right = (stream(NOWHERE_JSON[at], event_time=at) for at in ("sent", "seen"))
    job = join(left.where(pc.field("v") > 3), right, on="k", **options)
    given = OperatorTester(job, [LEFT, RIGHT], tmp_path)
    for given.now_ms, v in ((0, 4), (7, 3)):
        given.batch([{"k": "a", "sent": 0, "v": v}])
    assert [(place, at.next_offset, at.active_ms) for *place, at in given.pointer.positions] == [([0, 0], 2, active_ms)]


def test_a_message_for_which_a_step_raises_is_in_the_errors_as_it_was_sent(tmp_path):
    def halves(table):
        if 7 in table["n"].to_pylist():
            raise ValueError("seven")
        return table.set_column(table.column_names.index("n"), "n", pc.divide(table["n"], 2))

    tester = OperatorTester(stepped(lambda source: source.map_batches(halves, schema=FIELDS)), FIELDS, tmp_path)
    done = tester.batch([{"at": 1, "n": 8}, {"at": 2, "n": 7}, {"at": 3, "n": 4}])
    [error] = done.errors.to_pylist()
    assert (error["offset"], error["reason"], error["value"]) == (1, "poison", b'{"at":2,"n":7}')
    assert "ValueError: seven" in error["detail"]
    tester.lose_disk()
    assert tester.restore().messages == 2
    assert tester.drain().results["ns"].to_pylist() == [[4, 2]]


def test_a_step_sees_where_a_message_lies_and_what_its_own_timestamp_is(tmp_path):
    def places(table):
        return pc.add(table["_offset"], pc.multiply(table["_partition"].cast(pa.int64()), 100))

    def own(table):
        return table["_timestamp"].cast(pa.int64())

    job = stepped(lambda source: source.with_columns(n=places, own=own), own=collect_list("own"))
    tester = OperatorTester(job, FIELDS, tmp_path)
    tester.send([{"at": 1, "n": 0, "_timestamp": 5}, {"at": 1, "n": 0}], partition=2)
    tester.send([{"at": 1, "n": 0}], partition=2)
    [row] = tester.drain().results.to_pylist()
    assert (row["ns"], row["own"]) == ([200, 201, 202], [5_000])  # microseconds


@pytest.mark.parametrize(
    ("kind", "value", "time"),
    [
        (pa.timestamp("us", "UTC"), datetime(2026, 1, 2, 3, tzinfo=UTC), 1_767_322_800_000),
        (pa.timestamp("us", "Europe/Berlin"), datetime(2026, 1, 2, 3, tzinfo=UTC), 1_767_322_800_000),
        (pa.timestamp("ms"), datetime(2026, 1, 2, 3, 0, 0, 7_000), 1_767_322_800_007),
        (pa.date32(), date(2026, 1, 2), 1_767_312_000_000),
    ],
)
def test_event_times_are_given_as_their_field_has_them(kind, value, time, tmp_path):
    source = stream(archive("nowhere", value="at timestamp, n long"), event_time="at")
    schema = pa.schema([("at", kind), ("n", pa.int64())])
    job = source.where(pc.field("n") > 0).window(tumbling(1), retention=0, max_ahead=None).aggregate(n=count())
    plain = source.window(tumbling(1), retention=0, max_ahead=None).aggregate(n=count())
    for name, one in (("steps", job), ("plain", plain)):
        tester = OperatorTester(one, schema, tmp_path / name)
        tester.send([{"at": value, "n": 1}])
        assert tester.drain().results["window_start"].to_pylist() == [time]
        with pytest.raises(ValueError, match="'at'"):
            tester.send([{"at": "noon", "n": 1}])


def test_other_steps_fields_that_no_message_has_and_steps_that_do_not_fit_are_refused(tmp_path):
    tester = OperatorTester(stepped(lambda source: source.where(pc.field("n") > 3)), FIELDS, tmp_path)
    tester.batch([{"at": 0, "n": 4}])
    tester.change(stepped(lambda source: source.where(pc.field("n") > 3)))
    for other in (lambda source: source, lambda source: source.where(pc.field("n") > 4)):
        with pytest.raises(ValueError, match="has other steps, which are no free option"):
            tester.change(stepped(other))
    with pytest.raises(ValueError, match=r"has \['m'\]; the fields are \['at', 'n'\]"):
        tester.batch([{"at": 0, "n": 1}, {"at": 0, "m": 1}])
    with pytest.raises(ValueError, match=r"step 1, select.*no fields"):
        OperatorTester(stepped(lambda source: source.select("m", "at")), FIELDS, tmp_path / "other")
    assert tester.drain().results["ns"].to_pylist() == [[4]]


def test_a_restore_leaves_out_what_was_out_of_range(tmp_path):
    windows = stream(archive("nowhere", value="at long, n long"), event_time="at").window(
        tumbling("1 minute"), retention="1 hour", max_ahead=None
    )
    job = windows.aggregate(m=median("n"))
    tester = OperatorTester(job, pa.schema([("at", pa.int64()), ("n", pa.int64())]), tmp_path, now_ms=1_000_000)
    done = tester.batch([{"at": at, "n": 1} for at in (1_000_000, 2**62 + 5, 1_010_000)])
    assert done.errors["reason"].to_pylist() == ["out_of_range"]
    tester.lose_disk()
    assert tester.restore().messages == 2


def test_a_step_that_makes_something_else_of_a_message_that_is_replayed_is_found(tmp_path):
    calls = []

    def unsteady(table):
        calls.append(table.num_rows)
        return pc.add(table["n"], len(calls))

    tester = OperatorTester(stepped(lambda source: source.with_columns(n=unsteady)), FIELDS, tmp_path)
    tester.batch([{"at": 1, "n": 1}, {"at": 2, "n": 1}])
    tester.lose_disk()
    with pytest.raises(RestoreMismatch):
        tester.restore()


def test_a_step_sees_the_name_of_the_topic(tmp_path):
    source = stream(archive("nowhere", value="at long, n long", topics=["a", "b"]), event_time="at")
    job = source.where(pc.field("_topic") == "b").window(tumbling(100), retention=10, max_ahead=None)
    tester = OperatorTester(job.aggregate(ns=collect_list("n")), FIELDS, tmp_path)
    tester.send([{"at": 1, "n": 1}], stream=0)
    tester.send([{"at": 1, "n": 2}], stream=1)
    assert tester.drain().results["ns"].to_pylist() == [[2]]


def test_messages_for_which_a_step_raises_are_counted_anew_with_each_call(tmp_path):
    def never(table):
        if table.num_rows and pc.any(pc.equal(table["n"], -1)).as_py():
            raise KeyError("n")
        return pc.greater(table["n"], 0)

    tester = OperatorTester(stepped(lambda source: source.where(never)), FIELDS, tmp_path)
    for _ in range(3):
        assert tester.batch([{"at": 1, "n": -1}] * 40).errors.num_rows == 40
    with pytest.raises(UserCodeFailed, match="poison_limit=100"):
        tester.send([{"at": 1, "n": -1}] * 101)
    tester.lose_disk()
    assert tester.restore().messages == 0


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int64(), 1.5),
        (pa.int64(), Decimal("1.5")),
        (pa.int64(), np.float32(1.5)),
        (pa.date32(), 1.5),
        (pa.timestamp("ms"), 1.5),
        (pa.map_(pa.string(), pa.int64()), {"a": 1.5}),
        (pa.map_(pa.string(), pa.int64()), [("a", 1.5)]),
        (pa.struct([("x", pa.int64())]), [("x", 1.5)]),
        (pa.dictionary(pa.int32(), pa.int64()), 1.5),
        (pa.list_view(pa.int64()), [1.5]),
        (pa.list_(pa.int32()), [1, -0.9]),
        (pa.struct([("x", pa.uint8())]), {"x": 0.5}),
        (pa.large_list(pa.struct([("x", pa.int16())])), [{"x": 1.0}, {"x": 2.5}]),
    ],
)
def test_a_number_with_a_fraction_for_a_whole_one_is_refused_not_cut_off(kind, value, tmp_path):
    schema = pa.schema([("at", pa.int64()), ("n", kind)])
    source = stream(archive("nowhere", value="at long, n long"), event_time="at")
    job = source.window(tumbling(1), retention=0, max_ahead=None).aggregate(rows=count())
    tester = OperatorTester(job, schema, tmp_path)
    with pytest.raises(ValueError, match=r"field 'n' of type .*: a number with a fraction"):
        tester.send([{"at": 1, "n": value}])
    assert tester.drain().results.num_rows == 0


def test_times_that_python_has_no_date_for_go_through_steps(tmp_path):
    schema = pa.schema([("at", pa.timestamp("ms", "UTC")), ("n", pa.int64())])
    source = stream(archive("nowhere", value="at timestamp, n long"), event_time="at")
    job = source.where(pc.field("n") > 0).window(tumbling(1000), retention=0, max_ahead=None).aggregate(n=count())
    tester = OperatorTester(job, schema, tmp_path)
    far = 253_402_300_800_000  # 10000-01-01
    tester.send([{"at": far, "n": 1}])
    assert tester.drain().results["window_start"].to_pylist() == [far]
    tester.lose_disk()
    assert tester.restore().messages == 0


def test_a_replay_in_which_a_message_has_no_time_is_a_mismatch(tmp_path):
    calls = []

    def forgets(table):
        calls.append(1)
        return table["at"] if len(calls) < 4 else pa.nulls(table.num_rows, pa.int64())

    tester = OperatorTester(stepped(lambda source: source.with_columns(at=forgets)), FIELDS, tmp_path)
    while len(calls) < 3:
        tester.batch([{"at": 1, "n": 1}])
    tester.lose_disk()
    with pytest.raises(RestoreMismatch):
        tester.restore()


@pytest.mark.parametrize(
    "kind",
    [*(pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC")), pa.int64()],
    ids=str,
)
def test_an_event_time_in_milliseconds_is_that_time_whatever_the_field_holds(tmp_path, kind):
    source = archive("nowhere", value="at bigint, n bigint", topics=["t"])
    job = (
        stream(source, event_time="at")
        .window(tumbling("1 minute"), retention="1 hour", max_ahead=None)
        .aggregate(n=count())
    )
    tester = OperatorTester(job, pa.schema([("at", kind), ("n", pa.int64())]), tmp_path)
    first = 1_577_836_800_000  # 2020-01-01
    tester.batch([{"at": first, "n": 1}])
    (one,) = tester.batch([{"at": first + 3_600_000, "n": 0}]).results.to_pylist()
    assert (one["reason"], one["window_start"], one["n"]) == ("full", first, 1)


@pytest.mark.parametrize("kind", [pa.date32(), pa.date64()])
def test_an_event_time_in_milliseconds_is_a_day_where_the_field_holds_days(tmp_path, kind):
    source = archive("nowhere", value="at date, n bigint", topics=["t"])
    job = (
        stream(source, event_time="at")
        .window(tumbling("1 day"), retention="9 days", max_ahead=None)
        .aggregate(n=count())
    )
    tester = OperatorTester(job, pa.schema([("at", kind), ("n", pa.int64())]), tmp_path)
    tester.batch([{"at": 86_400_000 + 5, "n": 1}])
    (one,) = tester.batch([{"at": 3 * 86_400_000, "n": 0}]).results.to_pylist()
    assert (one["window_start"], one["n"]) == (86_400_000, 1)


def test_a_function_that_asked_to_run_again_is_called_then_whatever_comes_to_other_shards(tmp_path):
    job = stream(NOWHERE, event_time="at").process(
        after_silence, result=pa.schema([("closed", pa.int64())]), fields=["who"]
    )
    tester = OperatorTester(job, SCHEMA, tmp_path)
    tester.batch([row(0, 1)])
    assert tester.advance("59 minutes") is None
    assert tester.batch().results.num_rows == 0
    tester.lose_disk()
    tester.restore()
    assert tester.batch().results.num_rows == 0
    assert tester.advance("1 minute").results.to_pylist() == [{"closed": 3_600_000}]
    assert tester.advance("2 hours") is None


def test_max_ahead_of_an_operator_without_a_job(tmp_path):
    spec = window_spec(tumbling("1 hour"), SCHEMA, {"m": median("n")}, retention="10 days")
    tester = OperatorTester(WindowOperator(spec), SCHEMA, tmp_path)
    done = tester.batch([{"_time": at, **row(0, 1)} for at in (0, 2 * 86_400_000)])
    assert [(one["offset"], one["reason"]) for one in done.errors.to_pylist()] == [(1, "in_future")]
    tester.lose_disk()
    assert tester.restore().messages == 1
