"""The two sides of a join."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from backend.windows.definitions import Window

LEFT, RIGHT = 0, 1
SIDES = ("left", "right")


@dataclass(frozen=True)
class Side:
    """One side of a join.

    Attributes:
        number: `LEFT` or `RIGHT`.
        schema: The messages' own fields.
        on: The equal fields, in the order of the other side's.
        out: Fields that come out, in the order of the schema.
        window: Its windows; None is one unbounded window.
        retention_ms: See `join_spec`; None for none.
        retention_messages: See `join_spec`; None for none.
        outer: Rows without a partner come out, too.
    """

    number: int
    schema: pa.Schema
    on: tuple[str, ...]
    out: tuple[str, ...]
    window: Window | None
    retention_ms: int | None
    retention_messages: int | None
    outer: bool

    @property
    def name(self) -> str:
        """`left` or `right`."""
        return SIDES[self.number]

    @property
    def fields(self) -> list[pa.Field]:
        """The fields that travel: those that come out and the equal ones; all nullable."""
        return [pa.field(f.name, f.type) for f in self.schema if f.name in self.out or f.name in self.on]

    @property
    def columns(self) -> list[pa.Field]:
        """The columns that the operator's messages have for this side; nullable."""
        return [f.with_name(f"{self.name}.{f.name}") for f in self.fields]

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry."""
        return {
            "on": list(self.on),
            "out": list(self.out),
            "fields": [[f.name, str(f.type)] for f in self.fields],
            "window": None if self.window is None else self.window.describe(),
        }
