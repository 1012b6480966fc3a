"""What a window operator is asked to do: one checked value.

SAMZA-552's configuration, under its names there and here:

==================== ========================= ================= =============================================
SAMZA-552            option                    default           meaning
==================== ========================= ================= =============================================
measurement unit     `window` (its unit)       required          event time, or number of messages
window size          `window` (its size)       required
advance step size    `window` (its step)       the size
retention time       `retention`               required for time how long after its end a window takes messages; by
                                                                 number: how long after its newest one it is kept open
retention size       `retention_messages`      off               how many messages of a source partition; by number:
                                                                 of the shard, over all its source partitions
early emission       `policies.early_ms`,      off               send open windows, by wall clock or number of
                     `.early_messages`                           messages
full size            `policies.full`           on                send at the first message at or past the end
late arrival         `policies.late_ms`        10 seconds        send past windows, batched by wall clock
(not in it)          `idle_after`              1 minute          a silent source partition holds nothing back
(not in it)          `max_ahead`               1 day             event times later than batch time plus this are bad
==================== ========================= ================= =============================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from backend.aggregates import Aggregate, FullPlan, IncrementalPlan, compile_full, compile_incremental
from backend.aggregates.model import check_kinds
from backend.batch import ADDED_BY_SINKS, EDGES, MESSAGE_FIELDS, RESERVED, RESULT_FIELDS, published_name
from backend.boundary import check_names
from backend.keys.columns import has_order
from backend.windows.combined_rows import check_marks
from backend.windows.definitions import Duration, Window, _count, duration_ms
from backend.windows.policies import Policies

FORMAT, SESSION_FORMAT, BY_NUMBER_FORMAT = 1, 3, 7
"""What state means: of windows that all keys share, of sessions by event time, and of windows by number.

Format 1 of sessions: they were kept, and messages near them taken, for as long as the merged session's retention.
Format 2: they did not say how many of their messages no row has shown. Format 3 of those by number: a grown one was
sent with the next revision, and what had been sent was not kept. Until format 5 their sessions had rows of their own
kind, and until format 6 what waited was not in order of time.
"""

DEFAULT_IDLE_AFTER_MS = 60_000
DEFAULT_MAX_AHEAD_MS = 86_400_000


@dataclass(frozen=True)
class WindowSpec:
    """Everything a window operator needs to know; made by `window_spec`.

    Attributes:
        window: The windows.
        schema: The messages' own fields (none of `RESERVED`).
        keys: Fields of the group key, in order; may be empty.
        aggregates: Result name -> aggregate, in the order of the result's columns.
        retention_ms: How long after a window's end, in stream time, it still takes messages. Windows by number of
            messages: how long after the newest event time of its messages an open window is kept; 0 is for ever.
        retention_messages: Retention by number of messages, None for none; backend.windows.count_retention has the
            rule, of windows by number of messages backend.windows.by_number.falling. The earlier bound wins.
        policies: When results are sent.
        idle_after_ms: Wall clock after which a silent source partition no longer holds windows open; None is never.
        max_ahead_ms: Event times later than batch time plus this are refused; None is off.
    """

    window: Window
    schema: pa.Schema
    keys: tuple[str, ...]
    aggregates: Mapping[str, Aggregate]
    retention_ms: int
    retention_messages: int | None = None
    policies: Policies = field(default_factory=Policies)
    idle_after_ms: int | None = DEFAULT_IDLE_AFTER_MS
    max_ahead_ms: int | None = DEFAULT_MAX_AHEAD_MS

    @property
    def format(self) -> int:
        """Format version of the state."""
        if not self.window.by_time:
            return BY_NUMBER_FORMAT
        return SESSION_FORMAT if self.window.kind == "session" else FORMAT

    @property
    def message_schema(self) -> pa.Schema:
        """Schema of messages with all of their fields."""
        return pa.schema([*MESSAGE_FIELDS, *self.schema])

    @property
    def key_fields(self) -> list[pa.Field]:
        """Fields of the group key."""
        return [self.schema.field(name) for name in self.keys]

    @property
    def incremental(self) -> dict[str, Aggregate]:
        """The aggregates that need no messages."""
        return {name: aggregate for name, aggregate in self.aggregates.items() if aggregate.incremental}

    @property
    def full(self) -> dict[str, Aggregate]:
        """The aggregates that read every message of the window."""
        return {name: aggregate for name, aggregate in self.aggregates.items() if not aggregate.incremental}

    def plans(self) -> tuple[IncrementalPlan, FullPlan]:
        """Compile both kinds of aggregates; either may be empty."""
        schema = self.message_schema
        return compile_incremental(self.incremental, schema), compile_full(self.full, schema)

    def result_schema(self) -> pa.Schema:
        """Give the schema of results: `RESULT_FIELDS`, the group key, the aggregates."""
        incremental, full = self.plans()
        found = {f.name: f for f in [*incremental.result_fields, *full.result_fields]}
        return pa.schema([*RESULT_FIELDS, *self.key_fields, *(found[name] for name in self.aggregates)])

    def input_fields(self) -> list[str]:
        """Give the fields that the operator reads, in the order of the schema."""
        wanted = set(self.keys)
        for aggregate in self.aggregates.values():
            wanted.update(aggregate.fields)
        return [name for name in self.schema.names if name in wanted]

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry."""
        return {
            "operator": "window",
            "format": self.format,
            "window": self.window.describe(),
            "keys": [[f.name, str(f.type)] for f in self.key_fields],
            "aggregates": {name: aggregate.describe() for name, aggregate in self.aggregates.items()},
            "columns": list(self.aggregates),  # stored rows name nothing: this is what their values are of
            "fields": [[name, str(self.schema.field(name).type)] for name in self.input_fields()],
            "retention_ms": self.retention_ms,
            "retention_messages": self.retention_messages,
            "policies": self.policies.describe(),
            "idle_after_ms": self.idle_after_ms,
            "max_ahead_ms": self.max_ahead_ms,
        }

    def with_options(self, options: Mapping[str, Any]) -> WindowSpec:
        """Return this specification under other options; see `backend.batch.Operator.with_options`."""
        known = ("retention_ms", "retention_messages", "idle_after_ms", "max_ahead_ms")
        changed: dict[str, Any] = {name: options[name] for name in known if name in options}
        if "policies" in options:
            changed["policies"] = Policies(**options["policies"])
        return replace(self, **changed)


def window_spec(
    window: Window,
    schema: pa.Schema,
    aggregates: Mapping[str, Aggregate],
    *,
    keys: str | Sequence[str] = (),
    retention: Duration | None = None,
    retention_messages: int | None = None,
    policies: Policies | None = None,
    idle_after: Duration | None = DEFAULT_IDLE_AFTER_MS,
    max_ahead: Duration | None = DEFAULT_MAX_AHEAD_MS,
) -> WindowSpec:
    """Make a checked specification of windows for contexts and testers; `Stream.window` takes the same options.

    Args:
        window: `tumbling`, `hopping`, `sliding` or `session`.
        schema: The messages' own fields; none of our columns' names (`_stream`, `_partition`, `_offset`, `_time`, ...).
        aggregates: Name of a result's column -> aggregate, such as `{"n": count()}`.
        keys: Fields of the group key, in order; without any there is one group.
        retention: How long after its end, in stream time, a window takes late messages; required for windows by time.
            Windows by number: how long after the newest event time of its messages an open one is kept.
        retention_messages: Retention by number of messages, per source partition; windows by number count those of all.
            The earlier bound wins.
        policies: When results are sent; None: full windows at once, late updates every ten seconds.
        idle_after: Wall clock after which a silent source partition no longer holds windows open; None is never.
        max_ahead: An event time later than the wall clock plus this is refused as `in_future`; None refuses none.

    Raises:
        ValueError: An option is missing, unknown, or does not fit the others; the message names it.
    """
    if not isinstance(window, Window):
        raise ValueError(f"window={window!r}: give tumbling(...), hopping(...), sliding(...) or session(...)")
    if policies is not None and not isinstance(policies, Policies):
        raise ValueError(f"policies={policies!r}: allowed are policies(...) and None")
    check_kinds(aggregates)
    keys = check_names("keys", keys)
    _check_names(schema, keys, aggregates)
    _check_ours(window, aggregates)
    if window.by_time and retention is None:
        raise ValueError("retention=None: windows by event time need a retention, such as '1 hour' ('0 s' is allowed)")
    if not window.by_time and window.kind == "session" and retention_messages is not None:
        raise ValueError(
            f"retention_messages={retention_messages!r}: a session by number of messages ends after {window.size}"
            " messages without its key, so no more of them are open; give retention, or nothing"
        )
    spec = WindowSpec(
        window,
        schema,
        keys,
        dict(aggregates),
        duration_ms(retention, "retention", least=0 if window.by_time else 1) if retention is not None else 0,
        _count(retention_messages, "retention_messages") if retention_messages is not None else None,
        policies or Policies(),
        None if idle_after is None else duration_ms(idle_after, "idle_after", least=1),
        None if max_ahead is None else duration_ms(max_ahead, "max_ahead", least=0),
    )
    spec.plans()
    return spec


def _check_ours(window: Window, aggregates: Mapping[str, Aggregate]) -> None:
    """Refuse aggregates of our own columns, and those that are called like columns that are stored beside them."""
    beside = {"_last", "_revision", *(f"_{name}" for name in EDGES)}
    for name, aggregate in aggregates.items():
        if name in beside and (window.kind == "session" or not window.by_time):
            raise ValueError(f"aggregates: the result name {name!r} is taken already; allowed is any other name")
        ours = [wanted for wanted in aggregate.fields if wanted in RESERVED]
        if ours:
            raise ValueError(f"aggregates[{name!r}]: the fields {ours} are reserved: allowed are those of the messages")


def _check_names(schema: pa.Schema, keys: Sequence[str], aggregates: Mapping[str, Aggregate]) -> None:
    taken = {name.lower() for name in (*(f.name for f in RESULT_FIELDS), *RESERVED)}  # a and A are one to Spark
    shown = [published_name(key).lower() for key in keys]
    reserved = sorted(set(schema.names) & set(RESERVED))
    if reserved:
        raise ValueError(f"schema: the field names {reserved} are reserved")
    check_marks("schema", schema.names)
    for name in keys:
        if name not in schema.names:
            raise ValueError(f"keys: {name!r} is not a field; allowed are {schema.names}")
        if name.lower() in taken or shown.count(published_name(name).lower()) > 1:
            raise ValueError(f"keys: {name!r} is taken already; rename the field")
        if not has_order(schema.field(name).type):
            raise ValueError(
                f"keys: {name!r} is {schema.field(name).type}: allowed in a group key are integers, floats,"
                " texts, binaries, booleans, dates and timestamps"
            )
    folded = [*shown, *(name.lower() for name in aggregates)]
    for name in aggregates:
        if name.lower() in taken.union(ADDED_BY_SINKS) or name in keys or name in map(published_name, keys):
            raise ValueError(f"aggregates: the result name {name!r} is taken already; allowed is any other name")
        if folded.count(name.lower()) > 1:
            raise ValueError(f"aggregates: the result name {name!r} is taken already (a and A are one to Spark)")
