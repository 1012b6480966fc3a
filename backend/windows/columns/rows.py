"""Rows as columns: what data classes whose fields are as long as one another can do alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import pyarrow as pa

from backend.windows.columns.arrays import Mask


@dataclass(frozen=True, slots=True)
class Rows:
    """Base of such classes. A field is an array of numpy or Arrow, a table, or a list."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def where(self, rows: Mask) -> Self:
        """Give the rows of a mask."""
        return type(self)(*(_picked(getattr(self, field.name), rows) for field in fields(self)))

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Put rows behind one another; there is at least one part."""
        parts = [part for part in parts if len(part)] or parts[:1]
        if len(parts) == 1:
            return parts[0]
        return cls(*(_joined([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def _picked(column: Any, rows: Mask) -> Any:
    if isinstance(column, np.ndarray):
        return column[rows]
    if isinstance(column, list):
        return [column[at] for at in np.flatnonzero(rows).tolist()]
    if isinstance(column, pa.Table) and not column.num_columns:
        return column
    return column.filter(pa.array(rows))


def _joined(columns: list[Any]) -> Any:
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    if isinstance(columns[0], list):
        return [value for column in columns for value in column]
    return pa.concat_tables(columns) if isinstance(columns[0], pa.Table) else pa.concat_arrays(columns)
