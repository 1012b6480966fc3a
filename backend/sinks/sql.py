"""Tables of a SQL database by SQLAlchemy: rows and the record of their micro-batch in one transaction.

The record is the row of the output in the table `rewind_commits`, beside the output: `output` (its name), `owner`,
`version`, `rows`, `digest`. A transaction updates it first, from the version that was read: of two writers the second
finds another one, and has written nothing. Rows that are replaced are deleted and inserted.

Text that a database has no room for is changed: NUL characters become U+FFFD. Times outside of the years 1 to 9999 are
null. Lists, structs and maps are JSON; numbers in them that JSON has not (NaN, infinities) are null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.pool import NullPool

from backend.errors import SinkConflict
from backend.python_rows import python_values
from backend.sinks.table_rows import ROW_KEY, dated, unfit
from backend.sinks.table_sink import KeyedSink, Record, check_columns, check_owner, reaching, two_names
from backend.sinks.tables import KINDS

COMMITS = "rewind_commits"
_PLACES = ("host", "port", "dbname", "service", "unix_socket", "uri")
_CHUNK_ROWS = 500
"""Rows of one statement: databases bound its parameters."""


def sql_tables(url: str, table: str, errors: str | None, schema: str | None, options: Mapping[str, Any]) -> KeyedSink:
    """Make what `backend.sinks.sql_sink` returns."""
    names = two_names(table, errors, lambda name: name not in ("", COMMITS), f"other than {COMMITS}")
    if schema is not None and (not isinstance(schema, str) or not schema):
        raise ValueError(f"schema={schema!r}: must be the name of a schema, or None")
    try:
        engine = sa.create_engine(url, poolclass=NullPool, hide_parameters=True)
    except (ArgumentError, NoSuchModuleError, ImportError, AttributeError, ValueError) as error:
        why = "its driver is not installed" if isinstance(error, ImportError) else "not a database that is known"
        raise ValueError(f"url: {why}: allowed is what SQLAlchemy takes, such as postgresql+psycopg://...") from None
    database, query = engine.url.database or "", engine.url.query
    in_memory = not database or _file_of(database) in ("", ":memory:") or query.get("mode") == "memory"
    in_memory |= query.get("vfs") == "memdb"
    if engine.dialect.name == "sqlite" and in_memory:
        raise ValueError("url: SQLite in memory is gone with each connection: allowed is a file, sqlite:///<path>")
    if engine.dialect.name == "sqlite" and not _file_of(database).startswith(os.sep):
        absolute = str(Path(_file_of(database)).absolute())  # a start from elsewhere means the same file
        named = f"file:{quote(absolute)}" if database.startswith("file:") else absolute
        engine = sa.create_engine(engine.url.set(database=named), poolclass=NullPool, hide_parameters=True)
    tables = {kind: SqlOutput(engine, names[kind], schema) for kind in KINDS}
    return KeyedSink(tables, {"kind": "sql", "url": _shown(engine.url), "schema": schema, **names}, **options)


def _shown(url: sa.URL) -> str:
    """Return a URL as it may be told: of its query, where passwords stand too, what says which database it is."""
    places = {name: value for name, value in url.query.items() if name in _PLACES}
    return str(url.set(query=places).render_as_string(hide_password=True))


def _file_of(database: str) -> str:
    """Return the path of an SQLite database, which may be given as a URI of a file."""
    return unquote(urlsplit(database).path) if database.startswith("file:") else database


class SqlOutput:
    """One table; see `backend.sinks.table_sink.KeyedTable`.

    Args:
        engine: The database.
        name: The table.
        schema: Its schema; None for the connection's own.
    """

    def __init__(self, engine: sa.Engine, name: str, schema: str | None) -> None:
        self._engine, self._name, self._schema = engine, name, schema
        self.place = f"{_shown(engine.url)} {name}"
        self._commits = sa.Table(
            COMMITS,
            sa.MetaData(),
            sa.Column("output", sa.String(255), primary_key=True),
            sa.Column("owner", sa.String(255), nullable=False),
            sa.Column("version", sa.BigInteger, nullable=False),
            sa.Column("rows", sa.BigInteger, nullable=False),
            sa.Column("digest", sa.String(32), nullable=False),
            schema=schema,
        )
        self._table: sa.Table  # as of `open`
        self._last = Record()

    def unfit(self, schema: pa.Schema) -> str:
        """Say which column it cannot have."""
        return unfit(schema, times=False, cases=self._engine.dialect.name in ("postgresql", "oracle"))

    def owner(self) -> str | None:
        """Read whose it is."""
        url = self._engine.url
        if url.get_backend_name() == "sqlite" and not Path(_file_of(str(url.database))).exists():
            return None  # asked, SQLite would make the file
        with reaching(self.place), self._engine.connect() as connection:
            known = sa.inspect(connection)
            if not all(known.has_table(name, self._schema) for name in (COMMITS, self._name)):
                return None
            owner: str | None = connection.scalar(sa.select(self._commits.c.owner).where(self._mine))
            return owner

    def open(self, schema: pa.Schema, owner: str) -> None:
        """Make the table where there is none, and its row of the commits."""
        unique = ROW_KEY if ROW_KEY in schema.names else "id"
        columns = [sa.Column(field.name, _type(field, unique), primary_key=field.name == unique) for field in schema]
        table = self._table = sa.Table(self._name, sa.MetaData(), *columns, schema=self._schema)
        with reaching(self.place), self._engine.begin() as connection:
            for one in (self._commits, table):
                one.create(connection, checkfirst=True)
            found = connection.scalar(sa.select(self._commits.c.owner).where(self._mine))
            empty = connection.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first() is None
            check_owner(found, owner, empty=empty, where=self.place)
            there = sa.inspect(connection).get_columns(self._name, self._schema)
            check_columns(pa.schema([_found(column, schema) for column in there]), schema, self.place)
            if found is None:
                row = {"output": self._name, "owner": owner, **Record()._asdict()}
                connection.execute(sa.insert(self._commits).values(row))

    def last(self) -> Record:
        """Read the record."""
        columns = [self._commits.c[name] for name in Record._fields]
        with reaching(self.place), self._engine.connect() as connection:
            found = connection.execute(sa.select(*columns).where(self._mine)).first()
        self._last = Record() if found is None else Record(*found)
        return self._last

    def append(self, paths: Sequence[str], rows: Iterator[pa.RecordBatch], record: Record) -> None:
        """Insert in one transaction."""
        with reaching(self.place), self._engine.begin() as connection:
            self._note(connection, record)
            for batch in rows:
                self._insert(connection, batch)

    def replace(self, rows: pa.Table, gone: pa.Array, bounded: str | None, record: Record) -> None:
        """Delete and insert in one transaction."""
        keys = rows.column(ROW_KEY).to_pylist()
        with reaching(self.place), self._engine.begin() as connection:
            self._note(connection, record)
            for at in range(0, len(keys), _CHUNK_ROWS):
                those = self._table.c[ROW_KEY].in_(keys[at : at + _CHUNK_ROWS])
                connection.execute(sa.delete(self._table).where(those))
            for batch in rows.filter(pc.invert(gone)).to_batches():
                self._insert(connection, batch)

    @property
    def _mine(self) -> sa.ColumnElement[bool]:
        return self._commits.c.output == self._name

    def _note(self, connection: sa.Connection, record: Record) -> None:
        """Write the record over the one that was read; the row stays locked to the end of the transaction."""
        mine = sa.and_(self._mine, self._commits.c.version == self._last.version)
        done = connection.execute(sa.update(self._commits).where(mine).values(record._asdict()))
        if done.rowcount != 1:
            raise SinkConflict(
                "another writer is at work on the output",
                where=self.place,
                why=f"{COMMITS} no longer says micro-batch {self._last.version}",
                command="see that the query runs once; then start it again",
            )

    def _insert(self, connection: sa.Connection, batch: pa.RecordBatch) -> None:
        columns = [_values(batch.column(name)) for name in batch.schema.names]
        rows = [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]
        for at in range(0, len(rows), _CHUNK_ROWS):
            connection.execute(sa.insert(self._table), rows[at : at + _CHUNK_ROWS])


def _found(column: Mapping[str, Any], schema: pa.Schema) -> pa.Field:
    """Return a column of a table as one of the rows', whose type its database converts."""
    name = column["name"]
    kind = schema.field(name).type if name in schema.names else pa.string()
    return pa.field(name, kind, nullable=column["nullable"] or column["default"] is not None)


_MYSQL = ("mysql", "mariadb")


def _type(field: pa.Field, unique: str) -> Any:
    """Return a column's type for one of `table_rows.plain_type`.

    MySQL's own default for times has whole seconds, and for texts and bytes 64 KiB.
    """
    kind, types = field.type, pa.types
    if types.is_boolean(kind):
        return sa.Boolean()
    if types.is_integer(kind):
        return sa.BigInteger()
    if types.is_floating(kind):
        return sa.Double()
    if types.is_decimal(kind):
        return sa.Numeric(kind.precision, kind.scale)
    if types.is_timestamp(kind):
        return sa.DateTime(timezone=kind.tz is not None).with_variant(mysql.DATETIME(fsp=6), *_MYSQL)
    if types.is_date(kind):
        return sa.Date()
    if types.is_binary(kind):
        return sa.LargeBinary().with_variant(mysql.LONGBLOB(), *_MYSQL)
    return sa.String(64) if field.name == unique else sa.Text().with_variant(mysql.LONGTEXT(), *_MYSQL)


def _values(column: pa.Array) -> list[Any]:
    """Return a column's values as a driver takes them."""
    kind, types = column.type, pa.types
    values = python_values(dated(column))
    if types.is_nested(kind):
        values = [None if value is None else json.dumps(_finite(value), default=_text) for value in values]
    if types.is_nested(kind) or types.is_string(kind):
        return [None if value is None else value.replace("\x00", "\ufffd") for value in values]
    return values


def _finite(value: Any) -> Any:
    """Return a nested value with null for what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [*map(_finite, value)] if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
