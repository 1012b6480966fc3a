"""Keys that a job over an archive reads as dictionaries: which they are, and the results that pandas says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from backend import archive, count, stream, sum_, tumbling
from backend.sources import archive_files
from backend.sources.archive_files import WRITE_SCHEMA, write_archive
from backend.sources.archive_reader import ArchiveStreamReader
from tests.support.waiting import ended

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

START_MS = 1_700_000_040_000
CODED = pa.dictionary(pa.int32(), pa.string())


def rows(n: int) -> pd.DataFrame:
    random = np.random.default_rng(7)
    keys = np.array([None, *(f"k{number}" for number in range(50))], object)
    at = START_MS + np.sort(random.integers(0, 100_000, n))
    return pd.DataFrame({"key": keys[random.integers(0, len(keys), n)], "at": at, "x": random.integers(0, 100, n)})


def put(place: Path, given: pd.DataFrame, row_group_rows: int) -> None:
    n = len(given)
    columns = [pa.array(given[name]) for name in given.columns]
    value = pa.StructArray.from_arrays(columns, [*given.columns])
    times = pa.array(given["at"], pa.timestamp("ms", tz="UTC"))
    table = [["t"] * n, [0] * n, list(range(n)), times, [None] * n, value]
    schema = WRITE_SCHEMA.set(5, pa.field("value", value.type))
    write_archive(place, pa.table(table, schema=schema), rows_per_file=n, row_group_rows=row_group_rows)


def test_a_reader_codes_the_texts_of_a_field_and_nothing_else(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_files, "CODED_ROWS", 1_000)
    put(tmp_path / "a", rows(3_000), 1_500)
    source = archive(tmp_path / "a", value="key string, at long, x long", format="typed")
    for name, kind in (("key", CODED), ("x", pa.string())):
        reader = source.stream_reader()
        reader.code(name)
        [piece] = reader.plan(reader.index(), ("t", 0), 0, 3_000)
        for batch in reader.read(piece):
            assert batch.schema.field("value").type.field("key").type == kind
    reader = archive(tmp_path / "a", format="raw").stream_reader()
    before = reader.arrow_schema
    reader.code("value")
    assert reader.arrow_schema == before


@pytest.mark.parametrize("shards", [1, 2])
def test_windows_over_coded_keys(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    coded: list[str] = []
    real = ArchiveStreamReader.code

    def code(self: ArchiveStreamReader, name: str) -> None:
        coded.append(name)
        real(self, name)

    monkeypatch.setattr(ArchiveStreamReader, "code", code)
    n = archive_files.CODED_ROWS * 2
    given = rows(n)
    put(tmp_path / "a", given, archive_files.CODED_ROWS)
    source = archive(
        tmp_path / "a", value="key string, at long, x long", format="typed",
        max_offsets_per_batch=n // 2 + 1_000, max_offsets_per_task=n // 4,
    )  # fmt: skip
    job = stream(source, event_time="at", key="key").window(tumbling("10 seconds"), retention="1 minute")
    query = job.aggregate(n=count(), total=sum_("x")).start(
        spark, checkpoint=tmp_path / "c", results=tmp_path / "r", errors=tmp_path / "e", shards=shards,
        local_dir=tmp_path / "local", trigger="0 seconds", until="end",
    )  # fmt: skip
    ended(query)
    assert coded == ["key"]
    reader = source.stream_reader()
    reader.code("key")
    pieces = reader.plan(reader.index(), ("t", 0), 0, n // 2 + 1_000)
    kinds = [batch.schema.field("value").type.field("key").type for piece in pieces for batch in reader.read(piece)]
    assert kinds == [CODED] * len(kinds), "what the job's tasks read"
    found = spark.read.parquet(str(tmp_path / "r")).where("reason in ('full', 'drain')")
    found = found.selectExpr("unix_millis(window_start) as start", "key", "n", "total").toPandas()
    wanted = given.assign(start=given["at"] // 10_000 * 10_000).groupby(["start", "key"], dropna=False)["x"]
    wanted = wanted.agg(n="count", total="sum").reset_index()

    def sorted_rows(frame: pd.DataFrame) -> list[list[Any]]:
        columns = frame.assign(key=frame["key"].fillna("none"))[["start", "key", "n", "total"]]
        return sorted([int(start), key, int(n), int(total)] for start, key, n, total in columns.to_numpy())

    assert sorted_rows(found) == sorted_rows(wanted)
