"""Exactly once into topics: no row twice and none missing, wherever the driver dies around the one transaction."""

from __future__ import annotations

from typing import Any

import pytest

from backend import kafka_sink
from tests.kafka.test_kafka_sink import read
from tests.support.sink_story import MINUTE_MS, Player, Story, check_seen, collected

pytestmark = [pytest.mark.kafka, pytest.mark.gentle, pytest.mark.long]

VALUES = ("reason", "shard", "window_start", "origin", "n", 'odd "total".x')


@pytest.mark.parametrize("seed", [17, 18])
def test_fifty_deaths(kafka_broker: Any, kafka_topics: Any, seed: int) -> None:
    story = Story(seed, batches=50)  # each has one commit to die at, not two as with tables
    topics = kafka_topics.create(), kafka_topics.create()
    kafka_topics.adopt(f"{topics[0]}-commits")
    settings = kafka_broker.settings
    player = Player(
        lambda: kafka_sink(*topics, servers=settings),
        "",
        story,
        55,  # the last micro-batch may have nowhere left to die at
        run_tasks=collected,
        commits=("_transact",),
        tables=lambda sink: [sink._writer],
        is_out=lambda sink, version: sink._writer.check(version),
    )
    player.run()
    found = read(settings, topics[0])
    assert [row["window_end"] - row["window_start"] for row in found] == [MINUTE_MS] * len(found)
    assert sorted((row["id"], *(row[name] for name in VALUES)) for row in found) == sorted(story.log)
    errors = sorted((row["id"], row["offset"]) for row in read(settings, topics[1]))
    assert errors == sorted(row for rows in story.errors for row in rows)
    check_seen(player.seen, 50)
