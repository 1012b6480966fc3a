"""Coordinates of rows that have none: a DataFrame's rows, ranked in the shard's task.

Spark may deliver a planned micro-batch in another order when it runs again, so a row's place cannot come from the order
of arrival. It comes from what the row is: rows are ranked by event time, then by a digest of their fields. The offset
(format 1) is the micro-batch and the rank in it::

    +--------------------------+------------------+
    | version (Spark's batch)  | rank in the shard|
    | upper 31 bits            | lower 32 bits    |
    +--------------------------+------------------+

So offsets grow, each is one row of a shard (another shard's row may have the same), and they have gaps. Equal rows are
interchangeable: which of them is first changes nothing. Bad rows are ranked behind the good ones.

Within a micro-batch rows come in order of event time, so no row is late because of another one of the same micro-batch:
lateness is judged by what earlier, committed micro-batches saw, as Spark's own watermark is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from backend.batch import BEFORE, OFFSET, RESERVED, TIME
from backend.chunks import taken_rows
from backend.errors import ValueInvalid
from backend.rows import RowCodec
from backend.windows.columns.arrays import IntArray

RANK_BITS = 32
MAX_VERSION = 2**31 - 1


def first_offset(version: int) -> int:
    """Return the offset of a micro-batch's first row; offsets of earlier micro-batches are below it.

    >>> first_offset(0), first_offset(3) - 3 * 2**32
    (0, 0)
    """
    return version << RANK_BITS


def version_of(offset: int) -> int:
    """Return the micro-batch that an offset is of: the inverse of `first_offset`."""
    return offset >> RANK_BITS


def check_ranks(version: int, count: int, where: str) -> None:
    """Check that so many rows of a micro-batch have offsets.

    Raises:
        ValueInvalid: They have not.
    """
    if version > MAX_VERSION or count > 2**RANK_BITS:
        raise ValueInvalid(
            "a micro-batch of a DataFrame has no offsets for its rows",
            where=where,
            why=f"{count} rows of micro-batch {version} in one shard: at most {2**RANK_BITS} rows and micro-batch"
            f" {MAX_VERSION} are allowed",
            command="bound the micro-batches where the DataFrame is made (maxFilesPerTrigger, rowsPerSecond, ...), or"
            " take more shards",
        )


def rank(frames: Sequence[pa.Table], version: int, newest: int) -> pa.Table | None:
    """Return rows in order, with their offsets and the newest event time before each; None for no frames.

    Args:
        frames: One stream's rows in any order: `MESSAGE_FIELDS`, then fields.
        version: Spark's batch id.
        newest: Newest event time that earlier micro-batches saw.
    """
    if not frames:
        return None
    messages = pa.concat_tables(frames).combine_chunks()
    times = np.asarray(messages.column(TIME), np.int64)
    order = np.lexsort((*_digests(messages), times))
    messages, times = taken_rows(messages, order), times[order]
    before = np.maximum.accumulate(np.concatenate([np.array([newest], np.int64), times]))[:-1]
    offsets = np.arange(len(times), dtype=np.int64) + first_offset(version)
    for name, values in ((OFFSET, offsets), (BEFORE, before)):
        at = messages.schema.get_field_index(name)
        messages = messages.set_column(at, messages.schema.field(at), pa.array(values))
    return messages


def _digests(messages: pa.Table) -> tuple[IntArray, IntArray]:
    """Return 128 bits of a digest of each row's fields, in two arrays; equal rows have equal digests."""
    own = [field for field in messages.schema if field.name not in RESERVED]
    rows = RowCodec(pa.schema(own)).encode(messages) if own else [b""] * messages.num_rows
    digests = np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, rows)), np.int64).reshape(-1, 2)
    return digests[:, 0], digests[:, 1]


def rank_errors(errors: pa.Table, stream: int, version: int, after: int) -> pa.Table:
    """Return errors with a stream's bad rows in order, and with their offsets.

    Args:
        errors: `ERROR_SCHEMA`, in any order.
        stream: The stream; other streams' rows stay as they are.
        version: Spark's batch id.
        after: Number of the stream's good rows.
    """
    mine = pc.equal(errors.column("stream"), stream)
    bad = errors.filter(mine).sort_by([(name, "ascending") for name in ("event_time", "reason", "detail", "value")])
    offsets = np.arange(bad.num_rows, dtype=np.int64) + first_offset(version) + after
    at = errors.schema.get_field_index("offset")
    return pa.concat_tables(
        [errors.filter(pc.invert(mine)), bad.set_column(at, errors.schema.field(at), pa.array(offsets))]
    )
