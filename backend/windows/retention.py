"""What is out of retention, and the rule for options that change between two starts.

**Gone is what the stored bound says.** Windows up to the bound that a commit raised are gone: nothing reopens them, and
a message for them alone is refused. Today's options never say again what an earlier clock has expired; they say what is
refused from now on, and how far the bound moves next:

* A shorter retention refuses from its first micro-batch on. What waits of the windows that it drops is sent, the
  refused messages are remembered for as long as a replay would bring them (backend.messages.time_first), and then the
  bound
  moves: one commit. That micro-batch is never skipped as quiet.
* A longer one changes nothing below the bound. There messages go on being refused until the clock has caught up.
* Retention by number of messages is the same. A greater number is judged by the messages that are remembered, those
  that the smaller one needed; one that is turned on counts from then on, one that is turned off forgets.

What waits under a policy is decided by today's policies: `WindowOperator` has everything that waits looked at when they
change, and an update whose policy was turned off is due at once (`Waiting`). Open windows wait for their full result:
when those are turned off, all that is open is sent once, as early (`Execution.full_off`). What was sent in full
is known from the policies of its time (`Ledger.full_sent`), never from today's.

The end of a window that could take messages is `end`; gone and the bound are about window numbers, so this module knows
neither panes nor times: the kind's grid says which window a start belongs to (`Expiring`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from backend.store.protocol import Region
from backend.windows.columns.arrays import IntArray
from backend.windows.columns.grouping import start_of
from backend.windows.count_retention import NONE_GONE, Newest
from backend.windows.definitions import Assigner
from backend.windows.micro_batch import Execution


class Expiring(Protocol):
    """What a kind of windows says of its numbers."""

    grid: Assigner
    newest: Newest

    def gone_by_time(self, clock: int) -> int:
        """Return the last window that is out of retention by time at a watermark, at least `NONE_GONE`."""


@dataclass(frozen=True, slots=True)
class Gone:
    """What is out of retention, as numbers of windows: each is the last one that is gone.

    Attributes:
        before: For all messages of the micro-batch, as the stored bound says; `NONE_GONE` before there is one.
        after: For all messages after it; never less than `before`.
        each: For each message, beside retention by time; None when that says it all.
    """

    before: int
    after: int
    each: IntArray | None

    @classmethod
    def of(cls, kind: Expiring, execution: Execution) -> Gone:
        """Judge a micro-batch; call it once for each, because it counts the messages."""
        bound = execution.work.bounds.get(Region.REVISIONS)
        before = NONE_GONE if bound is None else kind.grid.last_begun_at(start_of(bound)) - 1
        each, after = kind.newest.judge(execution, max(before, kind.gone_by_time(execution.clock_after)))
        if before > max(kind.gone_by_time(execution.clock), NONE_GONE):
            floor = np.full(execution.messages.num_rows, before, np.int64)
            each = floor if each is None else np.maximum(each, floor)
        return cls(before, after, each)

    @property
    def moves(self) -> bool:
        """True when windows are dropped in this micro-batch."""
        return self.after > self.before
