"""Aggregates over a plain list of messages, recomputed from scratch each time they are asked for.

An aggregate is a tuple `(function, field, *arguments)`; the messages come in fold order. Nulls are left out, except by
`count` without a field, `first` and `last`; no value at all gives None (0 for counts, an empty list for collections).
NaN is a value: it spreads through sums and is the largest in any order. A sum of integers beyond int64 is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Aggregate = tuple[Any, ...]
Fields = Mapping[str, Any]


def evaluate(aggregate: Aggregate, rows: Sequence[Fields]) -> Any:
    """Compute one aggregate over the fields of some messages."""
    function, field, *arguments = aggregate
    if field is None:
        return len(rows)
    values = [row[field] for row in rows]
    if function not in ("first", "last"):
        values = [value for value in values if value is not None]
    return FUNCTIONS[function](values, *arguments)


def _order(value: Any) -> tuple[bool, Any]:
    nan = isinstance(value, float) and math.isnan(value)
    return nan, 0 if nan else value


def _total(values: Sequence[Any]) -> Any:
    if all(isinstance(value, int) for value in values):
        return sum(values)
    if all(math.isfinite(value) for value in values):
        return math.fsum(values)
    return sum(values)


def _sum(values: Sequence[Any]) -> Any:
    total = _total(values) if values else None
    return total if not isinstance(total, int) or -(2**63) <= total < 2**63 else None


def _mean(values: Sequence[Any]) -> float | None:
    return _total(values) / len(values) if values else None


def _variance(values: Sequence[Any]) -> float | None:
    """Sample variance: None below two values."""
    if len(values) < 2:
        return None
    mean = _total(values) / len(values)
    return float(_total([(value - mean) ** 2 for value in values]) / (len(values) - 1))


def _quantile(values: Sequence[Any], q: float) -> float | None:
    """Quantile by linear interpolation between the two nearest of the sorted values."""
    if not values:
        return None
    ordered = sorted(values, key=_order)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (ordered[above] - ordered[below]) * (place - below))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "count": len,
    "sum": _sum,
    "min": lambda values: min(values, key=_order, default=None),
    "max": lambda values: max(values, key=_order, default=None),
    "mean": _mean,
    "variance": _variance,
    "stddev": lambda values: None if len(values) < 2 else math.sqrt(_variance(values) or 0.0),
    "first": lambda values: values[0] if values else None,
    "last": lambda values: values[-1] if values else None,
    "median": lambda values: _quantile(values, 0.5),
    "quantile": _quantile,
    "collect_list": list,
    "collect_set": lambda values: sorted(set(values), key=_order),
    "top_k": lambda values, k: sorted(values, key=_order, reverse=True)[:k],
}
