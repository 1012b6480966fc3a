"""Aggregates by a user's own functions.

The functions run in Python, once per message (`reducer`) or once per window and group (`over_all`), and must be
deterministic: a retried micro-batch and a restore run them again. States are MessagePack, never pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from backend.aggregates.groups import Rows, taken
from backend.aggregates.model import Aggregate, check_publishable, qualified_name
from backend.boundary import check_function, user_code
from backend.errors import UNDECODABLE, StateCorrupted, ValueInvalid
from backend.python_rows import python_values

MAX_STATE_BYTES = 1 << 20


def reducer(
    *fields: str,
    init: Callable[[], Any],
    add: Callable[..., Any],
    merge: Callable[[Any, Any], Any],
    result: Callable[[Any], Any] | None = None,
    output: pa.DataType,
    state: Any = None,
) -> Aggregate:
    """Make an incremental aggregate of your own.

    Args:
        fields: Message fields, handed to `add` in this order as Python values (None for null).
        init: `init()` gives the state before any message.
        add: `add(state, *values)` gives the state after one more message; called in fold order.
        merge: `merge(earlier, later)` unites two states. Windows are put together from panes and sessions from
            sessions, so it must be associative with `add`. Where messages come out of order, or from several source
            partitions, which of them are added first depends on where micro-batches are cut: for a result that does
            not, their order must not matter.
        result: `result(state)` gives the value to emit; the state itself by default.
        output: Arrow type of the result.
        state: Type of the state for decoding (a dataclass, a `msgspec.Struct`, `tuple[int, float]`, ...). Without it
            the state comes back as MessagePack gives it: tuples as lists, sets not at all.

    Raises:
        ValueError: A function takes other arguments, `output` is no Arrow type that can be published, or `state` no
            type that can be decoded.
    """
    functions = _Functions(init, add, merge, _same if result is None else result)
    check_function("reducer: init", init, ())
    check_function("reducer: add", add, ("state", *fields))
    check_function("reducer: merge", merge, ("earlier", "later"))
    check_function("reducer: result", functions.result, ("state",))
    _check_output("reducer", output)
    options: dict[str, object] = {part: qualified_name(function) for part, function in vars(functions).items()}
    options["output"] = str(output)
    coder = _Coder(state)
    return Aggregate(
        "reducer", fields, True, lambda alias, schema: _Reducer(alias, fields, functions, output, coder), options
    )


def over_all(*fields: str, function: Callable[[pa.Table], Any], output: pa.DataType) -> Aggregate:
    """Make a full-state aggregate of your own.

    Args:
        fields: Message fields that the function needs.
        function: `function(table)` gets the `fields` of all messages of a window and group, in fold order, never
            empty, and gives the value to emit.
        output: Arrow type of the result.

    Raises:
        ValueError: The function does not take a table, or `output` is no Arrow type that can be published, or there is
            no field.
    """
    check_function("over_all: function", function, ("table",))
    if not fields:
        raise ValueError("over_all: fields=(); allowed: at least one field")
    _check_output("over_all", output)
    options: dict[str, object] = {"function": qualified_name(function), "output": str(output)}
    return Aggregate(
        "over_all", fields, False, lambda alias, schema: _OverAll(alias, fields, function, output), options
    )


def _same(state: Any) -> Any:
    return state


def _check_output(kind: str, output: object) -> None:
    if not isinstance(output, pa.DataType):
        raise ValueError(f"{kind}: output={output!r}; allowed: a pyarrow type, such as pyarrow.int64()")
    check_publishable(output, f"{kind}: output")


@dataclass(frozen=True)
class _Functions:
    init: Callable[[], Any]
    add: Callable[..., Any]
    merge: Callable[[Any, Any], Any]
    result: Callable[[Any], Any]


class _Coder:
    def __init__(self, kind: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        try:
            self._decoder = msgspec.msgpack.Decoder(Any if kind is None else kind)
        except TypeError as error:
            raise ValueError(f"reducer: state={kind!r}: {error}; allowed: a type that msgspec decodes") from None

    def encode(self, alias: str, state: Any) -> bytes:
        try:
            data = self._encoder.encode(state)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueInvalid(
                f"aggregates[{alias!r}]: the state of the reducer cannot be encoded",
                why=f"{error}; allowed: numbers, texts, bytes, lists, dicts, dataclasses, msgspec.Struct",
            ) from error
        if len(data) > MAX_STATE_BYTES:
            raise ValueInvalid(
                f"aggregates[{alias!r}]: the state of the reducer is too large",
                why=f"{len(data)} bytes, the bound is {MAX_STATE_BYTES}",
            )
        return data

    def decode(self, alias: str, data: bytes) -> Any:
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:  # whole, and of another type: no disk made that
            raise ValueInvalid(
                f"aggregates[{alias!r}]: a state of the reducer is not of the type that state= declares",
                why=str(error),
                command="let init, add and merge give that type; for a state that is stored already, give state= as it"
                " was",
            ) from error
        except UNDECODABLE as error:
            raise StateCorrupted(
                f"aggregates[{alias!r}]: the stored state of the reducer cannot be decoded", why=str(error)
            ) from error


class _Reducer:
    """Partial: `state`, MessagePack; null before any message."""

    def __init__(
        self, alias: str, fields: Sequence[str], functions: _Functions, output: pa.DataType, coder: _Coder
    ) -> None:
        self._alias, self._fields, self._part, self._coder = alias, list(fields), f"{alias}.state", coder
        self._functions = functions
        self.accumulator_fields = [pa.field(self._part, pa.binary())]
        self.result_field = pa.field(alias, output)

    def fold(self, rows: Rows) -> list[pa.Array]:
        columns = [python_values(rows.column(name)) for name in self._fields]
        values = zip(*columns, strict=True) if columns else iter([()] * len(rows.groups))
        states: dict[int, Any] = {}
        with self._named("add"):
            for group, arguments in zip(rows.groups.tolist(), values, strict=True):  # one message at a time
                state = states[group] if group in states else self._functions.init()
                states[group] = self._functions.add(state, *arguments)
        return [self._encode(states, rows.count)]

    def merge(self, rows: Rows) -> list[pa.Array]:
        states: dict[int, Any] = {}
        with self._named("merge"):
            for group, data in zip(rows.groups.tolist(), rows.column(self._part).to_pylist(), strict=True):
                if data is not None:
                    later = self._coder.decode(self._alias, data)
                    states[group] = self._functions.merge(states[group], later) if group in states else later
        return [self._encode(states, rows.count)]

    def _encode(self, states: dict[int, Any], count: int) -> pa.Array:
        rows = [self._coder.encode(self._alias, states[group]) if group in states else None for group in range(count)]
        return pa.array(rows, pa.binary())

    def result(self, accumulators: pa.Table) -> pa.Array:
        data = accumulators.column(self._part).to_pylist()
        states = (self._functions.init() if row is None else self._coder.decode(self._alias, row) for row in data)
        with self._named("result"):
            results = [self._functions.result(state) for state in states]
        return _output(self._alias, results, self.result_field.type)

    def _named(self, part: str) -> AbstractContextManager[None]:
        return user_code(f"aggregates[{self._alias!r}]: the reducer's functions, in {part},")


class _OverAll:
    """Groups without messages give null."""

    ordered = True

    def __init__(
        self, alias: str, fields: Sequence[str], function: Callable[[pa.Table], Any], output: pa.DataType
    ) -> None:
        self._fields, self._function = list(fields), function
        self.result_field = pa.field(alias, output)

    def result(self, rows: Rows) -> pa.Array:
        wanted = list(dict.fromkeys(self._fields))
        table = taken(pa.table([rows.column(name) for name in wanted], names=wanted), rows.order)
        out: list[Any] = []
        start = 0
        with user_code(f"aggregates[{self.result_field.name!r}]: the function"):
            for size in rows.sizes.tolist():
                out.append(self._function(table.slice(start, size)) if size else None)
                start += size
        return _output(self.result_field.name, out, self.result_field.type)


def _output(alias: str, values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, type=kind)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:  # ValueError: half of a surrogate pair
        raise ValueInvalid(
            f"aggregates[{alias!r}]: a function's result does not fit its output type", why=f"{kind}: {error}"
        ) from error
