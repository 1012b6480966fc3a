"""The sink that writes to topics, once. What is imported here needs no client of Kafka: the name is there without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backend.kafka_client.settings import KafkaSettings, check_topic
from backend.sinks.record import check_accepted
from backend.sinks.tables import ERRORS, RESULTS
from backend.windows.definitions import Duration, duration_ms
from recovery.files import check_place

if TYPE_CHECKING:
    from backend.sinks.kafka.sink import KafkaSink


def kafka_sink(
    results: str,
    errors: str,
    *,
    servers: str | KafkaSettings,
    key: str | Sequence[str] = (),
    guarantee: str = "exactly_once",
    commits: str | None = None,
    overflow: str | Path | None = None,
    patience: Duration = "2 minutes",
    accept_published: int | None = None,
) -> KafkaSink:
    """Write both outputs to Kafka topics, as JSON; see `backend.sinks.kafka.sink` for what each guarantee rests on.

    Args:
        results: Topic of the results; it must exist.
        errors: Topic of the errors; it must exist.
        servers: `host:port,...`, with security from `REWIND_KAFKA_*` in the environment; or `KafkaSettings`.
        key: Columns of the results that make the message's key, the job's group key for one: all revisions of a window
            then lie in one partition, in order. Without it, and for errors, the key is the row's `id`.
        guarantee: `exactly_once` (transactions, through the driver) or `at_least_once` (from the tasks).
        commits: Topic that says whose the output is and which micro-batch is out, made where it does not exist; by
            default `<results>-commits`. It belongs to the output: delete both or none.
        overflow: Directory or URI, the same on the driver and all executors, for rows that are larger than their
            topic's `max.message.bytes`: `<digest>.json` is the whole value, of the digest that `too_large` names in the
            row that goes in its place. None keeps only what fits.
        accept_published: A micro-batch that ran again and made other rows than are out, as `OutputDiffers` says: those
            that are out count, and the query goes on.
        patience: How long an outage of the cluster is waited for before the query stops with `SinkUnavailable`.

    Raises:
        ValueError: Of a bad option, naming it.
    """
    from backend.sinks.kafka.delivery import Publication
    from backend.sinks.kafka.sink import GUARANTEES, KafkaSink

    for option, topic in (("results", results), ("errors", errors)):
        check_topic(topic, option)
    named = commits if commits is not None else f"{results}-commits"
    check_topic(named, "commits")
    if results == errors:
        raise ValueError(f"errors={errors!r}: must be another topic than results")
    if guarantee not in GUARANTEES:
        raise ValueError(f"guarantee={guarantee!r}: allowed are {', '.join(GUARANTEES)}")
    columns = (key,) if isinstance(key, str) else key
    if not isinstance(columns, list | tuple) or not all(isinstance(name, str) and name for name in columns):
        raise ValueError(f"key={key!r}: must be a column of the results, or several")
    if named in (results, errors):
        raise ValueError(f"commits={named!r}: must be a topic of its own")
    check_accepted(accept_published)
    patience_s = duration_ms(patience, "patience", least=1000) / 1000
    settings = servers if isinstance(servers, KafkaSettings) else KafkaSettings.from_environment(servers)
    settings.check_files()
    whole = check_place(overflow, "overflow") if overflow is not None else None
    to = Publication(settings, {RESULTS: results, ERRORS: errors}, tuple(columns), "", {}, patience_s, whole)
    return KafkaSink(to, named, guarantee, accept_published)
