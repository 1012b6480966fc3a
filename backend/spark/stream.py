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

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from backend.aggregates import Aggregate
from backend.aggregates.model import check_kinds
from backend.batch import Operator, SourcePartition
from backend.boundary import check_names
from backend.sources import Source
from backend.sources.dataframe import dataframe_source, is_dataframe
from backend.steps import Step
from backend.windows.definitions import Duration, Window, duration_ms
from backend.windows.operator import WindowOperator
from backend.windows.policies import Policies
from backend.windows.spec import DEFAULT_IDLE_AFTER_MS, DEFAULT_MAX_AHEAD_MS, window_spec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from backend.sinks import Sink
    from backend.spark.start import StartOptions
    from recovery.listener import RestoreListener
    from recovery.supervise.supervisor import RewindQuery


@dataclass(frozen=True, slots=True)
class Known:
    """What a start knows that the description of a job does not say.

    Attributes:
        first_offsets: Earliest offset of each source partition when the query first started: windows of joins by number
            are aligned by them.
        topics: Number of topics of each stream.
        operator: The manifest's entry of the operator; empty at the first start.
    """

    first_offsets: Mapping[SourcePartition, int] = field(default_factory=dict)
    topics: Sequence[int] = ()
    operator: Mapping[str, Any] = field(default_factory=dict)


OperatorFactory = Callable[[Sequence[pa.Schema], Known], Operator]
"""Called with the Arrow schema of each stream's fields."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of messages; made by `stream`."""

    source: Source
    event_time: str | None
    key: tuple[str, ...]
    steps: tuple[Step, ...] = ()

    def where(self, condition: Any, *, version: str = "") -> Stream:
        """Keep the messages for which a condition is true; the others move positions and are no error.

        Args:
            condition: A pyarrow.compute expression, such as `pc.field("x") > 3`, or a function that is given an Arrow
                table (fields, and `_topic`, `_partition`, `_offset`, `_timestamp`) and gives a boolean array.
            version: Change it when a function does something else by code that is not in its own text.
        """
        return self._then(Step("where", {"": condition}, version))

    def with_columns(self, *, version: str = "", **columns: Any) -> Stream:
        """Add fields, or put others in their place, each by an expression or a function; see `where`."""
        return self._then(Step("with_columns", columns, version))

    def select(self, *fields: str) -> Stream:
        """Keep these fields only."""
        return self._then(Step("select", dict.fromkeys(fields)))

    def map_batches(
        self, function: Callable[[pa.Table], pa.Table], *, schema: pa.Schema | None = None, version: str = ""
    ) -> Stream:
        """Make an Arrow table of an Arrow table: of each row at most one, by itself, wherever batches are cut.

        Args:
            function: Given the fields and `_topic`, `_partition`, `_offset`, `_timestamp`, which must come back.
            schema: The fields that come back; None: what the function gives for an empty table.
            version: See `where`.
        """
        return self._then(Step("map_batches", {"": function}, version, schema))

    def _then(self, step: Step) -> Stream:
        return replace(self, steps=(*self.steps, step))

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
            retention_messages: Retention by number of messages, counted per shard and source partition; windows by
                number of messages count those of the whole shard. The earlier bound wins.
            policies: When results are emitted; by default full windows at once and late updates every ten seconds.
            idle_after: Wall clock after which a source partition that is silent, or brings nothing that is accepted, no
                longer holds windows open; None is never.
            max_ahead: An event time later than this after the record's own timestamp, or after the batch time where
                that is earlier or there is no timestamp, is refused as `in_future`; None refuses none.
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

        def make(schemas: Sequence[pa.Schema], _: Known) -> Operator:
            [schema] = schemas
            wanted = schema.names if fields is None else check_names("fields", fields)
            unknown = sorted(set(wanted) - set(schema.names))
            if unknown:
                raise ValueError(f"fields: {unknown} are not in the source; allowed are {', '.join(schema.names)}")
            return ProcessOperator(function, result, stores=stores, fields=wanted)

        ahead = None if max_ahead is None else duration_ms(max_ahead, "max_ahead", least=0)
        return Pipeline((self,), make, ahead, needs_order=False)


@dataclass(frozen=True, slots=True)
class WindowedStream:
    """A stream cut into windows; made by `Stream.window`."""

    stream: Stream
    windows: Window
    options: dict[str, Any]

    def aggregate(self, **aggregates: Aggregate) -> Pipeline:
        """Aggregate each window and group key, under the given result names.

        Raises:
            ValueError: No aggregate is given, or something else than one; names of fields are checked by `start`.
        """
        check_kinds(aggregates)
        if not aggregates:
            raise ValueError("aggregate(): must name at least one aggregate, such as n=count()")

        def make(schemas: Sequence[pa.Schema], _: Known) -> Operator:
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
    """

    streams: tuple[Stream, ...]
    make: OperatorFactory
    max_ahead_ms: int | None
    needs_order: bool
    settings: dict[str, Any] = field(default_factory=dict)
    sides: tuple[str, ...] = ("",)

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
        shards: int | None = None,
        route: str | None = None,
        local_dir: str | Path | None = None,
        trigger: Duration | None = None,
        until: str | None = None,
        changelog: str | None = None,
        retain: int | None = None,
        snapshots: str | int | None = None,
        arrow_rows: int | None = None,
        patience: Duration | None = None,
        queue_bytes: str | int | None = None,
        standby: int | None = None,
        name: str | None = None,
        listeners: Sequence[RestoreListener] | None = None,
        poison_limit: int | None = None,
        debug_steps: bool | None = None,
    ) -> RewindQuery:
        """Check everything, restore nothing yet, and start the query.

        Returns when the query runs. What passes (a broker or a host that is away) is waited for, as later, where the
        query has run before, so this may last as long as the option `patience` says; `patience="0 s"` makes at most
        five tries. A first start says within a minute or two what it cannot reach: it may be named wrongly.

        Args:
            spark: The session; its SQL settings are left as they were. Two settings of Python workers are made in its
                context where you have not made them.
            checkpoint: Spark's checkpoint location; Rewind's manifest, changelog and snapshots lie beside Spark's.
            results: Directory of the windows' results, Parquet, one directory `batch=<id>` per micro-batch.
            errors: Directory of the errors.
            sink: Instead of `results` and `errors`: any `backend.sinks.Sink`.
            shards: Number of shards, fixed at the first start. Default: one per source partition with
                `route="partition"`, else the session's default parallelism; one when the windows need the whole stream
                in order.
            route: `"key"` (default; any source) or `"partition"` (Samza's task per partition: cheaper replay, exact
                lateness).
            local_dir: Local state; `$NAME` is replaced where a task runs, such as `$SPARK_EXECUTOR_DIRS/rewind` where
                executors have disks of their own. Default: a directory under the system's temporary directory.
            trigger: Spark's processing-time trigger, `"1 second"` by default; `"0 seconds"` runs micro-batches back to
                back: the lowest latency. One is then held back, for less than it takes, if a window's end would come
                while it runs and can be foreseen: so it begins with the end. With an interval, sources that are read
                in the Python workers are asked a twentieth of it (at most 50 ms) after the trigger: a window that
                ends when it fires is closed by what was sent just behind the end, not by the next micro-batch.
            until: Default: run until stopped; `"end"` reads what the source holds at the start, drains, and ends.
            changelog: A URI for `open_changelog`. Default: beside the checkpoint.
            retain: Staged files and commits kept behind the committed version; 2 by default.
            snapshots: `"off"`, or every how many commits a snapshot of a shard goes to the checkpoint's filesystem
                (each staged file goes there with its commit). A shard can then move to another executor without a
                restart of the query. Default: `"off"` on a local checkpoint, which is every path without a scheme or
                with `file:`, a shared mount such as NFS too; else 50.
            arrow_rows: Rows per Arrow batch in the pack stage, 200,000 by default: larger is faster, each costs its
                size in a worker's memory.
            patience: How long a query that fails for what passes (processes that died or do not come up, a full disk, a
                cluster that does not answer) is started again without progress, with pauses of up to 30 s; then it ends
                with an error that says what it was. At least four new starts are made. `"10 minutes"` by default.
            queue_bytes: A shard whose state is missing queues its input, at most so many bytes, while its state is
                restored beside the running query, and then catches up: the other shards' results go on. 134,217,728 by
                default. `"off"`: the query stops for a restore, as it does in any case with `spark.speculation` and
                with a sink in which tasks publish.
            standby: 1 keeps a copy of each shard on the hosts that do not own it, and their Python workers warm: who
                takes over from a host that died fetches a few commits instead of the state. Needs `snapshots`. 0 by
                default.
            name: Spark's query name.
            listeners: Told of restores.
            poison_limit: How many messages in a row of a task may make a step raise (they go to the errors, `poison`)
                before the query ends; 100 by default.
            debug_steps: Run each step again under random cuts, and end the query, by name, at one that depends on them.

        An option that is None is as `options` has set it, else its default.

        Raises:
            ValueError: A bad option, by name.
            ManifestMismatch: The checkpoint's state cannot serve this job.
        """
        from recovery.files import check_place

        options = {
            "shards": shards,
            "route": route,
            "local_dir": local_dir,
            "trigger": trigger,
            "until": until,
            "changelog": changelog,
            "retain": retain,
            "snapshots": snapshots,
            "arrow_rows": arrow_rows,
            "patience": patience,
            "queue_bytes": queue_bytes,
            "standby": standby,
            "name": name,
            "listeners": listeners,
            "poison_limit": poison_limit,
            "debug_steps": debug_steps,
        }
        given, place = self._given(options), check_place(checkpoint, "checkpoint")
        query: RewindQuery = _starting().start(self, spark, place, _sink(results, errors, sink), given)
        return query

    def explain(self, spark: SparkSession, **options: Any) -> None:
        """Print what the job will do, and start nothing: sources, routing, state, what is logged, what a restore reads.

        Args:
            spark: The session.
            options: Those of `start` that are to be looked at with it: `shards`, `route`, `snapshots`.

        Raises:
            ValueError: A bad option, by name.
        """
        print(_starting().explain(self, spark, self._given(options)))

    def _given(self, options: Mapping[str, Any]) -> StartOptions:
        """Return the options that hold: those that are given, before what `options` has set."""
        known = _starting().StartOptions.__dataclass_fields__
        for option, value in (*self.settings.items(), *options.items()):
            if option not in known:
                raise ValueError(f"{option}={value!r}: not an option; allowed are {', '.join(sorted(known))}")
        given = {**self.settings, **{option: value for option, value in options.items() if value is not None}}
        made: StartOptions = _starting().StartOptions(**given)
        return made


def _starting() -> Any:
    """Return the module that starts pipelines, by name: it knows them, and imports them."""
    return import_module("backend.spark.start")


def _sink(results: str | Path | None, errors: str | Path | None, sink: Sink | None) -> Sink:
    if sink is not None:
        if results is not None or errors is not None:
            raise ValueError("sink: give either sink, or results and errors")
        if not all(callable(getattr(sink, method, None)) for method in ("open", "publish", "describe")):
            raise ValueError(f"sink={reprlib.repr(sink)}: allowed is what a function of backend.sinks gives")
        return sink
    if results is None or errors is None:
        raise ValueError("results and errors: both directories are needed (or a sink)")
    from backend.sinks import parquet_sink

    return parquet_sink(results, errors)


def stream(
    source: Source | DataFrame,
    *,
    event_time: str | None = None,
    key: str | Sequence[str] | None = None,
    name: str | None = None,
) -> Stream:
    """Begin a job with a source.

    Args:
        source: Such as `archive(...)` or `kafka(...)`, or a streaming DataFrame.
        event_time: Field with the event time: timestamp, date, or integer milliseconds. None takes the record's own
            timestamp, which a DataFrame's rows do not have.
        key: Field or fields of the group key; None for none. Windows take integers, floats, texts, binaries, booleans,
            dates and timestamps.
        name: Of a DataFrame: stands as `topic` in the errors; "dataframe" by default.

    Raises:
        ValueError: A bad option, by name.
    """
    if is_dataframe(source):
        source = dataframe_source(source, event_time, name)
    elif name is not None:
        raise ValueError(f"name={name!r}: only a DataFrame is given a name, others have their topics")
    if not callable(getattr(source, "offsets", None)):
        raise ValueError(
            f"source={reprlib.repr(source)}: allowed is what archive(...) or kafka(...) gives, or a streaming DataFrame"
        )
    fields = () if key is None else check_names("key", key)
    if len(set(fields)) != len(fields):
        raise ValueError(f"key={key!r}: must be the name of a field, a list of different names, or None")
    if event_time is not None and (not isinstance(event_time, str) or not event_time):
        raise ValueError(f"event_time={event_time!r}: must be the name of a field, or None")
    return Stream(source, None if event_time is None else str.__str__(event_time), fields)
