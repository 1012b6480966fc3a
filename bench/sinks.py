"""What goes through each sink: `python -m bench.sinks [--quick]`.

Two tasks make packed results of windows (1,000 keys, new windows in each micro-batch, no errors), and the sink's
`publish` brings them out, micro-batch by micro-batch: milliseconds of one, the first left out. `nothing` is the same
rows made and thrown away, which is below all of them. No operator, no source, no commit of Spark's.

Delta and Iceberg (its catalog in SQLite) are on the local disk; the object store is moto's, in this process. `SQL,
PostgreSQL` is there where `REWIND_POSTGRES` names a database. The function of `foreach_batch` writes Parquet by Spark.
Afterwards every row must be there once.
"""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from backend import count, delta_sink, foreach_batch, iceberg_sink, kafka_sink, parquet_sink, sql_sink, sum_, tumbling
from backend.sinks.sealing import Writing
from backend.spark.pack.frames import to_ipc
from backend.spark.shard_task import OUTPUT, OUTPUT_SCHEMA
from backend.windows.operator import WindowOperator
from backend.windows.spec import window_spec
from bench.data import START_MS
from bench.session import session
from bench.table import Options, report

SHARDS, KEYS, MINUTE_MS = 2, 1_000, 60_000
FIELDS = pa.schema([("key", pa.string()), ("x", pa.float64())])


def operator() -> WindowOperator:
    """Return the job whose results these are."""
    aggregates = {"n": count(), "total": sum_("x")}
    return WindowOperator(window_spec(tumbling("1 minute"), FIELDS, aggregates, keys=["key"], retention=0))


def made(batches: Iterator[pa.RecordBatch], version: int, rows: int) -> Iterator[pa.RecordBatch]:
    """Give a task's frames. Runs in a task."""
    schema = operator().result_schema
    for shard in [shard for batch in batches for shard in batch.column(0).to_pylist()]:
        at = np.arange(rows // SHARDS)
        start = START_MS + (version * rows + at // (KEYS // SHARDS)) * MINUTE_MS
        columns = {
            "reason": pa.repeat("full", len(at)),
            "revision": np.zeros(len(at), np.int64),
            "window_start": start,
            "window_end": start + MINUTE_MS,
            "key": pa.array([f"key-{shard}-{number:04d}" for number in at % (KEYS // SHARDS)]),
            "n": at % 97,
            "total": at * 0.5,
        }
        table = pa.table({name: columns.get(name, pa.nulls(len(at))) for name in schema.names}).cast(schema)
        frame = {"shard": shard, "version": version, "results": to_ipc(table), "metrics": "{}"}
        yield pa.RecordBatch.from_pylist([frame], schema=OUTPUT)


def tasks(
    batches: Iterator[pa.RecordBatch], version: int, rows: int, writing: Writing | None
) -> Iterator[pa.RecordBatch]:
    """Make frames, and write them where the operator's own tasks do. Runs in a task."""
    for frame in made(batches, version, rows):
        yield writing.write(frame, version) if writing is not None else frame


def thrown_away(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Give numbers of bytes. Runs in a task."""
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"bytes": [batch.nbytes]})


class Nothing:
    """Runs the action."""

    def publish(self, frames: Any, _version: int) -> None:
        """Throw a micro-batch away."""
        frames.mapInArrow(thrown_away, "bytes bigint").collect()


class Case(NamedTuple):
    """A sink to measure.

    Attributes:
        what: Its name.
        sink: What is measured.
        there: Counts the rows that are out; None where nothing is.
    """

    what: str
    sink: Any
    there: Callable[[], int] | None


def dataset(place: str, filesystem: Any = None) -> int:
    """Count the rows of Parquet files."""
    return int(ds.dataset(place, format="parquet", partitioning="hive", filesystem=filesystem).count_rows())


def tables(home: Path, urls: Sequence[tuple[str, str]]) -> Iterator[Case]:
    """Give the sinks into tables, in both modes."""
    import sqlalchemy as sa
    from deltalake import DeltaTable
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("c", uri=f"sqlite:///{home}/catalog.db", warehouse=f"file://{home}/warehouse")

    def counted(url: str, table: str) -> int:
        with sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
            return int(connection.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar_one())

    for mode in ("log", "newest"):
        delta, iceberg = f"{home}/delta-{mode}", f"db.{mode}"
        lines = partial(lambda at: DeltaTable(at).to_pyarrow_dataset().count_rows(), delta)
        yield Case(f"Delta, {mode}", delta_sink(delta, mode=mode), lines)
        lines = partial(lambda name: catalog.load_table(name).scan().count(), iceberg)
        yield Case(f"Iceberg, {mode}", iceberg_sink(iceberg, catalog=catalog, mode=mode), lines)
        for name, url in urls:
            table = f"bench_{mode}_{uuid.uuid4().hex[:8]}"
            yield Case(f"SQL, {name}, {mode}", sql_sink(url, table, mode=mode), partial(counted, url, table))


def kafka(settings: Any) -> Iterator[Case]:
    """Give the Kafka sink, with both guarantees."""
    from backend.kafka_client.admin import admin_client, create_topic
    from backend.kafka_client.reader import consumer, next_messages

    def counted(topic: str) -> int:
        from confluent_kafka import TopicPartition

        reader = consumer(settings, "bench-sinks", committed_only=True, auto_offset_reset="earliest")
        ends = {number: reader.get_watermark_offsets(TopicPartition(topic, number))[1] for number in range(SHARDS)}
        reader.assign([TopicPartition(topic, number, 0) for number in ends])
        found = 0
        while any(one.offset < ends[one.partition] for one in reader.position(reader.assignment())):
            found += sum(message.error() is None for message in next_messages(reader, 10_000, 0.5))
        reader.close()
        return found

    for guarantee in ("exactly_once", "at_least_once"):
        topics = [f"bench-{kind}-{uuid.uuid4().hex[:8]}" for kind in ("windows", "errors")]
        for topic in topics:
            create_topic(admin_client(settings), topic, SHARDS, {}, timeout_s=30)
        sink = kafka_sink(*topics, servers=settings, key="key", guarantee=guarantee)
        yield Case(f"Kafka, {guarantee.replace('_', ' ')}", sink, partial(counted, topics[0]))


def cases(home: Path, stack: ExitStack) -> Iterator[Case]:
    """Give all sinks."""
    import s3fs

    from recovery.testing.broker import open_broker

    yield Case("nothing", Nothing(), None)
    local = f"{home}/windows"
    yield Case("Parquet, local", parquet_sink(local, f"{home}/bad"), partial(dataset, local))
    store = s3fs.S3FileSystem()
    store.mkdir("out")
    yield Case("Parquet, S3", parquet_sink("s3://out/windows", "s3://out/bad"), partial(dataset, "out/windows", store))
    urls = [("SQLite", f"sqlite:///{home}/out.db"), ("PostgreSQL", os.environ.get("REWIND_POSTGRES", ""))]
    yield from tables(home, [(name, url) for name, url in urls if "://" in url])
    own = f"{home}/own"
    function = lambda results, errors, version: results.write.parquet(f"{own}/batch={version}")  # noqa: E731
    yield Case("foreach_batch", foreach_batch(function), partial(dataset, own))
    broker, close = open_broker()
    stack.callback(close)
    yield from kafka(broker.settings)


def measure(spark: Any, case: Case, home: Path, rows: int, batches: int) -> dict[str, Any]:
    """Publish micro-batches; give the row of a sink."""
    sink = case.sink
    if hasattr(sink, "begin"):
        sink.begin(str(home / "outbox" / case.what), operator())
    if hasattr(sink, "open"):
        sink.resume_from(-1)
        sink.open(uuid.uuid4().hex)
    taken = []
    for version in range(batches + 1):
        writing = sink.writing() if hasattr(sink, "writing") else None
        frames = spark.range(SHARDS, numPartitions=SHARDS).mapInArrow(
            partial(tasks, version=version, rows=rows, writing=writing), writing.ddl if writing else OUTPUT_SCHEMA
        )
        begun = time.perf_counter()
        sink.publish(frames, version)
        taken.append((time.perf_counter() - begun) * 1000)
    if case.there is not None:
        there = case.there()
        assert there == rows * (batches + 1), f"{case.what}: {there} rows are there"
    typical = statistics.median(taken[1:])
    return {
        "sink": case.what,
        "rows per micro-batch": rows,
        "ms per micro-batch": typical,
        "ms min-max": f"{min(taken[1:]):,.0f}-{max(taken[1:]):,.0f}",
        "rows/s": round(rows / typical * 1000),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    from moto.server import ThreadedMotoServer

    options = Options("sinks", __doc__).parse(arguments)
    rows, batches = (2_000, 2) if options.quick else (100_000, 5)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, ExitStack() as stack:
        stack.callback(server.stop)
        spark = stack.enter_context(session())
        home = Path(name)
        found = [measure(spark, case, home, rows, batches) for case in cases(home, stack)]
    report("sinks", options, f"Results through each sink, {SHARDS} tasks, two cores", found)


if __name__ == "__main__":
    main()
