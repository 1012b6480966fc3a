"""An archive that changes while a job reads it, and between its starts: by name, and the checkpoint goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend import archive, count, stream, tumbling
from backend.errors import SourceInvalid, SourceWentBack
from backend.sources.archive_files import WRITE_SCHEMA
from tests.support.waiting import ended, until

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

START = 1_700_000_040_000  # a full minute


def put(directory: Path, name: str, offsets: range, topic: str = "t") -> None:
    n = len(offsets)
    times = pa.array([START] * n, pa.timestamp("ms", tz="UTC"))
    values = [json.dumps({"at": START, "n": offset}).encode() for offset in offsets]
    directory.mkdir(exist_ok=True)
    rows = pa.table([[topic] * n, [0] * n, list(offsets), times, [None] * n, values], schema=WRITE_SCHEMA)
    pq.write_table(rows, directory / f".{name}")
    (directory / f".{name}").rename(directory / name)


def start(spark: Any, path: Path, until: str | None = "end", **options: Any) -> Any:
    source = archive(path / "a", value="at long, n long", **options)
    job = stream(source, event_time="at").window(tumbling("1 minute"), retention="1 hour").aggregate(n=count())
    return job.start(
        spark, checkpoint=path / "c", results=path / "r", errors=path / "e", shards=1, local_dir=path / "local",
        trigger="0 seconds", until=until,
    )  # fmt: skip


def test_a_stray_topic_and_lower_offsets(spark: Any, tmp_path: Path) -> None:
    put(tmp_path / "a", "offset.parquet", range(1))
    rows = pq.read_table(tmp_path / "a" / "offset.parquet")
    pq.write_table(rows.set_column(2, "offset", pa.array(["0"])), tmp_path / "a" / "offset.parquet")
    with pytest.raises(ValueError, match=r"offset\.parquet: the column offset is string"):
        start(spark, tmp_path)
    assert not any((tmp_path / name).exists() for name in "cre"), "nothing was made"
    (tmp_path / "a" / "offset.parquet").unlink()

    put(tmp_path / "a", "later.parquet", range(5, 10))
    query = start(spark, tmp_path, until=None)
    until(lambda: query.progress.rows >= 5 or not query.is_active, what="5 messages")
    put(tmp_path / "a", "stray.parquet", range(3), topic="u")
    with pytest.raises(SourceInvalid, match=r"another topic, 'u'.*stray\.parquet.*topics=\['t'\]"):
        ended(query)
    with pytest.raises(SourceInvalid, match=r"stray\.parquet"):
        start(spark, tmp_path)
    put(tmp_path / "a", "end.parquet", range(10, 12))
    ended(start(spark, tmp_path, topics=["t"]))
    drained = spark.read.parquet(str(tmp_path / "r")).where("reason = 'drain'").collect()
    assert [row["n"] for row in drained] == [7]

    (tmp_path / "a" / "stray.parquet").unlink()
    put(tmp_path / "a", "earlier.parquet", range(5))
    with pytest.raises(SourceWentBack, match=r"earlier\.parquet, t-0.*began with 5 and reads 12 next"):
        start(spark, tmp_path)
