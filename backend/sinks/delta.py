"""Delta tables by delta-rs: no Spark package, no jar.

The record of a micro-batch is in the transaction log as three application transactions, which last whatever becomes of
the log's old files: `rewind-<query>` has the version, `...-rows` the number of rows, `...-digest` their
digest. The commit's metadata names query and version for people. Of two writers that bring out the same micro-batch one
fails, since Delta refuses a commit whose transactions another one has advanced since its table version was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
from deltalake import CommitProperties, Transaction

from backend.places import check_apart
from backend.sinks.table_rows import ROW_KEY, dated_within, unfit
from backend.sinks.table_sink import KeyedSink, Record, check_columns, check_owner, reaching
from backend.sinks.tables import ERRORS, KINDS, RESULTS
from recovery.files import check_place

OWNER = "rewind.owner"
_GONE = "_rewind_gone"


def delta_tables(
    path: str | Path, errors: str | Path | None, storage_options: Mapping[str, str] | None, options: Mapping[str, Any]
) -> KeyedSink:
    """Make what `backend.sinks.delta_sink` returns."""
    places = {RESULTS: check_place(path, "path")}
    places[ERRORS] = check_place(errors if errors is not None else f"{places[RESULTS].rstrip('/')}-errors", "errors")
    check_apart([("errors", places[ERRORS]), ("path", places[RESULTS])])
    given = storage_options if storage_options is not None else {}
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for pair in given.items() for text in pair):
        raise ValueError("storage_options: must be texts by texts, as deltalake takes them")
    tables = {kind: DeltaOutput(places[kind], dict(given)) for kind in KINDS}
    return KeyedSink(tables, {"kind": "delta", **places}, **options)


class DeltaOutput:
    """One table; see `backend.sinks.table_sink.KeyedTable`.

    Args:
        place: Path or URI.
        storage_options: Of deltalake.
    """

    def __init__(self, place: str, storage_options: dict[str, str]) -> None:
        self.place, self._storage = place, storage_options
        self._owner, self._schema = "", pa.schema([])
        self._table: deltalake.DeltaTable  # as of `last`

    def unfit(self, schema: pa.Schema) -> str:
        """Say which column it cannot have."""
        why = unfit(schema, times=False, cases=False, within=True)
        zoneless = {field.name: _zoneless(field.type) for field in schema}
        if why or {False} in zoneless.values() or {False, True} in zoneless.values():
            return why
        bad = next((name for name, places in zoneless.items() if places), None)  # delta-rs does not look into maps
        return (
            f"column {bad!r}: times without a time zone within a map cannot be the only ones; cast them" if bad else ""
        )

    def owner(self) -> str | None:
        """Read whose it is."""
        with reaching(self.place):
            found = deltalake.DeltaTable.is_deltatable(self.place, self._storage)
            return self._load().metadata().configuration.get(OWNER) if found else None

    def open(self, schema: pa.Schema, owner: str) -> None:
        """Make the table where there is none, and mark it."""
        with reaching(self.place):
            if not deltalake.DeltaTable.is_deltatable(self.place, self._storage):
                deltalake.DeltaTable.create(
                    self.place,
                    schema,
                    mode="ignore",
                    configuration={OWNER: owner},
                    storage_options=self._storage,
                    raise_if_key_not_exists=False,
                )
            table = self._load()
            found = table.metadata().configuration.get(OWNER)
            check_owner(found, owner, empty=not table.file_uris(), where=self.place)
            check_columns(pa.schema(table.schema().to_arrow()), schema, self.place)
            if found is None:
                table.alter.set_table_properties({OWNER: owner}, raise_if_not_exists=False)
        self._owner, self._schema = owner, schema

    def last(self) -> Record:
        """Read the record."""
        with reaching(self.place):
            table = self._table = self._load()
            version, rows, digest = (table.transaction_version(name) for name in self._names)
        return Record() if version is None else Record(version, rows or 0, f"{digest or 0:016x}")

    def append(self, paths: Sequence[str], rows: Iterator[pa.RecordBatch], record: Record) -> None:
        """Append in one commit."""
        reader = pa.RecordBatchReader.from_batches(self._schema, map(_dated, rows))
        with reaching(self.place):
            deltalake.write_deltalake(
                self._table,
                reader,
                mode="append",
                schema_mode="merge",  # columns of the user's own are null
                commit_properties=self._commit(record),
            )

    def replace(self, rows: pa.Table, gone: pa.Array, bounded: str | None, record: Record) -> None:
        """Merge in one commit: of files that hold a row that changes, the other rows are copied, as Delta does it."""
        columns = {_quoted("t", name): _quoted("s", name) for name in rows.column_names}
        matching = [ROW_KEY] if bounded is None else [ROW_KEY, bounded]  # by its bounds files are passed over
        condition = " AND ".join(f"{_quoted('t', name)} = {_quoted('s', name)}" for name in matching)
        with reaching(self.place):
            merger = self._table.merge(
                pa.Table.from_batches(map(_dated, rows.to_batches()), rows.schema).append_column(_GONE, gone),
                condition,
                source_alias="s",
                target_alias="t",
                streamed_exec=False,
                commit_properties=self._commit(record),
            )
            merger.when_matched_delete(f"s.{_GONE}").when_matched_update(columns).when_not_matched_insert(
                columns, predicate=f"NOT s.{_GONE}"
            ).execute()

    @property
    def _names(self) -> tuple[str, str, str]:
        name = f"rewind-{self._owner}"
        return name, f"{name}-rows", f"{name}-digest"

    def _load(self) -> deltalake.DeltaTable:
        return deltalake.DeltaTable(self.place, storage_options=self._storage)

    def _commit(self, record: Record) -> CommitProperties:
        values = (record.version, record.rows, int(record.digest, 16))
        return CommitProperties(
            custom_metadata={OWNER: self._owner, "rewind.version": str(record.version)},
            app_transactions=[Transaction(name, value) for name, value in zip(self._names, values, strict=True)],
        )


def _dated(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows whose dates the library can read back: it writes the least and the greatest of each file as text."""
    columns = [dated_within(one, one.type) for one in rows.columns]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def _quoted(side: str, name: str) -> str:
    """Return a column for the parser of conditions, whatever its name."""
    escaped = name.replace('"', '""')
    return f'{side}."{escaped}"'


def _zoneless(kind: pa.DataType, *, within: bool = False) -> set[bool]:
    """Tell where timestamps without a time zone stand in a type: within a map, or not."""
    if pa.types.is_timestamp(kind):
        return {within} if kind.tz is None else set()
    within = within or pa.types.is_map(kind)
    return {place for at in range(kind.num_fields) for place in _zoneless(kind.field(at).type, within=within)}
