"""Exact offset ranges of source partitions, read with confluent-kafka where a task runs.

A range ends where it was said to end: at a message behind it, or where the broker says that nothing more is there to be
seen (the rest may be markers of transactions, or aborted). Offsets that are gone are an error, and so is a broker that
gives nothing for `STALL_S`. One that has just come up may not know the topic yet: it is asked again after `SETTLE_S`
without a message. No group's offsets are touched.

A process keeps the clients that it used last, without an assignment: connections and what they know of the topics stay,
messages do not.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import confluent_kafka
import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from pyspark.sql.pandas.types import to_arrow_schema

from backend.chunks import repeated
from backend.errors import HistoryLost, RewindError, SourceDamaged, SourceUnavailable, SourceWentBack
from backend.kafka_client.loss import KEEP
from backend.kafka_client.reader import next_messages
from backend.kafka_client.refusals import MISSING, REFUSALS, hearing, hidden, named
from backend.kafka_client.settling import SETTLE_S
from backend.sources.formats import record_schema
from backend.sources.kafka_watch import ANEW

if TYPE_CHECKING:
    from backend.sources import OffsetRange

STALL_S = 120.0  # Spark's connector waits as long
WAIT_S = 1.0
ASK_S = 10.0
EMPTY_TRIES = 3
AGAIN_S = 0.5  # as long as the client waits after a batch that it cannot parse
BULK = 10_000
"""Messages taken at a time, if so many have come: the client holds no more than `queued.max.messages.kbytes`."""
IDLE_CLIENTS = 2

READING = {
    "group.id": "rewind-reader",  # asked for by the client; no group is joined
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    "enable.partition.eof": "true",
    "auto.offset.reset": "error",
    "check.crcs": "true",
    "fetch.message.max.bytes": str(8 * 1024 * 1024),
    "queued.min.messages": "100000",
    "queued.max.messages.kbytes": str(32 * 1024),
    "fetch.queue.backoff.ms": "5",  # a second otherwise, each time the queue was full
    "fetch.wait.max.ms": "100",
    "topic.metadata.propagation.max.ms": "5000",  # a client that is new says for so long nothing of an unknown topic
    "log_level": "0",
}

RECORDS = to_arrow_schema(record_schema(), timezone="UTC")

_DAMAGE = frozenset({KafkaError._BAD_MSG, KafkaError._NOT_IMPLEMENTED})
"""Codes of batches that the client cannot parse."""

_idle: dict[str, Any] = {}


_LAST_MS = (2**63 - 1) // 1000
"""Of what microseconds can say; a record's timestamp beyond (nanoseconds that were taken for it) is none."""


def fetch(configuration: Mapping[str, str], topic: str, ranges: Mapping[int, OffsetRange]) -> Iterator[pa.RecordBatch]:
    """Return the messages of half-open offset ranges (`RECORDS`); Python's collector is off until all are read.

    A batch is of one source partition, and those of one come in order.

    Args:
        configuration: The client's, with `isolation.level`.
        topic: The topic.
        ranges: By source partition; there may be no message at a first offset.

    Raises:
        HistoryLost: The broker no longer has the offsets.
        SourceWentBack: It has none so far.
        SourceUnavailable: It gives nothing.
        TopicMissing: There is no such topic.
        AccessRefused: It refuses the credentials or their rights.
        SourceDamaged: It gives messages that were not asked for, or none but damaged ones.
    """
    with _client(configuration, topic) as consumer, _uncollected():
        consumer.errors.begin(consumer)
        asked = {number: _Range(configuration, (topic, number), bounds) for number, bounds in ranges.items()}
        left = [one for one in asked.values() if not one.done]
        consumer.assign([one.position() for one in left])
        while left:
            try:
                came = _by_range(next_messages(consumer, BULK, WAIT_S), asked, left)
            except KafkaException as error:
                raise left[0].refused(error) from None
            passed = [one for one, messages in came if one.done and any(m.error() is None for m in messages)]
            while came:
                one, messages = came.pop()
                if one.done:
                    continue
                records, failed = one.take(messages)
                del messages
                if records.num_rows:
                    since = time.monotonic()
                    yield records
                    away_s = time.monotonic() - since
                    for other in left:
                        other.silent_since += away_s  # nobody asked for messages
                    one.end_silence()
                del records
                one.judge(consumer, failed)
            left = [one for one in left if not one.done]
            for one in left:
                one.check_silence(consumer)
            if left and passed:  # the client would go on with them, however much there is
                consumer.incremental_unassign([one.position() for one in passed])
            if any(one.lost for one in left):
                time.sleep(AGAIN_S)
                _ask_again(consumer, left)


class _Range:
    """What is left to be read of a source partition, how long no message of it has come, and what came instead.

    Args:
        configuration: The client's.
        place: Topic and partition.
        bounds: Half-open.

    Attributes:
        following: The offset that comes next.
        lost: The client has to be told again where to go on.
        silent_since: When a message came, or what is here was begun, by the monotonic clock.
    """

    def __init__(self, configuration: Mapping[str, str], place: tuple[str, int], bounds: OffsetRange) -> None:
        self._configuration, self._place, self.where = configuration, place, "{}-{}".format(*place)
        self.following, self.end = bounds
        self.lost, self._why = False, "no answer"
        self.end_silence()

    @property
    def done(self) -> bool:
        """Whether all of it is read."""
        return self.following >= self.end

    def position(self) -> TopicPartition:
        """Return where to go on."""
        return TopicPartition(*self._place, self.following)

    def end_silence(self) -> None:
        """Begin anew: messages came."""
        self.silent_since, self._torn = time.monotonic(), False
        self._missing: tuple[float, Any] | None = None

    def take(self, messages: list[Any]) -> tuple[pa.RecordBatch, list[Any]]:
        """Return the records of messages, and what came instead of some."""
        topic, partition = self._place
        good, failed = messages, [message for message in messages if message.error() is not None]
        if failed:
            messages = _before_damage(messages, failed, partition)
            good = [message for message in messages if message.error() is None]
            # errors outlive an assignment: those of what the client read before may come now
            failed = [m for m in messages if m.error() is not None and m.partition() in (None, partition)]
        records = _records(good, topic, partition, self.following, self.end)
        if good:
            self.following = good[-1].offset() + 1
            self.end_silence()
        return records, failed

    def judge(self, consumer: Any, failed: list[Any]) -> None:
        """Judge what came instead of messages: the end of the partition, or errors; raises as `_has_lost_place`."""
        for message in failed:
            error = message.error()
            if error.code() == KafkaError._PARTITION_EOF:
                self.following, self._missing = max(self.following, message.offset()), None
            else:
                self.lost |= self._has_lost_place(consumer, error)
                self._hear(error)

    def _has_lost_place(self, consumer: Any, error: Any) -> bool:
        """Return whether the client has lost its place: behind a damaged batch, or where it asked for another offset.

        Raises:
            HistoryLost: The offsets are gone.
            SourceWentBack: The partition ends before them.
            AccessRefused, SourceUnavailable: It will not pass.
        """
        code = error.code()
        if code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            bounds = _bounds(consumer, self._place)
            if "truncation" in error.str() or (bounds is not None and bounds[1] < self.following):
                up_to = f"it holds offsets up to {bounds[1] - 1}: " if bounds is not None else ""
                raise SourceWentBack(
                    "a partition has lost its end",
                    where=self.where,
                    why=f"offset {self.following} comes next, {up_to}{error.str()}",
                    command=ANEW,
                )
            if bounds is None or self.following >= bounds[0]:
                return True
            raise HistoryLost(
                "the topic does not hold offsets that are needed",
                where=self.where,
                why=f"offset {self.following} comes next: {error.str()}",
                command=KEEP,
            )
        if error.fatal() or code in REFUSALS:
            raise self.refused(KafkaException(error))
        return code in _DAMAGE

    def _hear(self, error: Any) -> None:
        """Take note of an error that may pass."""
        torn = error.code() in _DAMAGE
        if torn or not self._torn:  # what follows from a damage is no reason
            self._why = str(error.str()) or self._why
        self._torn |= torn
        if error.code() in MISSING and self._missing is None:  # the client says it once
            self._missing = time.monotonic(), error

    def check_silence(self, consumer: Any) -> None:
        """Check that it has not lasted for too long.

        Raises:
            TopicMissing: The topic was not known `SETTLE_S` ago, and is not now.
            SourceDamaged: For `STALL_S` there were none but damaged messages.
            SourceUnavailable: For as long there was nothing.
        """
        now = time.monotonic()
        if self._missing is not None and now - self._missing[0] > SETTLE_S:
            unknown = _is_unknown(consumer, self._place[0])
            if unknown:
                raise self.refused(KafkaException(self._missing[1]))
            self._missing = (now, self._missing[1]) if unknown is None else None
        if now - self.silent_since > STALL_S:
            # a batch that does not match its checksum comes again and again
            why = hidden(self._why, self._configuration)
            raise (SourceDamaged if self._torn else SourceUnavailable)(
                "Kafka gives no more messages",
                where=self.where,
                why=f"nothing for {STALL_S:.0f} s at offset {self.following} of {self.end}: {why}",
                command="check the brokers, and that this client may read the topic",
            )

    def refused(self, error: Exception) -> RewindError:
        """Return a client's error by name."""
        return named(
            SourceUnavailable,
            "Kafka cannot be read",
            where=self.where,
            why=hidden(str(error), self._configuration),
            error=error,
            command="check the brokers; then start the query again",
        )


def _ask_again(consumer: Any, left: list[_Range]) -> None:
    """Let a client go on where ranges are that it lost; the others stay as they are, with what has come of them."""
    lost = [one for one in left if one.lost]
    positions = [one.position() for one in lost]
    if len(lost) == len(left):
        consumer.assign(positions)
    else:
        consumer.incremental_unassign(positions)
        consumer.incremental_assign(positions)
    for one in lost:
        one.lost = False


def _by_range(messages: list[Any], asked: Mapping[int, _Range], left: list[_Range]) -> list[tuple[_Range, list[Any]]]:
    """Divide messages among ranges; errors of no partition are for all that are left.

    What belongs to none goes to one that is left, where it is judged: a range that was asked for alone gets all.
    """
    if len(asked) == 1:
        return [(left[0], messages)]
    came: dict[_Range, list[Any]] = {}
    for message in messages:
        partition = message.partition()
        for one in left if partition is None else (asked.get(partition, left[0]),):
            came.setdefault(one, []).append(message)
    return list(came.items())


def _before_damage(messages: list[Any], failed: list[Any], partition: int) -> list[Any]:
    """Return messages up to a damaged batch of a partition, with what says so.

    The client goes on inside of such a batch, takes its bytes for an offset, and may read on there: what comes behind
    is no proof that nothing is between.
    """
    torn = next((m for m in failed if m.partition() == partition and m.error().code() in _DAMAGE), None)
    return messages if torn is None else messages[: messages.index(torn) + 1]


def _records(messages: list[Any], topic: str, partition: int, following: int, end: int) -> pa.RecordBatch:
    """Return messages below an offset.

    Raises:
        SourceDamaged: They are of another range: the client was used for others before.
    """
    offsets = np.fromiter((message.offset() for message in messages), np.int64, len(messages))
    rising = bool((offsets[1:] > offsets[:-1]).all())
    if len(offsets) and (
        not rising or offsets[0] < following or {message.partition() for message in messages} != {partition}
    ):
        raise SourceDamaged(
            "the client gave messages that were not asked for",
            where=f"{topic}-{partition}",
            why=f"offset {following} comes next, given were {offsets[0]} to {offsets[-1]}",
            command="start the query again",
        )
    if len(offsets) and offsets[-1] >= end:
        offsets = offsets[: int(np.searchsorted(offsets, end))]
        messages = messages[: len(offsets)]
    times = np.fromiter((message.timestamp()[1] for message in messages), np.int64, len(messages))
    at = pa.array(times, mask=(times > _LAST_MS) | (times < 0)).cast(pa.timestamp("ms", "UTC"))  # -1: it has none
    columns = [
        repeated(topic, len(messages)),
        pa.array(np.full(len(messages), partition, np.int32)),
        pa.array(offsets),
        at.cast(pa.timestamp("us", "UTC")),
        pa.array([message.key() for message in messages], pa.binary()),
        pa.array([message.value() for message in messages], pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RECORDS)


def _is_unknown(consumer: Any, topic: str) -> bool | None:
    """Return whether a broker says that there is no such topic; None where none answers."""
    try:
        answer = consumer.list_topics(topic, timeout=ASK_S).topics[topic].error
    except KafkaException as error:
        answer = error.args[0]
        return True if answer.code() in MISSING else None
    return answer is not None and answer.code() in MISSING


def _bounds(consumer: Any, place: tuple[str, int]) -> tuple[int, int] | None:
    """Return a partition's first offset and the one after its last as of now; None where nobody answers."""
    try:
        for _ in range(EMPTY_TRIES):
            low, end = consumer.get_watermark_offsets(TopicPartition(*place), timeout=ASK_S, cached=False)
            if low < end or not end:  # where only the first is refused, the client gives the second for both
                break
    except KafkaException:
        return None
    return int(low), int(end)


@contextmanager
def _client(configuration: Mapping[str, str], topic: str) -> Iterator[Any]:
    """Give a client of this process that has read this topic only, the block's own while it runs."""
    wanted = {**READING, **configuration}
    name = json.dumps([topic, wanted], sort_keys=True)
    consumer = _idle.pop(name, None) or hearing(confluent_kafka.Consumer, wanted)
    try:
        yield consumer
        consumer.unassign()
    except BaseException:  # a task that is cancelled, too
        consumer.close()
        raise
    if name in _idle:  # two readers at once in this process
        consumer.close()
        return
    while len(_idle) >= IDLE_CLIENTS:
        _idle.pop(next(iter(_idle))).close()
    _idle[name] = consumer


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python's collector away from many objects that live for a moment: it took half of the time."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
