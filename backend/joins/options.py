"""The options of a join, checked one by one: every bad one is a `ValueError` that names it and says what is allowed."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import pyarrow as pa

from backend.batch import RESERVED
from backend.boundary import check_names
from backend.joins.sides import LEFT, Side
from backend.messages.layout import MessageLayout, choose_layout
from backend.windows.definitions import MAX_DURATION_MS, Duration, Window, _count, duration_ms

MESSAGE_KEYS = ("auto", "time", "join_fields")


def checked_schema(schema: pa.Schema, side: str) -> pa.Schema:
    """Check the messages' own fields."""
    if not isinstance(schema, pa.Schema):
        raise ValueError(f"{side}_schema={schema!r}: give a pyarrow schema")
    reserved = sorted(set(schema.names) & set(RESERVED))
    if reserved:
        raise ValueError(f"{side}_schema: the field names {reserved} are reserved")
    return schema


def read_within(value: Any) -> tuple[int | None, int | None]:
    """Read the time range as (before, after) in milliseconds, two None for none."""
    if value is None:
        return None, None
    bounds = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(bounds) != 2:
        raise ValueError(f"within={value!r}: give one duration, or (before, after)")
    before, after = (duration_ms(bound, "within", least=-MAX_DURATION_MS) for bound in bounds)
    if before + after < 0:
        raise ValueError(f"within={value!r}: before + after is negative, so no pair could be in the range")
    return before, after


def read_out(names: Sequence[str] | None, schema: pa.Schema, side: str) -> tuple[str, ...]:
    """Read the fields that come out, in the order of the schema."""
    if names is None:
        return tuple(schema.names)
    if isinstance(names, str):
        raise ValueError(f"{side}_fields={names!r}: give a list of field names")
    if isinstance(names, Set):
        names = tuple(names)  # they come in the schema's order
    for name in check_names(f"{side}_fields", names):
        if name not in schema.names:
            raise ValueError(f"{side}_fields: {name!r} is not a field; allowed are {schema.names}")
    return tuple(name for name in schema.names if name in set(names))


def measured_by_number(left: Window | None, right: Window | None) -> bool:
    """Check the windows, and say whether they are measured by number of messages; by event time otherwise."""
    for name, window in (("left_window", left), ("right_window", right)):
        if window is not None and not isinstance(window, Window):
            raise ValueError(f"{name}={window!r}: give tumbling(...), hopping(...), sliding(...) or session(...)")
        if window is not None and window.calendar is not None:
            raise ValueError(f"{name}={window!r}: a join takes windows of a fixed length, such as tumbling('1 day')")
    units = {window.unit for window in (left, right) if window is not None}
    if len(units) > 1:
        raise ValueError(
            "left_window, right_window: one is by time and one by number of messages; allowed are two of one kind, or "
            "one window and None"
        )
    return units == {"messages"}


def read_retention(
    side: str, window: Window | None, value: Duration | None, messages: int | None, *, by_number: bool
) -> tuple[int | None, int | None]:
    """Read retention by time in milliseconds and by number of messages; None for none."""
    by_size = f"{side}_retention_messages"
    if not by_number:
        if value is None and (messages is None or window is not None):
            raise ValueError(
                f"{side}_retention=None: a join by event time needs a retention for each side, such as '1 hour'; "
                f"without a window {by_size} may bound the side instead"
            )
        keep = None if value is None else duration_ms(value, f"{side}_retention", least=0)
        return keep, None if messages is None else _count(messages, by_size)
    if value is not None:
        raise ValueError(
            f"{side}_retention={value!r}: windows by number of messages are kept by number, give {by_size}"
        )
    if messages is not None:
        return None, _count(messages, by_size)
    if window is None:
        raise ValueError(
            f"{by_size}=None: the other side has windows by number of messages, so this side needs a window by number "
            f"or {by_size}"
        )
    return None, window.size


def read_session_key(
    value: str | Sequence[str] | None, sides: Sequence[Side], pairs: Sequence[tuple[str, str]]
) -> tuple[int, ...]:
    """Read the session key as places in `on`; empty without session windows."""
    sessions = [f"{side.name}_window" for side in sides if side.window is not None and side.window.kind == "session"]
    if not sessions:
        if value is not None:
            raise ValueError(f"session_key={value!r}: allowed with session windows only")
        return ()
    if not pairs:
        raise ValueError(
            f"{sessions[0]}: session windows in a join need the session key in on: without it a message would look "
            "into every session of the other side, which is the same join without session windows"
        )
    names = [pair[LEFT] for pair in pairs]
    wanted = names if value is None else check_names("session_key", value)
    missing = [name for name in wanted if name not in names]
    if missing or not wanted:
        raise ValueError(
            f"session_key={value!r}: {missing or 'nothing'} is not in on, and a join that does not include the session "
            f"key has to look into every session; allowed are {names}"
        )
    return tuple(names.index(name) for name in wanted)


def read_layout(
    message_key: str,
    sides: Sequence[Side],
    within: tuple[int | None, int | None],
    session: tuple[int, ...],
    large_window: Duration,
    large_window_messages: int,
    stored: str | None,
) -> MessageLayout:
    """Choose the message key; `auto` keeps the stored one, since what it goes by may change between starts."""
    if message_key not in MESSAGE_KEYS:
        raise ValueError(f"message_key={message_key!r}: allowed are {', '.join(map(repr, MESSAGE_KEYS))}")
    equal, by_number, ranged = bool(sides[LEFT].on), sides[LEFT].by_number, within[0] is not None
    most_ms = duration_ms(large_window, "large_window", least=0)
    most = _count(large_window_messages, "large_window_messages", least=0)
    if message_key == "join_fields" and not equal:
        raise ValueError("message_key='join_fields': allowed for a join on equal fields only")
    if message_key == "time" and not by_number and equal and not ranged:
        raise ValueError(
            "message_key='time': without a time range every stored message would be read; allowed are 'auto' and "
            "'join_fields', or give within"
        )
    if by_number:
        needed = max((side.window.size if side.window else 0) + (side.retention_messages or 0) for side in sides)
        large = needed > most
    else:
        large = ranged and (within[0] or 0) + (within[1] or 0) > most_ms
    if message_key != "auto":
        large = message_key == "join_fields"
    layouts = [
        choose_layout(by_number=by_number, equal_fields=equal, time_range=ranged, large=one, session=bool(session))
        for one in (large, not large)
    ]
    return next((one for one in layouts if message_key == "auto" and one.name == stored), layouts[0])


def read_left_streams(value: object) -> int:
    """Check how many streams are left."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**16:
        raise ValueError(f"left_streams={value!r}: allowed are 1 to {2**16 - 1}")
    return value
