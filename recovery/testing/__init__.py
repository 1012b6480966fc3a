"""Rewind's pytest plugin: `pytest -p recovery.testing`, or by itself where the package is installed.

Fixtures: `kafka_broker`, `local_kafka_broker`, `secured_kafka_broker`, `kafka_topics`. And for jobs without Spark or
Kafka: `OperatorTester`. Importing this costs next to nothing: neither PySpark nor a Kafka client nor RocksDB is loaded
before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recovery.testing.fixtures import (
    kafka_broker,
    kafka_topics,
    local_kafka_broker,
    secured_kafka_broker,
    session_kafka_broker,
)

if TYPE_CHECKING:
    from recovery.testing.broker import LocalBroker
    from recovery.testing.events import Event, Topics
    from recovery.testing.tester import Emitted, OperatorTester

__all__ = [
    "kafka_broker",
    "local_kafka_broker",
    "secured_kafka_broker",
    "session_kafka_broker",
    "kafka_topics",
    "LocalBroker",
    "Event",
    "Topics",
    "OperatorTester",
    "Emitted",
]

_HOMES = {
    "LocalBroker": "recovery.testing.broker",
    "Event": "recovery.testing.events",
    "Topics": "recovery.testing.events",
    "OperatorTester": "recovery.testing.tester",
    "Emitted": "recovery.testing.tester",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
