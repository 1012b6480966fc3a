"""What may be a key or a value: bytes, of a bounded size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend.chunks import decoded, faulty_rows, is_coded
from backend.errors import KeyInvalid, ValueInvalid
from backend.store.protocol import MAX_KEY_BYTES, MAX_VALUE_BYTES

MAX_KEY_TEXT_BYTES = 30_000
"""Texts of a message's key, all together: encoded, and with whatever comes before, they stay below `MAX_KEY_BYTES`,
even if each byte has to be escaped. A message with a longer key is malformed, not the end of the job."""
MAX_FIELDS_BYTES = 15 * 1024 * 1024
"""Fields of a message that an operator reads, all together: a row of four aggregates that each keep them stays below
`MAX_VALUE_BYTES`. A message with more is malformed."""
_TEXTS = frozenset({pa.string(), pa.binary(), pa.large_string(), pa.large_binary()})


def key_text_bytes(columns: Sequence[pa.Array | pa.ChunkedArray], count: int) -> npt.NDArray[np.int64]:
    """Return the bytes of the texts in each of `count` rows' keys, given as columns: at most `MAX_KEY_TEXT_BYTES`."""
    total = np.zeros(count, np.int64)
    for column in columns:
        if column.type in _TEXTS:
            total += np.asarray(pc.binary_length(column).fill_null(0), np.int64)
    return total


def large_rows(columns: Sequence[pa.Array | pa.ChunkedArray], count: int) -> dict[int, str]:
    """Return the rows, of `count`, whose values have more than `MAX_FIELDS_BYTES`, and what is said of each.

    Columns that are dictionaries have short texts, as of keys.
    """
    if any(is_coded(column.type) for column in columns):
        others = sum(column.nbytes for column in columns if not is_coded(column.type))
        if others <= MAX_FIELDS_BYTES - 2 * MAX_KEY_TEXT_BYTES:
            return {}
        columns = [decoded(column) for column in columns]

    def is_large(start: int, stop: int) -> bool:
        total: int = sum(column.slice(start, stop - start).nbytes for column in columns)
        return total > MAX_FIELDS_BYTES

    return dict.fromkeys(faulty_rows(count, is_large), f"the fields have more than {MAX_FIELDS_BYTES} bytes")


def check_key(key: bytes) -> None:
    """Raise `KeyInvalid` unless the key is bytes, 1 to `MAX_KEY_BYTES` of them."""
    if type(key) is not bytes:
        raise KeyInvalid("a key must be bytes", why=f"{type(key).__name__} was given")
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise KeyInvalid("a key's size is out of range", why=f"{len(key)} bytes, allowed are 1 to {MAX_KEY_BYTES}")


def check_keys(keys: Sequence[bytes]) -> None:
    """Check many keys as `check_key` does, and name the first bad one."""
    if not _sized(keys, 1, MAX_KEY_BYTES):
        for key in keys:
            check_key(key)


def check_value(value: bytes) -> None:
    """Raise `ValueInvalid` unless the value is bytes, at most `MAX_VALUE_BYTES` of them."""
    if type(value) is not bytes:
        raise ValueInvalid("a value must be bytes", why=f"{type(value).__name__} was given")
    if len(value) > MAX_VALUE_BYTES:
        raise ValueInvalid("a value is too large", why=f"{len(value)} bytes, at most {MAX_VALUE_BYTES} are allowed")


def check_values(values: Sequence[bytes]) -> None:
    """Check many values as `check_value` does, and name the first bad one."""
    if not _sized(values, 0, MAX_VALUE_BYTES):
        for value in values:
            check_value(value)


def _sized(items: Sequence[bytes], low: int, high: int) -> bool:
    """Say whether all are bytes of a size in the closed range."""
    return set(map(type, items)) <= {bytes} and all(low <= size <= high for size in set(map(len, items)))
