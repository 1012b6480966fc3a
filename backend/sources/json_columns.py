"""JSON values as columns, for readers in Python: what `from_json` would make of them, or nothing at all.

Spark parses JSON in the JVM, row by row; pyarrow parses many values at once, three times as fast. They are not the same
parser, so this one speaks only where both must agree, and leaves all other values to `from_json`
(`backend.sources.formats.parse`): a value is taken when it is one object of plain fields in standard JSON that pyarrow
reads without an error. What pyarrow takes and Spark does not, or takes otherwise, is looked for by name: bytes that are
not UTF-8, `NaN` and the like, `-0` for a double, numbers and nesting beyond Spark's limits.

pyarrow takes many values or none. It often says which row it did not understand; after `MOST_TRIES` rows the values are
looked at one by one for suspects. Nobody's suspicion decides: what is taken was parsed and checked as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from backend.limits import MAX_KEY_TEXT_BYTES

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

PLAIN = frozenset({"string", "boolean", "byte", "short", "integer", "long", "double"})
"""Spark's types (`typeName`) that both parsers read in the same way."""
LONGEST_VALUE = MAX_KEY_TEXT_BYTES
"""Longer values are left to Spark: so no key in those taken is too long, nor a name longer than Spark allows."""
MOST_TRIES = 3
"""How many rows are left out because pyarrow named them."""

_BLANK = b" \t\r\n"
_SPARKS_LIMIT = 900  # characters of a number, levels of nesting: Spark's parser allows 1,000
_CONSTANT = re.compile(rb"[:,\[]\s*[-+]?(?:NaN|Inf)")
_MINUS_ZERO = re.compile(rb"-0(?![.\deE])")
_ROW = re.compile(r"in row (\d+)")
_OF_NUMBERS = np.zeros(256, np.bool_)
_OF_NUMBERS[list(b"0123456789.eE+-")] = True

Mask = npt.NDArray[np.bool_]


def readable(fields: StructType) -> bool:
    """Tell whether all fields are of `PLAIN` types."""
    return all(field.dataType.typeName() in PLAIN for field in fields.fields)


class JsonColumns:
    """Parses values of plain fields.

    Args:
        schema: The fields with their Arrow types, `pyspark.sql.pandas.types.to_arrow_schema` of `PLAIN` ones.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        self._doubles = any(pa.types.is_float64(field.type) for field in schema)

    def parse(self, values: Sequence[bytes | None]) -> tuple[Mask, pa.StructArray]:
        """Give which of the values are taken, and the fields of those, in order."""
        taken = np.ones(len(values), np.bool_)
        tries, looked = MOST_TRIES, False
        while taken.any():
            rows = np.flatnonzero(taken)
            chosen = values if len(rows) == len(values) else [values[row] for row in rows.tolist()]
            found, bad = self._columns(chosen)
            if found is not None:
                return taken, found
            if bad is None or tries == 0:
                if looked:
                    taken[:] = False
                    break
                looked, bad = True, self._suspects(chosen)
            elif isinstance(bad, int):
                tries, bad = tries - 1, [bad]
            taken[rows[list(bad)]] = False
        return taken, pa.array([], pa.struct(list(self._schema)))

    def _columns(self, values: Sequence[bytes | None]) -> tuple[pa.StructArray | None, int | list[int] | None]:
        """Give the fields of all values; or None, and which to leave out: one that pyarrow names, or all odd ones."""
        data = _lines(values)
        if data is None:
            return None, _others(values)
        odd = self._odd(data, values)
        if odd:
            return None, odd
        try:
            table = pj.read_json(
                pa.BufferReader(data),
                read_options=pj.ReadOptions(use_threads=False, block_size=len(data) + 1),
                parse_options=self._options,
            )
        except pa.ArrowInvalid as error:
            row = _ROW.search(str(error))
            at = int(row.group(1)) if row is not None else len(values)
            return None, at if at < len(values) else None
        if table.num_rows != len(values):  # one line was two objects
            return None, None
        columns = [column.combine_chunks() for column in table.columns]
        return pa.StructArray.from_arrays(columns, fields=list(self._schema)), None

    def _odd(self, data: bytes, values: Sequence[bytes | None]) -> list[int]:
        """Give which values, of one per line, pyarrow may take otherwise than Spark."""
        odd: set[int] = set()
        if not data.isascii():
            odd.update(_not_text(data, values))
        if b"NaN" in data or b"Inf" in data:
            odd.update(_rows_of(data, (found.end() for found in _CONSTANT.finditer(data))))
        if self._doubles and b"-0" in data:
            odd.update(_rows_of(data, (found.start() for found in _MINUS_ZERO.finditer(data))))
        lengths = np.fromiter(map(len, values), np.int64, len(values))  # type: ignore[arg-type]
        longest = int(lengths.max())
        if longest > LONGEST_VALUE:
            odd.update(np.flatnonzero(lengths > LONGEST_VALUE).tolist())
        if longest > _SPARKS_LIMIT:
            other = np.flatnonzero(~_OF_NUMBERS[np.frombuffer(data, np.uint8)])
            odd.update(_rows_of(data, other[:-1][np.diff(other) > _SPARKS_LIMIT].tolist()))
        if longest > 2 * _SPARKS_LIMIT:
            texts = pa.array(values, pa.binary())
            opened = pc.add(pc.count_substring(texts, "{"), pc.count_substring(texts, "["))
            odd.update(np.flatnonzero(np.asarray(opened) > _SPARKS_LIMIT).tolist())
        return sorted(odd)

    def _suspects(self, values: Sequence[bytes | None]) -> list[int]:
        """Give which values Python's own parser finds to be something else than an object of the fields."""
        fits = [(field.name, _fits(field.type)) for field in self._schema]
        suspects = []
        for number, value in enumerate(values):
            try:
                row = json.loads(value or b"")
                fine = all(row.get(name) is None or fit(row[name]) for name, fit in fits)
            except (ValueError, AttributeError, RecursionError):
                fine = False
            if not fine:
                suspects.append(number)
        return suspects


def _lines(values: Sequence[bytes | None]) -> bytes | None:
    """Give the values one per line; None where one is not between braces, or has a line break in a text."""
    if None in values:
        return None
    data = b"\n".join(values)  # type: ignore[arg-type] # there is no None
    if _one_per_line(data, len(values)):
        return data
    data = b"\n".join([_one_line(value.strip(_BLANK)) for value in values])  # type: ignore[union-attr]
    return data if _one_per_line(data, len(values)) else None


def _one_per_line(data: bytes, count: int) -> bool:
    """Tell whether each line begins and ends as an object does, and there is a line for each value."""
    return (
        data[:1] == b"{" and data[-1:] == b"}" and data.count(b"\n") == count - 1 and data.count(b"}\n{") == count - 1
    )


def _one_line(value: bytes) -> bytes:
    """Put a value on one line, if it is JSON: there a line break is a blank, but never in a text."""
    if b"\n" not in value:
        return value
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return value
    return value.replace(b"\n", b" ")


def _others(values: Sequence[bytes | None]) -> list[int]:
    """Give which values are not between braces, or have a line break in a text."""
    found = []
    for number, value in enumerate(values):
        text = _one_line((value or b"").strip(_BLANK))
        if text[:1] != b"{" or text[-1:] != b"}" or b"\n" in text:
            found.append(number)
    return found


def _not_text(data: bytes, values: Sequence[bytes | None]) -> list[int]:
    """Give which values are not UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        pass
    else:
        return []
    found = []
    for number, value in enumerate(values):
        try:
            (value or b"").decode()
        except UnicodeDecodeError:
            found.append(number)
    return found


def _rows_of(data: bytes, places: Iterable[int]) -> set[int]:
    """Give the lines in which places are."""
    lines = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    return set(np.searchsorted(lines, np.fromiter(places, np.int64)).tolist())


def _fits(kind: pa.DataType) -> Callable[[object], bool]:
    """Give what tells whether a value, as Python's parser gives it, fits a type."""
    if pa.types.is_integer(kind):
        bound = 1 << (kind.bit_width - 1)
        return lambda value: type(value) is int and -bound <= value < bound
    if pa.types.is_floating(kind):
        return lambda value: type(value) in (int, float)
    wanted = bool if pa.types.is_boolean(kind) else str
    return lambda value: type(value) is wanted
