"""The fluent API: from a source to a running query, everything checked before anything starts.

::

    query = (
        stream(departures, event_time="scheduled", key="origin")
        .window(tumbling("1 hour"), retention="6 hours")
        .aggregate(flights=count(), typical=median("delay"))
        .start(spark, checkpoint="checkpoints/departures", results="out/windows", errors="out/errors")
    )
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from backend.aggregates import Aggregate
from backend.batch import Operator, SourcePartition
from backend.operators.spec import DEFAULT_IDLE_AFTER_MS, DEFAULT_MAX_AHEAD_MS, window_spec
from backend.operators.window import WindowOperator
from backend.policies import Policies
from backend.sources import Source
from backend.windows import Duration, Window, duration_ms

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from backend.sinks import Sink
    from recovery.supervisor import RewindQuery

FirstOffsets = Mapping[SourcePartition, int]
"""Earliest offset of each source partition when the query first started."""
OperatorFactory = Callable[[Sequence[pa.Schema], FirstOffsets], Operator]
"""Called with the Arrow schema of each stream's fields; windows of joins by number are aligned by the first offsets."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of messages; made by `stream`."""

    source: Source
    event_time: str | None
    key: tuple[str, ...]

    def window(
        self,
        window: Window,
        *,
        retention: Duration | None = None,
        retention_messages: int | None = None,
        policies: Policies | None = None,
        idle_after: Duration | None = DEFAULT_IDLE_AFTER_MS,
        max_ahead: Duration | None = DEFAULT_MAX_AHEAD_MS,
    ) -> WindowedStream:
        """Cut the stream into windows.

        Args:
            window: `tumbling`, `hopping`, `sliding` or `session`.
            retention: How long after its end, in stream time, a window takes late messages; windows by number of
                messages: how long after the newest event time of its messages an open window is kept.
            retention_messages: Retention by number of messages per shard and source partition; the earlier bound wins.
            policies: When results are emitted; by default full windows at once and late updates every ten seconds.
            idle_after: Wall clock after which a silent source partition no longer holds windows open; None is never.
            max_ahead: Event times later than batch time plus this are refused as `in_future`; None for historic data.
        """
        options = {
            "retention": retention,
            "retention_messages": retention_messages,
            "policies": policies,
            "idle_after": idle_after,
            "max_ahead": max_ahead,
        }
        return WindowedStream(self, window, options)

    def process(
        self,
        function: Callable[..., pa.Table | None],
        *,
        stores: Sequence[Any] = (),
        result: pa.Schema,
        fields: Sequence[str] | None = None,
        max_ahead: Duration | None = DEFAULT_MAX_AHEAD_MS,
    ) -> Pipeline:
        """Run your own function on a shard's micro-batches, with named stores inside the same exactly-once commit.

        Args:
            function: Called with the micro-batch (an Arrow table) and a `backend.process.ProcessContext`: stores, batch
                time; gives an Arrow table, or None for no results.
            stores: Declarations, see `backend.process`.
            result: Schema of what the function gives.
            fields: Fields of the messages that the function reads; only they travel to the shards. None: all.
            max_ahead: As in `window`.
        """
        from backend.process import ProcessOperator

        def make(schemas: Sequence[pa.Schema], _: FirstOffsets) -> Operator:
            [schema] = schemas
            unknown = sorted(set(fields or ()) - set(schema.names))
            if unknown:
                raise ValueError(f"fields: {unknown} are not in the source; allowed are {', '.join(schema.names)}")
            return ProcessOperator(function, result, stores=stores, fields=schema.names if fields is None else fields)

        ahead = None if max_ahead is None else duration_ms(max_ahead, "max_ahead", least=0)
        return Pipeline((self,), make, ahead, needs_order=False)


@dataclass(frozen=True, slots=True)
class WindowedStream:
    """A stream cut into windows; made by `Stream.window`."""

    stream: Stream
    windows: Window
    options: dict[str, Any]

    def aggregate(self, **aggregates: Aggregate) -> Pipeline:
        """Aggregate each window and group key, under the given result names."""

        def make(schemas: Sequence[pa.Schema], _: FirstOffsets) -> Operator:
            [schema] = schemas
            spec = window_spec(self.windows, schema, aggregates, keys=self.stream.key, **self.options)
            return WindowOperator(spec)

        ahead = self.options["max_ahead"]
        ahead_ms = None if ahead is None else duration_ms(ahead, "max_ahead", least=0)
        by_others = isinstance(self.windows, Window) and self.windows.kind == "session" and not self.windows.by_time
        needs_order = not self.stream.key or by_others  # a session by number ends by messages of other keys
        return Pipeline((self.stream,), make, ahead_ms, needs_order)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A job that is fully said but not started.

    Attributes:
        streams: The inputs: one, or left and right of a join.
        make: Makes the operator, told the schema of each stream's fields.
        max_ahead_ms: See `Stream.window`.
        needs_order: Without a group key, and for sessions by number of messages, the windows need the whole stream in
            order: `route="partition"` or one shard.
        settings: What `options` has set.
        sides: Names of the inputs of a join, in the order of `streams`.
        routing: Gives the fields that route each stream, told the operator; None: each stream's key.
    """

    streams: tuple[Stream, ...]
    make: OperatorFactory
    max_ahead_ms: int | None
    needs_order: bool
    settings: dict[str, Any] = field(default_factory=dict)
    sides: tuple[str, ...] = ("",)
    routing: Callable[[Operator], Sequence[tuple[str, ...]]] | None = None

    def options(self, **settings: Any) -> Pipeline:
        """Give a copy with defaults for options of `start`."""
        return replace(self, settings={**self.settings, **settings})

    def start(
        self,
        spark: SparkSession,
        *,
        checkpoint: str | Path,
        results: str | Path | None = None,
        errors: str | Path | None = None,
        sink: Sink | None = None,
        **options: Any,
    ) -> RewindQuery:
        """Check everything, restore nothing yet, and start the query.

        Args:
            spark: The session; its settings are left as they were.
            checkpoint: Spark's checkpoint location; Rewind's manifest, changelog and packages lie beside Spark's files.
            results: Directory of the windows' results, Parquet, one directory `batch=<id>` per micro-batch.
            errors: Directory of the errors.
            sink: Instead of `results` and `errors`: any `backend.sinks.Sink`.
            options: See `backend.spark.start.StartOptions`.

        Raises:
            ValueError: A bad option, by name.
            ManifestMismatch: The checkpoint's state cannot serve this job.
        """
        from backend.spark.start import StartOptions, start

        merged = {**self.settings, **options}
        known = StartOptions.__dataclass_fields__
        for name, value in merged.items():
            if name not in known:
                raise ValueError(f"{name}={value!r}: not an option; allowed are {', '.join(sorted(known))}")
        return start(self, spark, str(checkpoint), _sink(results, errors, sink), StartOptions(**merged))


def _sink(results: str | Path | None, errors: str | Path | None, sink: Sink | None) -> Sink:
    if sink is not None:
        if results is not None or errors is not None:
            raise ValueError("sink: give either sink, or results and errors")
        return sink
    if results is None or errors is None:
        raise ValueError("results and errors: both directories are needed (or a sink)")
    from backend.sinks import parquet_sink

    return parquet_sink(str(results), str(errors))


def stream(source: Source, *, event_time: str | None = None, key: str | Sequence[str] | None = None) -> Stream:
    """Begin a job with a source.

    Args:
        source: Such as `archive(...)` or `kafka(...)`.
        event_time: Field with the event time: timestamp, date, or integer milliseconds. None takes the record's own
            timestamp.
        key: Field or fields of the group key; None for none.

    Raises:
        ValueError: A bad option, by name.
    """
    fields = () if key is None else (key,) if isinstance(key, str) else tuple(key)
    if len(set(fields)) != len(fields) or not all(isinstance(name, str) and name for name in fields):
        raise ValueError(f"key={key!r}: must be distinct names of fields")
    if event_time is not None and (not isinstance(event_time, str) or not event_time):
        raise ValueError(f"event_time={event_time!r}: must be the name of a field, or None")
    return Stream(source, event_time, fields)
