"""Counts, sums, means and variances: additive partial states."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend.aggregates import groups as g
from backend.aggregates.groups import Floats, Ints, Mask, Rows
from backend.aggregates.model import NUMBERS, Aggregate, of_field

_INT_LIMBS = 2
_DECIMAL_LIMBS = 4
_MAX_DIGITS = 38
_FLOAT_PARTS = {"hi": pa.float64(), "lo": pa.float64(), "special": pa.uint8()}


def count(name: str | None = None) -> Aggregate:
    """Count messages, or the non-null values of a field (NaN is a value). Result int64, never null."""
    fields = () if name is None else (name,)
    return Aggregate("count", fields, True, lambda alias, schema: _Count(alias, name))


def sum_(name: str) -> Aggregate:
    """Add a field.

    Integers give int64, null outside its range; decimals give decimal(p + 10, s) at most 38 digits, null outside;
    floats give float64 (NaN and infinities as in IEEE 754, beyond the largest double an infinity). The state of
    integers and decimals is exact for 2**31 messages of the largest values; that of floats carries about 106 bits.
    """
    return of_field("sum", name, NUMBERS, _Sum)


def mean(name: str) -> Aggregate:
    """Average a field: float64, or decimal(p + 4, s + 4) at most 38 digits, half up, for decimals.

    The sum below it is as of `sum_`, so a mean of int64 values never overflows.
    """
    return of_field("mean", name, NUMBERS, _Mean)


def variance(name: str) -> Aggregate:
    """Give the sample variance (n - 1) of a field as float64; null for fewer than two values (Spark's `var_samp`).

    Sums of values and of their squares are kept at twice double precision, so large means cost no digits that a
    double has. Integers beyond 2**53 are rounded to doubles first. Any NaN or infinity gives NaN; squares beyond the
    largest double give an infinity.
    """
    return of_field("variance", name, NUMBERS, lambda alias, entry: _Spread(alias, entry, root=False))


def stddev(name: str) -> Aggregate:
    """Give the sample standard deviation: the square root of `variance`."""
    return of_field("stddev", name, NUMBERS, lambda alias, entry: _Spread(alias, entry, root=True))


def _numbers(accumulators: pa.Table, name: str) -> npt.NDArray[Any]:
    """Give a column as numpy, 0 where it is null."""
    values: npt.NDArray[Any] = pc.fill_null(accumulators.column(name), 0).to_numpy()
    return values


class _Composed:
    """An aggregate whose partial is those of its parts, one behind the other."""

    def __init__(self, parts: Sequence[_Count | _Total], result_field: pa.Field) -> None:
        self._parts, self.result_field = parts, result_field
        self.accumulator_fields = [one for part in parts for one in part.accumulator_fields]

    def fold(self, rows: Rows) -> list[pa.Array]:
        return [column for part in self._parts for column in part.fold(rows)]

    def merge(self, rows: Rows) -> list[pa.Array]:
        return [column for part in self._parts for column in part.merge(rows)]


class _Count:
    """Partial: `n` int64."""

    def __init__(self, alias: str, name: str | None) -> None:
        self.part, self._name = f"{alias}.n", name
        self.accumulator_fields = [pa.field(self.part, pa.int64(), nullable=False)]
        self.result_field = pa.field(alias, pa.int64(), nullable=False)

    def fold(self, rows: Rows) -> list[pa.Array]:
        return [pa.array(rows.sizes if self._name is None else rows.sizes_of(self._name))]

    def merge(self, rows: Rows) -> list[pa.Array]:
        return [rows.total(self.part)]

    def result(self, accumulators: pa.Table) -> pa.Array:
        return accumulators.column(self.part)


class _Total:
    """A sum's partial columns: limbs for integers and decimals, `hi`, `lo`, `special` for floats.

    All are null while no value was seen. `special` holds the `SEEN_*` bits: of the values, and where `overflows` is
    true of a finite sum beyond the largest double.
    """

    def __init__(self, prefix: str, entry: pa.Field, *, overflows: bool = True) -> None:
        self._name, self._overflows = entry.name, overflows
        self.exact, self.scale = not pa.types.is_floating(entry.type), 0
        limbs = _INT_LIMBS
        if pa.types.is_decimal(entry.type):
            limbs, self.scale = _DECIMAL_LIMBS, entry.type.scale
        parts = {f"limb{place}": pa.int64() for place in range(limbs)} if self.exact else _FLOAT_PARTS
        self.accumulator_fields = [pa.field(f"{prefix}.{part}", own) for part, own in parts.items()]
        self.names = [one.name for one in self.accumulator_fields]

    def fold(self, rows: Rows) -> list[pa.Array]:
        return self.add(*rows.present(self._name), rows.sizes_of(self._name) > 0)

    def add(self, array: pa.Array, groups: Ints, seen: Mask) -> list[pa.Array]:
        """Take values without nulls, and which groups have one."""
        count = len(seen)
        if self.exact:
            return self._columns(g.add_integers(array, groups, count), seen)
        values: Floats = array.to_numpy(zero_copy_only=False).astype(np.float64, copy=False)
        hi, lo, special = g.add_floats(values, groups, count)
        if not self._overflows and special.any():
            special = g.special_of(values, groups, count)
        return self._columns([hi, lo, special], seen)

    def merge(self, rows: Rows) -> list[pa.Array]:
        """Take partials; empty ones count for nothing."""
        (first, groups), seen = rows.present(self.names[0]), rows.sizes_of(self.names[0]) > 0
        others = [rows.column(name).drop_null().to_numpy() for name in self.names[1:]]
        if self.exact:
            return self._columns(g.add_limbs([first.to_numpy(), *others], groups, rows.count), seen)
        low, bits = others
        both = np.concatenate([groups, groups])
        hi, lo, overflow = g.add_floats(np.concatenate([first.to_numpy(), low]), both, rows.count)
        special = g.merge_special(bits, groups, rows.count)
        return self._columns([hi, lo, special | overflow if self._overflows else special], seen)

    def _columns(self, parts: Sequence[npt.NDArray[Any]], seen: Mask) -> list[pa.Array]:
        return [g.column(part, seen, own.type) for part, own in zip(parts, self.accumulator_fields, strict=True)]

    def parts(self, accumulators: pa.Table) -> list[npt.NDArray[Any]]:
        """Give the limbs, or hi, lo and special; zeros where nothing was seen."""
        return [_numbers(accumulators, name) for name in self.names]

    def divided(self, accumulators: pa.Table, divisor: Ints, seen: Mask, kind: pa.DataType) -> pa.Array:
        """Divide sums of floats or decimals; null where `seen` is false."""
        if not self.exact:
            hi, _, special = self.parts(accumulators)
            return g.column(g.with_special(hi / divisor, special), seen, kind)
        totals = zip(g.from_limbs(self.parts(accumulators)), divisor.tolist(), seen, strict=True)
        return _decimals([Fraction(total, by) if ok else None for total, by, ok in totals], kind, self.scale)


class _Sum(_Composed):
    """Partial: that of `_Total`."""

    def __init__(self, alias: str, entry: pa.Field) -> None:
        self._total = _Total(alias, entry)
        if pa.types.is_decimal(entry.type):
            kind = pa.decimal128(min(entry.type.precision + 10, _MAX_DIGITS), entry.type.scale)
        else:
            kind = pa.int64() if self._total.exact else pa.float64()
        super().__init__([self._total], pa.field(alias, kind))

    def result(self, accumulators: pa.Table) -> pa.Array:
        seen: Mask = accumulators.column(self._total.names[0]).is_valid().to_numpy()
        kind = self.result_field.type
        if not pa.types.is_integer(kind):
            return self._total.divided(accumulators, np.ones(len(seen), np.int64), seen, kind)
        low, high = self._total.parts(accumulators)
        fits = (high >= -(2**31)) & (high < 2**31)
        return g.column((high << 32) | low, seen & fits, kind)


class _Mean(_Composed):
    """Partial: that of `_Total`, and `n` int64."""

    def __init__(self, alias: str, entry: pa.Field) -> None:
        self._total, self._n = _Total(alias, entry), _Count(alias, entry.name)
        self._of_integers, kind = pa.types.is_integer(entry.type), pa.float64()
        if pa.types.is_decimal(entry.type):
            kind = pa.decimal128(min(entry.type.precision + 4, _MAX_DIGITS), min(entry.type.scale + 4, _MAX_DIGITS))
        super().__init__([self._total, self._n], pa.field(alias, kind))

    def result(self, accumulators: pa.Table) -> pa.Array:
        n = _numbers(accumulators, self._n.part)
        seen, divisor, kind = n > 0, np.maximum(n, 1), self.result_field.type
        if not self._of_integers:
            return self._total.divided(accumulators, divisor, seen, kind)
        low, high = self._total.parts(accumulators)
        # Within +-2**52 the sum is a double already; beyond, adding the low limb last rounds once.
        return g.column((high * 2.0**32 + low) / divisor, seen, kind)


def _decimals(values: list[Fraction | None], kind: pa.DataType, scale: int) -> pa.Array:
    """Give unscaled values of `scale` digits as decimals of `kind`, half up; null where they do not fit."""
    out: list[Decimal | None] = []
    for value in values:
        if value is None:
            out.append(None)
            continue
        grown = value * 10 ** (kind.scale - scale)
        digits = (2 * abs(grown.numerator) + grown.denominator) // (2 * grown.denominator)
        if digits >= 10**kind.precision:
            out.append(None)
            continue
        sign = 1 if grown < 0 else 0
        out.append(Decimal((sign, tuple(int(d) for d in str(digits)), -kind.scale)))
    return pa.array(out, type=kind)


class _Spread(_Composed):
    """Partial: `n`, the sum and the sum of squares, each as of `_Total` of floats.

    Where the sum overflows, the squares did: `special` of the sum is of the values alone. (Up to 0.1 it had the
    overflow, too, and such state still gives NaN.)
    """

    def __init__(self, alias: str, entry: pa.Field, *, root: bool) -> None:
        self._name, self._root, as_floats = entry.name, root, entry.with_type(pa.float64())
        self._n = _Count(alias, entry.name)
        self._first = _Total(f"{alias}.sum", as_floats, overflows=False)
        self._second = _Total(f"{alias}.squares", as_floats)
        super().__init__([self._n, self._first, self._second], pa.field(alias, pa.float64()))

    def fold(self, rows: Rows) -> list[pa.Array]:
        array, groups = rows.present(self._name)
        values = array.cast(pa.float64(), safe=False).to_numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            square, error = g.two_product(values, values)
        error[~(np.isfinite(square) & np.isfinite(error))] = 0.0
        squares = pa.array(np.concatenate([square, error]))
        seen = rows.sizes_of(self._name) > 0
        return [
            *self._n.fold(rows),
            *self._first.add(pa.array(values), groups, seen),
            *self._second.add(squares, np.concatenate([groups, groups]), seen),
        ]

    def result(self, accumulators: pa.Table) -> pa.Array:
        n = _numbers(accumulators, self._n.part)
        hi, lo, special = self._first.parts(accumulators)
        square_hi, square_lo, square_special = self._second.parts(accumulators)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            # sum of squares - sum**2 / n, at twice double precision until the difference is taken
            mean_hi, mean_lo = _divide(hi, lo, n.astype(np.float64))
            product, error = g.two_product(mean_hi, hi)
            error = error + (mean_hi * lo + mean_lo * hi)
            difference, rest = g.two_sum(square_hi, -product)
            spread = np.maximum(difference + (rest + (square_lo - error)), 0.0) / (n - 1)
            spread = np.where(special != 0, np.nan, g.with_special(spread, square_special))
            return g.column(np.sqrt(spread) if self._root else spread, n > 1, pa.float64())


def _divide(hi: Floats, lo: Floats, divisor: Floats) -> tuple[Floats, Floats]:
    """Divide a pair by a double, to a pair."""
    quotient = hi / divisor
    product, error = g.two_product(quotient, divisor)
    return quotient, ((hi - product) - error + lo) / divisor
