"""Metrics of a running query, as Prometheus reads them."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from recovery.supervise.metrics import serve_metrics
from recovery.supervise.supervisor import Progress


class Query:
    def __init__(self) -> None:
        self.progress = Progress(version=4, micro_batches=5, rows=1000, results=20, errors=3, restores=1)
        self.progress.last = [
            {"shard": 0, "metrics": {"rows": 7, "operate_ms": 1.5, "drained": -1, "note": "text"}},
            {"shard": 1, "metrics": {"rows": 9}},
            {"shard": 2},
        ]


def test_progress_is_served_as_it_is_when_asked():
    query, registry = Query(), CollectorRegistry()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    close = serve_metrics(query, port=port, registry=registry)
    try:
        query.progress.rows = 1001
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    finally:
        close()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert set(lines) == {
        "rewind_version 4.0",
        "rewind_micro_batches_total 5.0",
        "rewind_rows_total 1001.0",
        "rewind_results_total 20.0",
        "rewind_errors_total 3.0",
        "rewind_restores_total 1.0",
        "rewind_moves_total 0.0",
        "rewind_adopted_total 0.0",
        "rewind_copied_total 0.0",
        'rewind_shard_rows{shard="0"} 7.0',
        'rewind_shard_rows{shard="1"} 9.0',
        'rewind_shard_operate_ms{shard="0"} 1.5',
    }
    assert list(registry.collect()) == []


def test_a_port_that_is_taken_leaves_nothing_behind():
    registry = CollectorRegistry(auto_describe=True)  # as the one that is taken by default
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="in use"):
            serve_metrics(Query(), port=other.getsockname()[1], registry=registry)
    assert list(registry.collect()) == []
    close = serve_metrics(Query(), port=0, registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        serve_metrics(Query(), port=0, registry=registry)
    close()
    serve_metrics(Query(), port=0, registry=registry)()
