"""State as tables: what `rewind show` prints and `rewind export` writes to Parquet.

Committed rows come from the changelog, so the job may be running. Messages are only in databases: they come from this
host's copy, which is at the committed micro-batch or the one before it, and the table says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from backend.errors import RewindError, StateUnavailable
from backend.keys import decode_columns
from backend.messages import TIME_FIRST, decode_messages
from backend.operators import panes
from backend.operators.grouping import split_keys
from backend.rocks import RocksStore
from backend.rows import RowCodec
from backend.store import Readable, Region, region_range
from recovery.pointer import COMMIT_KEY, decode_record
from recovery.survey import PANED, Checkpoint, readable, region_name

TABLES = ("windows", "aggregates", "messages", "rows")
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


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows.

    Attributes:
        table: One of `TABLES`.
        start: Event time in ms, inclusive; None from the first on.
        end: Event time in ms, exclusive; None to the last.
        key: Text that the group key must contain; None for all.
        version: As of this micro-batch; None for the newest.
    """

    table: str
    start: int | None = None
    end: int | None = None
    key: str | None = None
    version: int | None = None

    def __post_init__(self) -> None:
        if self.table not in TABLES:
            raise ValueError(f"table={self.table!r}: allowed are {', '.join(TABLES)}")
        if self.version is not None and self.table == "messages":
            raise ValueError("version: messages are only as of what this host's database is at; allowed is none")

    def within(self, low: int, high: int) -> bool:
        """Tell whether a half-open range of event time meets the wanted one."""
        return (self.end is None or low < self.end) and (self.start is None or high > self.start)


def read_table(checkpoint: Checkpoint, shard: int, wanted: Wanted) -> pa.Table:
    """Read one shard's rows.

    Raises:
        ValueError: This job's windows have no such table.
        StateUnavailable: Messages were asked for and this host has no database of the shard.
        RewindError: What the changelog or the database raises when it is damaged.
    """
    readers: dict[str, Callable[[Checkpoint, int, Wanted], pa.Table]] = {
        "windows": _windows,
        "aggregates": _aggregates,
        "messages": _messages,
        "rows": _rows,
    }
    return readers[wanted.table](checkpoint, shard, wanted)


def _committed(checkpoint: Checkpoint, shard: int, wanted: Wanted) -> Readable | None:
    commit = checkpoint.committed(shard, wanted.version)
    return readable(checkpoint.changelog.read(shard, commit)) if commit is not None else None


def _windows(checkpoint: Checkpoint, shard: int, wanted: Wanted) -> pa.Table:
    _check_paned(checkpoint, "windows")
    view = _committed(checkpoint, shard, wanted)
    rows = [
        {
            "shard": shard,
            "start": pane.start,
            "end": pane.end,
            "messages": pane.count,
            "digest": pane.digest,
            "group_keys": pane.groups,
            "offsets": " ".join(f"{s}/{p}:{first}-{last}" for s, p, first, last in pane.sources),
        }
        for pane in (panes.all_panes(view) if view is not None else [])
        if wanted.within(pane.start, pane.end)
    ]
    return pa.Table.from_pylist(rows, WINDOWS)


def _aggregates(checkpoint: Checkpoint, shard: int, wanted: Wanted) -> pa.Table:
    """Give one row per (pane, group key): which there are, and how large the partial aggregate is."""
    _check_paned(checkpoint, "aggregates")
    fields = [(name, _type(kind)) for name, kind in checkpoint.manifest.entries["operator"].get("keys", [])]
    view = _committed(checkpoint, shard, wanted)
    keys, values = view.scan_arrays(*region_range(Region.AGGREGATES)) if view is not None else ([], [])
    starts, _, groups = split_keys(keys, skip_bytes=2)
    columns = decode_columns(groups, [kind for _, kind in fields]) if fields else []
    table = pa.table(
        {
            "shard": pa.repeat(pa.scalar(shard, pa.int32()), len(keys)),
            "start": pa.array(starts, pa.int64()),
            **{name: column for (name, _), column in zip(fields, columns, strict=True)},
            "partial_bytes": pa.array([len(value) for value in values], pa.int64()),
        }
    )
    texts = zip(*(column.to_pylist() for column in columns), strict=True) if columns else [()] * len(keys)
    keep = [
        wanted.within(start, start + 1) and (wanted.key is None or any(wanted.key in str(field) for field in text))
        for start, text in zip(starts.tolist(), texts, strict=True)
    ]
    return table.filter(pa.array(keep, pa.bool_())).cast(table_schema(checkpoint, "aggregates"))


def _messages(checkpoint: Checkpoint, shard: int, wanted: Wanted) -> pa.Table:
    """Give the messages of this host's database, decoded where the layout is by time; else keys and values."""
    local = checkpoint.local(shard)
    if local is None or local.problem is not None:
        raise StateUnavailable(
            "this host has no readable database of the shard",
            where=f"shard {shard}, {checkpoint.local_dir}",
            why=str(local.problem) if local is not None else "nothing is there",
            command="rewind show <checkpoint> messages --local-dir <directory of the executor>",
        )
    with RocksStore.open(local.path / "db", read_only=True) as store:
        data = store.get(COMMIT_KEY)
        commit = decode_record(data).commit.name if data is not None else None
        keys, values = store.scan_arrays(*region_range(Region.MESSAGES))
    operator = checkpoint.manifest.entries.get("operator", {})
    schema = _stored_schema(operator)
    if schema is None or operator.get("window", {}).get("kind") not in PANED:
        table = pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})
    else:
        table = decode_messages(TIME_FIRST, RowCodec(schema), keys, values)
        times = table["_time"].to_pylist()
        table = table.filter(pa.array([wanted.within(time, time + 1) for time in times], pa.bool_()))
    table = table.append_column("shard", pa.repeat(pa.scalar(shard, pa.int32()), table.num_rows))
    return table.append_column("commit", pa.repeat(pa.scalar(commit, pa.string()), table.num_rows))


def _rows(checkpoint: Checkpoint, shard: int, wanted: Wanted) -> pa.Table:
    view = _committed(checkpoint, shard, wanted)
    rows = [
        {"shard": shard, "region": region_name(key[0]), "key": key, "value": value}
        for key, value in (view.scan(b"", None) if view is not None else [])
    ]
    return pa.Table.from_pylist(rows, RAW)


def table_schema(checkpoint: Checkpoint, table: str) -> pa.Schema:
    """Give the schema of a table without reading it.

    Raises:
        ValueError: There is no such table for this job.
    """
    operator = checkpoint.manifest.entries.get("operator", {})
    if table == "windows":
        _check_paned(checkpoint, table)
        return WINDOWS
    if table == "aggregates":
        _check_paned(checkpoint, table)
        keys = [pa.field(name, _type(kind)) for name, kind in operator.get("keys", [])]
        return pa.schema([_SHARD, pa.field("start", pa.int64()), *keys, pa.field("partial_bytes", pa.int64())])
    if table == "rows":
        return RAW
    raise ValueError(f"table={table!r}: allowed are windows, aggregates and rows")


def all_shards(checkpoint: Checkpoint, wanted: Wanted, shards: Sequence[int] | None = None) -> Iterator[pa.Table]:
    """Read a table shard by shard: never more than one shard in memory."""
    for shard in shards or checkpoint.shards:
        yield read_table(checkpoint, shard, wanted)


def _check_paned(checkpoint: Checkpoint, table: str) -> None:
    operator = checkpoint.manifest.entries.get("operator", {})
    if operator.get("window", {}).get("kind") not in PANED or operator.get("window", {}).get("unit") != "time":
        raise ValueError(f"table={table!r}: allowed are 'messages' and 'rows' for this job's windows")


def _stored_schema(operator: dict[str, object]) -> pa.Schema | None:
    """Give the schema of stored messages out of the manifest; None when a type's name says too little."""
    fields = operator.get("fields")
    if not isinstance(fields, list):
        return None
    try:
        return pa.schema([pa.field(name, _type(kind)) for name, kind in fields])
    except (ValueError, TypeError, RewindError):
        return None


def _type(name: str) -> pa.DataType:
    if name.startswith("timestamp["):
        unit, _, zone = name[len("timestamp[") : -1].partition(", tz=")
        return pa.timestamp(unit, zone or None)
    return pa.type_for_alias(name)
