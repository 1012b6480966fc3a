"""State as tables: what `rewind show` prints and `rewind export` writes to Parquet.

Committed rows come from the changelog, so the job may be running. Messages are only in databases: they come from this
host's copy, which is at the committed micro-batch or the one before it, and the table says which.

Rows are decoded by the operators' own readers, on an operator that is made out of the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from shlex import quote
from typing import Any, NamedTuple

import pyarrow as pa

from backend.batch import MAX_TIME, MIN_TIME, TIME
from backend.errors import StateUnavailable
from backend.joins.sides import SIDES
from backend.joins.spec import JoinSpec
from backend.joins.views import SideView
from backend.keys import decode_columns
from backend.messages.keys import stamps
from backend.messages.layout import OFFSET_FIRST
from backend.python_rows import arrow_value, python_values
from backend.rocks import RocksStore
from backend.store.memory import MemoryStore
from backend.store.protocol import Region, region_range
from backend.store.workspace import Workspace
from backend.windows import panes, views
from backend.windows.columns.grouping import split_keys
from recovery.commit.pointer import CommitRecord, read_commit_row
from recovery.inspect.checkpoint_view import Checkpoint, read_beside, readable, region_name
from recovery.inspect.known_operator import known_join, store_of, type_of, window_operator
from recovery.inspect.stores import STORE, as_json, as_table, number, rows_of

TABLES = ("windows", "aggregates", "messages", "rows")
"""A join has `left` and `right` for the messages of its sides. Each store of `process()` is a table of its name."""
_SHARD = pa.field("shard", pa.int32(), nullable=False)
RAW = pa.schema(
    [
        _SHARD,
        pa.field("region", pa.string(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
    ]
)
"""`rows`: every row of the committed state as bytes, for what no other table decodes."""
WINDOWS = pa.schema(
    [
        _SHARD,
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
        pa.field("messages", pa.int64(), nullable=False),
        pa.field("digest", pa.uint64(), nullable=False),
        pa.field("group_keys", pa.int64(), nullable=False),
        pa.field("offsets", pa.string(), nullable=False),
    ]
)
"""Panes: start inclusive, end exclusive, in ms; `offsets` is `stream/partition:first-last` per source partition."""

_EDGES = {True: ("start", "end"), False: ("start_offset", "last_offset")}
"""Of windows that are kept one by one: by event time, or by number of messages."""
_OWN = frozenset(("shard", "expires", "messages", "offsets", "partial_bytes", "commit", *_EDGES[True], *_EDGES[False]))
"""Columns of these tables and of no job: a field of one of these names has `_` behind it, and is no time of ours."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows.

    Attributes:
        table: One of `TABLES`, or the name of a store.
        start: Event time in ms, inclusive; None from the first on. Of what has a TTL, the time at which it expires.
        end: Likewise, exclusive; None to the last.
        key: Text that the key must contain; None for all.
        version: As of this micro-batch; None for the newest.
    """

    table: str
    start: int | None = None
    end: int | None = None
    key: str | None = None
    version: int | None = None

    @property
    def times(self) -> tuple[int, int]:
        """The wanted range of event time, half-open."""
        return MIN_TIME if self.start is None else self.start, MAX_TIME if self.end is None else self.end

    def check_whole(self) -> None:
        """Refuse to choose among rows that are shown as bytes.

        Raises:
            ValueError: A time or a key is given.
        """
        if self.start is not None or self.end is not None or self.key is not None:
            raise ValueError("from, to, key: rows that are shown as bytes have no times and keys; allowed are none")

    def has_key(self, *fields: object) -> bool:
        """Tell whether a key is wanted, by its fields as they are shown."""
        return self.key is None or any(self.key in shown(field) for field in fields if field is not None)

    def within(self, low: int, high: int) -> bool:
        """Tell whether a half-open range of event time meets the wanted one."""
        return (self.end is None or low < self.end) and (self.start is None or high > self.start)

    def filtered(self, table: pa.Table, times: Sequence[int | None], keys: Sequence[Sequence[object]]) -> pa.Table:
        """Give the rows that are wanted.

        Args:
            table: The rows.
            times: Of each row, None for one without a time.
            keys: Columns of the key's fields.
        """
        chosen = [
            (time is None or self.within(time, time + 1)) and self.has_key(*(field[at] for field in keys))
            for at, time in enumerate(times)
        ]
        return table.filter(pa.array(chosen, pa.bool_()))


def shown(value: object) -> str:
    """Return a value of a field as `rewind show` has it."""
    if isinstance(value, float):
        return str(number(value))
    return value.hex() if isinstance(value, bytes) else value.isoformat() if isinstance(value, date) else str(value)


def column_of(name: str) -> str:
    """Return the column of a job's field: no two fields have one.

    >>> column_of("user"), column_of("start"), column_of("start_")
    ('user', 'start_', 'start__')
    """
    return f"{name}_" if name.rstrip("_") in _OWN else name


def read_table(checkpoint: Checkpoint, shard: int, wanted: Wanted) -> pa.Table:
    """Read one shard's rows.

    Raises:
        ValueError: This job's windows have no such table.
        StateUnavailable: Messages were asked for and this host has no database of the shard.
        RewindError: What the changelog or the database raises when it is damaged.
    """
    return _known(checkpoint, wanted.table).read(checkpoint, shard, wanted)


def _committed(checkpoint: Checkpoint, shard: int, wanted: Wanted) -> tuple[MemoryStore, CommitRecord] | None:
    commit = checkpoint.committed(shard, wanted.version)
    if commit is None:
        return None
    history = checkpoint.changelog.read(shard, commit)
    checkpoint.shown[shard] = history.record
    return readable(history), history.record


def _windows(checkpoint: Checkpoint, shard: int, wanted: Wanted) -> pa.Table:
    if checkpoint.is_paned and wanted.key is not None:
        raise ValueError(
            f"key={wanted.key!r}: a row of this table is a window with all its keys: allowed is none; the tables"
            " aggregates and messages have keys"
        )
    schema, found = _window_schema(checkpoint), _committed(checkpoint, shard, wanted)
    if found is None:
        return schema.empty_table()
    rows = _paned(found[0], wanted) if checkpoint.is_paned else _one_by_one(checkpoint, *found, wanted)
    return pa.Table.from_pylist([{"shard": shard, **row} for row in rows], schema)


def _paned(store: MemoryStore, wanted: Wanted) -> Iterator[dict[str, Any]]:
    for pane in panes.all_panes(store):
        if wanted.within(pane.start, pane.end):
            yield {
                "start": pane.start,
                "end": pane.end,
                "messages": pane.count,
                "digest": pane.digest,
                "group_keys": pane.groups,
                "offsets": " ".join(f"{s}/{p}:{first}-{last}" for s, p, first, last in pane.sources),
            }


def _one_by_one(
    checkpoint: Checkpoint, store: MemoryStore, record: CommitRecord, wanted: Wanted
) -> Iterator[dict[str, Any]]:
    """Give windows that are kept one by one: sliding ones, sessions, and those by number of messages."""
    operator = window_operator(checkpoint.operator)
    by_time = operator.spec.window.by_time
    if not by_time and (wanted.start is not None or wanted.end is not None):
        raise ValueError("from, to: windows by number of messages have no event time; allowed are none")
    fields, (first, last) = _keys(checkpoint), _EDGES[by_time]
    for view in views.windows(operator.kind, Workspace(store, record.bounds), *wanted.times):
        if wanted.has_key(*(view.key or ("",))):
            yield {
                first: view.start,
                last: view.end,
                **{
                    field.name: arrow_value(value, field.type)
                    for field, value in zip(fields, view.key or (), strict=False)
                },
                "messages": view.messages,
                "offsets": " ".join(f"{s}/{p}:{low}-{high}" for (s, p), (low, high) in sorted(view.offsets.items())),
            }


def _store(checkpoint: Checkpoint, shard: int, wanted: Wanted) -> pa.Table:
    """Give the rows of a store of `process()`, as of the commit's batch time."""
    declaration, region = store_of(wanted.table, checkpoint.operator)
    found = _committed(checkpoint, shard, wanted)
    if found is None:
        return STORE.empty_table()
    view, record = found
    work = Workspace(view, record.bounds)
    rows = rows_of(declaration.bind(work, region, record.time_ms), work, region, record.time_ms)
    chosen = (row for row in rows if wanted.has_key(row["key"], as_json(row["key"])) and _in_time(row, wanted))
    return as_table(shard, chosen)


def _in_time(row: dict[str, Any], wanted: Wanted) -> bool:
    low = row.get("start", row.get("expires"))
    return low is None or wanted.within(low, row.get("end", low) + 1)


def _aggregates(checkpoint: Checkpoint, shard: int, wanted: Wanted) -> pa.Table:
    """Give one row per (pane, group key): which there are, and how large the partial aggregate is."""
    schema, found = _aggregate_schema(checkpoint), _committed(checkpoint, shard, wanted)
    if found is None:
        return schema.empty_table()
    fields = _keys(checkpoint)
    keys, values = found[0].scan_arrays(*region_range(Region.AGGREGATES))
    starts, _, groups = split_keys(keys, skip_bytes=2)
    columns = decode_columns(groups, [field.type for field in fields]) if fields else []
    lengths = pa.array([len(value) for value in values], pa.int64())
    table = pa.table([pa.repeat(shard, len(keys)), starts, *columns, lengths], schema.names)
    return wanted.filtered(table, starts.tolist(), [python_values(column) for column in columns]).cast(schema)


def _messages(checkpoint: Checkpoint, shard: int, wanted: Wanted) -> pa.Table:
    """Give the messages of this host's database, decoded where the layout is by time; else keys and values."""
    if wanted.version is not None:
        raise ValueError("version: messages are only as of what this host's database is at; allowed is none")
    return read_beside(lambda: _messages_of_now(checkpoint, shard, wanted))


def _messages_of_now(checkpoint: Checkpoint, shard: int, wanted: Wanted) -> pa.Table:
    local = checkpoint.local(shard)
    if local is None or local.problem is not None:
        raise StateUnavailable(
            "this host has no readable database of the shard",
            where=f"shard {shard}, {checkpoint.local_dir}",
            why=str(local.problem) if local is not None else "nothing is there",
            command=f"rewind show {quote(checkpoint.location)} {wanted.table} --local-dir <directory of the executor>",
        )
    with RocksStore.open(local.path / "db", read_only=True) as store:
        record = read_commit_row(store, str(local.path))
        table = _message_rows(checkpoint, store, record, wanted)
    if record is not None:
        checkpoint.shown[shard] = record
    commit = record.commit.name if record is not None else None
    table = table.rename_columns([column_of(name) for name in table.column_names])
    table = table.append_column("shard", pa.repeat(pa.scalar(shard, pa.int32()), table.num_rows))
    return table.append_column("commit", pa.repeat(pa.scalar(commit, pa.string()), table.num_rows))


def _message_rows(checkpoint: Checkpoint, store: RocksStore, record: CommitRecord | None, wanted: Wanted) -> pa.Table:
    work = Workspace(store, record.bounds if record is not None else {})
    try:
        operator = known_join(checkpoint.operator) or window_operator(checkpoint.operator)
    except ValueError:  # the job's own types or functions: the bytes, then
        wanted.check_whole()
        return _stored_messages(store, wanted.table, checkpoint.operator)
    if isinstance(operator, JoinSpec):
        side = operator.sides[SIDES.index(wanted.table)]
        names, table = side.on, SideView(operator, side, work).get_messages(MIN_TIME, MAX_TIME)
    else:
        by_time = operator.spec.window.by_time  # by number of messages the view counts in offsets
        names = tuple(name for name, _ in checkpoint.operator["keys"])
        table = views.messages(operator.kind, work, *(wanted.times if by_time else (MIN_TIME, MAX_TIME)))
    keys = [python_values(table[name]) for name in names if name in table.column_names]
    times = table[TIME].to_pylist() if TIME in table.column_names else [None] * table.num_rows
    return wanted.filtered(table, times, keys)


def _stored_messages(store: RocksStore, table: str, entry: dict[str, Any]) -> pa.Table:
    """Give the messages of a table as bytes; a join's two sides are told apart by their streams."""
    keys, values = store.scan_arrays(*region_range(Region.MESSAGES))
    found = pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})
    if table not in SIDES or not found.num_rows:
        return found
    left = stamps(OFFSET_FIRST, keys)[0] < entry["left_streams"]
    return found.filter(pa.array(left == (table == SIDES[0])))


def _rows(checkpoint: Checkpoint, shard: int, wanted: Wanted) -> pa.Table:
    wanted.check_whole()
    found = _committed(checkpoint, shard, wanted)
    rows = [
        {"shard": shard, "region": region_name(key[0]), "key": key, "value": value}
        for key, value in (found[0].scan(b"", None) if found is not None else [])
    ]
    return pa.Table.from_pylist(rows, RAW)


class _Table(NamedTuple):
    """A table of a job.

    Attributes:
        read: Reads it of one shard.
        schema: Gives its schema; None of messages: they are as of what this host's database is at.
    """

    read: Callable[[Checkpoint, int, Wanted], pa.Table]
    schema: Callable[[Checkpoint], pa.Schema] | None = None


def _tables(checkpoint: Checkpoint) -> dict[str, _Table]:
    """Give the tables of a job by name."""
    operator = checkpoint.operator
    found: dict[str, _Table] = {}
    if operator.get("operator") == "join":
        found = dict.fromkeys(SIDES, _Table(_messages))
    elif operator.get("operator") == "window":
        found["windows"] = _Table(_windows, _window_schema)
        if checkpoint.is_paned:
            found["aggregates"] = _Table(_aggregates, _aggregate_schema)
        found["messages"] = _Table(_messages)
    else:
        found = dict.fromkeys(operator.get("stores", {}), _Table(_store, lambda _: STORE))
    return {**found, "rows": _Table(_rows, lambda _: RAW)}


def _known(checkpoint: Checkpoint, table: str) -> _Table:
    tables = _tables(checkpoint)
    if table not in tables:
        raise ValueError(f"table={table!r}: allowed are {', '.join(tables)}")
    return tables[table]


def tables_of(checkpoint: Checkpoint) -> list[str]:
    """Name the tables of a job."""
    return list(_tables(checkpoint))


def table_schema(checkpoint: Checkpoint, table: str) -> pa.Schema:
    """Give the schema of a table without reading it.

    Raises:
        ValueError: There is no such table for this job, or it is one of messages.
    """
    schema = _known(checkpoint, table).schema
    if schema is None:
        raise ValueError(f"table={table!r}: allowed are {', '.join(tables_of(checkpoint))}")
    return schema(checkpoint)


def _window_schema(checkpoint: Checkpoint) -> pa.Schema:
    if checkpoint.is_paned:
        return WINDOWS
    edges = _EDGES[checkpoint.operator["window"]["unit"] == "time"]
    ends = [pa.field(edge, pa.int64(), nullable=False) for edge in edges]
    last = [pa.field("messages", pa.int64()), pa.field("offsets", pa.string(), nullable=False)]
    return pa.schema([_SHARD, *ends, *_keys(checkpoint), *last])


def _aggregate_schema(checkpoint: Checkpoint) -> pa.Schema:
    last = pa.field("partial_bytes", pa.int64())
    return pa.schema([_SHARD, pa.field("start", pa.int64()), *_keys(checkpoint), last])


def _keys(checkpoint: Checkpoint) -> list[pa.Field]:
    return [pa.field(column_of(name), type_of(kind)) for name, kind in checkpoint.operator.get("keys", [])]


def as_of_one(checkpoint: Checkpoint, wanted: Wanted) -> Wanted:
    """Fix the version, however long all shards take; messages are as of what this host's database is at."""
    if wanted.version is not None or _known(checkpoint, wanted.table).schema is None:
        return wanted
    return replace(wanted, version=max(checkpoint.versions(), default=None))


def all_shards(checkpoint: Checkpoint, wanted: Wanted, shards: Iterable[int] | None = None) -> Iterator[pa.Table]:
    """Read a table shard by shard, all as of one micro-batch: never more than one shard in memory."""
    wanted = as_of_one(checkpoint, wanted)
    for shard in shards or checkpoint.shards:
        yield read_table(checkpoint, shard, wanted)


def chosen_columns(table: pa.Table, names: str | None) -> pa.Table:
    """Give a table of the columns that are named, with commas, in that order; all for None.

    Raises:
        ValueError: There is no such column.
    """
    chosen = table.column_names if names is None else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in table.column_names:
            raise ValueError(f"--columns={names!r}: no column {name!r}; allowed are {', '.join(table.column_names)}")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"--columns={names!r}: a column twice; allowed is each once")
    return table.select(chosen)
