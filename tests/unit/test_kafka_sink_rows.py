"""What the Kafka sink says in its messages, how copies are told, and which options it refuses."""

from __future__ import annotations

import datetime
import itertools
import json

import pyarrow as pa
import pytest

from backend.batch import ERROR_SCHEMA
from backend.errors import UnknownFormat
from backend.sinks import kafka_sink
from backend.sinks.kafka_commits import Published, decode, encode
from backend.sinks.kafka_rows import Dedupe, digest, to_messages
from backend.sinks.tables import ERRORS, RESULTS, readable
from backend.sources.kafka_settings import KafkaSettings


def table(**columns: pa.Array) -> pa.Table:
    return readable(pa.table(columns), RESULTS, 7, 2, 0)


def test_a_row_is_a_json_object_with_its_id_first_and_times_in_milliseconds():
    made = to_messages(
        table(
            window_start=pa.array([-3_600_000, 2**62]),
            origin=pa.array(["JFK", None]),
            mean=pa.array([1.5, float("nan")]),
            seen=pa.array([datetime.datetime(2013, 1, 1, 5, 17, tzinfo=datetime.UTC), None], pa.timestamp("us", "UTC")),
        ),
        RESULTS,
        "windows",
        (),
    )
    assert [(message.topic, message.key) for message in made] == [("windows", b"7-2-0"), ("windows", b"7-2-1")]
    first, second = (json.loads(message.value) for message in made)
    assert first == {
        "id": "7-2-0", "version": 7, "shard": 2, "sequence": 0,
        "window_start": -3_600_000, "origin": "JFK", "mean": 1.5, "seen": "2013-01-01T05:17:00.000000Z",
    }  # fmt: skip
    assert next(iter(first)) == "id"
    assert (second["window_start"], second["origin"], second["mean"], second["seen"]) == (2**62, None, None, None)


def test_an_error_keeps_its_bytes_as_base64():
    fixed = {"topic": "t", "stream": 0, "partition": 1, "offset": 9, "timestamp": 5, "reason": "malformed"}
    bad = pa.Table.from_pylist([{**fixed, "value": b"\xff{", "key": None}], schema=ERROR_SCHEMA)
    (message,) = to_messages(readable(bad, ERRORS, 7, 2, 4), ERRORS, "bad", ("origin",))
    said = json.loads(message.value)
    assert message.key == b"7-2-e4"
    assert (said["value"], said["key"], said["timestamp"], said["offset"]) == ("/3s=", None, 5, 9)


def test_the_key_is_text_or_json_of_the_columns_that_were_named():
    rows = table(origin=pa.array(["JFK"]), n=pa.array([3]))
    keys = [to_messages(rows, RESULTS, "t", key)[0].key for key in (("origin",), ("n",), ("origin", "n"))]
    assert keys == [b"JFK", b"3", b'["JFK",3]']
    with pytest.raises(ValueError, match="key='carrier': allowed are the results' columns id, version"):
        to_messages(rows, RESULTS, "t", ("carrier",))


def test_the_digest_tells_content_order_and_where_one_part_ends():
    one, two = to_messages(table(n=pa.array([1, 2])), RESULTS, "t", ("n",))
    other = type(one)(one.topic + one.key.decode(), b"", one.value)
    found = [digest(messages) for messages in ([one, two], [two, one], [one], [other], [])]
    assert len(set(found)) == len(found)
    assert digest([one, two]) == found[0]


def test_dedupe_lets_each_row_through_once_whatever_was_written_again():
    """Runs of micro-batches cut anywhere, and a late writer of an older one between: each row once, in order."""
    rows = [{"shard": s, "version": v, "sequence": n} for v in range(3) for s in range(2) for n in range(3)]
    per_version = [[row for row in rows if row["version"] == v] for v in range(3)]
    for cut, again in itertools.product(range(7), range(7)):
        written = [*per_version[0], *per_version[1][:cut], *per_version[1], *per_version[0][:again], *per_version[2]]
        dedupe = Dedupe()
        seen = []
        for row in written:
            dedupe = Dedupe(json.loads(json.dumps(dedupe.state)))  # the consumer may start anew at any time
            if dedupe.is_new(row, "t", 0):
                seen.append(row)
        assert seen == rows
    assert dedupe.is_new(rows[0], "t", 1)
    assert dedupe.is_new(rows[0], "u", 0)


def test_the_commit_record_is_read_back_and_another_is_refused():
    record = Published("q", 7, 3, "ab")
    assert decode(encode(record), "t") == record
    assert json.loads(encode(record)) == {"query": "q", "version": 7, "messages": 3, "digest": "ab", "format": 1}
    for data, why in [
        (b'{"query":"q","version":1,"format":2}', "format 2, this release reads 1"),
        (b"hello", "something else"),
    ]:
        with pytest.raises(UnknownFormat, match=why):
            decode(data, "t")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"results": ""}, "results="),
        ({"errors": "r"}, "errors='r'"),
        ({"servers": "nowhere"}, "servers='nowhere'"),
        ({"guarantee": "hope"}, "guarantee='hope': allowed are exactly_once, at_least_once"),
        ({"commits": "e"}, "commits='e'"),
        ({"commits": "c", "guarantee": "at_least_once"}, "commits='c'"),
    ],
)
def test_a_bad_option_is_named(options, named):
    with pytest.raises(ValueError, match=named):
        kafka_sink(**{"results": "r", "errors": "e", "servers": "h:1", **options})


def test_what_is_told_of_it_holds_nothing_secret():
    settings = KafkaSettings("h:1", mechanism="PLAIN", username="ann", password="s3cret-x")
    sink = kafka_sink("r", "e", servers=settings)
    assert sink.describe() == {
        "kind": "kafka", "guarantee": "exactly_once", "results": "r", "errors": "e", "commits": "r-commits",
    }  # fmt: skip
    assert kafka_sink("r", "e", servers="h:1", guarantee="at_least_once").describe()["commits"] is None
    assert "s3cret-x" not in repr(sink) + str(vars(sink))
