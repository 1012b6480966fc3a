"""A shard's rows on their way to a sink, packed as tasks pack them."""

from __future__ import annotations

import pyarrow as pa

from backend.spark.pack.frames import to_ipc


def pack(table: pa.Table) -> bytes | None:
    """Pack a table as an Arrow IPC stream, None when it has no rows."""
    return to_ipc(table) if table.num_rows else None
