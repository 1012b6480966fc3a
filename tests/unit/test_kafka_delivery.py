"""A cluster that does not answer ends a delivery as a whole, after the patience, and nothing of it is sent later."""

from __future__ import annotations

import json
import time

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from backend.errors import SinkUnavailable
from backend.kafka_client.refusals import ClientErrors
from backend.kafka_client.settings import KafkaSettings
from backend.sinks.kafka.delivery import Delivery, Publication
from backend.sinks.kafka.sink import produce_frames
from tests.support.packed import pack

NOBODY = KafkaSettings("127.0.0.1:1")
FRAMES = pa.schema(
    [("shard", pa.int32()), ("version", pa.int64()), ("results", pa.binary()), ("errors", pa.binary())]
).append(pa.field("metrics", pa.string()))


@pytest.mark.parametrize("more", [{}, {"queue.buffering.max.messages": 10}])
@pytest.mark.slow
def test_nothing_expires_alone_and_all_is_given_up_together(more):
    """With a full queue the wait is in `send`, else in `finish`."""
    started = time.monotonic()
    delivery = Delivery(NOBODY, {"t": 5000}, 1.0, {"message.timeout.ms": 0} | more)
    with pytest.raises(KafkaException, match="none was acknowledged for 1 s"):
        for _ in range(100):
            delivery.send("t", b"v", b"k")
        # beside them it counts events that nobody has polled, such as a refused connection
        assert len(delivery.producer) >= 100, "nothing is given up before its time"
        delivery.finish()
    assert 1.0 <= time.monotonic() - started < 10
    delivery.producer.flush(5)
    assert len(delivery.producer) == 0, "nothing of it is sent later"


class Purging:
    """A client that reports messages which it threw away, and then the one that it did so for."""

    def __init__(self, delivery: Delivery, cause: int | None) -> None:
        self._left = [KafkaError._PURGE_QUEUE, KafkaError._PURGE_QUEUE, cause, KafkaError._PURGE_QUEUE]
        self._report, self.errors = delivery._refused, ClientErrors()

    def __len__(self) -> int:
        return len(self._left)

    def flush(self, timeout: float) -> int:
        """Serve one report."""
        code = self._left.pop(0)
        if code is not None:
            self._report(KafkaError(code), None)
        return len(self._left)

    def purge(self) -> None:
        """Let the rest be reported at once."""
        flush = self.flush
        self.flush = lambda timeout: [flush(timeout) for _ in range(len(self))] and 0


@pytest.mark.parametrize(
    ("cause", "named"),
    [(KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.MSG_SIZE_TOO_LARGE), (None, KafkaError._PURGE_QUEUE)],
)
def test_a_delivery_names_the_message_for_which_others_were_thrown_away(cause, named):
    delivery = Delivery(NOBODY, {"t": 5000}, 1.0, {})
    delivery.producer = Purging(delivery, cause)
    with pytest.raises(KafkaException) as found:
        delivery.finish()
    assert found.value.args[0].code() == named


@pytest.mark.slow
def test_a_task_says_that_the_cluster_does_not_answer():
    rows = [{"shard": 0, "version": 3, "results": pack(pa.table({"n": [1, 2]})), "errors": None, "metrics": None}]
    to = Publication(NOBODY, {"results": "r", "errors": "e"}, (), "q", {"r": 5000, "e": 5000}, 1.0)
    batch = pa.RecordBatch.from_pylist(rows, schema=FRAMES)
    with pytest.raises(SinkUnavailable, match=r"127\.0\.0\.1:1, r, e.*2 messages wait, none was acknowledged for 1 s"):
        list(produce_frames(iter([batch]), to=to, version=3))


def test_a_tasks_report_is_what_the_driver_reads(monkeypatch):
    monkeypatch.setattr(Delivery, "finish", lambda self: None)
    value = pack(pa.table({"text": ["x" * 9000, "y"]}))
    rows = [{"shard": 0, "version": 3, "results": value, "errors": None, "metrics": '{"rows": 2}'}]
    to = Publication(NOBODY, {"results": "r", "errors": "e"}, (), "q", {"r": 5000, "e": 5000}, 1.0)
    (report,) = produce_frames(iter([pa.RecordBatch.from_pylist(rows, schema=FRAMES)]), to=to, version=3)
    (row,) = report.to_pylist()
    found = json.loads(row["report"])
    assert (found["shard"], found["metrics"], found["cut"]) == (0, {"rows": 2}, [1, ["3-0-0 for r"]])
