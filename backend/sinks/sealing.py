"""What comes between the tasks of a micro-batch and its publication.

A shard may have queued the micro-batch instead of running it. When the micro-batch runs again it must do so again, so
that is written down (`recovery.queue.seals`) after the tasks ran, and before anything of it is out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Seal = Callable[[int, Iterable[Mapping[str, Any]]], None]
"""(version, what tasks reported: rows with `shard` and `metrics`) -> None; durable on return."""


@dataclass(frozen=True, slots=True)
class Writing:
    """How the operator's own tasks write what they made, until the query is started again; travels to them.

    Attributes:
        write: (rows of one shard as `backend.sinks` says, version) -> a row that reports what was written.
        ddl: Its schema, for Spark: of what the sink's `publish` gets. `shard` and `metrics` are as in the frames.
    """

    write: Callable[[pa.RecordBatch, int], pa.RecordBatch]
    ddl: str


_ARROW = {"int": pa.int32(), "bigint": pa.int64(), "string": pa.string(), "binary": pa.large_binary()}


def report_schema(ddl: str) -> pa.Schema:
    """Return what rows that go to the sink are in Arrow, given what they are for Spark.

    >>> report_schema("shard int, metrics string").names
    ['shard', 'metrics']
    """
    columns = [column.split() for column in ddl.split(", ")]
    return pa.schema([(name, _ARROW[kind]) for name, kind in columns])


def check_run(run: str) -> None:
    """Refuse to publish what no task was told to write.

    Raises:
        RuntimeError: `writing` was not called: the sink is within another that does not pass it on.
    """
    if not run:
        raise RuntimeError(
            "the tasks were not told to write for this sink: a sink around it must pass on `writing`, as it does"
            " `begin`, `open` and `publish`"
        )


def unsealed(version: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Do nothing: no shard queues."""


class Sealing:
    """The part of a sink, or of what it publishes from, that runs the tasks."""

    seal: Seal = staticmethod(unsealed)

    def seal_by(self, seal: Seal) -> None:
        """Take what to call after the tasks of a micro-batch ran, and before anything of it is out."""
        self.seal = seal

    def collect(self, frames: DataFrame, version: int) -> list[dict[str, Any]]:
        """Run the tasks of a micro-batch, by one action, and seal what they report."""
        rows = [row.asDict() for row in frames.collect()]
        self.seal(version, rows)
        return rows
