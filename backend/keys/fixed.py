"""Integers of fixed width in keys: big-endian, the sign bit of signed ones flipped, so that bytes sort as numbers do.

Keys made of such parts only (event time, offset) are built as rows of a matrix, `Bytes2D`, and become bytes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backend.keys.codes import undecodable

Bytes2D = npt.NDArray[np.uint8]
"""uint8, one row per key."""


def pack_fixed(values: npt.NDArray[Any]) -> Bytes2D:
    """Give integers as rows of big-endian bytes that sort as the integers do; signed ones have their sign flipped.

    Args:
        values: One dimension, any integer dtype; its width is the width of a row.
    """
    width = values.dtype.itemsize
    unsigned = values.astype(values.dtype.newbyteorder("="), copy=False).view(f"u{width}")
    if values.dtype.kind == "i":
        unsigned = unsigned ^ np.array(1 << (8 * width - 1), f"u{width}")
    return unsigned.astype(f">u{width}").view(np.uint8).reshape(len(values), width)


def unpack_fixed(rows: Bytes2D, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Invert `pack_fixed`: rows as wide as the dtype to integers."""
    kind = np.dtype(dtype)
    width = kind.itemsize
    unsigned = np.ascontiguousarray(rows).view(f">u{width}").reshape(len(rows)).astype(f"u{width}")
    if kind.kind == "i":
        unsigned ^= np.array(1 << (8 * width - 1), f"u{width}")
    return unsigned.view(kind)


def fixed_bytes(value: int, dtype: npt.DTypeLike = np.int64) -> bytes:
    """Give one integer as `pack_fixed` does.

    >>> fixed_bytes(-1).hex(), fixed_bytes(1, "u2").hex()
    ('7fffffffffffffff', '0001')
    """
    kind = np.dtype(dtype)
    flip = 1 << (8 * kind.itemsize - 1) if kind.kind == "i" else 0
    return (value + flip).to_bytes(kind.itemsize, "big")


def to_keys(rows: Bytes2D) -> list[bytes]:
    """Give rows of bytes as a list of bytes objects, trailing zeros included."""
    if not rows.size:
        return [b""] * len(rows)
    # dtype V keeps trailing zeros, S would strip them
    return np.ascontiguousarray(rows).view(f"V{rows.shape[1]}").ravel().tolist()


def to_rows(keys: Sequence[bytes], width: int) -> Bytes2D:
    """Give keys of one width as rows of bytes; read-only.

    Raises:
        StateCorrupted: A key is not `width` bytes long.
    """
    joined = b"".join(keys)
    if set(map(len, keys)) - {width}:
        bad = next((key for key in keys if len(key) != width), b"")
        raise undecodable(bad, f"{len(bad)} bytes, {width} were expected")
    return np.frombuffer(joined, np.uint8).reshape(len(keys), width)


def beside(parts: Sequence[Bytes2D]) -> Bytes2D:
    """Put the parts of each row beside each other, as `np.hstack` does.

    A cell is copied at once: byte by byte it takes several times as long.

    >>> beside([np.array([[1], [2]], np.uint8), np.array([[3, 4], [5, 6]], np.uint8)]).tolist()
    [[1, 3, 4], [2, 5, 6]]
    """
    widths = [part.shape[1] for part in parts]
    rows = np.empty((len(parts[0]), sum(widths)), np.uint8)
    at = 0
    for part, width in zip(parts, widths, strict=True):
        if width:
            rows[:, at : at + width].view(f"V{width}")[...] = np.ascontiguousarray(part).view(f"V{width}")
        at += width
    return rows


def to_binary(rows: Bytes2D) -> pa.BinaryArray:
    """Give rows of bytes as a binary array; shares the rows' memory."""
    count, width = rows.shape
    offsets = np.arange(0, width * (count + 1), width, dtype=np.int32)[: count + 1]
    data = pa.py_buffer(np.ascontiguousarray(rows))
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), data])
