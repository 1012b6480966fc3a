"""JSON values as columns, for readers in Python: what `from_json` would make of them, or nothing at all.

Spark parses JSON in the JVM, row by row; pyarrow parses many values at once, three times as fast. They are not the same
parser, so this one speaks only where both must agree, and leaves all other values to `from_json`
(`backend.sources.formats.parse`): a stretch of values is taken when each of them is one object of plain fields in
standard JSON that pyarrow reads without an error. What pyarrow takes and Spark does not, or takes otherwise, is looked
for by name: bytes that are not UTF-8, `NaN` and the like, `-0` for a double, numbers and nesting beyond Spark's limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
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
MOST_TRIES = 8
"""How often a stretch that is not understood is cut again."""

_BLANK = b" \t\r\n"
_SPARKS_LIMIT = 900  # characters of a number, levels of nesting: Spark's parser allows 1,000
_CONSTANT = re.compile(rb"[:,\[]\s*[-+]?(?:NaN|Inf)")
_MINUS_ZERO = re.compile(rb"-0(?![.\deE])")
_ROW = re.compile(r"in row (\d+)")
_OF_NUMBERS = np.zeros(256, np.bool_)
_OF_NUMBERS[list(b"0123456789.eE+-")] = True

Stretch = tuple[int, int, pa.StructArray | None]
"""(first value, the one after the last, their fields or None where Spark has to say)."""


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

    def stretches(self, values: Sequence[bytes | None]) -> Iterator[Stretch]:
        """Give the values in stretches, in order and without a gap."""
        tries, waiting = MOST_TRIES, [(0, len(values))]
        while waiting:
            low, high = waiting.pop()
            if low == high:
                continue
            found, bad = self._columns(values[low:high])
            if found is not None:
                yield low, high, found
            elif tries == 0 or high - low == 1:
                yield low, high, None
            else:
                tries -= 1
                if bad is None:
                    middle = (low + high) // 2
                    waiting += [(middle, high), (low, middle)]
                else:
                    waiting += [(low + bad + 1, high), (low + bad, low + bad + 1), (low, low + bad)]

    def _columns(self, values: Sequence[bytes | None]) -> tuple[pa.StructArray | None, int | None]:
        """Give the fields of all values; or None, and which value may be the first that is not understood."""
        if None in values:
            return None, values.index(None)
        data = b"\n".join(values)  # type: ignore[arg-type] # there is no None
        if not _one_per_line(data, len(values)):
            data = b"\n".join([value.strip(_BLANK) for value in values])  # type: ignore[union-attr]
            if not _one_per_line(data, len(values)):
                return None, _first_other(data, values)
        at = self._odd(data, values)
        if at is not None:
            return None, at
        try:
            table = pj.read_json(
                pa.BufferReader(data),
                read_options=pj.ReadOptions(use_threads=False, block_size=len(data) + 1),
                parse_options=self._options,
            )
        except pa.ArrowInvalid as error:
            row = _ROW.search(str(error))
            at = int(row.group(1)) if row is not None else None
            return None, at if at is not None and at < len(values) else None
        if table.num_rows != len(values):  # one line was two objects
            return None, None
        columns = [column.combine_chunks() for column in table.columns]
        return pa.StructArray.from_arrays(columns, fields=list(self._schema)), None

    def _odd(self, data: bytes, values: Sequence[bytes | None]) -> int | None:
        """Give which value, of one per line, pyarrow may take otherwise than Spark; None when there is none."""
        if not data.isascii():
            try:
                data.decode()
            except UnicodeDecodeError as error:
                return data.count(b"\n", 0, error.start)
        patterns = []
        if b"NaN" in data or b"Inf" in data:
            patterns.append(_CONSTANT)
        if self._doubles and b"-0" in data:
            patterns.append(_MINUS_ZERO)
        for pattern in patterns:
            found = pattern.search(data)
            if found is not None:
                return data.count(b"\n", 0, found.end())
        lengths = np.fromiter(map(len, values), np.int64, len(values))  # type: ignore[arg-type]
        longest = int(lengths.max())
        if longest > LONGEST_VALUE:
            return int(np.argmax(lengths > LONGEST_VALUE))
        if longest > _SPARKS_LIMIT:
            other = np.flatnonzero(~_OF_NUMBERS[np.frombuffer(data, np.uint8)])
            far = np.diff(other) > _SPARKS_LIMIT
            if far.any():
                return data.count(b"\n", 0, int(other[np.argmax(far)]))
        if longest > 2 * _SPARKS_LIMIT:
            texts = pa.array(values, pa.binary())
            opened = pc.add(pc.count_substring(texts, "{"), pc.count_substring(texts, "["))
            deep = np.asarray(opened) > _SPARKS_LIMIT
            if deep.any():
                return int(np.argmax(deep))
        return None


def _one_per_line(data: bytes, count: int) -> bool:
    """Tell whether each line begins and ends as an object does, and there is a line for each value."""
    return (
        data[:1] == b"{" and data[-1:] == b"}" and data.count(b"\n") == count - 1 and data.count(b"}\n{") == count - 1
    )


def _first_other(data: bytes, values: Sequence[bytes | None]) -> int | None:
    for number, value in enumerate(values):
        text = (value or b"").strip(_BLANK)
        if text[:1] != b"{" or text[-1:] != b"}" or b"\n" in text:
            return number
    return None
