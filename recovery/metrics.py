"""Metrics of a running query for Prometheus: what `RewindQuery.progress` knows, read when it is asked for.

Counters begin at the start of the process. Gauges per shard are of its newest micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from recovery.supervisor import Progress, RewindQuery

DEFAULT_PORT = 9108
PREFIX = "rewind"

_COUNTERS = {
    "micro_batches": "Micro-batches published",
    "rows": "Messages folded",
    "results": "Result rows emitted",
    "errors": "Error rows emitted",
    "restores": "Times that state was restored",
    "moves": "Times that a task fetched its shard's state from packages",
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
        yield GaugeMetricFamily(f"{PREFIX}_version", "Newest published micro-batch", progress.version)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, getattr(progress, name))
        gauges: dict[str, GaugeMetricFamily] = {}
        for shard in progress.last:
            for name, value in shard.get("metrics", {}).items():
                if not isinstance(value, int | float) or name == "drained":
                    continue
                family = gauges.setdefault(
                    name,
                    GaugeMetricFamily(f"{PREFIX}_shard_{name}", f"{name} of the newest micro-batch", labels=["shard"]),
                )
                family.add_metric([str(shard["shard"])], value)
        yield from gauges.values()


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
    collector = ProgressCollector(lambda: query.progress)
    registry.register(collector)
    server, thread = start_http_server(port, addr=address, registry=registry)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()
        registry.unregister(collector)

    return close
