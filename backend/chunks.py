"""Columns of Arrow tables as one array."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def one_chunk(column: Any) -> pa.Array:
    """Return a column as one array; not copied where it is one (pyarrow's `combine_chunks` copies always).

    >>> column = pa.chunked_array([[1, 2]])
    >>> one_chunk(column).buffers()[1].address == column.chunk(0).buffers()[1].address
    True
    """
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
