"""Grouped primitives over arrays: exact sums, extremes, first rows. No Python loop over messages.

Sums are *exact* within a call and therefore independent of the order of rows:

* integers are added as 32-bit limbs in int64 columns, so nothing wraps before 2**31 rows of one call;
* doubles are cut into slices whose group sums are exact in binary64 (`ExtractVector` of Rump, Ogita and Oishi,
  "Accurate floating-point summation", SIAM J. Sci. Comput. 31, 2008), slice by slice until nothing is left; the slice
  sums are kept as an unevaluated pair `hi + lo` (about 106 bits, made by Knuth's two-sum).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend.chunks import one_chunk, taken_rows

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

SEEN_NAN, SEEN_PLUS_INF, SEEN_MINUS_INF = 1, 2, 4
"""Bits of the `special` column of float sums."""

_CHUNK_ROWS = 1 << 19
_CHUNK_BITS = 20  # 2**20 >= _CHUNK_ROWS + 2: the sum of a slice stays below its sigma
_LONG_RUN, _CELLS = 1 << 12, 1 << 20
_COUNTED = 1 << 12
"""Groups that Arrow counts instead of sorting."""
_BITS, _MOST = 63, (1 << 63) - 1
_HUGE = 2.0**900
_SHIFT = 2.0**200
_LIMB_BITS = 32
_LIMB_MASK = (1 << _LIMB_BITS) - 1


@dataclass(frozen=True)
class Rows:
    """Rows with a group number each.

    Attributes:
        table: Rows in fold order: (stream, partition, offset).
        groups: int64, as long as the table; each in `[0, count)`.
        count: Number of groups; a group may have no row.
    """

    table: pa.Table
    groups: Ints
    count: int
    _columns: dict[str, pa.Array] = field(default_factory=dict, compare=False, repr=False)
    _groups: dict[str, tuple[Ints, Ints]] = field(default_factory=dict, compare=False, repr=False)
    _ascending: dict[str, tuple[Floats, Ints]] = field(default_factory=dict, compare=False, repr=False)

    def column(self, name: str) -> pa.Array:
        """Give a column as one array."""
        if name not in self._columns:
            self._columns[name] = one_chunk(self.table.column(name))
        return self._columns[name]

    def present(self, name: str) -> tuple[pa.Array, Ints]:
        """Give the non-null values of a column, and their groups."""
        return self.column(name).drop_null(), self._present(name)[0]

    def sizes_of(self, name: str) -> Ints:
        """Count the non-null values of a column per group."""
        return self._present(name)[1]

    def _present(self, name: str) -> tuple[Ints, Ints]:
        """Give the groups of the non-null values of a column, and how many each group has; found once."""
        array = self.column(name)
        if array.null_count == 0:
            return self.groups, self.sizes
        if name not in self._groups:
            groups = self.groups[array.is_valid().to_numpy(zero_copy_only=False)]
            self._groups[name] = groups, counts(groups, self.count)
        return self._groups[name]

    def total(self, name: str) -> pa.Array:
        """Add the counts of a column per group."""
        return pa.array(add_up(self.column(name).to_numpy(), self.groups, self.count))

    def ascending(self, name: str) -> tuple[Floats, Ints]:
        """Give the non-null values of a number column as doubles, and how many each group has.

        They are sorted by group, and ascending within a group, NaN last; -0.0 is given as 0.0.
        """
        if name not in self._ascending:
            (array, groups), sizes = self.present(name), self.sizes_of(name)
            values = _sorted_integers(array, groups, self.count) if pa.types.is_integer(array.type) else None
            if values is None:
                order = self.order if len(groups) == len(self.groups) else stable_order(groups, self.count)
                values = (array.cast(pa.float64(), safe=False).to_numpy() + 0.0)[order]
                sort_runs(values, sizes)
            self._ascending[name] = values, sizes
        return self._ascending[name]

    @cached_property
    def order(self) -> Ints:
        """Row numbers sorted by group, in fold order within a group."""
        return stable_order(self.groups, self.count)

    @cached_property
    def sizes(self) -> Ints:
        """Rows per group."""
        return counts(self.groups, self.count)


def stable_order(groups: Ints, count: int) -> Ints:
    """Sort row numbers by group, keeping the order of rows within a group.

    >>> stable_order(np.array([1, 0, 1, 0]), 2).tolist()
    [1, 3, 0, 2]
    """
    if count <= _COUNTED:
        return np.asarray(pc.array_sort_indices(pa.array(groups.astype(np.uint16)))).view(np.int64)
    bits = len(groups).bit_length()
    if count.bit_length() + bits > _BITS:
        return np.argsort(groups, kind="stable")
    order = groups.astype(np.int64) << bits  # numbers are sorted several at a time, what sorts their places is not
    order |= np.arange(len(groups))
    order.sort()
    order &= (1 << bits) - 1
    return order


def _sorted_integers(array: pa.Array, groups: Ints, count: int) -> Floats | None:
    """Sort integers by group, and ascending within a group; None where a group and a value have no room in 63 bits."""
    least, most = pc.min_max(array).as_py().values() if len(array) else (0, 0)
    bits = (most - least).bit_length()
    if count.bit_length() + bits > _BITS or most > _MOST:
        return None
    values: Ints = array.to_numpy().astype(np.int64) - least
    values |= groups.astype(np.int64) << bits
    values.sort()
    values &= (1 << bits) - 1
    values += least
    return values.astype(np.float64)


def sort_runs(values: Floats, sizes: Ints) -> None:
    """Sort each of consecutive runs of values, ascending, NaN last, in place.

    Short runs of about the same length are rows of a matrix, filled up with NaN: many small sorts take a third of one
    big sort by group and value.

    >>> values = np.array([3.0, 1.0, 2.0, 1.0])
    >>> sort_runs(values, np.array([2, 0, 2]))
    >>> values.tolist()
    [1.0, 3.0, 1.0, 2.0]
    """
    starts = sizes.cumsum() - sizes
    for run in np.flatnonzero(sizes > _LONG_RUN).tolist():
        values[starts[run] : starts[run] + sizes[run]].sort()
    short = np.flatnonzero((sizes > 1) & (sizes <= _LONG_RUN))
    bits = np.frexp(sizes[short] - 1.0)[1]  # 2**bits is the smallest power that is not less than the size
    for width in np.unique(bits).tolist():
        runs, most = short[bits == width], max(1, _CELLS >> width)
        for at in range(0, len(runs), most):
            own = sizes[runs[at : at + most]]
            place = np.repeat(starts[runs[at : at + most]] - (own.cumsum() - own), own) + np.arange(own.sum())
            inside = np.arange(1 << width) < own[:, None]
            cells = np.full(inside.shape, np.nan)
            cells[inside] = values[place]
            cells.sort(axis=1)
            values[place] = cells[inside]


def taken(values: Any, rows: Ints) -> Any:
    """Return some rows of an array or table; without copying values where the rows are consecutive ones.

    >>> taken(pa.array(["a", "b", "c"]), np.array([1, 2])).to_pylist()
    ['b', 'c']
    """
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return values.slice(int(rows[0]), len(rows))
    return taken_rows(values, rows) if isinstance(values, pa.Table) else values.take(pa.array(rows))


def counts(groups: Ints, count: int) -> Ints:
    """Count rows per group."""
    return np.bincount(groups, minlength=count).astype(np.int64, copy=False)


def add_up(values: Ints, groups: Ints, count: int) -> Ints:
    """Add integers per group, which must not wrap."""
    total = np.zeros(count, np.int64)
    np.add.at(total, groups, values)
    return total


def column(values: npt.NDArray[np.generic], seen: Mask, kind: pa.DataType) -> pa.Array:
    """Make a column that is null where `seen` is false."""
    return pa.array(values, type=kind, mask=None if seen.all() else ~seen)


def scatter(values: pa.Array, groups: Ints, count: int) -> pa.Array:
    """Put one value per listed group at its group's row; the other rows are null.

    >>> scatter(pa.array(["x"]), np.array([1]), 3).to_pylist()
    [None, 'x', None]
    """
    where = np.full(count, -1, np.int64)
    where[groups] = np.arange(len(groups))
    return values.take(pa.array(where, mask=where < 0))


def add_limbs(limbs: list[Ints], groups: Ints, count: int) -> list[Ints]:
    """Add numbers given as 32-bit limbs, lowest first, per group, and carry.

    Args:
        limbs: int64 columns; all but the last in `[0, 2**32)`, the last signed.
        groups: Group of each row.
        count: Number of groups.

    Returns:
        As many columns, one row per group, carried: all but the last in `[0, 2**32)`.
    """
    sums = []
    carry = np.zeros(count, np.int64)
    for position, limb in enumerate(limbs):
        total = add_up(limb, groups, count) + carry
        if position < len(limbs) - 1:
            carry = total >> _LIMB_BITS
            total &= _LIMB_MASK
        sums.append(total)
    return sums


def add_integers(array: pa.Array, groups: Ints, count: int) -> list[Ints]:
    """Add integers or decimals without nulls per group: what `add_limbs` gives of their limbs."""
    if pa.types.is_integer(array.type) and array.type != pa.uint64() and len(array):
        values: Ints = array.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
        if max(int(values.max()), -int(values.min())) < (1 << 62) // len(values):  # no sum of some wraps
            total = add_up(values, groups, count)
            return [total & _LIMB_MASK, total >> _LIMB_BITS]
    return add_limbs(limbs_of(array), groups, count)


def limbs_of(array: pa.Array) -> list[Ints]:
    """Split integers (two limbs) or decimal128 (four limbs) without nulls into 32-bit limbs, lowest first."""
    if pa.types.is_decimal(array.type):
        data = array.buffers()[1] if len(array) else b""
        words = np.frombuffer(data, np.int64)[2 * array.offset :][: 2 * len(array)].reshape(-1, 2)
        low, high = words[:, 0], words[:, 1]
        return [low & _LIMB_MASK, (low >> _LIMB_BITS) & _LIMB_MASK, high & _LIMB_MASK, high >> _LIMB_BITS]
    values: Ints = array.to_numpy(zero_copy_only=False)
    if values.dtype == np.uint64:
        return [(values & np.uint64(_LIMB_MASK)).astype(np.int64), (values >> np.uint64(_LIMB_BITS)).astype(np.int64)]
    values = values.astype(np.int64, copy=False)
    return [values & _LIMB_MASK, values >> _LIMB_BITS]


def from_limbs(limbs: list[Ints]) -> list[int]:
    """Give Python integers; for results, one per group."""
    columns = [limb.tolist() for limb in limbs]
    return [sum(part << (_LIMB_BITS * place) for place, part in enumerate(row)) for row in zip(*columns, strict=True)]


def two_sum(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Add without loss: `a + b == s + e` exactly, `s` the rounded sum (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def two_product(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Multiply without loss: `a * b == p + e` exactly while nothing overflows or underflows (Dekker, Veltkamp)."""
    split = 134217729.0  # 2**27 + 1
    p = a * b
    ah = a * split
    ah = ah - (ah - a)
    bh = b * split
    bh = bh - (bh - b)
    al, bl = a - ah, b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def special_of(values: Floats, groups: Ints, count: int) -> Flags:
    """Give the bits of `SEEN_*` of values that are NaN or infinite, per group."""
    special = np.zeros(count, np.uint8)
    for bit, test in ((SEEN_NAN, np.isnan), (SEEN_PLUS_INF, np.isposinf), (SEEN_MINUS_INF, np.isneginf)):
        special[groups[test(values)]] |= bit
    return special


def add_floats(values: Floats, groups: Ints, count: int) -> tuple[Floats, Floats, Flags]:
    """Add doubles per group.

    Returns:
        `hi`, `lo` (the sum is `hi + lo`, `hi` its rounding) over finite values, and the bits of `SEEN_*` for the
        others. A finite sum beyond the largest double counts as an infinity.
    """
    special = np.zeros(count, np.uint8)
    finite = np.isfinite(values)
    if not finite.all():
        special = special_of(values, groups, count)
        values, groups = values[finite], groups[finite]
    huge = np.abs(values) >= _HUGE
    hi, lo = np.zeros(count), np.zeros(count)
    if huge.any():
        # Scaled down, the huge ones cannot overflow on the way; scaling by a power of two is exact.
        high, low = _add_finite(values[huge] / _SHIFT, groups[huge], count)
        with np.errstate(over="ignore", invalid="ignore"):
            hi, lo = high * _SHIFT, low * _SHIFT
        values, groups = values[~huge], groups[~huge]
    with np.errstate(over="ignore", invalid="ignore"):
        rest_hi, rest_lo = _add_finite(values, groups, count)
        hi, error = two_sum(hi, rest_hi)
        lo = error + (lo + rest_lo)
        rounded, lo = two_sum(hi, np.where(np.isfinite(hi), lo, 0.0))
    special[np.isposinf(rounded)] |= SEEN_PLUS_INF
    special[np.isneginf(rounded)] |= SEEN_MINUS_INF
    lost = np.isinf(rounded)
    rounded[lost] = lo[lost] = 0.0
    return rounded, lo, special


def _add_finite(values: Floats, groups: Ints, count: int) -> tuple[Floats, Floats]:
    hi, lo = np.zeros(count), np.zeros(count)
    for start in range(0, len(values), _CHUNK_ROWS):
        rest = values[start : start + _CHUNK_ROWS]
        group = groups[start : start + _CHUNK_ROWS]
        while len(rest):
            largest = float(np.abs(rest).max())
            if largest == 0.0:
                break
            sigma = float(np.ldexp(1.0, int(np.frexp(largest)[1]) + _CHUNK_BITS))
            slices = (rest + sigma) - sigma
            total: Floats = np.bincount(group, weights=slices, minlength=count).astype(np.float64, copy=False)
            hi, error = two_sum(hi, total)
            lo += error
            rest = rest - slices
    return two_sum(hi, lo)


def with_special(values: Floats, special: Flags) -> Floats:
    """Replace sums by what NaN and infinities make of them: NaN wins, opposite infinities are NaN."""
    if not special.any():
        return values
    both = SEEN_PLUS_INF | SEEN_MINUS_INF
    out = np.where(special & SEEN_PLUS_INF, np.inf, np.where(special & SEEN_MINUS_INF, -np.inf, values))
    return np.where((special & SEEN_NAN != 0) | (special & both == both), np.nan, out)


def merge_special(special: Flags, groups: Ints, count: int) -> Flags:
    """Unite the bits per group."""
    out = np.zeros(count, np.uint8)
    np.bitwise_or.at(out, groups, special)
    return out


def without_negative_zero(array: pa.Array) -> pa.Array:
    """Give floats with one zero: `-0.0` and `0.0` are the same value to every aggregate."""
    if not pa.types.is_floating(array.type):
        return array
    return pc.add(array, pa.scalar(0, array.type))
