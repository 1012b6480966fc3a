"""What the job says of rows (shard, event time, what is refused) against Spark's own expressions."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as f

from backend import archive, collect_list, count, stream, tumbling
from backend.sinks import sql_sink
from backend.sources.archive import ArchiveSource
from backend.sources.archive_files import write_archive
from backend.spark.job import Job, describe
from backend.spark.start import StartOptions, build_job
from recovery.commit.manifest import Manifest
from recovery.commit.outputs import forget_outputs
from tests.support.parsed import records_of

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

DDL = (
    "text string, raw binary, yes boolean, i8 tinyint, i16 smallint, i32 int, i64 bigint, f32 float, f64 double,"
    " day date, at timestamp, plain timestamp_ntz, inner struct<a: int, b: string>, small decimal(9,2),"
    " wide decimal(30,3)"
)
VALUE = pa.struct(
    [
        ("text", pa.string()), ("raw", pa.binary()), ("yes", pa.bool_()), ("i8", pa.int8()), ("i16", pa.int16()),
        ("i32", pa.int32()), ("i64", pa.int64()), ("f32", pa.float32()), ("f64", pa.float64()), ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")), ("plain", pa.timestamp("us")),
        ("inner", pa.struct([("a", pa.int32()), ("b", pa.string())])), ("small", pa.decimal128(9, 2)),
        ("wide", pa.decimal128(30, 3)),
    ]
)  # fmt: skip
ROWS = 400
ALLOWED = " bytes, at most 30000 are allowed"
NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]


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
        "small": Decimal(rng.choice([0, -1, rng.randrange(-(10**9) + 1, 10**9)])).scaleb(-2),
        "wide": Decimal(rng.choice([0, -1, 127, 128, -128, -129, rng.randrange(-(10**29), 10**29)])).scaleb(-3),
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


def taken(spark: Any, job: Job) -> dict[tuple[int, int, int], tuple[Any, ...]]:
    """Put all rows through the stage that a replay has, and give what it saw: time, shard, whether it is good."""

    def see(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            names = ["_stream", "_partition", "_offset", "_time", "_shard"]
            columns = [batch.column(name).cast(pa.int64()) for name in names]
            fields = [name for name in ("inner", "day", "raw") if name in batch.schema.names]
            rows = pa.array([repr(row) for row in batch.select([*fields, "_offset"]).to_pylist()])
            yield pa.record_batch([*columns, batch.column("_malformed"), rows], [*names, "bad", "row"])

    ranges = {(s, p): (12, 10 + ROWS // 4 - 3) for s in range(2) for p in range(2)}
    schema = "_stream bigint, _partition bigint, _offset bigint, _time bigint, _shard bigint, bad string, row string"
    found = job.replay(spark, ranges, see, schema)
    assert found is not None
    rows = found.collect()
    assert len(rows) == 4 * (ROWS // 4 - 5)
    return {(row[0], row[1], row[2]): tuple(row[3:]) for row in rows}


def by_spark(spark: Any, source: ArchiveSource, key: tuple[str, ...], time: str | None, shards: int) -> dict[Any, Any]:
    """What Spark's own expressions say of the same records."""
    moment = f.col("timestamp") if time is None else f.col("value")[time]
    texts = [name for name in key if name in ("text", "raw")]
    lengths = [f.coalesce(f.octet_length(f.col("value")[name]), f.lit(0)) for name in texts]
    length = sum(lengths, f.lit(0))
    widths = {"f32": lambda column: column.cast("double")}
    # a key that is too long goes where null does
    fit = [f.when(length <= 30_000, f.col("value")[name]) for name in key]
    hashed = f.xxhash64(*[widths.get(name, lambda column: column)(own) for name, own in zip(key, fit, strict=True)])
    rows = records_of(spark, source, source.offsets()).select(
        f.when(f.col("topic") == "u", 1).otherwise(0).alias("stream"),
        "partition",
        "offset",
        (moment if time == "i64" else f.unix_millis(moment.cast("timestamp"))).alias("time"),
        f.pmod(hashed, f.lit(shards)).alias("shard"),
        f.when(f.col("value").isNull(), "the value is null")
        .when(length > 30_000, f.concat(f.lit("the key has "), length.cast("string"), f.lit(ALLOWED)))
        .alias("bad"),
    )
    return {(row[0], row[1], row[2]): tuple(row[3:]) for row in rows.collect()}


CASES = [
    (("text",), "at"),
    (("raw", "i64", "f64", "text"), "i64"),
    (("yes", "i8", "i16", "i32", "day"), "at"),
    (("f32", "plain", "at"), None),
    (("small", "wide"), "day"),
    (("wide", "text"), "plain"),
]


@pytest.mark.parametrize(("key", "event_time"), CASES)
def test_rows_are_what_sparks_expressions_say(
    spark: Any, directory: Path, key: tuple[str, ...], event_time: str | None
) -> None:
    source = archive(directory, value=DDL, format="typed")
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/Sao_Paulo")  # midnight was in the gap of some years
    try:
        routed = stream(source, event_time=event_time, key=key)
        if "wide" in key:  # no group key
            pipeline = routed.process(
                lambda *_: None, result=pa.schema([]), fields=["inner", "day", "raw"], max_ahead=None
            )
        else:
            pipeline = routed.window(tumbling("1 hour"), retention="1 day", max_ahead=None).aggregate(
                n=count(), inner=collect_list("inner"), days=collect_list("day"), raws=collect_list("raw")
            )
        job = build_job(pipeline, spark, StartOptions(shards=5), stored=None, first_offsets=list)
        mine, theirs = taken(spark, job), by_spark(spark, source, key, event_time, 5)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    for place in mine:
        assert mine[place][:3] == theirs[place], place
    assert len({row[1] for row in mine.values()}) == 5


def test_each_source_partition_of_several_topics_has_a_shard_for_itself(spark: Any, directory: Path) -> None:
    """Four of two topics; a checkpoint of before, whose manifest says no shards of topics, goes on as it was."""
    firsts = [[0, 0, 10], [0, 1, 10], [1, 0, 10], [1, 1, 10]]
    windows = stream(archive(directory, value=DDL, format="typed"), event_time="at").window(tumbling(messages=3))
    options = StartOptions(route="partition")
    new = build_job(windows.aggregate(n=count()), spark, options, stored=None, first_offsets=lambda: firsts)
    places = new.partitions(spark, bounded=True)
    assert new.by_shard(places) == {0: ((0, 0),), 1: ((0, 1),), 2: ((1, 0),), 3: ((1, 1),)}
    entries = describe(new, {"first_offsets": firsts})
    again = build_job(
        windows.aggregate(n=count()), spark, options, stored=Manifest(4, new.grouping, entries), first_offsets=list
    )
    assert describe(again, {}).items() <= entries.items()
    old = Manifest(4, new.grouping, {name: entry for name, entry in entries.items() if name != "bases"})
    before = build_job(windows.aggregate(n=count()), spark, options, stored=old, first_offsets=list)
    assert "bases" not in describe(before, {})
    assert before.by_shard(places) == {0: ((0, 0),), 1: ((0, 1), (1, 0)), 2: ((1, 1),), 3: ()}
    for job in (new, again, before):
        own = {place: shard for shard, mine in job.by_shard(places).items() for place in mine}
        assert {place[:2]: row[1] for place, row in taken(spark, job).items()} == own


def test_newest_rows_of_windows_by_number_of_several_topics_are_refused(
    spark: Any, directory: Path, tmp_path: Path
) -> None:
    """Two of them may begin at the same partition and offset, and one would be lost; also after `outputs --new`."""
    windows = stream(archive(directory, value=DDL, format="typed"), event_time="at", key="text").window(
        tumbling(messages=3)
    )
    sink = sql_sink(f"sqlite:///{tmp_path / 'rows.db'}", "rows", mode="newest")
    with pytest.raises(ValueError, match=r"mode='newest'.*two topics.*allowed are"):
        windows.aggregate(n=count()).start(spark, checkpoint=tmp_path / "checkpoint", sink=sink, until="end")
    assert not (tmp_path / "checkpoint").exists()
    places: dict[str, Any] = {"checkpoint": tmp_path / "checkpoint", "shards": 1, "until": "end"}
    query = windows.aggregate(n=count()).start(spark, **places, results=tmp_path / "r", errors=tmp_path / "e")
    query.await_termination()
    forget_outputs(str(tmp_path / "checkpoint"))
    with pytest.raises(ValueError, match=r"mode='newest'.*two topics.*allowed are"):
        windows.aggregate(n=count()).start(spark, **places, sink=sink)
    assert not (tmp_path / "rows.db").exists()
