"""Produce the departures of New York's airports to a topic, at a pace; ends when the year is over."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from backend.kafka_client.settings import KafkaSettings
from recovery.demo.produce import create_topic, in_order, produce
from recovery.drill.flights import AIRPORTS, make_archive


def main() -> None:
    """Create the topic and fill it; a topic that is there already is left alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--per-second", type=int, default=2000)
    parser.add_argument("--days", type=int, default=None, help="only the first days of 2013")
    options = parser.parse_args()
    settings = KafkaSettings.from_environment(options.servers)
    if not create_topic(settings, options.topic, len(AIRPORTS)):
        print(f"topic {options.topic} is there already")
        return
    with tempfile.TemporaryDirectory() as scratch:
        rows = in_order(make_archive(Path(scratch) / "archive", days=options.days))
    produce(settings, options.topic, rows, per_second=options.per_second)
    print(f"{rows.num_rows} messages produced to {options.topic}")


if __name__ == "__main__":
    main()
