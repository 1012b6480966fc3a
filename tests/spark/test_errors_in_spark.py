"""What the errors hold of a refused message, and how its bytes come back from the source: rows and bundles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backend import archive, count, fetch_refused, stream, tumbling
from backend.errors import HistoryLost
from backend.sources.archive_files import write_archive
from tests.support.waiting import ended

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

START = 1_700_000_040_000  # a full minute, years ago: the job reads an old archive
DAY = 86_400_000
TIMES = [START, START + DAY + 1_000, None, START + 7_200_000, START, 2**62 + 1]
WRITTEN = [START, START, START, START + 7_200_000, START + 7_200_000, START]
REASONS = {1: "in_future", 2: "no_event_time", 4: "out_of_retention", 5: "out_of_range"}
"""By hand: offset 1 is a day and a second after it was written; 4 is two hours late, and retention is one."""


def value_of(offset: int) -> dict[str, Any]:
    return {"key": f"k{offset}", "at": TIMES[offset], "more": "not read by the job"}


def write(path: Path, typed: bool) -> None:
    n = len(TIMES)
    rows = [value_of(offset) for offset in range(n)]
    kind = pa.struct([("key", pa.string()), ("at", pa.int64()), ("more", pa.string())])
    values = pa.array(rows, kind) if typed else pa.array([json.dumps(row, indent=1).encode() for row in rows])
    table = pa.table(
        {
            "topic": ["t"] * n,
            "partition": pa.array([3] * n, pa.int32()),
            "offset": pa.array(range(n), pa.int64()),
            "timestamp": pa.array(WRITTEN, pa.timestamp("ms", tz="UTC")),
            "key": pa.array([b"K%d" % offset for offset in range(n)]),
            "value": values,
        }
    )
    write_archive(path, table)


@pytest.mark.parametrize("typed", [False, True])
def test_every_refused_message_is_told_with_its_bytes(spark: Any, tmp_path: Path, typed: bool) -> None:
    write(tmp_path / "archive", typed)
    fields = "key string, at long, more string"
    source = archive(tmp_path / "archive", value=fields, format="typed" if typed else "json")
    query = (
        stream(source, event_time="at", key="key")
        .window(tumbling("1 minute"), retention="1 hour")
        .aggregate(n=count())
        .start(
            spark, checkpoint=tmp_path / "c", results=tmp_path / "r", errors=tmp_path / "e", shards=1,
            local_dir=tmp_path / "local", trigger="0 seconds", until="end",
        )
    )  # fmt: skip
    ended(query)
    told = [p["observedMetrics"]["rewind"] for p in query.query.recentProgress if p["observedMetrics"]]
    assert sum(figures["received"] or 0 for figures in told) == len(TIMES)
    assert sum(figures["errors_in_future"] or 0 for figures in told) == 1
    errors = spark.read.parquet(str(tmp_path / "e"))
    rows = {row["offset"]: row for row in errors.collect()}
    assert {offset: row["reason"] for offset, row in rows.items()} == REASONS
    assert rows[5]["event_time"] is None, "Spark has no date for it"
    assert f"the event time is {2**62 + 1} ms" in rows[5]["detail"]
    for offset, row in rows.items():
        assert (row["topic"], row["partition"]) == ("t", 3)
        assert round(row["timestamp"].timestamp() * 1000) == WRITTEN[offset]
        late = row["reason"] == "out_of_retention"
        assert row["key"] == (None if late else b"K%d" % offset)
        if late:
            assert row["value"] is None, "its fields may have been combined with others"
        elif typed:
            assert json.loads(row["value"]) == {name: value_of(offset)[name] for name in ("key", "at")}
        else:
            assert bytes(row["value"]) == json.dumps(value_of(offset), indent=1).encode()

    found = {
        row["offset"]: row for row in fetch_refused(spark, source, errors.where("reason <> 'in_future'")).collect()
    }
    assert sorted(found) == [2, 4, 5]
    for offset, row in found.items():
        assert (row["topic"], row["partition"], row["key"]) == ("t", 3, b"K%d" % offset)
        assert round(row["timestamp"].timestamp() * 1000) == WRITTEN[offset]
        own = row["value"].asDict() if typed else json.loads(bytes(row["value"]))
        assert own == value_of(offset)
    if typed:
        return
    assert fetch_refused(spark, source, errors.where("reason = 'malformed'")).collect() == []
    with pytest.raises(ValueError, match="limit=3"):
        fetch_refused(spark, source, errors, limit=3)
    with pytest.raises(ValueError, match="lacks partition, offset"):
        fetch_refused(spark, source, errors.select("topic"))
    with pytest.raises(HistoryLost, match="needed are 1 to 9"):
        fetch_refused(spark, source, errors.selectExpr("topic", "partition", "if(offset = 5, 9L, offset) offset"))
