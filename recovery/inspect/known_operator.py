"""The operator of a checkpoint without the user's job, out of the manifest: enough to read its state, not to run it.

Everything that the layout of the state depends on is in the manifest. What is not, a user's own function, is replaced
by one that refuses to be called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from backend import aggregates as agg
from backend.joins.sides import SIDES, Side
from backend.joins.spec import JoinSpec
from backend.messages.layout import MessageLayout
from backend.stores.key_value_store import KeyValueOptions
from backend.stores.named import Declaration
from backend.stores.session_store import SessionOptions
from backend.stores.state_variables import TTLOptions
from backend.stores.window_store import WindowOptions
from backend.windows.definitions import Window
from backend.windows.operator import WindowOperator
from backend.windows.policies import Policies
from backend.windows.spec import window_spec

_AGGREGATES: dict[str, Callable[..., agg.Aggregate]] = {
    "count": agg.count,
    "sum": agg.sum_,
    "min": agg.min_,
    "max": agg.max_,
    "mean": agg.mean,
    "variance": agg.variance,
    "stddev": agg.stddev,
    "first": agg.first,
    "last": agg.last,
    "approx_distinct": agg.approx_distinct,
    "median": agg.quantile,
    "quantile": agg.quantile,
    "collect_list": agg.collect_list,
    "collect_set": agg.collect_set,
    "top_k": agg.top_k,
}
"""What makes an aggregate of its fields and, by their names, the options that its entry has."""


def window_operator(entry: Mapping[str, Any]) -> WindowOperator:
    """Make the operator of windows out of the manifest's entry.

    Raises:
        ValueError: The entry is of something else, or of an aggregate or a type that only the job itself knows.
    """
    if entry.get("operator") != "window":
        raise ValueError(f"operator={entry.get('operator')!r}: has no windows")
    schema = pa.schema([pa.field(name, type_of(kind)) for name, kind in entry["fields"]])
    return WindowOperator(
        window_spec(
            Window(**entry["window"]),
            schema,
            {name: _aggregate(name, entry["aggregates"][name]) for name in entry.get("columns", entry["aggregates"])},
            keys=[name for name, _ in entry["keys"]],
            retention=entry["retention_ms"] if entry["window"]["unit"] == "time" else None,
            retention_messages=entry["retention_messages"],
            policies=Policies(**entry["policies"]),
            idle_after=entry["idle_after_ms"],
            max_ahead=entry["max_ahead_ms"],
        )
    )


def known_join(entry: Mapping[str, Any]) -> JoinSpec | None:
    """Give the specification of a join out of the manifest's entry; None when the job is no join.

    Fields that neither come out nor are joined on are not in it: they do not travel.

    Raises:
        ValueError: A field has a type that the manifest says too little of.
    """
    if entry.get("operator") != "join":
        return None
    free = entry["free"]
    layout = MessageLayout.named(entry["message_key"])
    left, right = (_side(number, entry, free, by_number=not layout.timed) for number in range(2))
    return JoinSpec(
        left,
        right,
        entry["how"],
        entry["before"],
        entry["after"],
        tuple(entry["session_key"]),
        layout,
        free["on_time_ms"],
        free["late_ms"],
        entry["idle_after_ms"],
        entry["max_ahead_ms"],
        entry["left_streams"],
    )


def _side(number: int, entry: Mapping[str, Any], free: Mapping[str, Any], *, by_number: bool) -> Side:
    side = entry[SIDES[number]]
    return Side(
        number,
        pa.schema([pa.field(name, type_of(kind)) for name, kind in side["fields"]]),
        tuple(side["on"]),
        tuple(side["out"]),
        Window(**side["window"]) if side["window"] is not None else None,
        free["retention_ms"][number],
        free["retention_messages"][number],
        entry["how"] in (SIDES[number], "outer"),
        by_number,
    )


def _aggregate(name: str, entry: Mapping[str, Any]) -> agg.Aggregate:
    kind, fields = entry["kind"], entry["fields"]
    if kind in _AGGREGATES:
        return _AGGREGATES[kind](*fields, **{option: entry[option] for option in entry.keys() - {"kind", "fields"}})
    if kind == "over_all":  # keeps nothing but the messages
        return agg.over_all(*fields, function=_refuse, output=pa.null())
    raise ValueError(f"aggregates[{name!r}]: only the job itself knows how {kind} is kept")


def _refuse(messages: pa.Table) -> Any:
    raise ValueError("the job's own function is not known here")


def store_of(name: str, entry: Mapping[str, Any]) -> tuple[Declaration, int]:
    """Give the declaration and the region of a named store of `process()`.

    Raises:
        ValueError: It is of a kind that this release does not know.
    """
    stored, free = entry["stores"][name], entry.get("free", {}).get("stores", {}).get(name, {})
    return _declaration(name, stored, free), int(stored["region"])


def _declaration(name: str, stored: Mapping[str, Any], free: Mapping[str, Any]) -> Declaration:
    kind = stored["kind"]
    if kind == "window":
        durations = (free["retention_ms"], free["window_size_ms"], free["grace_ms"])
        return WindowOptions(name, *durations, bool(stored["layout"].get("retain_duplicates")))
    if kind == "session":
        return SessionOptions(name, free["retention_ms"])
    if kind in ("value", "list", "map"):
        return TTLOptions(kind, name, free.get("ttl_ms"))
    if kind == "key-value":
        return KeyValueOptions(name)
    raise ValueError(f"stores[{name!r}]: the kind {kind!r} is not known to this release")


def type_of(name: str) -> pa.DataType:
    """Give a type by the name that it has in a manifest.

    >>> str(type_of("struct<at: timestamp[us, tz=UTC], tags: list<element: string not null>>")[1].type.value_type)
    'string'

    Raises:
        ValueError: The name says too little, as that of a struct may that has a colon in the name of a field.
    """
    text = _TypeName(name)
    try:
        kind = text.read()
    except (ValueError, TypeError, IndexError):
        kind = None
    if kind is None or text.rest or _without_names(str(kind)) != _without_names(name):
        raise ValueError(f"type {name!r}: it cannot be told from its name; the table rows has the bytes")
    return kind


_WORD = r"\w+(?:\[[^]]*\]|\([^)]*\))?"
_OTHER_NAME = r" \('[^']*'\)"
"""Of what is in a map, where it is not Arrow's own; nothing that is stored depends on it."""
_LISTS: dict[str, Callable[[pa.Field], pa.DataType]] = {
    "list": pa.list_,
    "large_list": pa.large_list,
    "list_view": pa.list_view,
    "large_list_view": pa.large_list_view,
}


class _TypeName:
    """Arrow's name of a type, read from its beginning on; what does not fit is a `ValueError`.

    Attributes:
        rest: What is not read yet.
    """

    def __init__(self, name: str) -> None:
        self.rest = name

    def read(self) -> pa.DataType:
        """Read a type."""
        word = self._take(f"({_WORD})")
        if not self.rest.startswith("<"):
            return _plain_type(word)
        self._take("(<)")
        kind = self._nested(word)
        self._take("(>)")
        return pa.list_(kind[0], int(self._take(r"\[(\d+)\]"))) if word == "fixed_size_list" else kind

    def _nested(self, word: str) -> pa.DataType:
        if word in _LISTS:
            return _LISTS[word](self._field())
        if word in ("struct", "fixed_size_list"):
            fields: list[pa.Field] = []
            while not self.rest.startswith(">"):
                fields.append(self._field())
                self._take("((?:, )?)")
            return pa.struct(fields)
        if word == "map":
            key, _ = self.read(), self._take(f"((?:{_OTHER_NAME})?, )")
            value, _ = self.read(), self._take(f"((?:{_OTHER_NAME})?)")
            return pa.map_(key, value, self._take(f"((?:, keys_sorted)?)(?:{_OTHER_NAME})?") != "")
        if word == "dictionary":
            self._take("(values=)")
            values, _ = self.read(), self._take("(, indices=)")
            return pa.dictionary(self.read(), values, self._take("(?:, ordered=([01]))") == "1")
        raise ValueError(word)

    def _field(self) -> pa.Field:
        name, kind = self._take("(.*?): "), self.read()
        return pa.field(name, kind, not self._take("((?: not null)?)"))

    def _take(self, pattern: str) -> str:
        found = re.match(pattern, self.rest, re.DOTALL)
        if found is None:
            raise ValueError(self.rest)
        self.rest = self.rest[found.end() :]
        return found[1]


def _plain_type(name: str) -> pa.DataType:
    kind, *parts = re.split(r"[\[(]|, |[\])]", name)
    if kind == "timestamp":
        return pa.timestamp(parts[0], parts[1].removeprefix("tz=") or None)
    if re.fullmatch("decimal(32|64|128|256)", kind):
        return getattr(pa, kind)(int(parts[0]), int(parts[1]))
    return pa.binary(int(parts[0])) if kind == "fixed_size_binary" else pa.type_for_alias(name)


def _without_names(name: str) -> str:
    return re.sub(_OTHER_NAME, "", name)
