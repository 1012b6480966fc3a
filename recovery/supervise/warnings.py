"""What a person should look at in a micro-batch that went well: clocks that jump, and most of it refused.

One message with a wrong clock can close every window and send all that follows to the errors; a wrong unit of the event
time, or a field that is no longer there, sends everything there. Neither is a failure, so nothing else says it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def warnings_of(version: int, shards: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return at most two warnings about a micro-batch.

    Args:
        version: Spark's batch id.
        shards: Per shard what the sink's `publish` gave: its counters are below `metrics`.

    >>> warnings_of(7, [{"metrics": {"received": 4, "errors": 3, "errors_in_future": 2, "errors_malformed": 1}}])
    ['micro-batch 7: 3 of 4 messages were refused (in_future 2, malformed 1)']
    >>> warnings_of(8, [{"metrics": {"received": 0, "errors": 1, "errors_out_of_retention": 1}}])
    ['micro-batch 8: 1 messages, of which some waited, were refused (out_of_retention 1)']
    >>> warnings_of(7, [{"metrics": {"received": 4, "errors": 2, "leaps": 1, "leap": "t-0, offset 3: by 9 ms"}}])
    ['micro-batch 7: watermarks moved by more than max_ahead with 1 messages: t-0, offset 3: by 9 ms']
    """
    metrics = [shard.get("metrics", {}) for shard in shards]
    found = []
    leaps = sum(int(one.get("leaps", 0)) for one in metrics)
    if leaps:
        which = next(one["leap"] for one in metrics if one.get("leap"))
        found.append(f"micro-batch {version}: watermarks moved by more than max_ahead with {leaps} messages: {which}")
    errors, received = (sum(int(one.get(name, 0)) for one in metrics) for name in ("errors", "received"))
    if 2 * errors > received:
        reasons: Counter[str] = Counter()
        for one in metrics:
            for name, value in one.items():
                if name.startswith("errors_"):
                    reasons[name.removeprefix("errors_")] += int(value)
        counts = ", ".join(f"{name} {count}" for name, count in sorted(reasons.items()))
        # what waited from micro-batches before may be refused too
        many = f"{errors} of {received} messages" if errors <= received else f"{errors} messages, of which some waited,"
        found.append(f"micro-batch {version}: {many} were refused ({counts})")
    return found
