"""Aggregates that need all messages of a window: order statistics, collections, the greatest k."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from backend.aggregates import groups as g
from backend.aggregates.groups import Floats, Ints, Rows
from backend.aggregates.model import ANY, FLAT, NUMBERS, Aggregate, of_field
from backend.aggregates.sketch import distinct

MAX_TOP = 10_000


def median(name: str) -> Aggregate:
    """Give the median of a field as float64: `quantile(name, 0.5)`."""
    return of_field("median", name, NUMBERS, _Quantile, incremental=False, fraction=0.5)


def quantile(name: str, fraction: float) -> Aggregate:
    """Give an exact quantile of a field as float64, interpolating linearly (Spark's `percentile`).

    Nulls are skipped, NaN is the greatest value; without a value the result is null. Integers beyond 2**53 and
    decimals are rounded to doubles.

    Args:
        name: A number field.
        fraction: From 0 (the smallest value) to 1 (the greatest).

    Raises:
        ValueError: The fraction is not within [0, 1].
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        raise ValueError(f"quantile: fraction={fraction!r}; allowed: a number from 0 to 1")
    return of_field("quantile", name, NUMBERS, _Quantile, incremental=False, fraction=float(fraction))


def collect_list(name: str) -> Aggregate:
    """Collect the non-null values of a field in fold order; an empty list without any."""
    return of_field("collect_list", name, ANY, _List, incremental=False)


def collect_set(name: str) -> Aggregate:
    """Collect the distinct non-null values of a field, ascending (NaN last); an empty list without any."""
    return of_field("collect_set", name, FLAT, _Set, incremental=False)


def top_k(name: str, k: int) -> Aggregate:
    """Give the k greatest values of a field, descending, duplicates included; NaN is the greatest value.

    Raises:
        ValueError: k is not within 1 to 10,000.
    """
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_TOP:
        raise ValueError(f"top_k: k={k!r}; allowed: an integer from 1 to {MAX_TOP}")
    return of_field("top_k", name, FLAT, _Top, incremental=False, k=k)


class _Quantile:
    ordered = False

    def __init__(self, alias: str, entry: pa.Field, fraction: float) -> None:
        self._name, self._fraction = entry.name, fraction
        self.result_field = pa.field(alias, pa.float64())

    def result(self, rows: Rows) -> pa.Array:
        values, sizes = rows.ascending(self._name)
        seen = sizes > 0
        out = np.zeros(rows.count)
        if seen.any():
            place = self._fraction * (sizes[seen] - 1)
            starts = (sizes.cumsum() - sizes)[seen]
            low, high = np.floor(place).astype(np.int64), np.ceil(place).astype(np.int64)
            out[seen] = _between(values[starts + low], values[starts + high], place - low)
        return g.column(out, seen, pa.float64())


def _between(low: Floats, high: Floats, share: Floats) -> Floats:
    """Interpolate; equal ends (infinities too) and a share of 0 give the lower one untouched."""
    with np.errstate(invalid="ignore", over="ignore"):
        mixed = (1 - share) * low + share * high
    untouched: Floats = np.where((share == 0) | (low == high), low, mixed)
    return untouched


class _Collected:
    """Lists per group, from values sorted by group."""

    ordered = False

    def __init__(self, alias: str, entry: pa.Field) -> None:
        self._name = entry.name
        self.result_field = pa.field(alias, pa.list_(pa.field("item", entry.type)), nullable=False)

    def _lists(self, values: pa.Array, sizes: Ints) -> pa.Array:
        offsets = np.concatenate([[0], sizes.cumsum()]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), values, type=self.result_field.type)


class _List(_Collected):
    ordered = True

    def result(self, rows: Rows) -> pa.Array:
        array, groups = rows.present(self._name)
        order = g.stable_order(groups, rows.count)
        return self._lists(g.taken(array, order), rows.sizes_of(self._name))


class _Set(_Collected):
    def result(self, rows: Rows) -> pa.Array:
        pairs = distinct(*rows.present(self._name)).sort_by([("group", "ascending"), ("value", "ascending")])
        sizes = g.counts(pairs.column("group").to_numpy(), rows.count)
        return self._lists(pairs.column("value").combine_chunks(), sizes)


class _Top(_Collected):
    def __init__(self, alias: str, entry: pa.Field, k: int) -> None:
        super().__init__(alias, entry)
        self._k = k

    def result(self, rows: Rows) -> pa.Array:
        array, groups = rows.present(self._name)
        pairs = pa.table({"group": groups, "value": g.without_negative_zero(array)})
        # Arrow sorts NaN last in either direction; ascending and then from the end makes it the greatest.
        pairs = pairs.sort_by([("group", "ascending"), ("value", "ascending")])
        sizes = rows.sizes_of(self._name)
        lengths = np.minimum(sizes, self._k)
        within = np.arange(int(lengths.sum())) - np.repeat(lengths.cumsum() - lengths, lengths)
        picks = np.repeat(sizes.cumsum(), lengths) - 1 - within
        return self._lists(pairs.column("value").combine_chunks().take(pa.array(picks)), lengths)
