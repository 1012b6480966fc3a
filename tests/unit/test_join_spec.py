"""What a join may ask for, and what is refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from backend import archive, join, stream
from backend.errors import ManifestMismatch
from backend.joins.spec import join_spec
from backend.sources.archive_files import WRITE_SCHEMA, write_archive
from backend.sources.formats import ValueFormat
from backend.spark.job import Job, describe
from backend.spark.start import StartOptions, build_job, known_sources
from backend.spark.stream import Pipeline, Stream
from backend.windows.definitions import hopping, session, tumbling
from recovery.commit.manifest import Manifest, read_manifest, record, settle
from recovery.inspect.known_operator import known_join
from recovery.testing import OperatorTester

ORDERS = pa.schema([("id", pa.int64()), ("value", pa.int64()), ("user", pa.string())])
SHIPMENTS = pa.schema([("id", pa.int32()), ("cost", pa.int64()), ("user", pa.string())])
HOUR = {"left_retention": "1 h", "right_retention": "1 h"}
MANY = {"left_retention_messages": 10, "right_retention_messages": 10}
N3 = tumbling(messages=3)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"within": 1, "left_window": N3, **MANY}, "offset"),
        ({"on": "id", "left_window": N3, **MANY}, "offset"),
        ({"on": "id", "left_window": N3, "large_window_messages": 12, **MANY}, "equal_offset"),
        ({"on": "id", "left_window": N3, "message_key": "join_fields", **MANY}, "equal_offset"),
        ({"within": 1, **HOUR}, "time_offset"),
        ({"on": "id", **HOUR}, "equal_time_offset"),
        ({"on": "id", "within": "5 min", **HOUR}, "time_equal_offset"),
        ({"on": "id", "within": "6 min", **HOUR}, "equal_time_offset"),
        ({"on": "id", "within": "6 min", "large_window": "12 min", **HOUR}, "time_equal_offset"),
        ({"on": "id", "within": "6 min", "message_key": "time", **HOUR}, "time_equal_offset"),
        ({"on": "id", "within": 1, "message_key": "join_fields", **HOUR}, "equal_time_offset"),
        ({"on": "id", "left_window": session("1 h"), **HOUR}, "session_equal_time_offset"),
        ({"on": "id", "within": 1, "left_window": session("1 h"), **HOUR}, "session_time_equal_offset"),
        ({"on": "id", "left_window": session(messages=9), **MANY}, "session_offset"),
    ],
)
def test_the_matrix_gives_the_message_key(options, parts):
    spec = join_spec(ORDERS, SHIPMENTS, **options)
    assert spec.layout.name == parts
    again = known_join(json.loads(json.dumps(spec.describe())))  # as the manifest keeps it
    assert again is not None
    assert (again.layout, again.session_key) == (spec.layout, spec.session_key)
    assert (again.before, again.after) == (spec.before, spec.after)
    for mine, theirs in zip(again.sides, spec.sides, strict=True):
        assert (mine.on, mine.out, mine.fields, mine.window) == (theirs.on, theirs.out, theirs.fields, theirs.window)
        assert mine.retention_ms == theirs.retention_ms
        assert mine.retention_messages == theirs.retention_messages


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "on=None, within=None: a join needs equal fields"),
        ({"on": "id", "how": "full"}, "how='full': allowed are 'inner', 'left', 'right', 'outer'"),
        ({"on": "value"}, "on: 'value' is not a field of the right side; allowed are .'id', 'cost', 'user'."),
        ({"on": [("id", "user")]}, "on: 'id' is int64 and 'user' is string; allowed are two integers"),
        ({"on": ["id", "id"]}, "on: 'id' is given twice"),
        ({"on": [("id", "id", "id")]}, "neither a field nor"),
        ({"on": []}, "on=.*name at least one field"),
        ({"on": 0}, "on=0: must be a field, a list of fields"),
        ({"on": b"id"}, "on=b'id': must be a field, a list of fields"),
        ({"on": {"id": "id"}}, "on={'id': 'id'}: must be a field, a list of fields"),
        ({"on": {"id"}}, "on={'id'}: must be a field, a list of fields"),
        ({"on": b""}, "on=b'': must be a field, a list of fields"),
        ({"on": [0]}, "on: 0 is neither a field nor"),
        ({"on": "id", "left_fields": 0}, "left_fields=0: must be the name of a field"),
        ({"on": "id", "left_fields": b"id"}, "left_fields=b'id': must be the name of a field"),
        ({"on": "id", "left_window": session(5), "session_key": 0}, "session_key=0: must be the name of a field"),
        ({"within": "soon"}, "within='soon' is not a duration"),
        ({"within": (1, 2, 3)}, "within=.*one duration, or .before, after."),
        ({"within": (-5, 4)}, "within=.*before . after is negative"),
        ({"on": "id", "left_retention": None}, "left_retention=None: a join by event time needs a retention"),
        ({"on": "id", "right_retention": None}, "right_retention=None: a join by event time needs a retention"),
        ({"on": "id", "right_retention_messages": 0}, "right_retention_messages=0 is not a number of messages"),
        ({"on": "id", "left_window": 5}, "left_window=5: give tumbling"),
        ({"on": "id", "left_window": N3, "right_window": hopping("1 h", "1 h")}, "one is by time and one by number"),
        ({"on": "id", "left_window": N3}, "left_retention='1 h': windows by number of messages are kept by number"),
        ({"on": "id", "left_window": N3, "left_retention": None, "right_retention": None}, "right_retention_messages="),
        ({"within": 1, "left_window": session(5)}, "left_window: session windows in a join need the session key in on"),
        ({"on": "id", "left_window": session(5), "session_key": "user"}, "session_key='user'.*allowed are .'id'."),
        ({"on": "id", "session_key": "id"}, "session_key='id': allowed with session windows only"),
        ({"on": "id", "message_key": "hash"}, "message_key='hash': allowed are 'auto', 'time', 'join_fields'"),
        ({"within": 1, "message_key": "join_fields"}, "message_key='join_fields': allowed for a join on equal fields"),
        ({"on": "id", "message_key": "time"}, "message_key='time': without a time range"),
        ({"on": "id", "left_fields": "id"}, "left_fields='id': give a list"),
        ({"on": "id", "right_fields": ["price"]}, "right_fields: 'price' is not a field"),
        ({"on": "id", "on_time_update_period": -1}, "on_time_update_period=-1"),
        ({"on": "id", "late_update_period": "x"}, "late_update_period='x'"),
        ({"on": "id", "idle_after": -1}, "idle_after=-1"),
        ({"on": "id", "max_ahead": -1}, "max_ahead=-1"),
        ({"on": "id", "left_streams": 0}, "left_streams=0: allowed are 1 to 65535"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        join_spec(ORDERS, SHIPMENTS, **{**HOUR, **options})


def test_reserved_and_colliding_names_are_refused():
    with pytest.raises(ValueError, match=r"left_schema: the field names .*_time.* are reserved"):
        join_spec(pa.schema([("_time", pa.int64())]), SHIPMENTS, within=1, **HOUR)
    with pytest.raises(ValueError, match="would be called 'reason'"):
        join_spec(pa.schema([("reason", pa.int64())]), SHIPMENTS, within=1, **HOUR)
    both = pa.schema([("x", pa.int64()), ("left_x", pa.int64())])
    with pytest.raises(ValueError, match="would be called 'left_x'"):
        join_spec(both, pa.schema([("x", pa.int64())]), within=1, **HOUR)


def test_equal_fields_of_one_name_come_out_once_and_other_shared_names_get_a_prefix():
    spec = join_spec(ORDERS, SHIPMENTS, on="id", **HOUR)
    assert spec.result_schema().names == [
        *("reason", "revision", "left_time", "right_time"),
        *("id", "value", "left_user", "cost", "right_user"),
    ]
    assert spec.result_schema().field("id").type == pa.int64()
    assert spec.input_fields == ["left.id", "left.value", "left.user", "right.id", "right.cost", "right.user"]


def test_a_tuple_of_names_is_two_equal_fields_and_a_pair_stands_in_a_list():
    other = SHIPMENTS.append(pa.field("number", pa.int32()))
    two, pair = (join_spec(ORDERS, other, on=on, **HOUR) for on in (("id", "user"), [("id", "number")]))
    assert (two.left.on, two.right.on) == (("id", "user"), ("id", "user"))
    assert (pair.left.on, pair.right.on) == (("id",), ("number",))
    with pytest.raises(ValueError, match="on: 'number' is not a field of the left side"):
        join_spec(ORDERS, other, on=("id", "number"), **HOUR)


def test_fields_that_do_not_come_out_travel_only_when_they_are_equal_fields():
    spec = join_spec(ORDERS, SHIPMENTS, on="id", left_fields=["value"], right_fields=["user"], **HOUR)
    assert spec.result_schema().names[4:] == ["value", "user"]
    assert spec.input_fields == ["left.id", "left.value", "right.id", "right.user"]


def test_a_range_is_symmetric_or_before_and_after():
    assert [(s.before, s.after) for s in (join_spec(ORDERS, SHIPMENTS, within=w, **HOUR) for w in ("1 s", (0, 5)))] == [
        (1000, 1000),
        (0, 5),
    ]


def test_what_may_change_between_starts_stands_apart():
    one = join_spec(ORDERS, SHIPMENTS, on="id", within=5, **HOUR).describe()
    other = {"left_retention": 1, "right_retention": 9, "on_time_update_period": 3, "late_update_period": 4}
    two = join_spec(ORDERS, SHIPMENTS, on="id", within=5, first_offsets={(0, 0): 7}, **other).describe()
    assert {**one, "free": None} == {**two, "free": None}
    assert one != join_spec(ORDERS, SHIPMENTS, on="id", within=6, **HOUR).describe()


def test_fields_that_come_out_are_in_the_schemas_order_whatever_they_are_given_in():
    spec = join_spec(ORDERS, SHIPMENTS, **{**HOUR, "on": "id", "left_fields": {"value", "id"}})
    assert spec.sides[0].out == tuple(name for name in ORDERS.names if name in {"value", "id"})


# -- what a start knows beside the description ----------------------------------------------------------------------


@pytest.fixture
def ids(monkeypatch):
    """Values have one field, whatever their format: DDL is parsed by Spark."""
    monkeypatch.setattr(ValueFormat, "fields", lambda self: StructType([StructField("id", LongType())]))


def source(path: Path, name: str) -> Stream:
    return stream(archive(topic(path, name), format="raw"))


def topic(directory: Path, name: str) -> Path:
    at = pa.array([0], pa.int64()).cast(pa.timestamp("ms", tz="UTC"))
    write_archive(directory / name, pa.table([[name], [0], [0], at, [None], [b""]], schema=WRITE_SCHEMA))
    return directory


def job_of(pipeline: Pipeline, checkpoint: str) -> Job:
    """Make the job as `start` does."""
    stored = read_manifest(checkpoint)
    options = StartOptions(shards=1)
    known = known_sources(pipeline, stored, checkpoint)
    spark = SimpleNamespace(conf=SimpleNamespace(get=lambda name: "UTC"))
    return build_job(known, spark, options, stored=stored, first_offsets=list)  # type: ignore[arg-type]


def settled(job: Job, checkpoint: str) -> Manifest:
    return settle(checkpoint, Manifest(job.shards, job.grouping, describe(job, {})), used=False)


def test_a_topic_that_comes_before_the_start_is_of_its_side(tmp_path, ids):
    left, right, checkpoint = tmp_path / "left", tmp_path / "right", str(tmp_path / "c")
    sides = [source(left, "b"), source(right, "c")]
    described = join(*sides, on="id", **HOUR)
    topic(left, "a")
    job = job_of(described, checkpoint)
    lefts = [name for side, name in job.streams if side == "left"]
    assert (lefts, job.operator.spec.left_streams) == (["a", "b"], 2)
    read = [[(field.name, own) for field, own in job._pack_input(side).fields] for side in job.inputs]
    assert read == [[("left.id", "id")], [("right.id", "id")]], "each side's own fields travel"
    record(checkpoint, settled(job, checkpoint))
    settled(job_of(join(*sides, on="id", **HOUR), checkpoint), checkpoint)


def test_auto_keeps_the_message_key_of_what_is_stored(tmp_path, ids):
    """Retention by number decides whether a window is large, and is free."""
    checkpoint = str(tmp_path / "c")
    sides = [source(tmp_path / name, name) for name in ("l", "r")]

    def job(kept: int, **options: object) -> Job:
        kept_messages = {"left_retention_messages": kept, "right_retention_messages": kept}
        given = {"large_window_messages": 20, **kept_messages, **options}
        return job_of(join(*sides, on="id", left_window=N3, **given), checkpoint)

    first = job(10)
    assert first.operator.spec.layout.name == "offset"
    record(checkpoint, settled(first, checkpoint))
    for other in (job(30), job(10, large_window_messages=1)):
        settled(other, checkpoint)
        assert other.operator.spec.layout == first.operator.spec.layout
    with pytest.raises(ManifestMismatch, match=r"operator\.message_key: was 'offset', is 'equal_offset'"):
        settled(job(10, message_key="join_fields"), checkpoint)


@pytest.mark.parametrize("stored", ["time_offset", "session_offset", "", "offset_offset"])
def test_a_message_key_that_the_join_cannot_have_is_not_taken(stored):
    assert join_spec(ORDERS, SHIPMENTS, on="id", left_window=N3, stored_layout=stored, **MANY).layout.name == "offset"


def test_the_tester_keeps_the_message_key_under_other_options(tmp_path):
    """As a start does: what is stored is found again."""
    sides = [source(tmp_path / name, name) for name in ("l", "r")]

    def job(large_window: str) -> Pipeline:
        return join(*sides, on="id", within="5 min", large_window=large_window, max_ahead=None, **HOUR)

    schema = pa.schema([("id", pa.int64())])
    tester = OperatorTester(job("1 h"), schema, tmp_path / "t")
    tester.batch([{"id": 1, "_time": 0}])
    tester.change(job("1 min"))
    assert tester.batch([{"id": 1, "_time": 0}], stream=1).results.num_rows == 1


def test_a_field_that_a_side_has_twice_is_refused_by_name() -> None:
    twice = pa.schema([("id", pa.int64()), ("a", pa.int64()), ("a", pa.string())])
    once = pa.schema([("id", pa.int64()), ("b", pa.int64())])
    for sides in ((twice, once), (once, twice)):
        with pytest.raises(ValueError, match="two columns of the results would be called 'a'"):
            join_spec(*sides, on="id", left_retention=9, right_retention=9)
