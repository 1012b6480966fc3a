"""A sink that keeps what it was given."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from backend.sinks.foreach import ForeachSink


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
