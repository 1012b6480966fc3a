"""Sinks into tables: no row twice and none missing, wherever the driver dies; each read back by another library."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from sqlalchemy.dialects import mysql
from sqlalchemy.dialects.mysql import mariadb

from backend.aggregates import count
from backend.batch import EDGES, ERROR_SCHEMA
from backend.errors import ManifestMismatch, OutputDiffers, SinkConflict, SinkUnavailable
from backend.process import ProcessOperator
from backend.sinks import delta_sink, iceberg_sink, sql, sql_sink, table_rows
from backend.windows.definitions import Window, hopping, session, sliding, tumbling
from backend.windows.operator import WindowOperator
from backend.windows.spec import window_spec
from recovery.commit.outputs import check_outputs, text_of, write_outputs
from tests.support.packed import pack
from tests.support.sink_story import (
    FIELDS,
    MINUTE_MS,
    START_MS,
    Player,
    Story,
    check_seen,
    frame,
    operator,
    scratch,
)

COLUMNS = 'id, reason, shard, epoch_ms(window_start), origin, n, "odd ""total"".x"'
Rows = list[tuple[Any, ...]]


@dataclass
class Case:
    """A kind of sink over one directory.

    Attributes:
        make: Gives a sink, by options.
        query: Runs SQL over `results` and `errors`.
        nul: What a NUL in a text has become.
    """

    make: Callable[..., Any]
    query: Callable[[str], Rows]
    nul: str = "\x00"

    def results(self) -> Rows:
        return sorted(self.query(f"SELECT {COLUMNS} FROM results"), key=lambda row: row[0])

    def errors(self) -> Rows:
        return sorted(self.query('SELECT id, "offset" FROM errors'))


def delta(home: Path) -> Case:
    from deltalake import DeltaTable

    def query(text: str) -> Rows:
        tables = {"results": home / "windows", "errors": home / "windows-errors"}
        return over({name: DeltaTable(path).to_pyarrow_table() for name, path in tables.items()}, text)

    return Case(lambda **options: delta_sink(home / "windows", **options), query)


def iceberg(home: Path) -> Case:
    from pyiceberg.catalog.sql import SqlCatalog

    def catalog() -> Any:
        return SqlCatalog("c", uri=f"sqlite:///{home}/catalog.db", warehouse=f"file://{home}/warehouse")

    def query(text: str) -> Rows:
        names = {"results": "db.windows", "errors": "db.windows_errors"}
        return over({name: catalog().load_table(table).scan().to_arrow() for name, table in names.items()}, text)

    return Case(lambda **options: iceberg_sink("db.windows", catalog=catalog(), **options), query)


def sqlite(home: Path) -> Case:
    import sqlite3

    def query(text: str) -> Rows:
        for name in ("results", "errors"):
            text = text.replace(f"FROM {name}", "FROM windows" + "_errors" * (name == "errors"))
        text = text.replace("epoch_ms(window_start)", "CAST(strftime('%s', window_start) AS INTEGER) * 1000")
        with sqlite3.connect(home / "out.db") as connection:
            return connection.execute(text).fetchall()

    return Case(lambda **options: sql_sink(f"sqlite:///{home}/out.db", "windows", **options), query, "\ufffd")


def over(tables: dict[str, Any], text: str) -> Rows:
    """Run SQL over Arrow tables in DuckDB."""
    with duckdb.connect() as connection:
        for name, table in tables.items():
            connection.register(name, table)
        return connection.execute(text).fetchall()


CASES = {"delta": delta, "iceberg": iceberg, "sqlite": sqlite}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return CASES[request.param](tmp_path)


def wanted(rows: Rows, nul: str) -> Rows:
    return [(*row[:4], row[4].replace("\x00", nul) if row[4] is not None else None, *row[5:]) for row in rows]


def storm(case: Case, home: Path, mode: str, batches: int, deaths: int) -> None:
    story = Story(17, batches)
    look = lambda: (case.results(), case.errors())  # noqa: E731
    player = Player(lambda: case.make(mode=mode), scratch(home), story, deaths, look=look)
    player.run()
    assert case.results() == wanted(getattr(story, mode), case.nul)
    assert case.errors() == sorted(row for rows in story.errors for row in rows)
    assert list(Path(scratch(home)).iterdir()) == []
    check_seen(player.seen, deaths)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["log", "newest"])
def test_no_row_comes_twice_and_none_is_missing_wherever_the_driver_dies(case: Case, mode: str, tmp_path: Path) -> None:
    storm(case, tmp_path, mode, batches=5, deaths=9)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["log", "newest"])
def test_a_hundred_deaths(case: Case, mode: str, tmp_path: Path) -> None:
    storm(case, tmp_path, mode, batches=40, deaths=100)


def begun(case: Case, home: Path, planned: int = -1, query: str = "q", job: Any = None, **options: Any) -> Any:
    sink = case.make(**options)
    sink.begin(scratch(home), job or operator())
    sink.resume_from(planned)
    sink.open(query)
    return sink


def brought(sink: Any, version: int, *rows: tuple[Any, ...]) -> None:
    """Publish rows of (reason, start, key, n) of shard 0."""
    made = frame(0, version, [(reason, 0, start, key, n, 0.5) for reason, start, key, n in rows], [])
    published(sink, version, made["results"])


def published(sink: Any, version: int, packed: bytes | None) -> None:
    """Publish results of shard 0."""
    made = {"shard": 0, "version": version, "results": packed, "errors": None, "metrics": "{}"}
    Player(lambda: sink, "", None, 0).publish(sink, version, [made])  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_table_of_another_query_or_with_rows_of_somebody_is_refused(case: Case, tmp_path: Path) -> None:
    brought(begun(case, tmp_path), 0, ("full", 0, "JFK", 1))
    with pytest.raises(ManifestMismatch, match="it is written by q/results; this is p/results"):
        begun(case, tmp_path, query="p")
    with pytest.raises(SinkConflict, match=r"micro-batch 0 is out, this is -1"):
        begun(case, tmp_path, planned=-1)
    begun(case, tmp_path, planned=0)
    other = process(pa.schema([("user", pa.string())]))
    with pytest.raises(ManifestMismatch, match="it has no user"):
        begun(case, tmp_path, planned=0, job=other)


def moved(kind: str, home: Path) -> Callable[..., Any]:
    """Move a sink's tables; give what makes a sink over where they are now, by options."""
    if kind == "delta":
        (home / "windows").rename(home / "moved")
        (home / "windows-errors").rename(home / "moved-errors")
        return partial(delta_sink, home / "moved")
    if kind == "iceberg":
        from pyiceberg.catalog.sql import SqlCatalog

        catalog = SqlCatalog("c", uri=f"sqlite:///{home}/catalog.db", warehouse=f"file://{home}/warehouse")
        for name in ("windows", "windows_errors"):
            catalog.rename_table(f"db.{name}", f"db.moved_{name}")
        return partial(iceberg_sink, "db.moved_windows", catalog=catalog, errors="db.moved_windows_errors")
    (home / "out.db").rename(home / "moved.db")
    return partial(sql_sink, f"sqlite+pysqlite:///{home}/moved.db", "windows")


@pytest.mark.parametrize("kind", CASES)
def test_tables_that_moved_are_the_querys_and_no_others(kind: str, tmp_path: Path) -> None:
    case = CASES[kind](tmp_path)
    assert not case.make().holds("q")
    if kind != "iceberg":  # whose catalog is there
        assert not list(tmp_path.iterdir()), "asked for, and made"
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "offsets" / "0").touch()
    write_outputs(str(checkpoint), begun(case, tmp_path, planned=0))
    there = moved(kind, tmp_path)
    with pytest.raises(ManifestMismatch, match="does not hold this query's output"):
        check_outputs(str(checkpoint), "p", there())
    with pytest.raises(ManifestMismatch, match=r"mode newest\);"):
        check_outputs(str(checkpoint), "q", there(mode="newest"))
    check_outputs(str(checkpoint), "q", there())
    begun(Case(there, case.query), tmp_path, planned=0)
    begun(case, tmp_path, planned=0, query="p")  # a new table is in the old place
    write_outputs(str(checkpoint), there())
    with pytest.raises(ManifestMismatch, match="does not hold this query's output"):
        check_outputs(str(checkpoint), "q", case.make())


def table_of_ones_own(kind: str, home: Path, fields: list[pa.Field]) -> Case:
    """Make an empty table of results before the query does."""
    if kind == "delta":
        from deltalake import DeltaTable

        DeltaTable.create(str(home / "windows"), pa.schema(fields))
    elif kind == "iceberg":
        from pyiceberg.catalog.sql import SqlCatalog

        catalog = SqlCatalog("c", uri=f"sqlite:///{home}/catalog.db", warehouse=f"file://{home}/warehouse")
        catalog.create_namespace("db")
        catalog.create_table("db.windows", pa.schema(fields))
    else:
        import sqlite3

        names = [field.name.replace('"', '""') for field in fields]
        columns = [f'"{name}"{"" if one.nullable else " NOT NULL"}' for name, one in zip(names, fields, strict=True)]
        with sqlite3.connect(home / "out.db") as connection:
            connection.execute(f"CREATE TABLE windows ({', '.join(columns)})")
    return CASES[kind](home)


def swapped(fields: list[pa.Field], name: str, kind: pa.DataType) -> list[pa.Field]:
    return [field.with_type(kind) if field.name == name else field for field in fields]


@pytest.mark.parametrize("kind", CASES)
def test_a_table_of_ones_own_takes_the_rows_or_is_refused(kind: str, tmp_path: Path) -> None:
    fields = list(begun(sqlite(tmp_path), tmp_path)._schemas["results"])
    more = pa.field("more", pa.string())
    homes = [tmp_path / name for name in ("more", "required", "type")]
    for home in homes:
        home.mkdir()
    case = table_of_ones_own(kind, homes[0], [*fields, more])
    brought(begun(case, homes[0]), 0, ("full", 0, "JFK", 1))
    assert case.query("SELECT origin, n, more FROM results") == [("JFK", 1, None)]
    case = table_of_ones_own(kind, homes[1], [*fields, more.with_nullable(False)])
    with pytest.raises(ManifestMismatch, match="more, which is required, is not in the results"):
        begun(case, homes[1])
    if kind != "sqlite":  # a database converts
        case = table_of_ones_own(kind, homes[2], swapped(fields, "n", pa.string()))
        with pytest.raises(ManifestMismatch, match="n is string, the results have int64"):
            begun(case, homes[2])


TYPES = [pa.bool_(), pa.int8(), pa.uint16(), pa.uint64(), pa.float32(), pa.large_string(), pa.binary(3), pa.date32(),
         pa.decimal128(20, 3), pa.timestamp("ns"), pa.timestamp("s", "Europe/Paris"), pa.large_list(pa.int16()),
         pa.struct([("a", pa.list_(pa.uint8()))]), pa.map_(pa.string(), pa.int64()),
         pa.dictionary(pa.int8(), pa.string()), pa.date64(), pa.string_view(), pa.binary_view(), pa.decimal32(5, 2),
         pa.list_view(pa.date64()), pa.map_(pa.string(), pa.list_(pa.timestamp("s")))]  # fmt: skip


def test_a_table_with_columns_of_every_type_is_known_again(case: Case, tmp_path: Path) -> None:
    job = process(pa.schema([(f"c{at}", kind) for at, kind in enumerate(TYPES)]))
    for version in range(2):
        sink = begun(case, tmp_path, planned=version, job=job)
        packed = pack(job.result_schema.empty_table().from_pylist([{"c0": True}], schema=job.result_schema))
        published(sink, version, packed)
    assert case.query("SELECT c0, c1, c14 FROM results") == [(True, None, None)] * 2


def test_a_table_that_is_dropped_while_the_query_runs_is_named(case: Case, tmp_path: Path) -> None:
    import shutil
    import sqlite3

    sink = begun(case, tmp_path)
    brought(sink, 0, ("full", 0, "JFK", 1))
    shutil.rmtree(tmp_path / "windows", ignore_errors=True)
    for database, table in (("out.db", "windows"), ("catalog.db", "iceberg_tables")):
        if (tmp_path / database).exists():
            with sqlite3.connect(tmp_path / database) as connection:
                connection.execute(f"DROP TABLE {table}")
    with pytest.raises(SinkUnavailable, match="windows"):
        brought(sink, 1, ("full", 0, "JFK", 1))


def test_a_catalog_is_named_where_it_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="catalog: nowhere: URI missing"):
        iceberg_sink("a.b", catalog="nowhere")
    for uri in ("postgres://app:s3cret@db/cat", "nosuch+driver://app:s3cret@db/cat?password=s3cret"):
        for kind in ({}, {"type": "sql"}):
            with pytest.raises(ValueError, match="catalog: rewind: ") as bad:
                iceberg_sink("a.b", catalog={"uri": uri, "warehouse": "w", "s3.secret-access-key": "s3cret", **kind})
            assert "s3cret" not in str(bad.value)
    with pytest.raises(SinkUnavailable, match="catalog rewind; why: OperationalError"):
        iceberg_sink("a.b", catalog={"type": "sql", "uri": f"sqlite:///{tmp_path}/no/c.db", "warehouse": "w"})
    with pytest.raises(ValueError, match="storage_options: must be texts"):
        delta_sink(tmp_path / "a", storage_options="key=value")  # type: ignore[arg-type]


def test_of_two_writers_one_fails_and_nothing_comes_twice(case: Case, tmp_path: Path) -> None:
    two_writers(case, tmp_path)


def two_writers(case: Case, tmp_path: Path) -> None:
    """A zombie that read the record before the other's commit, and commits after it."""
    sink, zombie = begun(case, tmp_path), begun(case, tmp_path)
    table = zombie._tables["results"]
    real = table.append

    def late(*given: Any) -> None:
        brought(sink, 0, ("full", 0, "JFK", 1))
        real(*given)

    table.append = late
    with pytest.raises((SinkConflict, SinkUnavailable)):
        brought(zombie, 0, ("full", 0, "JFK", 1))
    assert [row[0] for row in case.results()] == ["0-0-0"]
    brought(begun(case, tmp_path, planned=0), 0, ("full", 0, "JFK", 1))
    assert [row[0] for row in case.results()] == ["0-0-0"]


def test_other_rows_than_are_out_count_where_that_is_accepted(case: Case, tmp_path: Path) -> None:
    brought(begun(case, tmp_path), 3, ("full", 0, "JFK", 1))
    with pytest.raises(OutputDiffers, match="published 1 results, now 2") as caught:
        brought(begun(case, tmp_path, planned=3), 3, ("full", 0, "JFK", 1), ("full", 0, "LGA", 1))
    assert "accept_published=3" in caught.value.command
    sink = begun(case, tmp_path, planned=3, accept_published=3)
    brought(sink, 3, ("full", 0, "JFK", 2))
    brought(sink, 4, ("full", 0, "LGA", 1))
    assert [row[0::4] for row in case.results()] == [("3-0-0", "JFK"), ("4-0-0", "LGA")]


def test_times_that_have_no_date_stay_apart(case: Case, tmp_path: Path) -> None:
    """2**62 ms is an event time that a job may take, and no timestamp of microseconds."""
    far = 2**62 - 2**62 % MINUTE_MS
    sink = begun(case, tmp_path, mode="newest")
    brought(sink, 0, ("full", far, "JFK", 1), ("full", far - MINUTE_MS, "JFK", 2), ("full", 0, "JFK", 3))
    brought(sink, 1, ("late", far, "JFK", 4))
    assert sorted((row[3], row[5]) for row in case.results() if row[3] == 0) == [(0, 3)]
    assert sorted(row[5] for row in case.results() if row[3] is None) == [2, 4]


FAR_MS = {"the year 55,840": 1_700_000_000_000_000, "before year 1": -62_135_596_800_001, "late": 9_200_000_000_000_000}


@pytest.mark.parametrize("far", FAR_MS.values(), ids=FAR_MS)
@pytest.mark.parametrize("mode", ["log", "newest"])
def test_times_outside_of_the_years_1_to_9999_stop_no_query(case: Case, tmp_path: Path, mode: str, far: int) -> None:
    """Microseconds hold them, and some libraries have no date for them."""
    sink = begun(case, tmp_path, mode=mode)
    for version, n in enumerate((1, 2)):
        made = frame(0, version, [("full", 0, far, "JFK", n, 0.5), ("full", 0, 0, "JFK", 10 * n, 0.5)], [])
        refused = {
            "topic": "t",
            "stream": 0,
            "partition": 0,
            "offset": version,
            "event_time": far,
            "reason": "in_future",
        }
        errors = pack(pa.Table.from_pylist([refused], schema=ERROR_SCHEMA))
        told = {"shard": 0, "version": version, "results": made["results"], "errors": errors, "metrics": "{}"}
        Player(lambda: sink, "", None, 0).publish(sink, version, [told])  # type: ignore[arg-type]
    rows = [(row[3], row[5]) for row in case.results()]
    assert sorted(n for _, n in rows) == ([1, 2, 10, 20] if mode == "log" else [2, 20])
    assert {at for at, n in rows if n >= 10} == {0}
    assert {at for at, n in rows if n < 10} <= {None, far}
    assert len(case.errors()) == 2


def test_a_key_of_64_bits_without_a_sign_is_one_for_each_value(case: Case, tmp_path: Path) -> None:
    job = process(pa.schema([("user", pa.uint64()), ("n", pa.int64())]))
    sink = begun(case, tmp_path, job=job, key="user")
    users = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]
    for version in range(2):
        made = {"user": users, "n": [version * 10 + n for n in range(5)]}
        published(sink, version, pack(pa.table(made, schema=job.result_schema)))
    assert sorted(case.query("SELECT n FROM results")) == [(10,), (11,), (12,), (13,), (14,)]


def process(result: pa.Schema) -> ProcessOperator:
    return ProcessOperator(lambda batch, context: None, result, stores=[], fields=[])


def test_the_newest_row_of_a_key_of_ones_own(case: Case, tmp_path: Path) -> None:
    job = process(pa.schema([("reason", pa.string()), ("user", pa.string()), ("n", pa.int64())]))
    sink = begun(case, tmp_path, job=job, key="user")
    for version, users in enumerate((["ann", "bob", "ann"], ["bob"])):
        rows = {"reason": ["retracted"] * len(users), "user": users, "n": [version * 10 + n for n in range(len(users))]}
        packed = pack(pa.table(rows, schema=job.result_schema))
        published(sink, version, packed)
    assert sorted(case.query('SELECT "user", n FROM results')) == [
        ("ann", 2),
        ("bob", 10),
    ]  # a reason of the user's own


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mode": "latest"}, "mode='latest': allowed are log, newest"),
        ({"mode": "log", "key": "origin"}, "key='origin': must be"),
        ({"key": []}, r"key=\[\]: must be"),
        ({"key": [1]}, r"key=\[1\]: must be"),
        ({"key": "nobody"}, "key='nobody': not a column of the results; allowed are id, version"),
        ({"accept_published": -1}, "accept_published=-1"),
        ({"accept_published": True}, "accept_published=True"),
        ({"errors": ""}, "errors=''"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(
    case: Case, tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    before = sorted(tmp_path.rglob("windows*"))
    with pytest.raises(ValueError, match=why):
        begun(case, tmp_path, **options)
    assert sorted(tmp_path.rglob("windows*")) == before


def by_number(window: Window) -> WindowOperator:
    return WindowOperator(window_spec(window, FIELDS, {"n": count()}, keys=["origin"]))


def counted(*rows: tuple[str, tuple[int, int], tuple[int, int], int]) -> list[dict[str, Any]]:
    """Rows of windows by number: reason, partition and offset of the first message, and of the last one, messages."""
    return [
        {"reason": why, "revision": 0, "origin": "JFK", "n": n, **dict(zip(EDGES, first + last, strict=True))}
        for why, first, last, n in rows
    ]


@pytest.mark.parametrize("window", [tumbling(messages=3), hopping(messages=3, every=2), session(messages=3)])
def test_the_newest_row_of_windows_by_number(case: Case, tmp_path: Path, window: Window) -> None:
    """Two source partitions have the same offsets; the rows of a window that grows begin alike."""
    job = by_number(window)
    sink = begun(case, tmp_path, job=job, mode="newest")
    for version, rows in enumerate(
        (
            counted(("early", (0, 5), (0, 5), 1), ("early", (1, 5), (1, 6), 2), ("early", (0, 7), (0, 7), 9)),
            counted(("retracted", (0, 7), (0, 7), 9), ("full", (0, 5), (1, 7), 3)),
        )
    ):
        published(sink, version, pack(pa.Table.from_pylist(rows, schema=job.result_schema)))
    found = case.query("SELECT start_partition, start_offset, last_partition, last_offset, n FROM results")
    assert sorted(found) == [(0, 5, 1, 7, 3), (1, 5, 1, 6, 2)]


def test_sliding_windows_by_number_that_begin_alike_are_several(case: Case, tmp_path: Path) -> None:
    job = by_number(sliding(messages=3))
    sink = begun(case, tmp_path, job=job, mode="newest")
    rows = counted(("full", (0, 5), (0, 5), 1), ("full", (0, 5), (1, 5), 2), ("full", (0, 5), (0, 6), 3))
    published(sink, 0, pack(pa.Table.from_pylist(rows, schema=job.result_schema)))
    published(sink, 1, pack(pa.Table.from_pylist(counted(("full", (1, 5), (1, 6), 3)), schema=job.result_schema)))
    assert sorted(case.query("SELECT last_partition, last_offset, n FROM results")) == [
        (0, 5, 1),
        (0, 6, 3),
        (1, 5, 2),
        (1, 6, 3),
    ]


def test_a_job_without_windows_has_no_newest_row(case: Case, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mode='newest': the job has no windows: allowed is mode='log', or key="):
        begun(case, tmp_path, job=process(pa.schema([("user", pa.string())])), mode="newest")


def test_outputs_that_are_one_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="errors="):
        delta_sink(tmp_path / "a", errors=tmp_path / "a")
    with pytest.raises(ValueError, match="errors="):
        sql_sink("sqlite://", "a", errors="a")
    with pytest.raises(ValueError, match="errors="):
        iceberg_sink("a.b", catalog={"type": "in-memory", "warehouse": str(tmp_path)}, errors="a.b")
    with pytest.raises(ValueError, match="table='b'"):
        iceberg_sink("b", catalog="c")
    with pytest.raises(ValueError, match="catalog:"):
        iceberg_sink("a.b", catalog="")


def changed(sink: Any) -> None:
    """Bring out rows of three windows, none, and changes in one of them."""
    brought(sink, 0, *(("full", START_MS, key, 1) for key in ("JFK", "LGA", "EWR")))
    brought(sink, 1)
    for version in range(2, 5):
        brought(sink, version, ("full", START_MS + version * MINUTE_MS, "JFK", version))
    brought(sink, 5, ("retracted", START_MS, "LGA", 1), ("late", START_MS, "EWR", 7))


def test_a_delta_commit_per_micro_batch_with_rows_says_which_and_writes_what_changed(tmp_path: Path) -> None:
    from deltalake import DeltaTable

    case = delta(tmp_path)
    changed(begun(case, tmp_path, mode="newest"))
    commits = [one for one in reversed(DeltaTable(tmp_path / "windows").history()) if "rewind.version" in one]
    assert [int(one["rewind.version"]) for one in commits] == [0, 2, 3, 4, 5]
    assert {one["rewind.owner"] for one in commits} == {"q/results"}
    done = commits[-1]["operationMetrics"]
    assert [done[f"num_target_rows_{what}"] for what in ("inserted", "updated", "deleted")] == [0, 1, 1]
    assert done["num_target_files_skipped_during_scan"] == 3, "files of other windows are not read"


def test_an_iceberg_commit_per_micro_batch_with_rows_says_which_and_leaves_other_files(tmp_path: Path) -> None:
    from pyiceberg.catalog.sql import SqlCatalog

    def table() -> Any:
        catalog = SqlCatalog("c", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse")
        return catalog.load_table("db.windows")

    sink = begun(iceberg(tmp_path), tmp_path, mode="newest")
    before = len(table().metadata.metadata_log)
    changed(sink)
    after = table()
    assert len(after.metadata.metadata_log) - before == 5, "one commit for each of 0, 2, 3, 4 and 5"
    said = [(one.summary["rewind.owner"], int(one.summary["rewind.version"])) for one in after.snapshots()]
    assert list(dict.fromkeys(said)) == [("q/results", version) for version in (0, 2, 3, 4, 5)]
    last = [one.summary for one in after.snapshots() if one.summary["rewind.version"] == "5"]
    files = {what: sum(int(one[what] or 0) for one in last) for what in ("deleted-data-files", "deleted-records")}
    assert files == {"deleted-data-files": 1, "deleted-records": 3}, "files of other windows are left as they are"
    assert sum(int(one["added-records"] or 0) for one in last) == 2, "JFK, which lay in that file, and EWR"


def test_a_sql_transaction_per_micro_batch_with_rows_writes_what_changed(tmp_path: Path) -> None:
    import sqlalchemy as sa

    sink = begun(sqlite(tmp_path), tmp_path, mode="newest")
    engine = sink._tables["results"]._engine
    seen: list[str] = []

    def told(connection: Any, cursor: Any, statement: str, given: Any, context: Any, many: bool) -> None:
        words = statement.split()
        table = words[2] if words[0] in ("DELETE", "INSERT") else words[1]
        if words[0] in ("DELETE", "INSERT", "UPDATE"):
            seen.append(f"{words[0]} {table} {cursor.rowcount}")

    sa.event.listen(engine, "after_cursor_execute", told)
    sa.event.listen(engine, "commit", lambda connection: seen.append("commit"))
    changed(sink)
    assert seen == [
        *("UPDATE rewind_commits 1", "DELETE windows 0", "INSERT windows 3", "commit"),
        *("UPDATE rewind_commits 1", "DELETE windows 0", "INSERT windows 1", "commit") * 3,
        *("UPDATE rewind_commits 1", "DELETE windows 2", "INSERT windows 1", "commit"),
    ]
    with sa.create_engine(engine.url).connect() as connection:
        found = connection.execute(sa.text("SELECT owner, version FROM rewind_commits WHERE output = 'windows'"))
        assert found.fetchall() == [("q/results", 5)]


def test_a_password_is_told_nowhere_and_an_outage_is_waited_for(tmp_path: Path) -> None:
    sink = sql_sink("postgresql+psycopg://u:secret@127.0.0.1:1/d", "windows")
    sink.begin(scratch(tmp_path), operator())
    with pytest.raises(SinkUnavailable) as caught:
        sink.open("q")
    assert "secret" not in str(caught.value) + repr(sink.describe())
    assert "127.0.0.1:1" in str(caught.value)
    sink = sql_sink("postgresql+psycopg://127.0.0.1:1/d?user=u&password=secret&host=h&sslpassword=secret", "windows")
    assert sink.describe()["url"] == "postgresql+psycopg://127.0.0.1:1/d?host=h"
    sink.begin(scratch(tmp_path), operator())
    with pytest.raises(SinkUnavailable) as caught:
        sink.open("q")
    assert "secret" not in str(caught.value)
    assert "secret" not in text_of({"kind": "sql", "url": "postgresql://h/d?password=secret", "results": "windows"})
    with pytest.raises(ValueError, match="url: not a database that is known") as bad:
        sql_sink("nothing:secret", "windows")
    assert "secret" not in str(bad.value)
    with pytest.raises(ValueError, match="url: not a database that is known") as bad:
        sql_sink("postgresql+psycopg://u:secret@here:port/d", "windows")
    assert "secret" not in str(bad.value)


@pytest.mark.parametrize(
    ("fields", "delta", "iceberg"),
    [
        ([("at", pa.time64("us"))], "column 'at': time64", None),
        ([("at", pa.list_(pa.time32("s")))], "column 'at': list<item: time64", None),
        (
            [("at", pa.struct([("x", pa.duration("us"))]))],
            "column 'at': struct<x: duration",
            "column 'at': struct<x: dur",
        ),
        ([("n", pa.decimal256(50, 2))], "column 'n': decimal256", "column 'n': decimal256"),
        ([("n", pa.int64()), ("N", pa.int64())], "columns 'n' and 'N'", None),
    ],
)
def test_columns_that_a_table_cannot_have_are_a_bad_option(
    case: Case, tmp_path: Path, fields: Any, delta: str, iceberg: str | None, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["case"]
    said = iceberg if kind == "iceberg" else delta
    there = set(tmp_path.iterdir())
    if said is None:
        begun(case, tmp_path, job=process(pa.schema(fields)))
    else:
        with pytest.raises(ValueError, match=rf"^{'sql' if kind == 'sqlite' else kind}_sink: {re.escape(said)}"):
            begun(case, tmp_path, job=process(pa.schema(fields)))
        assert set(tmp_path.iterdir()) <= there | {tmp_path / "catalog.db"}


def test_names_that_a_table_takes_for_one_are_found_within_columns_and_beside_its_own(
    case: Case, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["case"]
    structs = process(pa.schema([("n", pa.list_(pa.struct([("x", pa.int64()), ("X", pa.int64())])))]))
    if kind == "delta":
        with pytest.raises(ValueError, match="columns 'x' and 'X': the table takes them for one"):
            begun(case, tmp_path, job=structs)
    else:  # an Iceberg table tells them apart, SQL has them as a text
        begun(case, tmp_path, job=structs)
    own = process(pa.schema([("ROW_KEY", pa.string())]))
    if kind == "iceberg":
        return
    with pytest.raises(ValueError, match="columns 'ROW_KEY' and 'row_key'"):
        begun(case, tmp_path, job=own, mode="newest", key=["ROW_KEY"])


FAR_S = 2**53
"""Seconds that no timestamp of microseconds has."""


def test_times_within_lists_structs_and_maps_become_microseconds_as_others_do(case: Case, tmp_path: Path) -> None:
    """What no timestamp has is null, fractions of a microsecond are cut off: neither ends the query."""
    second = pa.timestamp("s")
    fields: Any = [
        ("l", pa.list_(second)),
        ("s", pa.struct([("t", pa.timestamp("ns"))])),
        ("m", pa.map_(pa.string(), second)),
    ]
    seconds = pa.array([7, FAR_S, 8, 9, FAR_S], second)
    lists = pa.ListArray.from_arrays([0, 2, 2, 5], seconds, fields[0][1])
    structs = pa.StructArray.from_arrays([pa.array([1_999, None, -1], pa.timestamp("ns"))], fields=list(fields[1][1]))
    maps = pa.MapArray.from_arrays([0, 2, 2, 3], pa.array(["a", "b", "c"]), seconds[:3])
    job = process(pa.schema(fields))
    rows = pa.table([lists, structs, maps], schema=job.result_schema)
    sink = begun(case, tmp_path, job=job)
    batch = next(iter(rows.slice(1).to_batches()))
    cast = table_rows.plain(batch, sink._schemas["results"].remove(0).remove(0).remove(0).remove(0))
    assert [column.cast(pa.list_(pa.timestamp("us"))).to_pylist() for column in cast.columns[:1]] == [
        [[], [moment(8), moment(9), None]]
    ]
    assert cast.column("s").to_pylist() == [{"t": None}, {"t": moment(0)}]
    assert cast.column("m").to_pylist() == [[], [("c", moment(8))]]
    published(sink, 0, pack(rows))
    assert case.query("SELECT count(*) FROM results") == [(3,)]


def test_a_delta_table_whose_only_times_without_a_zone_are_in_a_map_is_refused(tmp_path: Path) -> None:
    at = pa.timestamp("us")
    for number, kind in enumerate((pa.map_(at, pa.int64()), pa.list_(pa.map_(pa.string(), at)))):
        home = tmp_path / str(number)
        with pytest.raises(ValueError, match="column 'm': times without a time zone within a map"):
            begun(delta(home), home, job=process(pa.schema([("m", kind)])))
        begun(delta(home), home, job=process(pa.schema([("m", kind), ("at", at)])))


def test_a_map_with_a_key_that_no_timestamp_has_is_null(case: Case, tmp_path: Path) -> None:
    kind = pa.map_(pa.timestamp("s", "UTC"), pa.int64())
    job = process(pa.schema([("m", kind)]))
    keys = pa.array([7, FAR_S, 8, 9], pa.timestamp("s", "UTC"))
    maps = pa.MapArray.from_arrays([0, 0, 2, 3, 4], keys, pa.array([1, 2, 3, 4]), type=kind)
    rows = pa.table([maps], schema=job.result_schema)
    plain = pa.schema([("m", pa.map_(pa.timestamp("us", "UTC"), pa.int64()))])
    cast = table_rows.plain(next(iter(rows.slice(1).to_batches())), plain)
    there = [one and [(at.replace(tzinfo=None), n) for at, n in one] for one in cast.column("m").to_pylist()]
    assert there == [None, [(moment(8), 3)], [(moment(9), 4)]]
    published(begun(case, tmp_path, job=job), 0, pack(rows))
    assert case.query("SELECT count(*) FROM results") == [(4,)]


def test_a_database_by_the_uri_of_a_file_is_found_where_it_is(tmp_path: Path) -> None:
    home = tmp_path / "a b"
    home.mkdir()
    quoted = str(home).replace(" ", "%20")
    for number, database in enumerate((f"{home}/0.db", f"file:{quoted}/1.db", f"file://localhost{quoted}/2.db")):
        sink = sql_sink(f"sqlite:///{database}{'?uri=true' if number else ''}", "windows")
        assert not sink.holds("q")
        assert not (home / f"{number}.db").exists()
        begun(Case(lambda sink=sink, **_: sink, lambda _: []), tmp_path)  # type: ignore[misc]
        assert sink.holds("q")
        assert (home / f"{number}.db").exists()


@pytest.mark.parametrize("url", ["sqlite:///out.db", "sqlite:///file:out.db?uri=true"])
def test_a_database_by_a_relative_path_is_the_one_where_it_was_given(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From elsewhere it is another one, and the second start is told so."""
    said = []
    for name in ("a b", "c"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        sink = sql_sink(url, "windows")
        said.append(str(sink.describe()["url"]))
    assert said[0] != said[1]
    begun(Case(lambda **_: sink, lambda _: []), tmp_path / "begun")
    assert (tmp_path / "c" / "out.db").exists()
    assert not (tmp_path / "a b" / "out.db").exists()


def test_numbers_that_json_has_not_are_null_within_lists(tmp_path: Path) -> None:
    import json

    job = process(pa.schema([("l", pa.list_(pa.float64())), ("m", pa.map_(pa.string(), pa.float64()))]))
    case = sqlite(tmp_path)
    rows = pa.table([[[1.5, float("nan"), float("-inf")]], [[("x", float("inf"))]]], schema=job.result_schema)
    published(begun(case, tmp_path, job=job), 0, pack(rows))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    [found] = case.query("SELECT l, m FROM results")
    assert [json.loads(text, parse_constant=refuse) for text in found] == [[1.5, None, None], [["x", None]]]


def test_catalogs_that_are_given_by_their_properties_are_told_apart(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "offsets" / "0").touch()

    def sink(name: str) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        uri = f"sqlite:///{tmp_path}/{name}/catalog.db"
        return iceberg_sink("db.t", catalog={"type": "sql", "uri": uri, "warehouse": f"file://{tmp_path}/{name}"})

    write_outputs(str(checkpoint), sink("one"))
    check_outputs(str(checkpoint), "q", sink("one"))
    with pytest.raises(ManifestMismatch, match="does not hold this query's output"):
        check_outputs(str(checkpoint), "q", sink("two"))


def moment(seconds: int) -> datetime:
    return datetime(1970, 1, 1) + timedelta(seconds=seconds)


def test_a_delta_table_with_a_date_that_python_has_not_is_read_back(tmp_path: Path) -> None:
    """delta-rs writes the least and the greatest of a file into the log, as a text that it cannot read."""
    case = delta(tmp_path)
    job = process(pa.schema([("d", pa.date32()), ("user", pa.string())]))
    for version, options in enumerate(({}, {"mode": "newest", "key": ["user"]})):
        home = tmp_path / str(version)
        case = delta(home)
        days = pa.array([5_000_000, 0], pa.int32()).cast(pa.date32())
        published(
            begun(case, home, job=job, **options), 0, pack(pa.table([days, ["a", "b"]], schema=job.result_schema))
        )
        assert sorted(case.query('SELECT "user", d FROM results')) == [("a", None), ("b", date(1970, 1, 1))]


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite+pysqlite://",
        "sqlite:///file::memory:?uri=true",
        "sqlite:///file:x?mode=memory&uri=true",
        "sqlite:///file:/x?vfs=memdb&uri=true",
        "sqlite:///file:?uri=true",
    ],
)
def test_a_database_that_each_connection_has_anew_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url: SQLite in memory"):
        sql_sink(url, "windows")


def test_a_delta_table_takes_such_dates_within_lists_structs_and_maps(tmp_path: Path) -> None:
    from deltalake import DeltaTable

    day, one = pa.date32(), pa.array([2**31 - 1, 0], pa.int32()).cast(pa.date32())
    kinds = [pa.list_(day), pa.struct([("d", day)]), pa.map_(pa.string(), day), pa.map_(day, pa.string())]
    ends, words = pa.array([0, 1, 2], pa.int32()), pa.array(["x", "y"])
    columns = [
        *(pa.ListArray.from_arrays(ends, one), pa.StructArray.from_arrays([one], ["d"])),
        *(pa.MapArray.from_arrays(ends, words, one), pa.MapArray.from_arrays(ends, one, words)),
    ]
    fields = [(f"c{number}", kind) for number, kind in enumerate(kinds)]
    job = process(pa.schema([*fields, ("user", pa.string())]))
    case = delta(tmp_path)
    table = pa.table([*columns, ["a", "b"]], schema=job.result_schema)
    published(begun(case, tmp_path, job=job), 0, pack(table))
    rows = DeltaTable(tmp_path / "windows").to_pyarrow_table().sort_by("user")
    first = date(1970, 1, 1)
    assert rows.select(["c0", "c1", "c2", "c3"]).to_pylist() == [
        {"c0": [None], "c1": {"d": None}, "c2": [("x", None)], "c3": None},
        {"c0": [first], "c1": {"d": first}, "c2": [("y", first)], "c3": [(first, "y")]},
    ]


@pytest.mark.parametrize("dialect", [mysql.dialect, mariadb.MariaDBDialect])
def test_mysql_has_microseconds_and_long_texts(dialect: Callable[[], Any]) -> None:
    """Its own defaults would round times to seconds, and refuse texts and bytes of more than 64 KiB."""
    kinds = {"at": pa.timestamp("us", "UTC"), "text": pa.string(), "bytes": pa.binary()}
    texts = [sql._type(pa.field(name, kind), "id").compile(dialect=dialect()) for name, kind in kinds.items()]
    assert texts == ["DATETIME(6)", "LONGTEXT", "LONGBLOB"]
