"""When a micro-batch is planned: a moment after a trigger that has just fired, so that it reads what closes windows."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from backend.kafka_client.admin import End
from backend.kafka_client.settings import KafkaSettings
from backend.sources import kafka_reader
from backend.sources.kafka_reader import KafkaStreamReader
from backend.spark.reading import behind_trigger, with_read


@pytest.mark.parametrize(
    ("now_ms", "trigger_ms", "waited_ms"),
    [
        (1_700_000_000_000.0, 1_000, 50.0),  # a twentieth of a second
        (1_700_000_000_012.0, 1_000, 38.0),
        (1_700_000_000_050.0, 1_000, 0.0),
        (1_700_000_000_700.0, 1_000, 0.0),  # the last micro-batch took longer: no trigger fired now
        (1_700_000_000_000.0, 60_000, 0.0),  # 20 seconds behind a whole minute
        (1_700_000_040_000.0, 60_000, 50.0),  # at most so long
        (1_700_000_000_000.0, 200, 10.0),
    ],
)
def test_a_look_waits_out_the_first_twentieth_of_an_interval(now_ms: float, trigger_ms: int, waited_ms: float) -> None:
    done: list[Any] = []
    look = behind_trigger(
        lambda *given: done.append(given) or "end", trigger_ms, lambda: now_ms, lambda s: done.append(s * 1000)
    )
    assert look({"next": 1}, 5) == "end"
    assert done == [*([pytest.approx(waited_ms)] if waited_ms else []), ({"next": 1}, 5)]


def test_the_ends_that_a_look_behind_the_trigger_finds_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the reader that Spark asks for both: the lag of its progress is as of its last look."""
    found, clients = [10, 25, 40], list[object]()
    monkeypatch.setattr(kafka_reader, "admin_client", lambda _: clients.append(object()) or clients[-1])
    monkeypatch.setattr(kafka_reader, "ends", lambda *_, **__: {("t", 0): End(found.pop(0), 0)})
    looks = KafkaStreamReader(KafkaSettings("h:1"), ("t",), "read_committed", None, 1000)
    reader: Any = with_read(looks, iter, 1)
    start = {"t": {"0": 10}}
    assert reader.reportLatestOffset() == {"t": {"0": 10}}
    for end in (25, 40):
        assert reader.latestOffset(start, ReadAllAvailable()) == {"t": {"0": end}}
        assert reader.reportLatestOffset() == {"t": {"0": end}}
    assert len(clients) == 1
