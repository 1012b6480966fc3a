"""Bundled rows against the same rows through the JVM's `pack_input`: what Spark says of each is the oracle."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend import archive, collect_list, count, stream, tumbling
from backend.sources.archive import ArchiveSource
from backend.sources.archive_files import write_archive
from backend.spark.job import Job
from backend.spark.start import StartOptions, build_job

pytestmark = pytest.mark.spark

DDL = (
    "text string, raw binary, yes boolean, i8 tinyint, i16 smallint, i32 int, i64 bigint, f32 float, f64 double,"
    " day date, at timestamp, plain timestamp_ntz, inner struct<a: int, b: string>"
)
VALUE = pa.struct(
    [
        ("text", pa.string()), ("raw", pa.binary()), ("yes", pa.bool_()), ("i8", pa.int8()), ("i16", pa.int16()),
        ("i32", pa.int32()), ("i64", pa.int64()), ("f32", pa.float32()), ("f64", pa.float64()), ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")), ("plain", pa.timestamp("us")),
        ("inner", pa.struct([("a", pa.int32()), ("b", pa.string())])),
    ]
)  # fmt: skip
ROWS = 400
NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]


class ByRows(ArchiveSource):
    """The same archive, its rows taken apart by the JVM."""

    bundled = False


def value(rng: random.Random) -> dict[str, Any] | None:
    if rng.random() < 0.05:
        return None
    moment = datetime.fromtimestamp(rng.randrange(-(10**15), 3 * 10**15) / 1e6, UTC)
    whole: dict[str, Any] = {
        "text": rng.choice(["", "a", "ä€😀" * rng.randrange(20), "k" * rng.randrange(70), "x" * 29_999, "y" * 30_001]),
        "raw": rng.randbytes(rng.randrange(40)),
        "yes": rng.random() < 0.5,
        "i8": rng.randrange(-128, 128),
        "i16": rng.randrange(-(2**15), 2**15),
        "i32": rng.choice([rng.randrange(-(2**31), 2**31), -1, 0]),
        "i64": rng.choice([rng.randrange(-(2**63), 2**63), -1, 0]),
        "f32": rng.choice([0.0, -0.0, 1.5, NAN, float("-inf")]),
        "f64": rng.choice([0.0, -0.0, rng.random(), NAN, float("inf")]),
        "day": date.fromordinal(rng.randrange(600_000, 800_000)),
        "at": moment,
        "plain": moment.replace(tzinfo=None),
        "inner": {"a": rng.randrange(5), "b": None},
    }
    return {name: None if rng.random() < 0.1 else found for name, found in whole.items()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(7)
    home = tmp_path_factory.mktemp("bundles") / "archive"
    places = [(topic, partition, 10 + at) for topic in ("t", "u") for partition in (0, 1) for at in range(ROWS // 4)]
    columns = {
        "topic": pa.array([place[0] for place in places]),
        "partition": pa.array([place[1] for place in places], pa.int32()),
        "offset": pa.array([place[2] for place in places], pa.int64()),
        "timestamp": pa.array([rng.randrange(-5, 10**9) for _ in places], pa.timestamp("ms", "UTC")),
        "key": pa.array([rng.choice([None, b"record"]) for _ in places], pa.binary()),
        "value": pa.array([value(rng) for _ in places], VALUE),
    }
    write_archive(home, pa.table(columns), rows_per_file=30, row_group_rows=11)
    return home


def taken(spark: Any, job: Job) -> dict[tuple[int, int, int], dict[str, Any]]:
    """Put all rows through the stage that a replay has, and give what it saw."""

    def see(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = [
                repr({name: found for name, found in row.items() if name != "_batch_ms"}) for row in batch.to_pylist()
            ]
            names = ("_stream", "_partition", "_offset")
            yield pa.RecordBatch.from_arrays(
                [*(batch.column(name).cast(pa.int64()) for name in names), pa.array(rows)], [*names, "row"]
            )

    ranges = {(s, p): (12, 10 + ROWS // 4 - 3) for s in range(2) for p in range(2)}
    found = job.replay(spark, ranges, see, "_stream bigint, _partition bigint, _offset bigint, row string")
    assert found is not None
    rows = found.collect()
    assert len(rows) == 4 * (ROWS // 4 - 5)
    return {(row[0], row[1], row[2]): row[3] for row in rows}


CASES = [
    (("text",), "at"),
    (("raw", "i64", "f64", "text"), "i64"),
    (("yes", "i8", "i16", "i32", "day"), "at"),
    (("f32", "plain", "at"), None),
]


@pytest.mark.parametrize(("key", "event_time"), CASES)
def test_bundles_say_what_the_jvm_says(
    spark: Any, directory: Path, key: tuple[str, ...], event_time: str | None
) -> None:
    source = archive(directory, value=DDL, format="typed")
    job = build_job(
        stream(source, event_time=event_time, key=key)
        .window(tumbling("1 hour"), retention="1 day", max_ahead=None)
        .aggregate(n=count(), inner=collect_list("inner"), days=collect_list("day"), raws=collect_list("raw")),
        spark,
        StartOptions(shards=5),
        grouping=None,
        first_offsets=list,
    )
    assert source.bundled
    [side] = job.inputs
    by_rows = replace(job, inputs=(replace(side, source=ByRows(source.path, source.value, 10, 7)),))
    mine, theirs = taken(spark, job), taken(spark, by_rows)
    assert mine.keys() == theirs.keys()
    for place in mine:
        assert without_raw(mine[place]) == without_raw(theirs[place]), place


def without_raw(row: str) -> str:
    """Leave out the JSON of a key that is too long: its spelling is free, that it is there is not."""
    head, _, rest = row.partition("'_raw': ")
    raw, _, tail = rest.partition(", '_malformed'")
    return f"{head}{raw == 'None'}{tail}"


def test_a_checkpoint_made_by_rows_goes_on_with_bundles(spark: Any, tmp_path: Path) -> None:
    """Both send a key to the same shard and count the same offsets; the oracle is a plain loop."""
    rng = random.Random(3)
    kind = pa.struct([("key", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    sent = [(f"k{rng.randrange(40)}", 1_700_000_000_000 + 60_000 * number) for number in range(300)]

    def more(first: int, end: int) -> None:
        values = [{"key": key, "at": datetime.fromtimestamp(ms / 1000, UTC)} for key, ms in sent[first:end]]
        table = pa.table(
            {
                "topic": pa.array(["t"] * len(values)),
                "partition": pa.array([0] * len(values), pa.int32()),
                "offset": pa.array(range(first, end), pa.int64()),
                "timestamp": pa.array([0] * len(values), pa.timestamp("ms", "UTC")),
                "key": pa.nulls(len(values), pa.binary()),
                "value": pa.array(values, kind),
            }
        )
        pq.write_table(table, tmp_path / "archive" / f"{first}.parquet")

    def run(source: ArchiveSource) -> None:
        stream(source, event_time="at", key="key").window(
            tumbling("1 hour"), retention="1 day", max_ahead=None
        ).aggregate(n=count()).start(
            spark, checkpoint=tmp_path / "c", results=tmp_path / "results", errors=tmp_path / "errors", shards=3,
            local_dir=tmp_path / "local", trigger="0 seconds", until="end",
        ).await_termination()  # fmt: skip

    (tmp_path / "archive").mkdir()
    source = archive(tmp_path / "archive", value="key string, at timestamp", format="typed", max_offsets_per_batch=70)
    more(0, 150)
    run(ByRows(source.path, source.value, 70, 50))
    more(150, 300)
    run(source)
    expected = Counter((key, ms // 3_600_000 * 3_600_000) for key, ms in sent)
    newest: dict[tuple[str, int], tuple[int, int]] = {}
    for row in spark.read.parquet(str(tmp_path / "results")).collect():
        window = row["key"], int(row["window_start"].timestamp() * 1000)
        newest[window] = max(newest.get(window, (-1, 0)), (row["revision"], row["n"]))
    assert {window: n for window, (_, n) in newest.items()} == expected
