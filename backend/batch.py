"""What goes into an operator and what comes out of it: the terms that the layers share.

An operator is a pure transformation of one shard's micro-batch: it reads committed state through a
`backend.store.workspace.Workspace`, leaves its changes there, and returns an `Outcome`. It knows no Spark, no Kafka,
no disk.

Times are int64 milliseconds since the epoch. `NO_TIME` stands for "no event seen yet" wherever a column or field of
stream time may lack one; it is smaller than every event time that is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec
import pyarrow as pa

if TYPE_CHECKING:
    from backend.store.rows import StoreRows
    from backend.store.workspace import Workspace

NO_TIME = -(2**63)
"""Stream time before the first message."""
MIN_TIME, MAX_TIME = -(2**62), 2**62
"""Of times in stores; sums with a few durations stay inside int64."""
MIN_EVENT_TIME, MAX_EVENT_TIME = -(2**60), 2**60
"""Of messages; others are refused as bad input. So no window ends, or leaves retention, at `MAX_TIME`."""
EVENT_TIMES = f"allowed are {MIN_EVENT_TIME} to {MAX_EVENT_TIME} ms"

STREAM = "_stream"
"""uint16: number of the (side, topic) in the manifest; 0 for a single topic."""
PARTITION = "_partition"
"""int32: the source partition."""
OFFSET = "_offset"
"""int64: the source offset."""
TIME = "_time"
"""int64: event time, milliseconds."""
BEFORE = "_before"
"""int64: newest event time of the same source partition before this message, `NO_TIME` if there was none."""

OWN_TIMESTAMP = "_own timestamp"
"""int64: the record's own timestamp in frames (backend.spark.pack.frames), milliseconds; operators do not see it."""

RESERVED = (STREAM, PARTITION, OFFSET, TIME, BEFORE, OWN_TIMESTAMP)

MESSAGE_FIELDS = [
    pa.field(STREAM, pa.uint16(), nullable=False),
    pa.field(PARTITION, pa.int32(), nullable=False),
    pa.field(OFFSET, pa.int64(), nullable=False),
    pa.field(TIME, pa.int64(), nullable=False),
    pa.field(BEFORE, pa.int64(), nullable=False),
]

SourcePartition = tuple[int, int]
"""(stream, partition)."""


class Position(msgspec.Struct, frozen=True, array_like=True):
    """How far one source partition has been consumed.

    Attributes:
        next_offset: The next offset to read.
        stream_time: Newest event time seen, `NO_TIME` before the first; never goes back.
        active_ms: Batch time of the last micro-batch that brought an accepted message of it: what steps drop and what
            is refused on the way to the shards counts for `counts_offsets` alone. At first, when it became known.
    """

    next_offset: int
    stream_time: int
    active_ms: int


Positions = Mapping[SourcePartition, Position]

ERROR_SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("stream", pa.uint16(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.int64()),  # the record's own timestamp, ms
        pa.field("event_time", pa.int64()),  # ms; null when it could not be read
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string()),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),  # raw bytes when parsing failed; the fields as JSON otherwise
    ]
)
"""Rows of the errors output. Reasons: `ERROR_REASONS` (`poison`: a step raised); of contexts also `out_of_order`."""

RESULT_FIELDS = [
    pa.field("reason", pa.string(), nullable=False),  # of RESULT_REASONS
    pa.field("revision", pa.int32(), nullable=False),  # 0 for the first row of a (window, group key)
    pa.field("window_start", pa.int64()),  # ms; null for tuple windows
    pa.field("window_end", pa.int64()),  # ms, exclusive; sliding and session windows: the last event time (inclusive)
    pa.field("start_partition", pa.int32()),  # windows by number: source partition and offset of the first message,
    pa.field("start_offset", pa.int64()),
    pa.field("last_partition", pa.int32()),  # and of the last one; null for others
    pa.field("last_offset", pa.int64()),
]
"""Leading columns of every operator's result table; the group key's fields and the aggregates follow."""

PLANNED, WATERMARK, NEXT_END, ENDS_APART = "planned", "watermark", "next_end", "ends_apart"
"""Metrics of a shard, milliseconds: when its micro-batch was planned; its watermark; when, in event time, its next
window ends, and how much later the one behind it. Only those of windows with fixed ends have them."""
GAUGES = frozenset({"windows_open", PLANNED, WATERMARK, NEXT_END, ENDS_APART})
"""Of an operator's metrics: of these the newest counts, the others add up."""

FIRST = {"start_partition": PARTITION, "start_offset": OFFSET}
LAST = {"last_partition": PARTITION, "last_offset": OFFSET}
EDGES = FIRST | LAST
"""Columns of results that say with which messages a window by number of messages begins and ends, and where they come
from. No two windows of a group key begin with the same message, but sliding ones that hold less than their size."""

RESULT_REASONS = ("early", "full", "late", "drain", "retracted")
ERROR_REASONS = ("malformed", "poison", "no_event_time", "in_future", "out_of_range", "out_of_retention")
KNOWN_REASONS = frozenset(RESULT_REASONS + ERROR_REASONS)
"""Only these become names of metrics: a function of the user's can emit any text as one."""

ADDED_BY_SINKS = ("id", "version", "shard", "sequence", "batch")
"""Columns that sinks add to identify a result row (`batch` is the directory's): sinks put `_` behind
the name of a key or of a joined field that is called so, whatever its case (Spark sees none); aggregates cannot be."""


def published_name(name: str) -> str:
    """Give the name that a result column has for readers.

    >>> published_name("id"), published_name("ID"), published_name("user")
    ('id_', 'ID_', 'user')
    """
    return f"{name}_" if name.lower() in ADDED_BY_SINKS else name


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One shard's share of a micro-batch.

    Attributes:
        version: Spark's batch id; standalone, a counter.
        time_ms: The batch time that Spark logged: the same when the micro-batch runs again.
        messages: `MESSAGE_FIELDS`, then the fields the operator asked for; sorted by (stream, partition, offset), no
            duplicates, all offsets at or above the committed position.
        before: Positions as committed.
        after: Positions when this micro-batch is done; partitions that only other shards got rows of advance too.
        drain: The bounded input ends with this micro-batch.
        timestamps: The messages' own timestamps, milliseconds, as long as `messages`, null where there is none; None
            where nobody knows them.
        due_ms: `Outcome.next_due_ms` as committed: the batch time that was asked for, come or not; None for none.
        firsts: First offset of each source partition that brings something for the first time: to any shard, and bad
            input counts.
    """

    version: int
    time_ms: int
    messages: pa.Table
    before: Positions
    after: Positions
    drain: bool = False
    timestamps: pa.ChunkedArray | None = None
    due_ms: int | None = None
    firsts: Mapping[SourcePartition, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Proof:
    """What a range of the message store must hold: checked after a replay, before the state is used.

    Attributes:
        label: The window (or pane, or session) that the range belongs to, for reports.
        start: First key, inclusive.
        end: Last key, exclusive.
        count: Number of messages.
        digest: `backend.messages.rows.digest` of them: order-independent, 64 bits.
    """

    label: str
    start: bytes
    end: bytes
    count: int
    digest: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a micro-batch came to, beside the changes left in the workspace.

    Attributes:
        results: The operator's `result_schema`, in the order of emission.
        errors: `ERROR_SCHEMA`.
        next_due_ms: Batch time at which the operator wants to run again without input; None when nothing waits.
        replay_from: Per source partition the smallest `start_offset` over *all* retained windows; empty when no
            message store is kept.
        rejected: (stream, partition, offset) of messages that a replay from there must leave out and that the bounds
            alone would not.
        message_count: Live messages in the message store.
        message_digest: Their digest.
        metrics: Counters for progress, of the operator's own: results and errors are counted by reason without it.
    """

    results: pa.Table
    errors: pa.Table
    next_due_ms: int | None = None
    replay_from: Mapping[SourcePartition, int] = field(default_factory=dict)
    rejected: Sequence[tuple[int, int, int]] = ()
    message_count: int = 0
    message_digest: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Settling(Protocol):
    """An operator whose state, not a bound, tells which messages are live: each group key has its own windows."""

    def settle(self, work: Workspace) -> None:
        """Delete replayed messages of windows that are gone.

        Called after a replay, when `work` sees the restored state and every replayed message. It deletes nothing else.
        """


def counts_offsets(operator: object) -> bool:
    """Tell whether an operator's clocks are offsets (joins by number): they go on with what is not accepted, too."""
    return bool(getattr(operator, "counts_offsets", False))


FREE_OPTIONS = (
    "policies",
    "retention_ms",
    "retention_messages",
    "idle_after_ms",
    "max_ahead_ms",
    "free",  # a join's retentions and update periods, the durations of a process's stores
)
"""Entries of `Operator.describe` that may be others at the next start; all others stay."""


class Operator(Protocol):
    """A stateful operator over one shard. Holds no state of its own between calls."""

    @property
    def result_schema(self) -> pa.Schema:
        """Schema of `Outcome.results`, known before anything runs."""

    @property
    def input_fields(self) -> Sequence[str]:
        """Names of the message fields that the operator reads: only they travel to the shards."""

    @property
    def replays(self) -> bool:
        """Tell whether messages are kept, which a restore reads from the source again."""

    def process(self, batch: MicroBatch, work: Workspace) -> Outcome:
        """Fold one micro-batch into the state seen through `work`."""

    def replay_rows(self, messages: pa.Table) -> StoreRows:
        """Give the message-store rows of accepted messages, sorted by key: the same bytes that `process` writes."""

    def proofs(self, work: Workspace) -> Iterable[Proof]:
        """Give what the message store must hold according to the window metadata, whatever it holds."""

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry: everything that must stay the same for the state to stay readable."""

    def with_options(self, options: Mapping[str, Any]) -> Operator:
        """Return this operator under other options.

        Args:
            options: Parts of what `describe` gave, as JSON gives them back: those that may change between starts
                (`FREE_OPTIONS`). What is not in it stays.
        """
