"""The join operator without Spark: SAMZA-552's contexts, each message given to one side.

    join = StandaloneJoin(spec)
    join.add_left(Message(offset=1, time=0, fields={"id": 1}))
    join.add_right(Message(offset=1000, time=5, fields={"id": 1}))
    join.get_result()                                # the pair
    join.left.get_messages(0, 10, join_keys=1)       # backend.joins.views has all forms

What is durable, and when, is as for windows: backend.contexts.windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from backend.contexts.base import Automatic, Context, Message, Result, Standalone, wall_clock_ms
from backend.joins.operator import JoinOperator
from backend.joins.sides import LEFT, RIGHT, SIDES
from backend.joins.spec import JoinSpec
from backend.joins.views import SideView
from backend.store.protocol import Store


class _Sides(Context[JoinSpec, JoinOperator]):
    """The two sides of a context."""

    _operator_of = JoinOperator

    @property
    def _key_columns(self) -> Sequence[str]:
        return [f"{side.name}.{name}" for side in self._spec.sides for name in side.on]

    @property
    def left(self) -> SideView:
        """The left side, to be looked at."""
        return SideView(self._spec, self._spec.sides[LEFT], self._work)

    @property
    def right(self) -> SideView:
        """The right side, to be looked at."""
        return SideView(self._spec, self._spec.sides[RIGHT], self._work)

    def _value(self, message: Message, column: str) -> Any:
        side, _, name = column.partition(".")
        return message.fields.get(name) if side == SIDES[self._spec.side_of(message.stream)] else None

    def add_left(self, message: Message, wall_ms: int | None = None) -> None:
        """Add a left message as `add_message` does."""
        if not message.stream < self._spec.left_streams:
            most = self._spec.left_streams - 1
            raise ValueError(f"stream={message.stream!r}: allowed are 0 to {most}, those of the left side")
        self.add_message(message, wall_ms)

    def add_right(self, message: Message, wall_ms: int | None = None) -> None:
        """Add a right message as `add_message` does; its stream counts from 0 on this side."""
        self.add_message(replace(message, stream=self._spec.left_streams + message.stream), wall_ms)


class StandaloneJoin(_Sides, Standalone[JoinSpec, JoinOperator]):
    """SAMZA-552's standalone context of a join: the caller fetches results and flushes.

    Args:
        spec: The join.
        store: Where state is flushed to; the caller closes it. None keeps it in memory.
        clock: Wall clock in milliseconds, for calls that do not say it.
    """

    def __init__(self, spec: JoinSpec, store: Store | None = None, *, clock: Callable[[], int] = wall_clock_ms) -> None:
        super().__init__(spec, store, clock=clock)


class AutomaticJoin(_Sides, Automatic[JoinSpec, JoinOperator]):
    """SAMZA-552's automatic context of a join: results flow on by themselves.

    Args:
        spec: The join.
        downstream: Takes one result; False refuses it for now, None does not.
        store: Where state is flushed to; the caller closes it. None keeps it in memory.
        on_error: Takes one row of the errors output (out of retention, ...); None drops them.
        clock: Wall clock in milliseconds, for calls that do not say it.
    """

    def __init__(
        self,
        spec: JoinSpec,
        downstream: Callable[[Result], bool],
        store: Store | None = None,
        *,
        on_error: Callable[[Result], None] | None = None,
        clock: Callable[[], int] = wall_clock_ms,
    ) -> None:
        super().__init__(spec, downstream, store, on_error=on_error, clock=clock)
