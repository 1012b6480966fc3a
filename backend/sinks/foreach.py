"""Sinks that hand tables to the driver: to a function of the user's, or to a list for tests and notebooks.

All rows of a micro-batch pass through the driver's memory. The function is called at least once per micro-batch: again
with the same version after a crash before Spark's commit. With `version` and the rows' `id` it can make that exactly
once: by replacing what it wrote for this version, or by writing rows and version in one transaction and skipping a
version it has seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from backend.sinks.tables import (
    ERRORS,
    RESULTS,
    check_version,
    empty_errors,
    merge_metrics,
    readable,
    summary,
    unpack,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Consumer = Callable[[pa.Table, pa.Table, int], None]
"""(results, errors, version) -> None."""


class ForeachSink:
    """Calls `function(results, errors, version)` on the driver for each micro-batch that has rows.

    Args:
        function: Gets tables in order of (shard, sequence) with the columns of the Parquet sink. Without results the
            first table has neither rows nor columns. What it raises stops the query, the micro-batch is not committed.
    """

    def __init__(self, function: Consumer) -> None:
        self._function = function

    def open(self, query: str) -> None:
        """Do nothing: whose output it is, is the function's matter."""

    def publish(self, frames: DataFrame, version: int) -> list[dict[str, Any]]:
        """Collect, then call the function."""
        return self.take([row.asDict() for row in frames.collect()], version)

    def take(self, rows: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
        """Hand collected frames on: the second half of `publish`."""
        tables: dict[str, list[pa.Table]] = {RESULTS: [], ERRORS: []}
        by_shard: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            check_version(row["version"], version)
            by_shard.setdefault(row["shard"], []).append(row)
        summaries = []
        for shard in sorted(by_shard):
            counts = {RESULTS: 0, ERRORS: 0}
            for row in by_shard[shard]:
                for kind, parts in tables.items():
                    if row[kind] is not None:
                        parts.append(readable(unpack(bytes(row[kind])), kind, version, shard, counts[kind]))
                        counts[kind] += parts[-1].num_rows
            metrics = merge_metrics(row["metrics"] for row in by_shard[shard])
            summaries.append(summary(shard, counts[RESULTS], counts[ERRORS], metrics))
        if any(part.num_rows for parts in tables.values() for part in parts):
            results = pa.concat_tables(tables[RESULTS]) if tables[RESULTS] else pa.table({})
            errors = pa.concat_tables(tables[ERRORS]) if tables[ERRORS] else empty_errors()
            self._function(results, errors, version)
        return summaries

    def describe(self) -> dict[str, object]:
        """Give the kind and the function's name."""
        return {"kind": "foreach", "function": getattr(self._function, "__qualname__", repr(self._function))}


class CollectSink(ForeachSink):
    """Keeps the tables of every version in this process: for tests and notebooks, exactly one copy per version.

    Attributes:
        results: Version -> table.
        errors: Version -> table.
    """

    def __init__(self) -> None:
        self.results: dict[int, pa.Table] = {}
        self.errors: dict[int, pa.Table] = {}
        super().__init__(self._keep)

    def take(self, rows: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
        """Forget what this version held before, then keep the new tables."""
        self.results.pop(version, None)
        self.errors.pop(version, None)
        return super().take(rows, version)

    def _keep(self, results: pa.Table, errors: pa.Table, version: int) -> None:
        if results.num_rows:
            self.results[version] = results
        if errors.num_rows:
            self.errors[version] = errors

    def describe(self) -> dict[str, object]:
        """Give the kind."""
        return {"kind": "collect"}
