"""The peer of `bench.kafka`: the same windows in Quix Streams, in a process of its own with an environment of its own.

`python bench/quix_peer.py <json>`; the options are those of `Options`. It ends when no message came for `idle_s` and
prints one JSON line: messages, wall-clock time of the first and of the last one, and when it was told to begin.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from quixstreams import Application
from quixstreams.dataframe.windows import Collect, Count, Max, Sum


@dataclass
class Options:
    """What `bench.kafka` says."""

    servers: str
    topic: str
    output: str
    group: str
    state_dir: str
    full_state: bool
    idle_s: float
    begin_from: str = "earliest"
    grace_ms: int = 0


def main() -> None:
    """Run until the topic is read."""
    options = Options(**json.loads(sys.argv[1]))
    began = time.time()
    seen: dict[str, Any] = {"messages": 0, "first": 0.0, "last": 0.0}

    def processed(topic: str, partition: int, offset: int) -> None:
        now = time.time()
        seen["messages"] += 1
        seen["first"] = seen["first"] or now
        seen["last"] = now

    app = Application(
        broker_address=options.servers,
        consumer_group=options.group,
        auto_offset_reset=options.begin_from,
        state_dir=options.state_dir,
        on_message_processed=processed,
        loglevel="INFO",
    )
    rows = app.dataframe(app.topic(options.topic, value_deserializer="json"))
    windows = rows.tumbling_window(10_000, grace_ms=options.grace_ms)
    if options.full_state:
        found = windows.agg(values=Collect("x")).final()
        found = found.apply(lambda window: {**window, "values": len(window["values"])})
    else:
        found = windows.agg(n=Count(), total=Sum("x"), worst=Max("x")).final()
    found.to_topic(app.topic(options.output, value_serializer="json"))
    app.run(timeout=options.idle_s)
    print(json.dumps({"began": began, **seen}), flush=True)


if __name__ == "__main__":
    main()
