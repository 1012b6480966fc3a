"""The snippets of docs/ that need a broker, run as they stand there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from backend import archive, count, stream, tumbling
from recovery.drill.data import made_flights
from recovery.drill.flights import archive_of
from tests.kafka.test_kafka_sink import read
from tests.support.snippets import run

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.gentle]

HOUR = 3_600_000
ENDS = {"checkpoint=": 'until="end", trigger="0 s", checkpoint='}


def test_a_job_on_kafka(spark: Any, kafka_broker: Any, kafka_topics: Any, tmp_path: Path) -> None:
    topic = kafka_topics.create()
    kafka_topics.produce(topic, [{"origin": "JFK", "delay": 1.0, "scheduled": row * HOUR // 4} for row in range(8)])
    changed = {
        "host:9092": kafka_broker.settings.servers,
        '"departures"': repr(topic),
        "departures-changelog": f"{topic}-changelog",
        "/data": str(tmp_path),
        **ENDS,
    }
    run("docs/kafka.md:1", {"spark": spark}, changed)["query"].await_termination()
    rows = pq.read_table(tmp_path / "windows").to_pylist()
    assert sorted(row["flights"] for row in rows) == [4, 4]


class Message:
    """A message as a client's consumer gives it."""

    def __init__(self, row: dict[str, Any], topic: str) -> None:
        self._row, self._topic = row, topic

    def value(self) -> bytes:
        return json.dumps(self._row).encode()

    def topic(self) -> str:
        return self._topic

    def partition(self) -> int:
        return 0


def test_a_sink_and_its_reader(spark: Any, kafka_broker: Any, kafka_topics: Any, tmp_path: Path) -> None:
    results, errors = kafka_topics.create(), kafka_topics.create()
    kafka_topics.adopt(f"{results}-commits")
    archive_of(made_flights(1), tmp_path / "departures")
    pipeline = (
        stream(archive(tmp_path / "departures", value="origin string"), key="origin")
        .window(tumbling("1 hour"), retention="1 hour", max_ahead=None)
        .aggregate(n=count())
    )
    changed = {
        "host:9092": kafka_broker.settings.servers,
        '"windows"': repr(results),
        '"windows-errors"': repr(errors),
        "/data": str(tmp_path),
        **ENDS,
    }
    given = {"spark": spark, "pipeline": _Kept(pipeline)}
    run("docs/sinks.md:4", given, changed)
    given["pipeline"].query.await_termination()
    rows = read(kafka_broker.settings, results)
    assert len({row["id"] for row in rows}) == len(rows) > 20

    used: list[dict[str, Any]] = []
    kept: list[Any] = []
    again = [Message(row, results) for row in [*rows, *rows]]
    run("docs/sinks.md:6", {"consumer": again, "use": used.append, "keep": kept.append, "state_of_before": None})
    assert [row["id"] for row in used] == [row["id"] for row in rows]
    assert json.loads(json.dumps(kept[0])) == kept[0]


class _Kept:
    """A pipeline that keeps the query that it started."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self.query: Any = None

    def start(self, *arguments: Any, **options: Any) -> Any:
        self.query = self._pipeline.start(*arguments, **options)
        return self.query
