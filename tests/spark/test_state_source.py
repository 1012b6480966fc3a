"""`spark.read.format("rewind")`: the committed state as a table, partition by shard, of older versions too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from recovery.inspect.data_source import RewindStateSource
from tests.support.windows import make_windows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.gentle]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("windows")
    make_windows(home)
    return home


@pytest.fixture
def reader(spark: SparkSession, home: Path):
    spark.dataSource.register(RewindStateSource)
    return lambda **options: spark.read.format("rewind").options(**options).load(str(home / "checkpoint"))


def test_windows(reader) -> None:
    rows = reader(table="windows").orderBy("start").collect()
    assert [(row.shard, row.start, row.end, row.messages) for row in rows] == [
        (0, 0, 10_000, 2),
        (0, 10_000, 20_000, 1),
        (0, 20_000, 30_000, 2),
    ]
    assert all(row.digest >= 0 for row in rows)


def test_an_older_version(reader) -> None:
    assert reader(table="windows", batchId=0).count() == 2
    with pytest.raises(Exception, match="lions"):
        reader(table="lions").count()


def test_all_shards_are_as_of_the_micro_batch_that_was_the_newest_when_it_was_planned(home: Path) -> None:
    """Tasks run at different times; the query goes on meanwhile."""
    source = RewindStateSource({"path": str(home / "checkpoint"), "table": "windows"}).reader(None)
    newest = max(home.glob("checkpoint/commits/[0-9]*"), key=lambda path: int(path.name))
    newest.rename(home / "commit")
    [planned] = source.partitions()
    (home / "commit").rename(newest)
    assert sum(batch.num_rows for batch in source.read(planned)) < 3
    [now] = source.partitions()
    assert sum(batch.num_rows for batch in source.read(now)) == 3


def test_rows_and_aggregates(reader) -> None:
    assert reader(table="rows").where("region = 'windows'").count() == 3
    assert {row.k for row in reader(table="aggregates").select("k").collect()} == {"anna", "bert"}


def test_bad_options_are_named(reader) -> None:
    with pytest.raises(Exception, match="colour"):
        reader(colour="red").schema  # noqa: B018
    with pytest.raises(Exception, match="batchId"):
        reader(batchId="newest").schema  # noqa: B018
