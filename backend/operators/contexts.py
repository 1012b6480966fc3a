"""The window operator without Spark: SAMZA-552's automatic and standalone contexts over one store.

Messages go in one at a time (or some at once: the same results, faster), timers by `timeout`. Both contexts run the
columnar operator that Spark runs, a message being a micro-batch of one.

What is durable: `flush` writes everything since the last one as a whole: messages, metadata, and with them the offsets.
So no stored offset is ahead of the messages, and a store that is opened again goes on where the last flush was; what
was added since then is to be added again, and what comes twice is a NOOP (R.4), also when its window is gone.

* `AutomaticContext` sends results on by itself, and flushes when results were sent, a window was opened, or windows
  went out of retention. A downstream may refuse: then the selector is disabled, `add_message` raises
  `SelectorDisabled`, and `timeout` goes on with the refused result and enables the selector again.
* `StandaloneContext` keeps results until they are fetched: `get_result` copies them, `flush` clears them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from backend.operators import views
from backend.operators.context_base import Automatic, Message, Result, Standalone, wall_clock_ms
from backend.operators.spec import WindowSpec
from backend.operators.views import WindowView
from backend.operators.window import WindowOperator
from backend.store import Store
from backend.workspace import Workspace


class _Look:
    """Looking at the windows of a context."""

    operator: WindowOperator
    _work: Workspace

    def get_windows(self, start: int, end: int) -> list[WindowView]:
        """Give the windows in retention that overlap `[start, end)`, ascending."""
        return views.windows(self.operator.kind, self._work, start, end)

    def get_messages(self, start: int, end: int, key: Mapping[str, Any] | None = None) -> pa.Table:
        """Give the kept messages of `[start, end)`, of one key or all; see `backend.operators.views.messages`."""
        return views.messages(self.operator.kind, self._work, start, end, key)


class AutomaticContext(_Look, Automatic):
    """SAMZA-552's automatic execution context: results flow on by themselves.

    Args:
        spec: The windows.
        downstream: Takes one result; False refuses it for now.
        store: Where state is flushed to; the caller closes it. None keeps it in memory.
        on_error: Takes one row of the errors output (out of retention, ...); None drops them.
        clock: Wall clock in milliseconds, for calls that do not say it.
    """

    def __init__(
        self,
        spec: WindowSpec,
        downstream: Callable[[Result], bool],
        store: Store | None = None,
        *,
        on_error: Callable[[Result], None] | None = None,
        clock: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self.operator = WindowOperator(spec)
        super().__init__(
            self.operator, spec.schema, spec.max_ahead_ms, downstream, store, on_error=on_error, clock=clock
        )


class StandaloneContext(_Look, Standalone):
    """SAMZA-552's standalone context: the caller fetches results and flushes.

    Args:
        spec: The windows.
        store: Where state is flushed to; the caller closes it. None keeps it in memory.
        clock: Wall clock in milliseconds, for calls that do not say it.
    """

    def __init__(
        self, spec: WindowSpec, store: Store | None = None, *, clock: Callable[[], int] = wall_clock_ms
    ) -> None:
        self.operator = WindowOperator(spec)
        super().__init__(self.operator, spec.schema, spec.max_ahead_ms, store, clock=clock)


__all__ = ["AutomaticContext", "Message", "Result", "StandaloneContext", "wall_clock_ms"]
