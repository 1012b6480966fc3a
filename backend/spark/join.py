"""The fluent API of joins: two streams into one stateful operator.

::

    query = join(
        stream(departures, event_time="scheduled"),
        stream(weather, event_time="observed"),
        on="origin",
        within=("59 minutes", "0 s"),
        how="left",
        left_retention="1 day",
        right_retention="1 day",
    ).start(spark, checkpoint="checkpoints/weather", results="out/joined", errors="out/errors")

Both streams are routed by the equal fields, so a pair meets in one shard. Without equal fields every message may pair
with every other one within the time range, so there is one shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from backend.batch import Operator
from backend.joins.operator import JoinOperator
from backend.joins.sides import SIDES
from backend.joins.spec import (
    DEFAULT_LARGE_WINDOW_MESSAGES,
    DEFAULT_LARGE_WINDOW_MS,
    join_spec,
)
from backend.spark.stream import Known, Pipeline, Stream
from backend.windows.definitions import Duration, Window, duration_ms
from backend.windows.spec import DEFAULT_IDLE_AFTER_MS, DEFAULT_MAX_AHEAD_MS


def join(
    left: Stream,
    right: Stream,
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
    idle_after: Duration | None = DEFAULT_IDLE_AFTER_MS,
    max_ahead: Duration | None = DEFAULT_MAX_AHEAD_MS,
    session_key: str | Sequence[str] | None = None,
    message_key: str = "auto",
    large_window: Duration = DEFAULT_LARGE_WINDOW_MS,
    large_window_messages: int = DEFAULT_LARGE_WINDOW_MESSAGES,
    on_time_update_period: Duration = 0,
    late_update_period: Duration = 0,
) -> Pipeline:
    """Join two streams: pairs of messages with equal fields, within a time range, each exactly once.

    Args:
        left: Made by `stream`, without a key: `on` routes.
        right: The same.
        on: Equal fields: a name, or a list of names and of pairs (left name, right name).
        within: The time range: how far apart event times may be, or (before, after): the right message at most
            `before` earlier and `after` later than the left one; both ends are in.
        how: `inner`, `left`, `right` or `outer`: rows without a partner come once none can arrive any more.
        left_window: Windows of the left side, by time or by number of messages; None: unbounded within retention.
        right_window: The same.
        left_retention: How long a left message can be joined, in the right side's stream time.
        right_retention: The same.
        left_retention_messages: How many left messages can be joined.
        right_retention_messages: The same.
        left_fields: Fields that come out; None for all. Only they and the equal ones travel to the shards.
        right_fields: The same.
        idle_after: Wall clock after which a source partition that is silent, or brings nothing that is accepted, holds
            nothing back; None for never.
        max_ahead: As in `Stream.window`.
        session_key: For session windows: the session key, left names out of `on`; None for all of `on`.
        message_key: How stored messages are ordered: `auto` chooses by the window at the first start and keeps that,
            `time` treats it as small, `join_fields` as large.
        large_window: A time range (before + after) above this is large.
        large_window_messages: Windows by number that keep more than this are large.
        on_time_update_period: Send pairs batched by this, in batch time; 0 sends per message.
        late_update_period: The same for late arrivals: messages whose window had ended before they came.

    Raises:
        ValueError: A bad option, by name; what needs the sources' fields is checked by `start`.
    """
    for side, given in zip(SIDES, (left, right), strict=True):
        if not isinstance(given, Stream):
            raise ValueError(f"{side}={given!r}: must be what stream(...) gives")
        if given.key:
            raise ValueError(f"{side}: key={list(given.key)!r} is not allowed in a join: messages are routed by `on`")

    def make(schemas: Sequence[pa.Schema], known: Known) -> Operator:
        return JoinOperator(
            join_spec(
                *schemas,
                on=on,
                within=within,
                how=how,
                left_window=left_window,
                right_window=right_window,
                left_retention=left_retention,
                right_retention=right_retention,
                left_retention_messages=left_retention_messages,
                right_retention_messages=right_retention_messages,
                left_fields=left_fields,
                right_fields=right_fields,
                session_key=session_key,
                message_key=message_key,
                large_window=large_window,
                large_window_messages=large_window_messages,
                on_time_update_period=on_time_update_period,
                late_update_period=late_update_period,
                idle_after=idle_after,
                max_ahead=max_ahead,
                left_streams=known.topics[0],
                first_offsets=known.first_offsets,
                stored_layout=known.operator.get("message_key"),
            )
        )

    ahead_ms = None if max_ahead is None else duration_ms(max_ahead, "max_ahead", least=0)
    return Pipeline((left, right), make, ahead_ms, needs_order=on is None, sides=SIDES)
