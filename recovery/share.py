"""A shard's share of a micro-batch, as an attempt is given it and as a queue keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from backend.batch import ERROR_SCHEMA, Position, SourcePartition


@dataclass(frozen=True, slots=True)
class ShardInput:
    """What an attempt is given: the shard's share of the micro-batch.

    Attributes:
        time_ms: The batch time that Spark logged.
        messages: Sorted by (stream, partition, offset), without duplicates; None when the shard got no rows.
        after: Positions after the micro-batch.
        in_future: (stream, partition, offset) refused against the clock: a replay must refuse them again.
        drain: The bounded input ends with this micro-batch.
        came: The source brought something, the input ends, or options were changed: the operator runs. Otherwise it
            runs iff it is due.
        adopt: Name of the commit that the shard is to adopt, if it queues since that one; "" for none.
        errors: Bad input, `ERROR_SCHEMA`, in order of (stream, partition, offset): packed rows come in any order, and a
            micro-batch that runs again has to give each error the same place.
        timestamps: The messages' own timestamps, milliseconds, as long as `messages`; null where there is none.
        with_values: False where messages may be combined: the operator's errors have no value then.
        firsts: As in `backend.batch.MicroBatch`.
    """

    time_ms: int
    messages: pa.Table | None
    after: Mapping[SourcePartition, Position]
    in_future: tuple[tuple[int, int, int], ...] = ()
    drain: bool = False
    came: bool = True
    adopt: str = ""
    errors: pa.Table = field(default_factory=ERROR_SCHEMA.empty_table)
    timestamps: pa.ChunkedArray | None = None
    with_values: bool = True
    firsts: Mapping[SourcePartition, int] = field(default_factory=dict)
