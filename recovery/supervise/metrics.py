"""Metrics of a running query for Prometheus: what `RewindQuery.progress` knows, read when it is asked for.

Counters begin at the start of the process. Gauges per shard are of its newest micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from recovery.supervise.supervisor import Progress, RewindQuery

DEFAULT_PORT = 9108
PREFIX = "rewind"

_NO_NAME = re.compile(r"[^a-zA-Z0-9_]")
"""What Prometheus takes in no name: a store of `process()` may be called anything. What comes to one name adds up."""
_COUNTERS = {
    "micro_batches": "Micro-batches published",
    "rows": "Messages folded",
    "results": "Result rows emitted",
    "errors": "Error rows emitted",
    "restores": "Times that the query was stopped to restore state",
    "adopted": "Times that a shard, restored beside the query, adopted what it had queued",
    "moves": "Times that a task fetched its shard's state from snapshots",
    "copied": "Bytes that a standby has given to copies of shards on other hosts",
}


class ProgressCollector:
    """Give a query's progress as metrics.

    Args:
        progress: Gives it, each time that Prometheus asks.
    """

    def __init__(self, progress: Callable[[], Progress]) -> None:
        self._progress = progress

    def collect(self) -> Iterator[Metric]:
        """Read the progress."""
        progress = self._progress()
        restoring = progress.restoring.items()
        yield GaugeMetricFamily(f"{PREFIX}_version", "Newest published micro-batch", progress.version)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, getattr(progress, name))
        for name, text, values in (
            ("queued", "Micro-batches queued while the state is restored", progress.queued),
            ("restoring_done", "Messages replayed of the restore under way", {s: a.records for s, a in restoring}),
            ("restoring_of", "Messages to replay", {s: a.of for s, a in restoring if a.of is not None}),
            ("restoring_rate", "Messages replayed a second", {s: a.rate for s, a in restoring}),
        ):
            yield _by_shard(name, text, values)
        gauges: dict[str, dict[str, float]] = {}
        for shard in progress.last:
            for name, value in shard.get("metrics", {}).items():
                if not isinstance(value, int | float) or name == "drained":
                    continue
                shards = gauges.setdefault(_NO_NAME.sub("_", name), {})
                shards[str(shard["shard"])] = shards.get(str(shard["shard"]), 0) + value
        for name, shards in gauges.items():
            yield _by_shard(f"shard_{name}", f"{name} of the newest micro-batch", shards)


def _by_shard(name: str, text: str, values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["shard"])
    for shard, value in values.items():
        family.add_metric([str(shard)], value)
    return family


def serve_metrics(
    query: RewindQuery, *, port: int = DEFAULT_PORT, address: str = "127.0.0.1", registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Serve a query's metrics over HTTP from a thread of this process, and what else is in the registry.

    Args:
        query: As `start()` gave it.
        port: 0 takes a free one.
        address: Where to listen; `0.0.0.0` to be reached from other hosts.
        registry: `PrometheusListener` counts restores in the same one by default.

    Returns:
        What ends it.
    """
    server, thread = start_http_server(port, addr=address, registry=registry)
    collector = ProgressCollector(lambda: query.progress)

    def close() -> None:
        registry.unregister(collector)
        end()

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    try:
        registry.register(collector)
    except ValueError:  # another query's are there
        end()
        raise
    return close
