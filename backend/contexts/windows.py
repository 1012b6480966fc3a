"""The window operator without Spark: SAMZA-552's automatic and standalone contexts over one store.

Messages go in one at a time (or some at once: the same results, faster), timers by `timeout`. Both contexts run the
columnar operator that Spark runs, a message being a micro-batch of one.

What is durable: `flush` writes everything since the last one as a whole: messages, metadata, and with them the offsets.
So no stored offset is ahead of the messages, and a store that is opened again goes on where the last flush was; what
was added since then is to be added again, and what comes twice is a NOOP (R.4), also when its window is gone. What
comes for the first time after a later offset of its source partition is no replay: it goes to the errors (`offsets`).

* `AutomaticContext` sends results on by itself, and flushes when results were sent, a window was opened, or windows
  went out of retention. A downstream may refuse: then the selector is disabled, `add_message` raises
  `SelectorDisabled`, and `timeout` goes on with the refused result and enables the selector again.
* `StandaloneContext` keeps results until they are fetched: `get_result` copies them, `flush` clears them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from backend.contexts.base import Automatic, Context, Message, Result, Standalone, wall_clock_ms
from backend.contexts.offsets_seen import ORDERED
from backend.store.protocol import Store
from backend.windows import views
from backend.windows.operator import WindowOperator
from backend.windows.spec import WindowSpec
from backend.windows.views import WindowView


class _Look(Context[WindowSpec, WindowOperator]):
    """Looking at the windows of a context."""

    _operator_of = WindowOperator

    @property
    def _key_columns(self) -> Sequence[str]:
        return self._spec.keys

    def get_windows(self, start: int, end: int) -> list[WindowView]:
        """Give the windows in retention that overlap `[start, end)`, ascending."""
        return views.windows(self.operator.kind, self._work, start, end)

    def get_messages(
        self, start: int, end: int, key: Mapping[str, Any] | None = None, *, by: str | None = None
    ) -> pa.Table:
        """Give the kept messages of `[start, end)`, of one key or all, `by` time or offset.

        `backend.windows.views.messages` says what each argument is.
        """
        return views.messages(self.operator.kind, self._work, start, end, key, by)


class AutomaticContext(_Look, Automatic[WindowSpec, WindowOperator]):
    """SAMZA-552's automatic execution context: results flow on by themselves.

    Args:
        spec: The windows.
        downstream: Takes one result; False refuses it for now, None does not.
        store: Where state is flushed to; the caller closes it. None keeps it in memory.
        on_error: Takes one row of the errors output (out of retention, ...); None drops them.
        clock: Wall clock in milliseconds, for calls that do not say it.
        offsets: `"ordered"`: an offset that was passed without having been added is an error, reason `out_of_order`.
            `"unordered"`: it is added; at most 10,000 gaps may be open in a source partition at a time.

    Raises:
        ValueError: `offsets` is neither.
    """

    def __init__(
        self,
        spec: WindowSpec,
        downstream: Callable[[Result], bool],
        store: Store | None = None,
        *,
        on_error: Callable[[Result], None] | None = None,
        clock: Callable[[], int] = wall_clock_ms,
        offsets: str = ORDERED,
    ) -> None:
        super().__init__(spec, downstream, store, on_error=on_error, clock=clock, offsets=offsets)


class StandaloneContext(_Look, Standalone[WindowSpec, WindowOperator]):
    """SAMZA-552's standalone context: the caller fetches results and flushes.

    Args:
        spec: The windows.
        store: Where state is flushed to; the caller closes it. None keeps it in memory.
        clock: Wall clock in milliseconds, for calls that do not say it.
        offsets: `"ordered"`: an offset that was passed without having been added is an error, reason `out_of_order`.
            `"unordered"`: it is added; at most 10,000 gaps may be open in a source partition at a time.

    Raises:
        ValueError: `offsets` is neither.
    """

    def __init__(
        self,
        spec: WindowSpec,
        store: Store | None = None,
        *,
        clock: Callable[[], int] = wall_clock_ms,
        offsets: str = ORDERED,
    ) -> None:
        super().__init__(spec, store, clock=clock, offsets=offsets)


__all__ = ["AutomaticContext", "Message", "Result", "StandaloneContext", "wall_clock_ms"]
