"""Listeners are told what happens to a shard, and never shown a number that means something else."""

from __future__ import annotations

import io
import logging

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from recovery.inspect.displays import ProgressListener, PrometheusListener
from recovery.listener import Listeners, LoggingListener, RestoreListener, Restoring

RANGES = {(0, 1): (10, 2010), (1, 0): (5, 6)}
KNOWN = Restoring(
    3, "00000000000000000007_ab", "checksum mismatch in 000012.sst", "replay", 2000, RANGES, {0: "orders"}
)
UNKNOWN = Restoring(4, "00000000000000000007_cd", "no local state", "snapshot")


def run(listener: RestoreListener, restoring: Restoring) -> None:
    listener.start(restoring)
    listener.batch(restoring, {(0, 1): 1010}, 1000, 64_000)
    listener.batch(restoring, {(0, 1): 2010}, 1000, 64_000)
    listener.end(restoring, 2000, 128_000, 0.5)


def test_the_log_says_why_and_how_fast(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rewind.restore"):
        run(LoggingListener(), KNOWN)
        LoggingListener().suspended(UNKNOWN, "the source is gone")
    start, end, suspended = caplog.messages
    assert "shard 3 by replay" in start
    assert "checksum mismatch in 000012.sst" in start
    assert "2,000 records" in start
    assert "orders partition 1: offsets 10 to 2009, stream 1 partition 0: offsets 5 to 5" in start
    assert "2,000 records, 128,000 bytes in 0.500 s (4,000 per second)" in end
    assert "the source is gone" in suspended


def test_the_log_does_not_divide_by_no_time(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rewind.restore"):
        LoggingListener().end(UNKNOWN, 0, 0, 0.0)
    assert "per second" not in caplog.text


@pytest.mark.parametrize("restoring", [KNOWN, UNKNOWN])
def test_the_bar_shows_no_sentinels(restoring: Restoring) -> None:
    out = io.StringIO()
    run(ProgressListener(Console(file=out, force_terminal=True, width=160)), restoring)
    text = out.getvalue()
    assert "2,000/2,000" in text
    assert "done in 0.50 s" in text
    assert restoring.why in text
    for sentinel in ("-1", "None", "nan", "inf"):
        assert sentinel not in text


def test_the_bar_of_a_shard_that_is_restored_again() -> None:
    out = io.StringIO()
    listener = ProgressListener(Console(file=out, force_terminal=True, width=160))
    listener.start(KNOWN)
    listener.start(UNKNOWN)
    listener.suspended(KNOWN, "the disk is full")
    run(listener, KNOWN)
    listener.end(UNKNOWN, 5, 5, 0.1)
    assert "suspended: the disk is full" in out.getvalue()


def test_prometheus_counts() -> None:
    registry = CollectorRegistry()
    listener = PrometheusListener(registry)
    run(listener, KNOWN)
    listener.start(KNOWN)
    labels = {"shard": "3", "how": "replay"}

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"rewind_restore_{name}", labels)

    assert value("started_total") == 2
    assert value("completed_total") == 1
    assert value("running") == 1
    assert value("records_total") == 2000
    assert value("bytes_total") == 128_000
    assert value("seconds_total") == 0.5
    listener.suspended(KNOWN, "stopped")
    assert value("running") == 0
    assert value("suspended_total") == 1


def test_a_listener_that_fails_is_logged_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    class Broken(LoggingListener):
        def start(self, restoring: Restoring) -> None:
            raise RuntimeError("no disk for the log")

    class Good(LoggingListener):
        def start(self, restoring: Restoring) -> None:
            heard.append(restoring.why)

    Listeners([Broken(), Good()]).start(KNOWN)
    assert heard == [KNOWN.why]
    assert "no disk for the log" in caplog.text
