"""Compare two runs of a job: the last revision of each window, the set of errors, and a digest of the state.

Floats are rounded in their last digits, and nothing that depends on the wall clock is looked at.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import xxhash

from backend.batch import ADDED_BY_SINKS, RESULT_FIELDS, published_name
from backend.messages.layout import Part
from backend.python_rows import python_values
from backend.rocks import RocksStore
from backend.store.protocol import Region
from backend.store.workspace import Workspace
from backend.stores.named import BY_KEY, TIME_BYTES
from backend.windows.definitions import Window
from recovery.changelog import History
from recovery.inspect.checkpoint_view import Checkpoint, logged_differences, read_beside
from recovery.inspect.verify import PROBLEM, check_index
from recovery.restore.prove import check_messages

FLOAT_DIGITS = 9
CLOCKED = frozenset({Region.COMMIT, Region.REVISIONS, Region.OPERATOR, Region.REJECTED})
"""Regions whose rows hold batch times or sequence numbers, or what was decided by a batch time."""
MAX_SAMPLES = 5
_NAN = math.nan
"""One object: rows are equal where their parts are the same or equal."""

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """What a run came to.

    Attributes:
        windows: (window, group key) -> the aggregates of its last revision.
        errors: (stream, partition, offset, reason), each as often as it was written.
        state: Shard -> order-independent digest of its committed state, with count and digest of the messages.
        doubled: Result rows with the same window, group key and revision as another, and errors written twice.
    """

    windows: Mapping[Row, Row]
    errors: Mapping[Row, int]
    state: Mapping[int, tuple[int, int, int]]
    doubled: int


@dataclass(frozen=True, slots=True)
class Difference:
    """How a faulty run differs from its control.

    Attributes:
        windows: Windows compared.
        lost: Windows or errors that are not there.
        extra: Windows or errors that the control has not.
        changed: Windows with other aggregates.
        doubled: Rows written twice.
        state_equal: Whether every shard's state digest is the control's.
        samples: Some of what differs, one sentence each.
        digests: Shard, digest of its state in the control and in the faulty run, in hex; empty where there is none.
    """

    windows: int
    errors: int
    lost: int
    extra: int
    changed: int
    doubled: int
    state_equal: bool
    samples: tuple[str, ...] = field(default=())
    digests: tuple[tuple[int, str, str], ...] = field(default=())

    @property
    def equal(self) -> bool:
        """Whether there was something to compare, and nothing differs."""
        clean = self.lost == self.extra == self.changed == self.doubled == 0
        return clean and self.state_equal and self.windows + self.errors > 0


def read_output(checkpoint: Checkpoint, results: Path, errors: Path) -> Output:
    """Read what a run wrote, and the state that it committed."""
    entries = checkpoint.manifest.entries
    windows, doubled = last_revisions(_table(results), window_columns(entries), not_compared(entries))
    found = Counter(_rows(_table(errors), ("stream", "partition", "offset", "reason")))
    doubled += found.total() - len(found)
    return Output(windows, found, {s: state_digest(checkpoint, s) for s in checkpoint.shards}, doubled)


def window_columns(entries: Mapping[str, Any]) -> list[str]:
    """Give the columns of the results that say of which window and group key a row is; none where there are no windows.

    Args:
        entries: The manifest's.
    """
    operator = entries.get("operator", {})
    if operator.get("operator") != "window":
        return []
    shard = ["shard"] if entries.get("route") == "partition" else []  # each has windows of its own
    return [*shard, *Window(**operator["window"]).columns, *(published_name(name) for name, _ in operator["keys"])]


def not_compared(entries: Mapping[str, Any]) -> tuple[str, ...]:
    """Give the columns of the results that differ between two sound runs; those of `process` are all the job's own.

    Args:
        entries: The manifest's.
    """
    ours = entries.get("operator", {}).get("operator") in ("window", "join")
    return (*ADDED_BY_SINKS, "reason", "revision") if ours else ADDED_BY_SINKS


def last_revisions(
    results: pa.Table, place: Sequence[str], apart: Sequence[str] = ADDED_BY_SINKS
) -> tuple[dict[Row, Row], int]:
    """Give the aggregates of each window's last revision, and how many rows are there twice.

    Without windows (a join, `process`) every row is compared: its number of copies stands for a revision.

    Args:
        results: What was published.
        place: As `window_columns` gives them.
        apart: As `not_compared` gives them.
    """
    leading = [field.name for field in RESULT_FIELDS] if place else []
    rest = [name for name in results.column_names if name not in (*apart, *leading, *place)]
    if not results.num_rows:
        return {}, 0
    if not place:
        return {row: (copies,) for row, copies in Counter(_rows(results, rest)).items()}, 0
    order = results.sort_by([("revision", "ascending")])
    last: dict[Row, Row] = {}
    seen: set[Row] = set()
    doubled = 0
    for row in _rows(order, (*place, "revision", "reason", *rest)):
        window, revision, reason = row[: len(place)], row[len(place)], row[len(place) + 1]
        doubled += (*window, revision) in seen
        seen.add((*window, revision))
        if reason == "retracted":
            last.pop(window, None)
        else:
            last[window] = row[len(place) + 2 :]
    return last, doubled


def state_digest(checkpoint: Checkpoint, shard: int) -> tuple[int, int, int]:
    """Give the digest of a shard's committed rows, and count and digest of its messages."""
    commit = checkpoint.committed(shard)
    if commit is None:
        return 0, 0, 0
    history = checkpoint.changelog.read(shard, commit)
    expiring = expiring_regions(checkpoint.manifest.entries)
    total = 0
    for keys, values in history.chunks():
        for key, value in zip(keys, values, strict=True):
            if key[0] in expiring:
                if key[1:2] == BY_KEY:  # the others say when it expires, and nothing else
                    total += xxhash.xxh3_64_intdigest(key + value[TIME_BYTES:])
            elif key[0] not in CLOCKED:
                total += xxhash.xxh3_64_intdigest(key + value)
    return total % 2**64, history.record.message_count, history.record.message_digest


def local_differences(checkpoint: Checkpoint, unread: Collection[int] = ()) -> list[str]:
    """Say what each local database has otherwise than changelog and commit record, one sentence each.

    Args:
        checkpoint: Its `local_dir` has the databases; each is compared as of its own commit.
        unread: Shards that are left out.

    Raises:
        RewindError: A database, or what the changelog has as of its commit, cannot be read.
    """
    wrong: list[str] = []
    indexed = has_index(checkpoint.manifest.entries)
    for shard in checkpoint.shards:
        local = checkpoint.local(shard) if shard not in unread else None
        if local is None or (local.problem is None and local.commit is None):
            continue
        if local.problem is not None:
            raise local.problem
        assert local.commit is not None
        history = checkpoint.changelog.read(shard, local.commit)
        found = read_beside(partial(_differences, local.path / "db", history, indexed))
        wrong += [f"shard {shard}, local state: {what}" for what in found]
    return wrong


def _differences(database: Path, history: History, indexed: bool) -> list[str]:
    with RocksStore.open(database, read_only=True) as store:
        wrong = logged_differences(store, history) + check_messages(store, history.record, [])
        index = check_index(Workspace(store, history.record.bounds), str(database), whole=indexed)
        return wrong + [found.what for found in index if found.level == PROBLEM]


def has_index(entries: Mapping[str, Any]) -> bool:
    """Return whether each message that is stored has a row in `Region.MESSAGE_INDEX`.

    Args:
        entries: The manifest's.
    """
    operator = entries.get("operator", {})
    window, layout = operator.get("window", {}), operator.get("message_key", "")
    first = str(layout).partition("_")[0]
    return window.get("kind") == "session" or window.get("unit") == "messages" or first in (Part.SESSION, Part.EQUAL)


def expiring_regions(entries: Mapping[str, Any]) -> frozenset[int]:
    """Return the regions of stores whose rows hold when they expire: batch times plus a TTL (`backend.stores.ttl`).

    Args:
        entries: The manifest's.
    """
    stores = entries.get("operator", {}).get("stores", {}).values()
    return frozenset(int(one["region"]) for one in stores if one["kind"] in ("value", "list", "map"))


def compare(control: Output, faulty: Output) -> Difference:
    """Compare a faulty run with its control."""
    samples: list[str] = []
    lost = extra = 0
    for kind, wanted, given in (("window", control.windows, faulty.windows), ("error", control.errors, faulty.errors)):
        missing, added = wanted.keys() - given.keys(), given.keys() - wanted.keys()
        lost, extra = lost + len(missing), extra + len(added)
        samples += [f"{kind} {row} is missing" for row in missing]
        samples += [f"{kind} {row} is too much" for row in added]
    both = control.windows.keys() & faulty.windows.keys()
    changed = [row for row in both if control.windows[row] != faulty.windows[row]]
    samples += [f"window {row}: {control.windows[row]} expected, {faulty.windows[row]} given" for row in changed]
    state = [shard for shard in control.state if control.state[shard] != faulty.state.get(shard)]
    samples += [f"shard {shard}: another state" for shard in state]
    return Difference(
        len(control.windows),
        len(control.errors),
        lost,
        extra,
        len(changed),
        faulty.doubled,
        not state,
        tuple(samples[:MAX_SAMPLES]),
        tuple((shard, _hex(control, shard), _hex(faulty, shard)) for shard in sorted(control.state)),
    )


def _hex(output: Output, shard: int) -> str:
    """Give a shard's digest of rows, then of messages."""
    rows, _, messages = output.state.get(shard, (0, 0, 0))
    return f"{rows:016x} {messages:016x}" if shard in output.state else ""


def _table(path: Path) -> pa.Table:
    return pa.dataset.dataset(path, format="parquet", partitioning="hive").to_table()


def _rows(table: pa.Table, names: Sequence[str]) -> list[Row]:
    if not table.num_rows:  # a job without errors publishes no file of them, so there are no columns either
        return []
    columns = [[_rounded(value) for value in python_values(table[name])] for name in names]
    return list(zip(*columns, strict=True)) if columns else []


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return _NAN if math.isnan(value) else float(f"{value:.{FLOAT_DIGITS}g}")
    if isinstance(value, list):
        return tuple(_rounded(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _rounded(item)) for name, item in value.items())
    return value
