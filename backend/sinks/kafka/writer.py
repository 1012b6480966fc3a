"""Write a micro-batch to Kafka in one transaction, once: fenced, and looked up before it is written.

Spark may hand over a micro-batch again: after a crash between the publication and its own commit, or when it could not
tell whether the publication worked. So each transaction also writes to the commit topic which micro-batch it brings,
and a writer that opens reads that back before it writes anything:

1. `init_transactions` under a name made of the commit topic's. The broker ends what an older producer of that name left
   open (a prepared commit is completed, the rest aborted) and refuses the older producer from then on. So what the
   commit topic says afterwards is final, whoever was writing.
2. The newest record of the commit topic says which micro-batch is out, of which query, and which topics it went to. The
   same one again is passed over, if it holds the same rows (`backend.sinks.record`); an older one means that the
   checkpoint went back behind what readers have seen: refused. A start then writes that record again in its own name:
   the output is taken over.
3. Messages and the record go out in one transaction: readers of committed messages see all of a micro-batch or nothing.

When a transaction ends unclearly (a timeout while committing), the producer is thrown away and step 1 begins again, as
long as the sink's patience lasts. A broker that was away for longer than the transaction may take ends it and refuses
the producer as if another one had taken over: the newest record says whose that was.
One transaction per micro-batch, not per shard: readers then never see half a micro-batch, and one name is fenced.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException

from backend.errors import (
    AccessRefused,
    ManifestMismatch,
    RewindError,
    SinkConflict,
    SinkUnavailable,
    TopicMissing,
)
from backend.kafka_client.admin import admin_client, asked_identities
from backend.kafka_client.identity import TopicIdentity
from backend.kafka_client.refusals import in_pieces
from backend.kafka_client.settling import SETTLE_S, while_it_settles
from backend.kafka_client.writer import is_fenced
from backend.sinks.kafka.commits import KEY, TIMEOUT_S, Published, encode, newest, was_cut
from backend.sinks.kafka.delivery import Delivery, Publication, may_be_too_large, reaching, unavailable, was_purged
from backend.sinks.kafka.fitting import send_fitted, tell
from backend.sinks.kafka.rows import Message
from backend.sinks.kafka.topics import ever_written, failure, look
from backend.sinks.record import Contents, check_ahead, check_same
from backend.sinks.tables import RESULTS
from recovery.killpoints import kill_point

log = logging.getLogger("rewind.sink")

TRIES = 3
RETRY_S = 1.0
FRESH_S = 0.25
"""What was asked while messages were on their way is asked again where that took longer. A topic that is made anew
within it takes this transaction; the next one, or the next start, finds out."""
TRANSACTION_TIMEOUT_S = 120
"""A crashed writer's open transaction holds readers back for so long at most."""


class TransactionalWriter:
    """The one writer of an output. Not for several threads.

    Args:
        to: The outputs; `open` says of which query, and what they take.
        commits: The commit topic.
        strict: Whether what the commit topic says decides what is written (exactly once), or only whose the output is.
        accept: A micro-batch that is out and counts, though it ran again with other rows; None for none.

    Attributes:
        to: As given, and as `open` and later answers of the cluster say.
    """

    def __init__(self, to: Publication, commits: str, *, strict: bool = True, accept: int | None = None) -> None:
        self.to, self._settings, self._commits = to, to.settings, commits
        # the output is known by its commit topic, as its owner is: other queries may write to the same results
        results = to.topics[RESULTS]
        self._name = f"rewind-sink-{results}" if commits == f"{results}-commits" else f"rewind-sink-{results}/{commits}"
        self._strict = strict
        self._accept = accept
        self._claimed = False
        self._doubtful = False
        self._id = uuid.uuid4().hex[:12]
        self._topic_ids: dict[str, str] = {}
        self._delivery: Delivery | None = None
        self._admin: Any = None
        self._newest: Published | None = None

    def open(self, query: str, ids: dict[str, str], limits: Mapping[str, int], *, planned: int = -1) -> None:
        """Take the output over.

        Args:
            query: Whose it is to be.
            ids: Kafka's id of each output, by topic.
            limits: What each takes, in bytes.
            planned: Newest micro-batch that the query has planned; what it published is one of those.

        Raises:
            ManifestMismatch: It is another query's.
            SinkConflict: The commit topic no longer tells what the query has published, or a topic was made again.
            SinkUnavailable: The cluster does not answer.
        """
        self.to, self._topic_ids = replace(self.to, query=query, limits=limits), ids
        self._claimed = self._doubtful = False
        self._open_producer()
        known = self._newest
        if known is None:
            self._judge_missing(planned)
        elif known.topics and known.topics != self._topic_ids:
            self._judge_other(known.topics, self._topic_ids)
        self._write(None, [])
        self._claimed = True

    def check(self, version: int) -> bool:
        """Return whether a micro-batch is out already.

        Raises:
            SinkConflict: A later one is, or a newer start has taken the output over.
            SinkUnavailable: The cluster does not answer.
        """
        self._ensure_producer()
        out = self._newest.version if self._newest is not None else -1
        command = "start with new output topics, or put the checkpoint back"
        check_ahead(out, version, where=self._where, command=command)
        return out == version

    def publish(self, version: int, messages: Sequence[Message], contents: Contents) -> None:
        """Write a micro-batch, unless it is out already; visible to readers of committed messages on return.

        Args:
            version: Spark's batch id.
            messages: Of the shards, in order; none where tasks have brought them out already, in no transaction.
            contents: What they hold, by output and shard.

        Raises:
            OutputDiffers: It is out with other rows.
            SinkConflict: Another writer took over, or a later micro-batch is out.
            SinkUnavailable: It was not written.
            TopicMissing: A topic does not exist any more.
        """
        if self.check(version):
            known = self._newest.contents if self._newest is not None else None
            check_same(
                known or {},
                contents,
                version=version,
                where=self._where,
                command="see what differs; then, if the rows that are out shall count,"
                f" kafka_sink(..., accept_published={version}); or start with other topics",
                accept=self._accept,
            )
            return
        count = sum(rows for shards in contents.values() for rows, _ in shards.values())
        if count:
            self._write(Published(self.to.query, version, count, contents, self._id, self._topic_ids), messages)

    def close(self) -> None:
        """Let the clients go; nothing is in flight between two publications."""
        self._delivery = self._admin = None

    @property
    def _where(self) -> str:
        return f"{self._settings.servers}/{self._commits}"

    def _claim(self) -> Published:
        """Return what a start writes: what is out, in its own name."""
        known = self._newest or Published(self.to.query, -1)
        return msgspec.structs.replace(known, writer=self._id, topics=self._topic_ids)

    def _write(self, record: Published | None, messages: Sequence[Message]) -> None:
        """Write a record and its messages in one transaction; None: the claim of a start, whoever was there before."""
        deadline = time.monotonic() + self.to.patience_s
        what = f"micro-batch {record.version}" if record else "claim"
        tries, fenced, pause_s, began = 0, 0, min(RETRY_S, self.to.patience_s / TRIES), time.monotonic()
        overran: SinkUnavailable | None = None
        while True:
            tries += 1
            try:
                self._ensure_producer()
                wanted = record or self._claim()  # a zombie may have published since the try before this one
                if self._newest != wanted:  # else that one worked after all
                    if overran is not None:
                        raise overran
                    began = time.monotonic()
                    self._transact(wanted, messages)
                    self._newest = wanted
                return
            except (KafkaException, SinkUnavailable) as error:
                self._let_go()
                if error is overran:
                    raise
                about = error.args[0] if isinstance(error, KafkaException) else None
                if is_fenced(error) and self._claimed:
                    fenced, self._doubtful = fenced + 1, True
                    if fenced > 1:  # once may be an outage
                        overran = self._too_long(time.monotonic() - began, len(messages))
                    if fenced > TRIES:
                        raise unavailable(self._settings, self._commits, error) from None
                    tries -= 1
                    log.warning("%s is written again where this writer still has the output: %s", what, error)
                    # its new owner claims it meanwhile
                    time.sleep(min(pause_s * 2 ** (fenced - 1), self.to.patience_s))
                    continue
                if about is not None and may_be_too_large(about):
                    self._look_at_limits()
                failed = self._failure(error) if about is not None else error
                final = isinstance(failed, AccessRefused | TopicMissing)
                if final or (tries >= TRIES and (not _is_outage(error) or time.monotonic() > deadline)):
                    raise failed from None
                log.warning("%s is written again: %s", what, failed)
                time.sleep(pause_s)

    def _failure(self, error: Exception) -> RewindError:
        """Return a client's error by name. A claim is made of topics that were there a moment ago: it ends at once."""
        if not self._claimed:
            return unavailable(self._settings, self._commits, error)
        return failure(self._settings, [*self._topic_ids, self._commits], self._commits, error)

    def _too_long(self, took_s: float, count: int) -> SinkUnavailable | None:
        """Return why a transaction that took so long was ended by the broker, if that is why."""
        if took_s < TRANSACTION_TIMEOUT_S:
            return None
        return SinkUnavailable(
            "a micro-batch's transaction takes too long",
            where=self._where,
            why=f"{count} messages were not out after {took_s:.0f} s, and the broker ends a transaction after"
            f" {TRANSACTION_TIMEOUT_S}",
            command="bound the micro-batches (max_offsets_per_trigger of kafka(), max_offsets_per_batch of archive()),"
            " or see why the topics take so little: a quota on the producer, slow brokers; then start the query again",
        )

    def _ensure_producer(self) -> None:
        """Open a producer where there is none, which ends another writer's: after a fence it asks whose the output is.

        Not otherwise: a transaction of this writer may be open, and only the new producer ends it.
        """
        if self._delivery is None:
            if self._doubtful:
                self._check_mine(newest(self._settings, self._commits))
            self._open_producer()
            self._doubtful = False

    def _look_at_limits(self) -> None:
        """Ask what the outputs take by now: a message was refused. Which topics they are is for the commit to check."""
        try:
            _, limits = look(self._settings, tuple(self._topic_ids), settle_s=SETTLE_S)
            self.to = replace(self.to, limits=limits)
        except (SinkUnavailable, TopicMissing) as error:
            log.warning("what the output topics take is not known now: %s", error)

    def _transact(self, record: Published, messages: Sequence[Message]) -> None:
        delivery = self._delivery
        assert delivery is not None
        delivery.start()
        delivery.producer.begin_transaction()
        tell(record.version, [send_fitted(delivery, messages, self.to)])
        delivery.send(self._commits, encode(record), KEY, 0)
        asked, at = self._ask_outputs(), time.monotonic()
        delivery.finish()  # all of it is on the brokers, and nobody sees it
        self._check_outputs(asked if time.monotonic() - at < FRESH_S else self._ask_outputs())
        kill_point("during_publish", record.version)
        delivery.producer.commit_transaction(min(TIMEOUT_S, self.to.patience_s))

    def _ask_outputs(self) -> Callable[[], dict[str, TopicIdentity]]:
        """Ask which topics the outputs are by now; what is returned waits for the answer."""
        self._admin = self._admin or admin_client(self._settings)
        topics, timeout_s = tuple(self._topic_ids), min(TIMEOUT_S, self.to.patience_s)
        return asked_identities(self._settings, topics, admin=self._admin, timeout_s=timeout_s, unknown_s=SETTLE_S)

    def _check_outputs(self, asked: Callable[[], dict[str, TopicIdentity]]) -> None:
        """Check before a commit that the outputs are still the topics that the producer was opened for.

        Raises:
            SinkConflict: One was deleted and made again: what was out is gone. Where rows may come twice, it is said.
            SinkUnavailable: The cluster does not answer.
            TopicMissing: One does not exist.
            AccessRefused: The cluster refuses the credentials or their rights.
        """
        try:
            with reaching(self._settings, ", ".join(self._topic_ids)):
                found = asked()
            now = {topic: one.id for topic, one in found.items()}
            if now != self._topic_ids:
                self._judge_other(self._topic_ids, now)
        except (AccessRefused, SinkConflict, TopicMissing):
            self._end_transaction()
            raise
        self._topic_ids = now

    def _end_transaction(self) -> None:
        """Abort what is open, so that no reader waits for it; where that fails, the broker does it after a while."""
        assert self._delivery is not None
        with suppress(KafkaException):
            self._delivery.producer.abort_transaction(TIMEOUT_S)
        self._let_go()

    def _open_producer(self) -> None:
        """Fence and end what went before, then learn what is out."""
        more = {"transactional.id": self._name, "transaction.timeout.ms": int(TRANSACTION_TIMEOUT_S * 1000)}
        with reaching(self._settings, self._commits):
            delivery = Delivery(self._settings, self.to.limits, min(TIMEOUT_S, self.to.patience_s), more)
            begin = partial(in_pieces, delivery.producer, delivery.producer.init_transactions)
            while_it_settles(lambda: begin(min(TIMEOUT_S, self.to.patience_s)))
        self._newest = newest(self._settings, self._commits)
        if self._newest is not None and self._newest.query != self.to.query:
            raise ManifestMismatch(
                "the output topics belong to another query",
                where=self._where,
                why=f"query {self._newest.query} wrote them, this is {self.to.query}: their micro-batches would mix",
                command="choose other topics; or, when that query has ended for good (rewind reset), delete the commit"
                " topic: the next start takes the output over, and rows tell their query by `query_id`",
            )
        if self._claimed:
            self._check_mine(self._newest)
        self._delivery = delivery

    def _let_go(self) -> None:
        """Throw the producer away with all that waits in it."""
        if self._delivery is not None:
            self._delivery.drop()
        self._delivery = None

    def _judge_missing(self, planned: int) -> None:
        """Refuse to begin anew where the query has published before, and what it published is still there."""
        cut = was_cut(self._settings, self._commits)
        written = ever_written(self._settings, tuple(self._topic_ids)) if planned >= 0 else []
        if not cut and not written:
            return
        why = "its records are gone" if cut else f"it is empty, and {', '.join(written)} is not"
        if planned >= 0:
            why += f", while the checkpoint has planned micro-batches up to {planned}: the last may be out or not"
        if not self._strict:
            log.warning("%s does not say whose the output is: %s; the query takes it", self._where, why)
        elif planned >= 0:
            raise SinkConflict(
                "the commit topic of the output was deleted, made again or emptied",
                where=self._where,
                why=why,
                command="start with other topics; or delete results, errors and commits together, and make the first"
                " two again",
            )

    def _judge_other(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        """Refuse topics that are not those that the records of the commit topic are about."""
        changed = [topic for topic, number in now.items() if before.get(topic, number) != number]
        if not changed:
            log.warning("%s: the output was %s and is %s", self._where, ", ".join(before), ", ".join(now))
            return
        topics = ", ".join(changed)
        if not self._strict:
            log.warning("%s: %s was deleted and made again; the query goes on in the new one", self._where, topics)
            return
        raise SinkConflict(
            "an output topic was deleted and made again",
            where=f"{self._settings.servers}/{topics}",
            why="what the commit topic says is out was in the one before: it would never be published again",
            command=f"start with other topics; or delete the commit topic {self._commits} too, with all outputs that"
            " have rows, and make the outputs again",
        )

    def _check_mine(self, latest: Published | None) -> None:
        """Return when this writer has the output: then the broker itself ended its transaction, for its length.

        Raises:
            SinkConflict: Another writer has taken over.
        """
        if latest is None or (latest.query, latest.writer) != (self.to.query, self._id):
            raise SinkConflict(
                "another writer has taken the output over",
                where=self._where,
                why="a newer start of this query, or the topics were given to another one",
                command="see that the query runs once; then start it again",
            ) from None


def _is_outage(error: Exception) -> bool:
    """Return whether waiting may help: no answer, or one that Kafka calls retriable."""
    if isinstance(error, SinkUnavailable):
        return True
    about = error.args[0]
    return (
        about.retriable()
        or was_purged(about)
        or about.code()
        in (
            KafkaError._TIMED_OUT,
            KafkaError._MSG_TIMED_OUT,
            KafkaError._TRANSPORT,
            KafkaError._ALL_BROKERS_DOWN,
            KafkaError._STATE,
        )
    )
