"""Restoring a lost disk from Kafka beside Quix Streams: `python -m bench.kafka_restore [--quick] [--messages N]`.

The job of `bench.kafka` that keeps every message, with windows that stay open, so all messages are in the state. Both
run to the end of a topic, lose their disks, and start again. Compared are messages of state per second, from the
restore's start to its end (Quix's topic has a tenth of the messages, and it is one process): ours replays the JSON of
the topic and reads windows' metadata from the changelog's topic; Quix reads its changelog, as it logs. `s before`:
between knowing that state is missing and starting.
"""

from __future__ import annotations

import json
import re
import tempfile
import uuid
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.kafka import Ours, Quix, beside_peers, fill
from bench.restore import Clock
from bench.session import session
from bench.table import report
from recovery.testing.broker import Broker, open_broker

DAY_MS = 86_400_000
STARTED = "The application started"
BEGAN, ENDED = "Beginning recovery check", "Recovery process complete"


def ours(spark: Any, broker: Broker, topic: str, messages: int, directory: Path) -> dict[str, Any]:
    """Restore our state."""
    job = Ours(spark, broker, topic, directory, full_state=True, per=max(1, messages // 2), retention="1 day")
    assert job.run()["messages"] == messages
    job.lose_state()
    with Clock() as clock:
        assert job.run(clock)["restores"] == 1
    assert clock.records >= messages, clock.records
    return {"who": "Rewind", "messages": messages, "s before": clock.began - clock.failed,
            "s to restore": clock.ended - clock.began}  # fmt: skip


def quix(python: Path, broker: Broker, topic: str, messages: int, directory: Path) -> dict[str, Any]:
    """Restore the peer's."""
    job = Quix(python, broker, topic, directory, full_state=True, n=1, grace_ms=DAY_MS)
    assert job.run()["messages"] == messages
    job.lose_state()
    before = len(job.log())
    job.run()
    started, began, ended = (logged(job.log()[before:], text) for text in (STARTED, BEGAN, ENDED))
    return {"who": "Quix Streams", "messages": messages, "s before": began - started, "s to restore": ended - began}


def logged(log: str, text: str) -> float:
    """Give the seconds at which the peer logged something.

    Raises:
        ValueError: It did not: nothing was restored, or it says it in other words.
    """
    found = re.search(rf"^\[([^\]]+)\].*{re.escape(text)}", log, re.MULTILINE)
    if found is None:
        raise ValueError(f"the peer did not log {text!r}: {log[-1000:]}")
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    options = beside_peers("kafka_restore", __doc__, 5_000_000, arguments)
    messages = 20_000 if options.quick else options.messages
    broker, close = open_broker()
    try:
        long, short = (f"restored-{uuid.uuid4().hex[:8]}" for _ in range(2))
        fill(broker, long, messages, 10_000)
        fill(broker, short, messages // 10, 10_000)
        with session() as spark, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            places = [Path(name) / who for who in ("ours", "quix")]
            for place in places:
                place.mkdir()
            rows = [
                ours(spark, broker, long, messages, places[0]),
                quix(options.peers, broker, short, messages // 10, places[1]),
            ]
    finally:
        close()
    for row in rows:
        row["messages/s"] = row["messages"] / row["s to restore"]
    for row in rows:
        row["Rewind / this"] = rows[0]["messages/s"] / row["messages/s"]
        print(json.dumps(row), flush=True)
    report("kafka-restore", options, "Restoring a lost disk from Kafka, two cores, every message kept", rows, [])


if __name__ == "__main__":
    main()
