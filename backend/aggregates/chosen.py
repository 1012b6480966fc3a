"""Extremes and first or last values: aggregates that choose one of the values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from backend.aggregates import groups as g
from backend.aggregates.groups import Ints, Rows
from backend.aggregates.model import FLAT, Aggregate, of_field
from backend.batch import OFFSET, PARTITION, STREAM

_ORDER = (STREAM, PARTITION, OFFSET)


def min_(name: str) -> Aggregate:
    """Give the smallest value of a field: numbers, booleans, texts and bytes (by bytes), dates, times, timestamps.

    NaN is the greatest value: the result is NaN only when there is nothing else.
    """
    return of_field("min", name, FLAT, lambda alias, entry: _Extreme(alias, entry, "min"))


def max_(name: str) -> Aggregate:
    """Give the greatest value of a field, as `min_`; NaN when there is one."""
    return of_field("max", name, FLAT, lambda alias, entry: _Extreme(alias, entry, "max"))


def first(name: str, *, ignore_nulls: bool = False) -> Aggregate:
    """Give the field of the first message in fold order: (stream, source partition, offset).

    The order is kept with the value, so partials merge in any sequence. With `ignore_nulls` the first message that
    has a value counts; without, its value may be null, as in Spark.
    """
    return _edge("first", name, ignore_nulls)


def last(name: str, *, ignore_nulls: bool = False) -> Aggregate:
    """Give the field of the last message in fold order, as `first`."""
    return _edge("last", name, ignore_nulls)


def _edge(kind: str, name: str, ignore_nulls: bool) -> Aggregate:
    if not isinstance(ignore_nulls, bool):
        raise ValueError(f"{kind}: ignore_nulls={ignore_nulls!r}; allowed: True, False")

    def make(alias: str, entry: pa.Field, ignore_nulls: bool) -> _Edge:
        return _Edge(alias, entry, kind == "last", ignore_nulls)

    return of_field(kind, name, FLAT, make, ignore_nulls=ignore_nulls)


class _Extreme:
    """Partial: `value`, null while none was seen."""

    def __init__(self, alias: str, entry: pa.Field, how: str) -> None:
        self._name, self._part, self._kind, self._how = entry.name, f"{alias}.value", entry.type, how
        self.accumulator_fields = [pa.field(self._part, entry.type)]
        self.result_field = pa.field(alias, entry.type)
        self._plain = _plain_type(entry.type)

    def fold(self, rows: Rows) -> list[pa.Array]:
        return [self._choose(rows, self._name)]

    def merge(self, rows: Rows) -> list[pa.Array]:
        return [self._choose(rows, self._part)]

    def result(self, accumulators: pa.Table) -> pa.Array:
        return accumulators.column(self._part)

    def _choose(self, rows: Rows, name: str) -> pa.Array:
        (array, groups), count = rows.present(name), rows.count
        if self._plain is None:  # texts, bytes, booleans, decimals: Arrow's own grouped extremes
            table = pa.table({"group": groups, "value": array}).group_by("group", use_threads=False)
            chosen = table.aggregate([("value", self._how)])
            values = chosen.column(f"value_{self._how}").combine_chunks()
            return g.scatter(values.cast(self._kind), chosen.column("group").to_numpy(), count)
        values = g.without_negative_zero(array).view(self._plain).to_numpy(zero_copy_only=False)
        seen = rows.sizes_of(name) > 0
        best = np.full(count, self._start(values.dtype), values.dtype)
        # NaN is the greatest value: `maximum` lets it win, `fmin` leaves it aside unless there is nothing else
        choose = np.maximum if self._how == "max" else np.fmin
        with np.errstate(invalid="ignore"):  # NaN among the values
            choose.at(best, groups, values)
        best[~seen] = 0
        return g.column(best, seen, self._plain).view(self._kind)

    def _start(self, dtype: np.dtype[Any]) -> float:
        """Give what every value wins against."""
        if dtype.kind == "f":
            return -np.inf if self._how == "max" else np.nan
        return np.iinfo(dtype).min if self._how == "max" else np.iinfo(dtype).max


def _plain_type(kind: pa.DataType) -> pa.DataType | None:
    """Give the integer or float type of the same width that orders alike; None when there is none."""
    if pa.types.is_integer(kind) or pa.types.is_float64(kind) or pa.types.is_float32(kind):
        return kind
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    return None


class _Edge:
    """Partial: `value`, and `stream`, `partition`, `offset` of its message; the three are null while none was seen."""

    def __init__(self, alias: str, entry: pa.Field, last_one: bool, ignore_nulls: bool) -> None:
        self._name, self._last, self._ignore = entry.name, last_one, ignore_nulls
        self._value = f"{alias}.value"
        self._order = [f"{alias}.{part}" for part in ("stream", "partition", "offset")]
        kinds = (pa.uint16(), pa.int32(), pa.int64())
        self.accumulator_fields = [pa.field(self._value, entry.type)]
        self.accumulator_fields += [pa.field(name, kind) for name, kind in zip(self._order, kinds, strict=True)]
        self.result_field = pa.field(alias, entry.type)

    def fold(self, rows: Rows) -> list[pa.Array]:
        array = rows.column(self._name)
        numbers = np.arange(len(array))
        if self._ignore and array.null_count:
            numbers = numbers[array.is_valid().to_numpy(zero_copy_only=False)]
        return self._take(rows, numbers, [self._name, *_ORDER])

    def merge(self, rows: Rows) -> list[pa.Array]:
        seen = np.flatnonzero(rows.column(self._order[0]).is_valid().to_numpy(zero_copy_only=False))
        stream, partition, offset = (rows.column(name).drop_null().to_numpy() for name in self._order)
        in_order = np.lexsort((offset, partition, stream))
        return self._take(rows, seen[in_order], [self._value, *self._order])

    def _take(self, rows: Rows, numbers: Ints, names: list[str]) -> list[pa.Array]:
        """Take per group the first or last of the rows `numbers`, which are in fold order."""
        # Of several assignments to one place numpy keeps the last.
        chosen = np.full(rows.count, -1, np.int64)
        ordered = numbers if self._last else numbers[::-1]
        chosen[rows.groups[ordered]] = ordered
        picks = pa.array(chosen, mask=chosen < 0)
        return [
            rows.column(name).take(picks).cast(part.type)
            for name, part in zip(names, self.accumulator_fields, strict=True)
        ]

    def result(self, accumulators: pa.Table) -> pa.Array:
        return accumulators.column(self._value)
