"""Messages made to hurt: each is counted once or refused by its reason, with its place; the job goes on."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from backend import archive, count, max_, median, stream, tumbling
from backend.batch import MAX_EVENT_TIME, MIN_EVENT_TIME
from backend.sources.archive_files import write_archive
from backend.windows.micro_batch import error_rows
from tests.crash.faulty_disk import scratch
from tests.crash.hostile import ENDS, NOW, YEAR_1, YEAR_9999, Hostile, fuzzed, many_keys, plain
from tests.crash.told import told
from tests.support.waiting import ended

STREAMS = 8


def test_fuzzed_streams() -> None:
    refused: Counter[str] = Counter()
    home = scratch()
    for seed in range(STREAMS):
        refused += fuzzed(home / str(seed), seed)
    shutil.rmtree(home)
    assert set(refused) == {"malformed", "no_event_time", "out_of_range", "in_future", "out_of_retention"}
    told.count("fuzzed streams", str(STREAMS))


def test_one_message_of_the_far_future_expires_nothing(tmp_path: Path) -> None:
    job = Hostile(tmp_path)
    far = [plain(1 + at, time) for at, time in enumerate((YEAR_9999, NOW + 86_400_001, MAX_EVENT_TIME, *ENDS))]
    job.batch([plain(0, NOW), *far, plain(90, NOW + 1), plain(91, NOW - 3_000_000)], NOW)
    job.batch([plain(100, NOW + 2)], NOW)
    job.batch([], NOW, drain=True)
    job.check()
    reasons = Counter(error["reason"] for error in job.errors)
    assert reasons["in_future"] == 4, "the largest event time is among them twice"
    assert reasons["out_of_range"] == sum(not MIN_EVENT_TIME <= time <= MAX_EVENT_TIME for time in ENDS)
    assert sum(n for _, n in job.counted.values()) == 4, "those of today count"


def test_without_the_bound_it_expires_them_and_says_so(tmp_path: Path) -> None:
    job = Hostile(tmp_path, max_ahead_ms=None)
    job.batch([plain(0, NOW), plain(1, YEAR_9999), plain(2, NOW + 1), plain(3, YEAR_1)], NOW)
    job.batch([plain(4, NOW)], NOW)
    job.batch([], NOW, drain=True)
    job.check()
    assert [error["offset"] for error in job.errors] == [2, 3, 4]


def test_a_clock_that_goes_back(tmp_path: Path) -> None:
    job = Hostile(tmp_path, max_ahead_ms=1_000)
    for number, now in enumerate((NOW, NOW - 86_400_000, NOW + 5_000, 0, NOW)):
        job.batch([plain(2 * number, NOW), plain(2 * number + 1, NOW + 60_000 * number)], now)
    job.batch([], NOW, drain=True)
    job.check()


def test_values_of_ten_megabytes(tmp_path: Path) -> None:
    job = Hostile(tmp_path)
    large = bytes(10_000_000)
    job.batch(
        [plain(0, NOW), plain(1, NOW, malformed="too large to be true", raw=large), plain(2, None, raw=large)], NOW
    )
    job.batch([], NOW, drain=True)
    job.check()
    assert [len(error["value"] or b"") for error in job.errors] == [10_000_000, 10_000_000]


def test_a_hundred_thousand_keys_in_one_micro_batch(tmp_path: Path) -> None:
    grown = many_keys(tmp_path, 100_000)
    assert grown < 1_000, f"{grown:.0f} MB for 100,000 keys"


def test_a_refused_message_with_a_time_that_python_has_no_date_for() -> None:
    fields = [("_stream", pa.int32()), ("_partition", pa.int32()), ("_offset", pa.int64()), ("_time", pa.int64())]
    schema = pa.schema([*fields, ("at", pa.timestamp("us", "UTC")), ("k", pa.string())])
    row = {"_stream": 0, "_partition": 1, "_offset": 2, "_time": 3, "k": "k"}
    for at, text in ((253_402_300_800 * 10**6, "10000-01-01T00:00:00.000000Z"), (0, "1970-01-01T00:00:00Z")):
        messages = pa.table(
            [pa.array([value], f.type) for f, value in zip(schema, [0, 1, 2, 3, at, "k"], strict=True)], schema=schema
        )
        (found,) = error_rows(messages, "out_of_retention", "").to_pylist()
        assert json.loads(found["value"]) == {"at": text, "k": "k"}
        assert (found["partition"], found["offset"]) == (row["_partition"], row["_offset"])


# -- through Spark, where values are parsed ---------------------------------------------------------------------------

START = 1_700_000_040_000
GOOD = '{"key": "k%d", "x": 1.5, "at": %d}'
DEEP = '{"key": ' + '{"a":' * 2_000 + "1" + "}" * 2_000 + "}"
VALUES: list[bytes | None] = [
    None,
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xff\xfe\x00\x01",
    b'{"key": "\xff\xfe", "x": 1, "at": %d}' % START,
    DEEP.encode(),
    b'{"key": "a", "key": "b", "x": 1, "x": 2, "at": %d}' % START,
    b'{"key": "a", "x": NaN, "at": %d}' % START,
    b'{"key": "a", "x": 1e999, "at": %d}' % START,
    b'{"key": "a", "x": ' + b"9" * 5_000 + b', "at": %d}' % START,
    b'{"key": "a", "x": 1, "at": 9223372036854775807}',
    b'{"key": "a", "x": 1, "at": 9223372036854775808}',
    b'{"key": "a", "x": 1, "at": -9223372036854775808}',
    b'{"key": "a", "x": 1, "at": %d}' % YEAR_1,
    b'{"key": "a", "x": 1, "at": %d}' % YEAR_9999,
    b'{"key": "a", "x": 1}',
    b'{"key": "a", "x": "text", "at": %d}' % START,
    b'{"key": "%s", "x": 1, "at": %d}' % (b"k" * 40_000, START),
    b'{"key": "\\u0000\\u0000", "x": 1, "at": %d}' % START,
    b'{"key": "\\ud800", "x": 1, "at": %d}' % START,
    b'{"key": "a", "x": 1, "at": %d, "more": "%s"}' % (START, b"m" * 10_000_000),
    b"x" * 10_000_000,
]


@pytest.mark.spark
@pytest.mark.gentle
def test_the_same_through_spark(spark, tmp_path: Path) -> None:
    values = [(GOOD % (at % 7, START + at)).encode() for at in range(100)]
    for at, value in enumerate(VALUES):
        values.insert(3 * at + 1, value)  # type: ignore[arg-type]
    rows = pa.table(
        {
            "topic": ["t"] * len(values),
            "partition": pa.array([0] * len(values), pa.int32()),
            "offset": pa.array(range(len(values)), pa.int64()),
            "timestamp": pa.array([START] * len(values), pa.timestamp("ms", tz="UTC")),
            "key": pa.array([b"\xff"] * len(values), pa.binary()),
            "value": pa.array(values, pa.binary()),
        }
    )
    write_archive(tmp_path / "archive", rows)
    source = archive(str(tmp_path / "archive"), value="key string, x double, at long", max_offsets_per_batch=200)
    query = (
        stream(source, event_time="at", key="key")
        .window(tumbling("1 minute"), retention="1 hour")
        .aggregate(n=count(), most=max_("x"), typical=median("x"))
        .start(
            spark,
            checkpoint=tmp_path / "checkpoint",
            results=tmp_path / "results",
            errors=tmp_path / "errors",
            shards=1,
            local_dir=tmp_path / "local",
            trigger="0 seconds",
            until="end",
        )
    )
    ended(query)
    results = spark.read.parquet(str(tmp_path / "results")).collect()
    errors = spark.read.parquet(str(tmp_path / "errors")).select("topic", "partition", "offset", "reason").collect()
    newest: dict[object, tuple[int, int]] = {}
    for row in results:
        window = row["window_start"], row["key"]
        newest[window] = max(newest.get(window, (-1, 0)), (row["revision"], row["n"]))
    places = [(row["topic"], row["partition"], row["offset"]) for row in errors]
    assert len(places) == len(set(places))
    assert all(row["reason"] for row in errors)
    assert {row["offset"] for row in errors} <= {3 * at + 1 for at in range(len(VALUES))}, "what is good is counted"
    assert sum(n for _, n in newest.values()) + len(errors) == len(values), "none is lost, none counted twice"
    told.count("hostile values through Spark", str(len(VALUES)))
    shutil.rmtree(tmp_path / "local")
