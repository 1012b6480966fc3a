"""Several aggregates over one schema, compiled: what the operators call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import pyarrow as pa

from backend.aggregates.groups import Ints, Rows, counts
from backend.aggregates.model import Aggregate, Full, Incremental, check

MESSAGES = "_messages"
"""int64: messages in a partial. The only partial column when there is no aggregate, so that a row remains."""


class IncrementalPlan:
    """Aggregates kept as partial states: fold messages, merge partials in any sequence, take results.

    Attributes:
        accumulator_schema: Flat columns `<name>.<part>`; `_messages` alone without aggregates.
        result_fields: One per aggregate, in their order.
        input_fields: Message fields that `fold` reads beside `backend.batch.MESSAGE_FIELDS`.
    """

    def __init__(self, bound: Sequence[Incremental], input_fields: Sequence[str]) -> None:
        self._bound = list(bound)
        fields = [part for item in self._bound for part in item.accumulator_fields]
        self.accumulator_schema: pa.Schema = pa.schema(fields or [pa.field(MESSAGES, pa.int64(), nullable=False)])
        self.result_fields: list[pa.Field] = [item.result_field for item in self._bound]
        self.input_fields: list[str] = list(input_fields)

    def fold(self, messages: pa.Table, groups: Ints, n: int) -> pa.Table:
        """Make one partial per group.

        Args:
            messages: Messages in fold order: (stream, partition, offset).
            groups: Group of each message, in `[0, n)`.
            n: Number of groups; a group without messages gets the empty partial.

        Returns:
            `accumulator_schema`, n rows: row g is group g's.
        """
        rows = Rows(messages, groups, n)
        if not self._bound:
            return pa.table([pa.array(counts(groups, n))], schema=self.accumulator_schema)
        return self._accumulators([item.fold(rows) for item in self._bound])

    def merge(self, accumulators: pa.Table, groups: Ints, n: int, at: Ints | None = None) -> pa.Table:
        """Make one partial per group from partials (`accumulator_schema`).

        Their order does not matter but to a user's `merge(earlier, later)`.

        Args:
            accumulators: The partials.
            groups: Group of each, in `[0, n)`.
            n: Number of groups; each has a partial.
            at: Which rows of `accumulators` are merged, as long as `groups`; None is all.
        """
        if len(groups) == n:  # one each: nothing to merge
            order = np.argsort(groups) if at is None else at[np.argsort(groups)]
            columns = [accumulators.column(name).take(pa.array(order)) for name in self.accumulator_schema.names]
            return pa.table(columns, schema=self.accumulator_schema)
        rows = Rows(accumulators if at is None else accumulators.take(pa.array(at)), groups, n)
        if not self._bound:
            return pa.table([rows.total(MESSAGES)], schema=self.accumulator_schema)
        return self._accumulators([item.merge(rows) for item in self._bound])

    def result(self, accumulators: pa.Table) -> pa.Table:
        """Give `result_fields`, one row per partial; the partials stay usable."""
        if not self._bound:
            return accumulators.select([])
        return pa.table([item.result(accumulators) for item in self._bound], schema=pa.schema(self.result_fields))

    def _accumulators(self, columns: list[list[pa.Array]]) -> pa.Table:
        return pa.table([array for part in columns for array in part], schema=self.accumulator_schema)


class FullPlan:
    """Aggregates computed from all messages of a group.

    Attributes:
        result_fields: One per aggregate, in their order.
        input_fields: Message fields that `result` reads.
        ordered: A result depends on the order of the messages.
    """

    def __init__(self, bound: Sequence[Full], fields: Sequence[str]) -> None:
        self._bound = list(bound)
        self.result_fields: list[pa.Field] = [item.result_field for item in bound]
        self.input_fields: list[str] = list(fields)
        self.ordered = any(item.ordered for item in bound)

    def result(self, messages: pa.Table, groups: Ints, n: int) -> pa.Table:
        """Give `result_fields`, n rows: row g is group g's.

        Args:
            messages: `input_fields`, or more; in fold order where `ordered`.
            groups: Group of each message, in `[0, n)`.
            n: Number of groups.
        """
        if not self._bound:
            return pa.table({MESSAGES: counts(groups, n)}).select([])
        rows = Rows(messages, groups, n)
        return pa.table([item.result(rows) for item in self._bound], schema=pa.schema(self.result_fields))


def compile_incremental(aggregates: Mapping[str, Aggregate], schema: pa.Schema) -> IncrementalPlan:
    """Bind incremental aggregates to the schema of the messages; none is allowed too.

    Args:
        aggregates: Result name -> aggregate.
        schema: The messages' fields, `backend.batch.MESSAGE_FIELDS` or not.

    Raises:
        ValueError: An unknown field, a type that the aggregate cannot take, a name that is not allowed, or an
            aggregate that needs all messages (`compile_full` takes those).
    """
    check(aggregates, schema)
    for name, aggregate in aggregates.items():
        if not aggregate.incremental:
            raise ValueError(f"aggregates[{name!r}]: {aggregate.kind} needs all messages of a window: use compile_full")
    bound = [cast(Incremental, aggregate.bind(name, schema)) for name, aggregate in aggregates.items()]
    owner: dict[str, str] = {}
    for name, item in zip(aggregates, bound, strict=True):
        for one in item.accumulator_fields:
            if owner.setdefault(one.name, name) != name:
                raise ValueError(
                    f"aggregates: {owner[one.name]!r} and {name!r} both keep a partial result {one.name!r}: rename one"
                )
    return IncrementalPlan(bound, _inputs(aggregates))


def compile_full(aggregates: Mapping[str, Aggregate], schema: pa.Schema) -> FullPlan:
    """Bind aggregates that need all messages to the schema of the messages; none is allowed too.

    Raises:
        ValueError: As for `compile_incremental`, which takes the others.
    """
    check(aggregates, schema)
    bound = [cast(Full, aggregate.bind(name, schema)) for name, aggregate in aggregates.items()]
    for name, aggregate in aggregates.items():
        if aggregate.incremental:
            raise ValueError(f"aggregates[{name!r}]: {aggregate.kind} needs no messages: use compile_incremental")
    return FullPlan(bound, _inputs(aggregates))


def _inputs(aggregates: Mapping[str, Aggregate]) -> list[str]:
    return list(dict.fromkeys(name for aggregate in aggregates.values() for name in aggregate.fields))
