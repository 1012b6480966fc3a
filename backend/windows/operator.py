"""The window operator: common checks, then the kind of window at hand.

How a kind plugs in (`Kind`): `WindowOperator.process` reads the `Ledger`, makes an `Execution`, puts event times aside
that nobody can take, and calls `Kind.fold(execution)`, which

* refuses further messages with `execution.refuse(mask, reason, detail)`;
* reads and writes state through `execution.work` only: rows keyed start first
  (backend.windows.columns.grouping), so that `raise_bound` expires them;
* appends result tables to `execution.results` in order of emission (`Emission.table` lays out the columns);
* keeps what waits to be sent in `Region.REVISIONS` (backend.windows.revisions; `Waiting` applies the policies) and
  the time it is due in `execution.ledger.due_ms`;
* keeps `execution.ledger.messages` and `.digest` (message store), `execution.replay_from` and
  `execution.rejected` up to date;
* keeps the number of open windows, `execution.ledger.open`, up to date (`execution.add_open`), so that nobody has to
  count.

The ledger is written back here. Nothing survives in an operator between two calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import pyarrow as pa

from backend.batch import (
    ENDS_APART,
    ERROR_SCHEMA,
    NEXT_END,
    NO_TIME,
    PLANNED,
    WATERMARK,
    MicroBatch,
    Operator,
    Outcome,
    Proof,
    Settling,
)
from backend.store.rows import StoreRows
from backend.store.workspace import Workspace
from backend.windows import ledger as ledgers
from backend.windows.aligned.combining import Combining, combines
from backend.windows.aligned.kind import Aligned
from backend.windows.by_number.kind import Tuples
from backend.windows.merging.kind import Sessions
from backend.windows.micro_batch import Execution, beyond, joined, time_limits
from backend.windows.shared import Shared
from backend.windows.sliding.kind import Sliding
from backend.windows.spec import WindowSpec
from backend.windows.watermark import came, exact, next_idle_ms, watermark_after


class Kind(Protocol):
    """One kind of window."""

    def fold(self, execution: Execution) -> None:
        """Take one micro-batch."""

    def replay_rows(self, messages: pa.Table) -> StoreRows:
        """Give the message-store rows of accepted messages; empty when none are kept."""

    def proofs(self, work: Workspace) -> Iterable[Proof]:
        """Give what the message store must hold; none when none are kept."""

    def count_open(self, work: Workspace, clock: int) -> int:
        """Count the windows with a message that are open at a watermark, from state; may read all of it."""


class WindowOperator:
    """SAMZA-552's windowed aggregator over one shard; see `backend.batch.Operator`.

    A drain that no message came before since the last one sends nothing: the rows would be the same again.

    Results of a micro-batch stand in the order retracted, full, late, early, drain; within each by window start, then
    by the group key's encoding. Without full results, what waited of windows that closed stands in their place, with
    its reason `early`.

    Args:
        spec: What to do.
    """

    def __init__(self, spec: WindowSpec) -> None:
        self.spec = spec
        self.kind = _kind(spec)
        """The kind of window at hand."""
        self.result_schema = spec.result_schema()
        self.input_fields = spec.input_fields()
        self.replays = bool(spec.full)
        """Whether messages are kept: for aggregates over all values."""

    def process(self, batch: MicroBatch, work: Workspace) -> Outcome:
        """Fold one micro-batch into the state seen through `work`."""
        ledger = ledgers.read(work, self.spec.format)
        policies = ledger.policies, ledger.early_messages
        full_off = ledger.run_under(self.spec.policies, batch.time_ms)
        again = ledger.drained and not came(batch.before, batch.after)
        ledger.drained = batch.drain or again
        if again and batch.drain:  # what is open was sent by the drain before this one
            batch = replace(batch, drain=False)
        before = ledger.clock
        after = watermark_after(before, batch.after, batch.time_ms, self.spec.idle_after_ms)
        idle_after = self.spec.idle_after_ms
        execution = Execution(
            batch, work, batch.messages, ledger, before, after, exact(batch.before, batch.after), idle_after
        )
        execution.full_off, execution.policies_changed = full_off, policies != (ledger.policies, ledger.early_messages)
        self._check_times(execution)
        self.kind.fold(execution)
        if not isinstance(self.kind, Shared):  # others write down each revision
            ledger.full_since = ledger.full_since[-1:]
        ledger.clock = after
        if ledger.open is None:  # an older release wrote the state: count once
            ledger.open = self.kind.count_open(work, after)
        execution.metrics["windows_open"] = ledger.open
        if isinstance(self.kind, Aligned) and after != NO_TIME:
            end, behind = self.kind.next_ends(after)
            figures = {PLANNED: batch.time_ms, WATERMARK: after, NEXT_END: end, ENDS_APART: behind - end}
            execution.metrics.update(figures)
        work.put(ledgers.KEY, ledgers.encode(ledger))
        idle = next_idle_ms(after, batch.after, batch.time_ms, self.spec.idle_after_ms)
        due = min((time for time in (ledger.due_ms, idle) if time is not None), default=None)
        return Outcome(
            results=joined(execution.results, self.result_schema),
            errors=joined(execution.errors, ERROR_SCHEMA),
            next_due_ms=due,
            replay_from=execution.replay_from,
            rejected=execution.rejected,
            message_count=ledger.messages,
            message_digest=ledger.digest,
            metrics=execution.metrics,
        )

    def replay_rows(self, messages: pa.Table) -> StoreRows:
        """Give the message-store rows of accepted messages, sorted by key: the same bytes that `process` writes."""
        return self.kind.replay_rows(messages).sorted()

    def proofs(self, work: Workspace) -> Iterable[Proof]:
        """Give what the message store must hold according to the window metadata."""
        return self.kind.proofs(work)

    def settle(self, work: Workspace) -> None:
        """Take out of replayed messages what the window metadata does not hold; for time windows the bounds do."""
        if isinstance(self.kind, Settling):
            self.kind.settle(work)

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry."""
        return self.spec.describe()

    def with_options(self, options: Mapping[str, Any]) -> WindowOperator:
        """Return this operator under other options; see `backend.batch.Operator.with_options`."""
        return WindowOperator(self.spec.with_options(options))

    def _check_times(self, execution: Execution) -> None:
        """Refuse what the pack stage would have: standalone there is none before the operator."""
        if not execution.messages.num_rows:
            return
        for first, last, reason, detail in time_limits(execution.batch.time_ms, self.spec.max_ahead_ms):
            execution.refuse(beyond(execution.messages, first, last), reason, detail)
        execution.refused.clear()  # a restore leaves out what the pack stage refused: no mark, which might never go


def combining_of(operator: Operator) -> Combining | None:
    """Return what may combine messages before they come to an operator; None where each is wanted."""
    if not isinstance(operator, WindowOperator) or not combines(operator.spec):
        return None
    assert isinstance(operator.kind, Aligned)
    return Combining(operator.spec, plan=operator.kind.incremental)


def _kind(spec: WindowSpec) -> Kind:
    if not spec.window.by_time:
        return Tuples(spec)
    if spec.window.kind == "session":
        return Sessions(spec)
    return Sliding(spec) if spec.window.kind == "sliding" else Aligned(spec)
