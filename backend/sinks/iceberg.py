"""Iceberg tables by pyiceberg: no Spark package, no jar.

The record of a micro-batch is in the table's properties (`rewind.owner`, `.version`, `.rows`, `.digest`), which change
in the commit that brings the rows and last whatever becomes of old snapshots. The snapshot's properties name query and
version for people. A commit is tried once, against the metadata that the record was read from, so of two writers one
fails: `commit.retry.num-retries` of the table is 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchTableError, NotInstalledError
from pyiceberg.expressions import And, BooleanExpression, GreaterThanOrEqual, In, LessThanOrEqual
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table import Transaction

from backend.errors import SinkUnavailable
from backend.sinks.table_rows import ROW_KEY, dated, unfit
from backend.sinks.table_sink import KeyedSink, Record, check_columns, check_owner, reaching, two_names
from backend.sinks.tables import KINDS

PREFIX = "rewind."
OWNER = f"{PREFIX}owner"
_PLAIN = ("name", "type", "warehouse")
_RETRIES = {"commit.retry.num-retries": "0"}


def iceberg_tables(
    table: str, catalog: str | Catalog | Mapping[str, str], errors: str | None, options: Mapping[str, Any]
) -> KeyedSink:
    """Make what `backend.sinks.iceberg_sink` returns."""
    names = two_names(table, errors, lambda name: "." in name.strip("."), "with its namespace, such as 'db.windows'")
    if isinstance(catalog, Catalog):
        found = catalog
    elif catalog and isinstance(catalog, str | Mapping):
        given = {"name": catalog} if isinstance(catalog, str) else {"name": "rewind", **catalog}
        name = str(given["name"])
        try:
            with reaching(f"catalog {name}"):
                found = load_catalog(**given)
        except SinkUnavailable as error:
            if isinstance(error.__cause__, (ValueError, ImportError, NotInstalledError, *_sql_argument_errors())):
                raise ValueError(f"catalog: {name}: {_hidden(str(error.__cause__), given)}") from None
            raise SinkUnavailable(
                error.what, where=error.where, why=_hidden(error.why, given), command=error.command
            ) from None
    else:
        raise ValueError("catalog: must be the name of a catalog, its properties, or one of pyiceberg's")
    tables = {kind: IcebergOutput(found, names[kind]) for kind in KINDS}
    # catalogs that are given by their properties all have one name
    where = {name: _without_secrets(found.properties.get(name, "")) for name in ("uri", "warehouse")}
    return KeyedSink(tables, {"kind": "iceberg", "catalog": found.name, **where, **names}, **options)


def _sql_argument_errors() -> tuple[type[Exception], ...]:
    """Return what SQLAlchemy raises for a URL of a catalog that it cannot take; without it there is no such catalog."""
    try:
        from sqlalchemy.exc import ArgumentError
    except ImportError:
        return ()
    return (ArgumentError,)


def _hidden(text: str, properties: Mapping[str, str]) -> str:
    """Return an error's text without the values of a catalog's properties, which may be secrets; places are told."""
    for name, value in properties.items():
        if name not in _PLAIN and value:
            text = text.replace(str(value), _without_secrets(value) if "://" in str(value) else "***")
    return text


def _without_secrets(uri: object) -> str:
    """Return a URI without user, password and query.

    >>> _without_secrets("postgresql+psycopg://app:s3/cr?t@db/cat?user=app&password=s3cret")
    'postgresql+psycopg://db/cat'
    """
    return re.sub("//.*@", "//", str(uri)).partition("?")[0]


class IcebergOutput:
    """One table; see `backend.sinks.table_sink.KeyedTable`.

    Args:
        catalog: Where it is.
        name: `<namespace>.<table>`.
    """

    def __init__(self, catalog: Catalog, name: str) -> None:
        self._catalog, self._name = catalog, name
        self.place = f"{catalog.name}:{name}"
        self._owner = ""
        self._table: IcebergTable  # as of `last`

    def unfit(self, schema: pa.Schema) -> str:
        """Say which column it cannot have."""
        return unfit(schema, times=True, cases=True)

    def owner(self) -> str | None:
        """Read whose it is."""
        with reaching(self.place):
            try:
                found: str | None = self._catalog.load_table(self._name).properties.get(OWNER)
            except NoSuchTableError:
                return None
            return found

    def open(self, schema: pa.Schema, owner: str) -> None:
        """Make the table where there is none, and mark it."""
        with reaching(self.place):
            try:
                table = self._catalog.load_table(self._name)
            except NoSuchTableError:
                self._catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
                table = self._catalog.create_table_if_not_exists(self._name, schema)
            found = table.properties.get(OWNER)
            check_owner(found, owner, empty=table.current_snapshot() is None, where=self.place)
            check_columns(table.schema().as_arrow(), schema, self.place)
            if found is None:
                with table.transaction() as change:
                    change.set_properties({OWNER: owner, **_RETRIES})
        self._owner = owner

    def last(self) -> Record:
        """Read the record."""
        with reaching(self.place):
            table = self._table = self._catalog.load_table(self._name)
        version, rows, digest = (table.properties.get(PREFIX + name) for name in Record._fields)
        return Record() if version is None else Record(int(version), int(rows or 0), digest or "")

    def append(self, paths: Sequence[str], rows: Iterator[pa.RecordBatch], record: Record) -> None:
        """Append in one commit."""
        with reaching(self.place), self._table.transaction() as change:
            change.append(_dated(pa.Table.from_batches(rows)), snapshot_properties=self._about(record))
            self._note(change, record)

    def replace(self, rows: pa.Table, gone: pa.Array, bounded: str | None, record: Record) -> None:
        """Delete and append in one commit: of files that hold a row that changes, the other rows are copied."""
        keys: BooleanExpression = In(ROW_KEY, rows.column(ROW_KEY).to_pylist())
        if bounded is not None:  # files outside are passed over
            ends = pc.min_max(rows.column(bounded).cast(pa.int64())).as_py()
            keys = And(keys, And(GreaterThanOrEqual(bounded, ends["min"]), LessThanOrEqual(bounded, ends["max"])))
        stays = _dated(rows.filter(pc.invert(gone)))
        with reaching(self.place), self._table.transaction() as change:
            change.overwrite(stays, overwrite_filter=keys, snapshot_properties=self._about(record))
            self._note(change, record)

    def _about(self, record: Record) -> dict[str, str]:
        return {OWNER: self._owner, f"{PREFIX}version": str(record.version)}

    @staticmethod
    def _note(change: Transaction, record: Record) -> None:
        change.set_properties({PREFIX + name: str(value) for name, value in record._asdict().items()})


def _dated(rows: pa.Table) -> pa.Table:
    """Return rows whose times the library has dates for: it looks at the least and the greatest of each file."""
    return pa.table([dated(column) for column in rows.columns], schema=rows.schema)
