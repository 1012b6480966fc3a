"""What sinks into tables share: a micro-batch's results and errors, each in one commit of a table that keeps which.

The commit carries a `Record` of the query's micro-batch: version, number of rows, their digest. It is read back before
anything is written. A micro-batch whose record is there has been published: the same rows are passed over, others are
`OutputDiffers`. So no row comes twice and none is missing, wherever the process died, and what the table's readers have
seen is what the state will hold. Results come before errors, each with its own record.

mode `log` appends every row, mode `newest` keeps one row per window and group key, or per `key`: retractions delete,
everything else replaces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import pyarrow as pa

from backend.batch import Operator, published_name
from backend.errors import ManifestMismatch, RewindError, SinkUnavailable
from backend.sinks.outbox import OutboxSink, Written
from backend.sinks.record import check_ahead, check_whole
from backend.sinks.table_rows import ROW_KEY, START, dated, newest, plain, plain_type, row_keys, withdrawn
from backend.sinks.tables import KINDS, RESULTS
from backend.texts import one_line
from backend.windows.operator import WindowOperator
from recovery.killpoints import kill_point

MODES = ("log", "newest")


class Record(NamedTuple):
    """What a table's newest commit of the query says; version -1 before the first."""

    version: int = -1
    rows: int = 0
    digest: str = ""


class Table(Protocol):
    """A table of another system. Every method raises `SinkUnavailable` when that does not answer."""

    @property
    def place(self) -> str:
        """Where it is, for errors; nothing secret."""

    def owner(self) -> str | None:
        """Read whose the table is; None where there is no table, or no mark on it. Touches nothing."""

    def open(self, schema: pa.Schema, owner: str) -> None:
        """Make the table where there is none, and mark it as an owner's; see `check_owner` and `check_columns`."""

    def last(self) -> Record:
        """Read the owner's newest record; what is written next must find the table as it was here."""

    def append(self, paths: Sequence[str], rows: Iterator[pa.RecordBatch], record: Record) -> None:
        """Add rows and the record in one commit; or rows, then the record.

        Args:
            paths: Files of the outbox, by shard.
            rows: What they hold, in plain types; read as it is taken.
            record: Of the micro-batch.
        """


class KeyedTable(Table, Protocol):
    """A table that can keep the newest row of each key."""

    def unfit(self, schema: pa.Schema) -> str:
        """Say which column, in plain types, it cannot have; empty when it can have all. Asks nobody."""

    def replace(self, rows: pa.Table, gone: pa.Array, bounded: str | None, record: Record) -> None:
        """Put rows in the place of those with the same `ROW_KEY`, and the record, in one commit.

        Args:
            rows: One per key.
            gone: Which of them only take away.
            bounded: A column without nulls that is the same in all rows of a key: files outside of its bounds need not
                be looked at.
            record: Of the micro-batch.
        """


class TableSink(OutboxSink):
    """Publishes into two tables, every row: `parquet_sink` on object stores.

    Args:
        tables: Of results and of errors.
        about: What `describe` returns.
        accept_published: See `backend.kafka_sink`.
        outbox: Where tasks write; None is beside the checkpoint.

    Raises:
        ValueError: A bad option, by name.
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        about: Mapping[str, object],
        *,
        accept_published: int | None = None,
        outbox: str | None = None,
    ) -> None:
        super().__init__(accept_published, outbox)
        self._tables, self._about = tables, about

    def places(self) -> dict[str, str]:
        """Return local directories, by option."""
        local = {kind: table.place for kind, table in self._tables.items()}
        return {kind: place for kind, place in local.items() if place.startswith(os.sep)}

    def holds(self, query: str) -> bool:
        """Check whether both tables are a query's already, wherever they are; touches nothing.

        Raises:
            SinkUnavailable: One does not answer.
        """
        return all(table.owner() == f"{query}/{kind}" for kind, table in self._tables.items())

    def open(self, query: str) -> None:
        """Take both tables for the query.

        Raises:
            ManifestMismatch: A table is another's, or has other columns.
            SinkConflict: More is out than the checkpoint has planned.
            SinkUnavailable: It does not answer.
        """
        for kind, table in self._tables.items():
            table.open(self._schemas[kind], f"{query}/{kind}")
            if self._planned is not None:
                self._check_ahead(table, table.last(), self._planned)
        super().open(query)  # the outbox may be beside the results: it is this query's only where those are

    def describe(self) -> dict[str, object]:
        """Return the kind and the places; nothing secret."""
        return {**self._about}

    def _bring_out(self, written: Written, version: int) -> None:
        for kind, point in zip(KINDS, ("before_publish", "during_publish"), strict=True):
            kill_point(point, version)
            table, made = self._tables[kind], Record(version, *written.content(kind))
            out = table.last()
            self._check_ahead(table, out, version)
            if out.version == version:
                check_whole(kind, out[1:], made[1:], version=version, where=table.place, accept=self._accept)
            elif made.rows:
                self._commit(kind, written, made)
            else:
                self._check_nothing(table, version)
        kill_point("after_publish", version)

    def _commit(self, kind: str, written: Written, made: Record) -> None:
        rows = (plain(batch, self._schemas[kind]) for batch in written.batches(kind))
        self._tables[kind].append(written.paths(kind), rows, made)

    def _check_nothing(self, table: Table, version: int) -> None:
        """Check that nothing is out of a micro-batch that makes no rows; a commit is whole: there is nothing."""

    def _check_ahead(self, table: Table, out: Record, version: int) -> None:
        command = "rewind outputs <checkpoint> --new, then start with other tables; or put the checkpoint back"
        check_ahead(out.version, version, where=table.place, command=command)


class KeyedSink(TableSink):
    """Publishes into two tables that can keep the newest results: `delta_sink`, `iceberg_sink`, `sql_sink`.

    Args:
        tables: Of results and of errors.
        about: What `describe` returns.
        mode: One of `MODES`, for results; None is `newest` where `key` is given, else `log`.
        key: Columns of the results of which the newest row stays; None takes the window and the job's group key.
        accept_published: See `backend.kafka_sink`.

    Raises:
        ValueError: A bad option, by name.
    """

    _dated = False  # keys are told apart by times as they are

    def __init__(
        self,
        tables: Mapping[str, KeyedTable],
        about: Mapping[str, object],
        *,
        mode: str | None = None,
        key: str | Sequence[str] | None = None,
        accept_published: int | None = None,
    ) -> None:
        mode = mode if mode is not None else "log" if key is None else "newest"
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: allowed are {', '.join(MODES)}")
        names = (key,) if isinstance(key, str) else key
        if names is not None and (
            mode != "newest" or not isinstance(names, list | tuple) or not names or not all(map(_is_name, names))
        ):
            raise ValueError(f"key={key!r}: must be columns of the results, with mode='newest', or None")
        super().__init__(tables, {**about, "mode": mode, "key": names}, accept_published=accept_published)
        self._results, self._mode, self._given = tables[RESULTS], mode, names
        self._key: Sequence[str] = ()
        self._windows = False

    def begin(self, outbox: str, operator: Operator) -> None:
        """Take note of where tasks may write and of whose results come, before `open`; makes nothing.

        Raises:
            ValueError: The options do not fit the job, by name.
        """
        super().begin(outbox, operator)
        self._check_fit()
        if self._mode != "newest":
            return
        self._windows = isinstance(operator, WindowOperator)
        self._key = self._given if self._given is not None else _window_key(operator)
        names = self._empty[RESULTS].column_names
        for name in self._key:
            if name not in names:
                raise ValueError(f"key={name!r}: not a column of the results; allowed are {', '.join(names)}")
        if ROW_KEY in names:
            raise ValueError(f"mode='newest': the results have a column {ROW_KEY!r}, which is the sink's; rename it")
        try:
            row_keys(self._empty[RESULTS], self._key)
        except ValueError as error:
            raise ValueError(f"key={list(self._key)}: {error}") from None
        self._schemas[RESULTS] = self._schemas[RESULTS].append(pa.field(ROW_KEY, pa.string()))
        self._check_fit()

    def _check_fit(self) -> None:
        why = self._results.unfit(self._schemas[RESULTS])
        if why:
            raise ValueError(f"{self._about['kind']}_sink: {why}")

    def _commit(self, kind: str, written: Written, made: Record) -> None:
        if kind != RESULTS or self._mode != "newest":
            super()._commit(kind, written, made)
            return
        rows = newest(pa.Table.from_batches(written.batches(kind)), self._key)
        gone = withdrawn(rows, self._windows)
        rows = pa.Table.from_batches([plain(batch, self._schemas[kind]) for batch in rows.to_batches()])
        # such bounds tell a library which files to pass over: those that it has a date for
        bounded = START in self._key and not dated(rows.column(START)).null_count
        self._results.replace(rows, gone, START if bounded else None, made)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name)


def _window_key(operator: Operator) -> Sequence[str]:
    """Return the columns that a window's rows are known by.

    Raises:
        ValueError: The job has none.
    """
    if not isinstance(operator, WindowOperator):
        raise ValueError("mode='newest': the job has no windows: allowed is mode='log', or key=[...]")
    return ["shard", *operator.spec.window.columns, *(published_name(name) for name in operator.spec.keys)]


def two_names(table: str, errors: str | None, allows: Callable[[str], bool], what: str) -> dict[str, str]:
    """Return the names of both tables; by default the errors' is `<table>_errors`.

    Args:
        table: Of results.
        errors: Of errors.
        allows: Whether a text is a name.
        what: What a name must be, for the error.

    Raises:
        ValueError: A bad name, or one for both.
    """
    names = {"table": table, "errors": f"{table}_errors" if errors is None else errors}
    for option, name in names.items():
        if not isinstance(name, str) or not allows(name):
            raise ValueError(f"{option}={name!r}: must be the name of a table {what}")
    if names["errors"] == table:
        raise ValueError(f"errors={errors!r}: must be another table than table")
    return dict(zip(KINDS, names.values(), strict=True))


def check_owner(found: str | None, owner: str, *, empty: bool, where: str) -> None:
    """Refuse a table that is not an owner's.

    Args:
        found: Its mark; None for none.
        owner: `<query>/<kind>`.
        empty: It has no rows.
        where: The table.

    Raises:
        ManifestMismatch: It is another one's, or has rows and no mark.
    """
    if found == owner or (found is None and empty):
        return
    whose = "it has rows, and no mark that says whose they are" if found is None else f"it is written by {found}"
    raise ManifestMismatch(
        "the output table belongs to another query",
        where=where,
        why=f"{whose}; this is {owner}: their micro-batches would mix",
        command="choose another table",
    )


def check_columns(found: pa.Schema, schema: pa.Schema, where: str) -> None:
    """Refuse a table that does not take the rows: a column is missing, of another type, or required and not ours.

    Args:
        found: The table's columns.
        schema: The rows', in plain types.
        where: The table.

    Raises:
        ManifestMismatch: Names the columns.
    """
    there = dict(zip(found.names, found, strict=True))
    wrong = [f"it has no {name}" for name in schema.names if name not in there]
    for name, field in there.items():
        if name not in schema.names:
            wrong += [] if field.nullable else [f"{name}, which is required, is not in the results"]
        elif (kind := plain_type(field.type)) != schema.field(name).type:
            wrong.append(f"{name} is {kind}, the results have {schema.field(name).type}")
    if wrong:
        raise ManifestMismatch(
            "the output table has other columns than the results",
            where=where,
            why="; ".join(wrong),
            command="change the table, or choose another one",
        )


@contextmanager
def reaching(where: str) -> Iterator[None]:
    """Name whatever a table's library raises in here: each catalog and each store has errors of its own.

    Raises:
        SinkUnavailable: Something was raised that is not ours.
    """
    try:
        yield
    except RewindError:
        raise
    except Exception as error:
        raise SinkUnavailable(
            "an output table cannot be read or written",
            where=where,
            why=one_line(f"{type(error).__name__}: {error}"),
            command="see that it can be reached and written; the query tries again, and goes on after the last"
            " committed micro-batch",
        ) from error
