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
from typing import Any

import pyarrow as pa

from backend.batch import Operator
from backend.joins import DEFAULT_IDLE_AFTER_MS, DEFAULT_MAX_AHEAD_MS, join_spec
from backend.operators.join import JoinOperator
from backend.spark.stream import FirstOffsets, Pipeline, Stream
from backend.windows import Duration, Window, duration_ms

SIDES = ("left", "right")


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
    **more: Any,
) -> Pipeline:
    """Join two streams: pairs of messages with equal fields, within a time range, each exactly once.

    Args:
        left: Made by `stream`, without a key: `on` routes.
        right: The same.
        on: Equal fields: a name, names, or (left name, right name).
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
        idle_after: Wall clock after which a silent source partition holds nothing back; None for never.
        max_ahead: Event times later than batch time plus this are refused; None for historic data.
        more: `session_key`, `message_key`, `large_window`, `large_window_messages`, `on_time_update_period`,
            `late_update_period`: see `backend.joins.join_spec`.

    Raises:
        ValueError: A bad option, by name; what needs the sources' fields is checked by `start`.
    """
    for side, given in zip(SIDES, (left, right), strict=True):
        if given.key:
            raise ValueError(f"{side}: key={list(given.key)!r} is not allowed in a join: messages are routed by `on`")
    for name, value in more.items():
        if name not in _MORE:
            raise ValueError(f"{name}={value!r}: not an option of join; allowed are {', '.join(_MORE)}")
    options: dict[str, Any] = {
        "on": on,
        "within": within,
        "how": how,
        "left_window": left_window,
        "right_window": right_window,
        "left_retention": left_retention,
        "right_retention": right_retention,
        "left_retention_messages": left_retention_messages,
        "right_retention_messages": right_retention_messages,
        "left_fields": left_fields,
        "right_fields": right_fields,
        "idle_after": idle_after,
        "max_ahead": max_ahead,
        **more,
    }

    def make(schemas: Sequence[pa.Schema], first_offsets: FirstOffsets) -> Operator:
        streams = len(left.source.topics)
        return JoinOperator(join_spec(*schemas, **options, left_streams=streams, first_offsets=first_offsets))

    ahead_ms = None if max_ahead is None else duration_ms(max_ahead, "max_ahead", least=0)
    return Pipeline((left, right), make, ahead_ms, needs_order=on is None, sides=SIDES, routing=_equal_fields)


def _equal_fields(operator: Operator) -> Sequence[tuple[str, ...]]:
    assert isinstance(operator, JoinOperator)
    return [side.on for side in operator.spec.sides]


_MORE = (
    "session_key",
    "message_key",
    "large_window",
    "large_window_messages",
    "on_time_update_period",
    "late_update_period",
)
