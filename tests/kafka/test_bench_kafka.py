"""The benchmark of a changelog in Kafka in its small form: what was written is read and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.benches import run_quick

pytestmark = pytest.mark.kafka


def test_a_changelog_is_read_and_restored(kafka_broker: Any, tmp_path: Path) -> None:
    environment = {"KAFKA_BOOTSTRAP_SERVERS": kafka_broker.settings.servers}
    rows = run_quick("changelog_kafka", tmp_path / "out", environment)
    assert [(row["what"], row["rows"]) for row in rows["changelog-kafka"]] == [("read", 20_000), ("restore", 20_000)]
