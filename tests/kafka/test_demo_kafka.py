"""The demo on Kafka, small: killed by SIGKILL inside a micro-batch, disk lost, restored from two topics, proven."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recovery.demo.chapters import Failed
from recovery.demo.kafka import KafkaDemo
from recovery.demo.proof import prove_demo
from recovery.drill.flights import TOPIC

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.long]


def test_a_disaster_on_kafka_changes_nothing(spark: Any, kafka_broker: Any, kafka_topics: Any, tmp_path: Path) -> None:
    kafka_topics.adopt(TOPIC, f"{TOPIC}-changelog")
    text = io.StringIO()
    console = Console(file=text, width=200)
    story = KafkaDemo(tmp_path / "demo", console, days=30, offsets=300, settings=kafka_broker.settings)
    story.prepare()
    story.disaster()
    story.restart()
    assert story.observed.replayed > 0
    proof = prove_demo(spark, story.out)
    assert proof.holds, proof
    assert proof.malformed > 0
    assert not list((tmp_path / "demo" / "checkpoint" / "rewind").glob("changelog/*"))
    again = KafkaDemo(tmp_path / "again", console, days=1, offsets=400, settings=kafka_broker.settings)
    with pytest.raises(Failed, match="already"):
        again.prepare()
