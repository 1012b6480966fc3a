"""Rewind's pytest plugin: `pytest -p recovery.testing`, or by itself where the package is installed.

Importing it costs next to nothing: neither PySpark nor a Kafka client is loaded before a fixture is used.
"""

from __future__ import annotations

from recovery.testing.fixtures import kafka_broker, kafka_topics, local_kafka_broker, secured_kafka_broker

__all__ = ["kafka_broker", "kafka_topics", "local_kafka_broker", "secured_kafka_broker"]
