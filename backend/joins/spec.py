"""What a windowed join is asked to do: one checked value (SAMZA-552, "Configuration of A Join Window Operator").

A pair is a left and a right message whose equal fields are equal and not null, with
`-before <= right.time - left.time <= after` (both ends included), each in a retained window of its side when the other
comes. A message belongs to the first window that includes it, so a pair is one row, once.

========================= ============================== ==================== ==========================================
SAMZA-552                 option                         default              meaning
========================= ============================== ==================== ==========================================
measurement unit, size,   `left_window`, `right_window`  unbounded            windows by time or by number of messages
advance step
retention time            `left_retention`, ...          required for time    how long after its window's end, in the
                                                                              other side's stream time, a message joins
retention size            `left_retention_messages`, ... off                  how many messages of the side
setKeyedMessageStore      `message_key`                  by the matrix        `backend.messages.layout.MATRIX`
setOnTimeUpdatePeriod     `on_time_update_period`        per message          send pairs batched by wall clock
setLateUpdatePeriod       `late_update_period`           per arrival          the same for late arrivals
========================= ============================== ==================== ==========================================

Streams `0 .. left_streams - 1` are left, the others right. Messages have `backend.batch.MESSAGE_FIELDS`, then one
column per field of each side, `left.<field>` and `right.<field>`, null on the rows of the other side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from backend.batch import MESSAGE_FIELDS, SourcePartition
from backend.joins.fields import out_columns, read_on
from backend.joins.options import (
    checked_schema,
    measured_by_number,
    read_layout,
    read_left_streams,
    read_out,
    read_retention,
    read_session_key,
    read_within,
)
from backend.joins.sides import LEFT, RIGHT, SIDES, Side
from backend.messages.layout import MessageLayout
from backend.windows.definitions import Duration, Window, duration_ms
from backend.windows.spec import DEFAULT_IDLE_AFTER_MS, DEFAULT_MAX_AHEAD_MS

FORMAT = 1

HOW = ("inner", "left", "right", "outer")

DEFAULT_LARGE_WINDOW_MS = 600_000
"""A time range wider than this is large: messages are then found by their equal fields, not by reading the range.

Measured at 50 messages a second and side, CPU milliseconds per micro-batch, by the range | by the equal fields:
micro-batches of 10 s with a range of 5 min 48 | 28, of 15 min 135 | 38, of 60 min 774 | 55; micro-batches of 60 s with
a range of 5 min 63 | 125. Both are even where the range is about fifteen times the event time of a micro-batch.
"""
DEFAULT_LARGE_WINDOW_MESSAGES = 100_000
"""A window by number of messages that keeps more than this is large."""

JOIN_FIELDS = [
    pa.field("reason", pa.string(), nullable=False),  # full | late | drain
    pa.field("revision", pa.int32(), nullable=False),  # 0: a pair is emitted once
    pa.field("left_time", pa.int64()),  # event time, ms; null for the missing side of an outer row
    pa.field("right_time", pa.int64()),
]
"""Leading columns of a join's results; the fields of both sides follow."""


@dataclass(frozen=True)
class JoinSpec:
    """Everything a join needs to know; made by `join_spec`.

    Attributes:
        left: The left side.
        right: The right side.
        how: `inner`, `left`, `right` or `outer`.
        before: How much earlier than the left message the right one may be, ms; None with `after` for no time range.
        after: How much later.
        session_key: Which of the equal fields are the session key, by place in `on`; empty without session windows.
        layout: The messages' keys.
        on_time_ms: Pairs of messages on time are sent batched by this, in batch time; 0 is at once.
        late_ms: The same for late arrivals.
        idle_after_ms: Wall clock after which a silent source partition no longer holds outer rows; None is never.
        max_ahead_ms: Event times later than batch time plus this are refused; None is off.
        left_streams: Streams from 0 to this, exclusive, are left.
        first_offsets: Where source partitions begin, for windows by number; others begin with their first message.
    """

    left: Side
    right: Side
    how: str
    before: int | None
    after: int | None
    session_key: tuple[int, ...]
    layout: MessageLayout
    on_time_ms: int = 0
    late_ms: int = 0
    idle_after_ms: int | None = DEFAULT_IDLE_AFTER_MS
    max_ahead_ms: int | None = DEFAULT_MAX_AHEAD_MS
    left_streams: int = 1
    first_offsets: Mapping[SourcePartition, int] = field(default_factory=dict)

    @property
    def sides(self) -> tuple[Side, Side]:
        """Left and right."""
        return self.left, self.right

    @property
    def by_number(self) -> bool:
        """Whether windows and retention are measured by number of messages; by event time otherwise."""
        return not self.layout.timed

    @property
    def ranged(self) -> bool:
        """Whether there is a time range."""
        return self.before is not None

    def side_of(self, stream: int) -> int:
        """Give the side of a stream."""
        return LEFT if stream < self.left_streams else RIGHT

    @property
    def input_fields(self) -> list[str]:
        """Names of the columns that messages have behind `MESSAGE_FIELDS`."""
        return [f.name for side in self.sides for f in side.columns]

    @property
    def message_schema(self) -> pa.Schema:
        """Schema of the messages that the operator takes."""
        return pa.schema([*MESSAGE_FIELDS, *(f for side in self.sides for f in side.columns)])

    def result_schema(self) -> pa.Schema:
        """Give the schema of results: `JOIN_FIELDS`, then the fields of both sides."""
        return pa.schema([*JOIN_FIELDS, *(column for column, _ in out_columns(*self.sides))])

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry; what is under `free` may change between starts."""
        return {
            "operator": "join",
            "format": FORMAT,
            "how": self.how,
            "left": self.left.describe(),
            "right": self.right.describe(),
            "before": self.before,
            "after": self.after,
            "session_key": list(self.session_key),
            "message_key": self.layout.name,
            "left_streams": self.left_streams,
            "idle_after_ms": self.idle_after_ms,
            "max_ahead_ms": self.max_ahead_ms,
            "free": {
                "retention_ms": [side.retention_ms for side in self.sides],
                "retention_messages": [side.retention_messages for side in self.sides],
                "on_time_ms": self.on_time_ms,
                "late_ms": self.late_ms,
            },
        }

    def with_options(self, options: Mapping[str, Any]) -> JoinSpec:
        """Return this specification under other options; see `backend.batch.Operator.with_options`."""
        changed: dict[str, Any] = {name: options[name] for name in ("idle_after_ms", "max_ahead_ms") if name in options}
        free = options.get("free", {})
        changed |= {name: free[name] for name in ("on_time_ms", "late_ms") if name in free}
        for side in self.sides:
            retention = ("retention_ms", "retention_messages")
            changed[side.name] = replace(side, **{name: free[name][side.number] for name in retention if name in free})
        return replace(self, **changed)


def join_spec(
    left_schema: pa.Schema,
    right_schema: pa.Schema,
    *,
    on: str | Sequence[str | tuple[str, str]] | None = None,
    within: Duration | tuple[Duration, Duration] | None = None,
    how: str = "inner",
    left_window: Window | None = None,
    right_window: Window | None = None,
    left_retention: Duration | None = None,
    right_retention: Duration | None = None,
    left_retention_messages: int | None = None,
    right_retention_messages: int | None = None,
    left_fields: Sequence[str] | None = None,
    right_fields: Sequence[str] | None = None,
    session_key: str | Sequence[str] | None = None,
    message_key: str = "auto",
    large_window: Duration = DEFAULT_LARGE_WINDOW_MS,
    large_window_messages: int = DEFAULT_LARGE_WINDOW_MESSAGES,
    on_time_update_period: Duration = 0,
    late_update_period: Duration = 0,
    idle_after: Duration | None = DEFAULT_IDLE_AFTER_MS,
    max_ahead: Duration | None = DEFAULT_MAX_AHEAD_MS,
    left_streams: int = 1,
    first_offsets: Mapping[SourcePartition, int] | None = None,
    stored_layout: str | None = None,
) -> JoinSpec:
    """Make a checked specification.

    Args:
        left_schema: The left messages' own fields.
        right_schema: The right messages' own fields.
        on: Equal fields: a name, or a list of names and of pairs (left name, right name).
        within: The time range: how far apart event times may be, or (before, after): the right message at most
            `before` earlier and `after` later than the left one; both ends are in. A negative bound shifts the range.
        how: `inner`, `left`, `right` or `outer`.
        left_window: `backend.windows.definitions` by time or by number of messages; None: unbounded within retention.
            Windows by number count each source partition's offsets from its first one, so they are aligned by the
            first offsets. For how long a message can be joined its session ends the gap behind it: messages that
            prolong the session later do not prolong that.
        right_window: The same.
        left_retention: How long a left message can be joined: until the right side's stream time is this far behind the
            end of its window, without a window behind its own event time. Also what out of retention means: the same,
            by the stream time of the message's own source partition. Required for joins by time.
        right_retention: The same.
        left_retention_messages: By time: only the newest so many left messages can be joined. By number: how many
            numbers behind its window's end a message can be joined; by default the window's size.
        right_retention_messages: The same.
        left_fields: Fields that come out (and travel, with the equal ones); None for all.
        right_fields: The same.
        session_key: For session windows: the session key, left names out of `on`; None for all of `on`.
        message_key: `auto` takes SAMZA-552's matrix (see `stored_layout`); `time` treats the window as small,
            `join_fields` as large.
        large_window: A time range (before + after) above this is large.
        large_window_messages: Windows by number that keep more than this are large.
        on_time_update_period: Send pairs batched by this, in batch time; 0 sends per message.
        late_update_period: The same for late arrivals: messages whose window had ended before they came.
        idle_after: Wall clock after which a silent source partition holds nothing back; None for never.
        max_ahead: Event times later than batch time plus this are refused; None for historic data.
        left_streams: Streams `0 .. left_streams - 1` are left, the others right.
        first_offsets: (stream, partition) -> first offset, for windows by number; others begin with what comes first.
        stored_layout: Name of the layout of what is stored: `auto` keeps it, whether the window is large or small now.

    Raises:
        ValueError: An option is missing, unknown, or does not fit the others; the message names it.
    """
    if how not in HOW:
        raise ValueError(f"how={how!r}: allowed are {', '.join(map(repr, HOW))}")
    pairs = read_on(on, left_schema, right_schema)
    before, after = read_within(within)
    if not pairs and before is None:
        raise ValueError(
            "on=None, within=None: a join needs equal fields (on='id') or a time range (within='10 min'); with "
            "neither, every message would pair with every other one"
        )
    by_number = measured_by_number(left_window, right_window)
    sides = [
        Side(
            number,
            checked_schema(schema, SIDES[number]),
            tuple(pair[number] for pair in pairs),
            read_out(fields, schema, SIDES[number]),
            window,
            *read_retention(SIDES[number], window, retention, messages, by_number=by_number),
            how in (SIDES[number], "outer"),
            by_number,
        )
        for number, schema, fields, window, retention, messages in (
            (LEFT, left_schema, left_fields, left_window, left_retention, left_retention_messages),
            (RIGHT, right_schema, right_fields, right_window, right_retention, right_retention_messages),
        )
    ]
    for side in sides:
        if not side.fields:
            raise ValueError(f"{side.name}_fields=[]: name at least one field, or join on one")
    session = read_session_key(session_key, sides, pairs)
    spec = JoinSpec(
        sides[LEFT],
        sides[RIGHT],
        how,
        before,
        after,
        session,
        read_layout(message_key, sides, (before, after), session, large_window, large_window_messages, stored_layout),
        duration_ms(on_time_update_period, "on_time_update_period", least=0),
        duration_ms(late_update_period, "late_update_period", least=0),
        None if idle_after is None else duration_ms(idle_after, "idle_after", least=1),
        None if max_ahead is None else duration_ms(max_ahead, "max_ahead", least=0),
        read_left_streams(left_streams),
        dict(first_offsets or {}),
    )
    spec.result_schema()
    return spec
