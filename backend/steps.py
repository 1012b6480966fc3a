"""Steps of a stream before its window, join or `process`: each makes of a message at most one.

They run on what was parsed, in the worker that read it, live and in a replay alike. A step sees the messages' fields
and their coordinates; which message a row is, is told by the coordinates that come back. So nothing depends on where
batches are cut, as long as a step looks at each row alone; `Steps.debug` finds the one that does not.

A message for which a step raises goes to the errors, found by halving the batch. One that `where` drops, or that
`map_batches` does not give back, moves positions and nothing else.
"""

from __future__ import annotations

import inspect
import random
import re
import reprlib
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import RESERVED
from backend.boundary import check_function, said, user_code
from backend.chunks import contains, faulty_rows, is_rebuilt, one_chunk, other_field, rebuilt, retyped
from backend.errors import UserCodeFailed, ValueInvalid
from backend.python_rows import python_rows
from backend.readable import readable
from backend.texts import one_line

if TYPE_CHECKING:
    import pandas as pd

COORDINATES = {
    "_topic": ("topic", pa.string()),
    "_partition": ("partition", pa.int32()),
    "_offset": ("offset", pa.int64()),
    "_timestamp": ("timestamp", pa.timestamp("us", "UTC")),
}
"""Columns that a step sees besides the fields, with their names in `backend.sources.COLUMNS`."""
PASSED, DROPPED, POISON = 0, 1, 2
_MOST_US = 2**63 - 1
_INDEX_OF_PANDAS = re.compile(r"__index_level_\d+__")
VERDICT = "verdict"
"""Column behind `backend.sources.COLUMNS` that says what the steps made of a row."""
DEFAULT_POISON_LIMIT = 100
CUTS = 8
"""Most pieces that the debug mode cuts a batch into."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Attributes:
        kind: `where`, `with_columns`, `select` or `map_batches`.
        what: The expression or function by column; under "" of `where` and `map_batches`; of `select`, None.
        version: What the user says to tell code apart that reads alike.
        schema: Of what `map_batches` gives; None: as it answers to no rows.
    """

    kind: str
    what: dict[str, Any]
    version: str = ""
    schema: pa.Schema | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a schema.

        Raises:
            ValueError: A bad option, by name.
        """
        if not isinstance(self.version, str):
            raise ValueError(f"version={self.version!r}: must be a text")
        if not self.what:
            raise ValueError(f"{self.kind}(): must name at least one field")
        if self.schema is not None and not isinstance(self.schema, pa.Schema):
            raise ValueError(f"schema={reprlib.repr(self.schema)}: must be a pyarrow.Schema, or None")
        for name, value in self.what.items():
            option = name or self.kind
            if not isinstance(name, str) or name in (*RESERVED, *COORDINATES):
                raise ValueError(f"{self.kind}: {name!r} is no field: allowed are other names than {[*COORDINATES]}")
            expression = isinstance(value, pc.Expression) and self.kind != "map_batches"
            if self.kind != "select" and not expression and not callable(value):
                allowed = "a function" if self.kind == "map_batches" else "a pyarrow.compute expression or a function"
                raise ValueError(f"{option}={reprlib.repr(value)}: must be {allowed} of an Arrow table")
            if not callable(value) or expression:
                continue
            check_function(option, value, ("table",))
            if not _text(value) and not self.version:
                raise ValueError(f"{option}={reprlib.repr(value)}: its source text is not to be had: give version=")

    def describe(self) -> dict[str, Any]:
        """Return the manifest's entry: text and version, never bytecode."""
        schema = None if self.schema is None else [[one.name, str(one.type)] for one in self.schema]
        texts = {name: _text(value) for name, value in self.what.items()}
        return {"step": self.kind, "text": texts, "version": self.version, "schema": schema}

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return what the step makes of rows: fields, then `COORDINATES`."""
        fields = [name for name in table.column_names if name not in COORDINATES]
        if self.kind == "select":
            return table.select([*self.what, *COORDINATES])
        if self.kind == "where":
            keep = _evaluate(self.what[""], table)
            if not pa.types.is_boolean(keep.type):
                raise ValueInvalid("where must give true or false for each row", why=f"it gave {keep.type}")
            return table.filter(keep)
        if self.kind == "with_columns":
            made = {name: _evaluate(what, table) for name, what in self.what.items()}
            columns = {name: table.column(name) for name in fields} | made
            return pa.table(columns | {name: table.column(name) for name in COORDINATES})
        found = self.what[""](table)
        if isinstance(found, pa.RecordBatch):
            found = pa.Table.from_batches([found])
        if not isinstance(found, pa.Table):
            raise ValueInvalid("map_batches must give an Arrow table", why=f"it gave {type(found).__name__}")
        missing = [name for name in COORDINATES if name not in found.column_names]
        if missing:
            raise ValueInvalid("map_batches must give the coordinates back", why=f"{', '.join(missing)} did not come")
        if self.schema is not None:
            odd_names = [name for name in self.schema.names if found.column_names.count(name) != 1]
            if odd_names:
                why = f"{', '.join(odd_names)} did not come, or twice: it gave {', '.join(found.column_names)}"
                raise ValueInvalid("map_batches gave other fields than its schema= says", why=why)
            for one in self.schema:
                odd = other_field(found.column(one.name).type, one.type, one.name)
                if odd:
                    why = f"{odd}: one of {found.column(one.name).type} and the declared {one.type} has it"
                    raise ValueInvalid("map_batches gave other fields than its schema= says", why=why)
            found = pa.table([*(found.column(one.name).cast(one.type) for one in self.schema),
                              *(found.column(name) for name in COORDINATES)],
                             [*self.schema.names, *COORDINATES])  # fmt: skip
        own = [name for name in found.column_names if name not in COORDINATES]
        # a frame of pandas that was sorted or filtered brings its index along, an empty one does not
        own = [name for name in own if name in table.column_names or not _INDEX_OF_PANDAS.fullmatch(name)]
        return found.select([*own, *COORDINATES])

    def schema_after(self, schema: pa.Schema, name: str) -> pa.Schema:
        """Return the fields that come out.

        Args:
            schema: The fields that go in.
            name: Of the step, for errors.

        Raises:
            ValueError: A field is unknown, or the step does not take these fields.
        """
        taken = sorted(set(schema.names) & set(COORDINATES))
        if taken:
            raise ValueError(
                f"{name}: the fields {taken} are named as coordinates that a step sees; allowed are other names"
            )
        if self.kind == "select":
            unknown = sorted(set(self.what) - set(schema.names))
            if unknown:
                raise ValueError(f"{name}: {unknown} are no fields; allowed are {', '.join(schema.names)}")
        if self.kind == "map_batches" and self.schema is not None:
            found = self.schema
        else:
            hint = " (a function that takes no empty table: give schema=)" if self.kind == "map_batches" else ""
            empty = pa.table([pa.array([], one.type) for one in schema], schema.names)
            for own, (_, kind) in COORDINATES.items():
                empty = empty.append_column(own, pa.array([], kind))
            try:
                table = self(empty)
            except Exception as error:
                raise ValueError(
                    f"{name}: does not take the fields {', '.join(schema.names)}{hint}: {error}"
                ) from error
            found = pa.schema([one for one in table.schema if one.name not in COORDINATES]).remove_metadata()
        folded = [one.lower() for one in found.names]
        bad = sorted({one for one in folded if folded.count(one) > 1} | set(found.names) & set(RESERVED))
        if bad or not found.names:
            raise ValueError(f"{name}: gives the fields {found.names}: must be different names, at least one, not ours")
        if any(pa.types.is_null(one.type) for one in found):
            raise ValueError(f"{name}: gives a field without a type: {found}")
        return found


@dataclass(slots=True)
class Steps:
    """Steps made ready for a source's fields: a plain object that Spark sends to the tasks.

    Attributes:
        parse: Of the source.
        steps: In order.
        schema: Of the fields at the end, as frames carry them.
        poison_limit: How many messages in a row of a task may raise; None, as of a replay, which repeats what was
            accepted: any number.
        debug: Run each step again under random cuts.
        ranked: The source's rows have no offsets: steps see the row's number in the batch instead.
    """

    parse: Callable[[pa.RecordBatch], pa.RecordBatch]
    steps: tuple[Step, ...]
    schema: pa.Schema
    poison_limit: int | None = DEFAULT_POISON_LIMIT
    debug: bool = False
    ranked: bool = False
    _raised: dict[str, int] = field(default_factory=dict)

    def __call__(self, records: pa.RecordBatch) -> pa.RecordBatch:
        """Parse records, and run the steps; gives `backend.sources.COLUMNS` and `VERDICT`."""
        rows = self.parse(records)
        fields, malformed = readable(rows.column("fields"), rows.column("malformed"))
        for name, column in (("fields", fields), ("malformed", malformed)):
            rows = rows.set_column(rows.schema.get_field_index(name), name, column)
        good, table, places = self._table(rows)
        verdict = np.where(np.asarray(rows.column("malformed").is_null()), DROPPED, 0).astype(np.int8)
        reasons = rows.column("malformed").to_pylist()
        for number, step in enumerate(self.steps):
            name = step_name(number, step)
            before = table
            parts = []
            for part, error in self._run(name, step, table):
                if error is None:
                    parts.append(part)
                    continue
                [row] = good[self._rows(places, part)]
                verdict[row], reasons[row] = POISON, f"{name}: {error}"
            table = self._joined(parts) if parts else table.slice(0, 0)
            if self.debug and before.num_rows > 1:
                self._check_cuts(name, step, before, table)
            if not parts:
                break  # no function is asked about no rows
        at = good[self._rows(places, table)]
        for row in self._beyond(table) if len(at) else ():
            verdict[at[row]], reasons[at[row]] = POISON, f"{self._where}: a time that no timestamp has"
        within = np.flatnonzero(verdict[at] != POISON)
        at, table = at[within], table.take(pa.array(within))
        verdict[at] = PASSED
        values = self._values(table) if len(at) else self.schema.empty_table()
        place = np.full(rows.num_rows, -1, np.int64)
        place[at] = np.arange(len(at))
        columns = map(one_chunk, values.take(pa.array(place, mask=place < 0)).columns)
        # a row that did not come back has no fields
        made = pa.StructArray.from_arrays([*columns], fields=list(self.schema), mask=pa.array(place < 0))
        raw = rows.column("fields") if pa.types.is_null(rows.column("raw").type) else rows.column("raw")
        out_columns = {name: rows.column(name) for name in rows.schema.names}
        out_columns |= {
            "fields": made,
            "raw": raw,
            "malformed": pa.array(reasons, pa.string()),
            VERDICT: pa.array(verdict),
        }
        return pa.RecordBatch.from_pydict(out_columns)

    def _table(self, rows: pa.RecordBatch) -> tuple[npt.NDArray[np.int64], pa.Table, pd.MultiIndex]:
        """Return which rows the steps are given, these with their coordinates, and their places: no place is twice.

        A message that came twice in a batch is given once. Where the source has no offsets, rows are numbered.
        """
        good = np.flatnonzero(np.asarray(rows.column("malformed").is_null()))
        given = rows.take(pa.array(good))
        fields = given.column("fields")
        table = pa.table(dict(zip((one.name for one in fields.type), fields.flatten(), strict=True)))
        for name, (own, kind) in COORDINATES.items():
            made = pa.array(good) if self.ranked and name == "_offset" else given.column(own)
            table = table.append_column(name, made.cast(kind))
        places = _places(table)
        first = ~places.duplicated()
        return (good, table, places) if first.all() else (good[first], table.filter(pa.array(first)), places[first])

    def _values(self, table: pa.Table) -> pa.Table:
        """Return the fields as frames carry them.

        Raises:
            ValueInvalid: A step gave others than of an empty table.
        """
        try:
            more = {*table.column_names} - {*self.schema.names, *COORDINATES}
            if more:
                raise KeyError(f"{', '.join(sorted(more))} came, too")
            # fractions of a microsecond are cut off: what a timestamp has no room for is found before
            columns = [_in_micros(one_chunk(table.column(name))) for name in self.schema.names]
            return pa.table(columns, self.schema.names).cast(self.schema)
        except (KeyError, pa.ArrowException) as error:
            raise self._other_fields(table.schema, error) from error

    def _beyond(self, table: pa.Table) -> list[int]:
        """Return the rows with a time that no timestamp of microseconds has."""
        rows: set[int] = set()
        for one in self.schema:
            if one.name not in table.column_names:
                continue
            column = one_chunk(table.column(one.name))
            if pa.types.is_timestamp(column.type):
                most = _MOST_US // {"s": 1_000_000, "ms": 1_000}.get(column.type.unit, 1)
                ticks = np.asarray(pc.fill_null(column.cast(pa.int64()), 0))
                rows.update(np.flatnonzero((ticks > most) | (ticks < -most)).tolist() if most < _MOST_US else ())
            elif _has_time(column.type):
                rows.update(_misfits(column))
        return sorted(rows)

    def _joined(self, parts: Sequence[pa.Table]) -> pa.Table:
        """Return parts of a batch as one; a part may have integers where another one has fractions.

        Raises:
            ValueInvalid: They have types that are not one.
        """
        try:
            return pa.concat_tables(parts, promote_options="permissive")
        except pa.ArrowException as error:
            raise self._other_fields(parts[-1].schema, error) from error

    def _other_fields(self, schema: pa.Schema, error: Exception) -> ValueInvalid:
        given = [one for one in schema.remove_metadata() if one.name not in COORDINATES]
        return ValueInvalid(
            "a step gave other fields than it declared",
            where=self._where,
            why=f"{one_line(str(error))}; of an empty table it gives {_said(self.schema)}, now it gave {_said(given)}",
            command="give the same fields for every batch, or schema= with map_batches",
        )

    @property
    def _where(self) -> str:
        return ", ".join(step_name(number, step) for number, step in enumerate(self.steps))

    def _rows(self, places: pd.MultiIndex, table: pa.Table) -> npt.NDArray[np.int64]:
        """Return which of the given rows came back.

        Raises:
            ValueInvalid: One came back twice, or was not given.
        """
        found = np.asarray(places.get_indexer(_places(table)), np.int64)
        if (found < 0).any() or len(np.unique(found)) != len(found):
            raise ValueInvalid(
                "a step must make at most one row of each, with the coordinates of that row",
                where=self._where,
                why="a row came back twice" if (found >= 0).all() else "a row came back that was not given",
                command="leave _topic, _partition and _offset as they are",
            )
        return found

    def _run(self, name: str, step: Step, table: pa.Table) -> Iterator[tuple[pa.Table, str | None]]:
        """Yield what a step makes of rows, in order; of a row for which it raises that row, and what it raised.

        Raises:
            UserCodeFailed: It raised for too many rows in a row.
        """
        if not table.num_rows:
            return
        try:
            found = step(table)
        except ValueInvalid:
            raise
        except (Exception, SystemExit) as error:  # a worker that exits would be taken for one that died
            if table.num_rows > 1:
                half = table.num_rows // 2
                yield from self._run(name, step, table.slice(0, half))
                yield from self._run(name, step, table.slice(half))
                return
            text = f"{type(error).__qualname__}: {said(error)}"
            self._raised[name] = self._raised.get(name, 0) + 1
            if self.poison_limit is not None and self._raised[name] > self.poison_limit:
                with user_code(f"{name}, for more than poison_limit={self.poison_limit} messages in a row,"):
                    raise
            yield table, text
            return
        self._raised[name] = 0
        yield found, None

    def _check_cuts(self, name: str, step: Step, given: pa.Table, whole: pa.Table) -> None:
        """Run a step under random cuts.

        Raises:
            UserCodeFailed: It gave something else than for the whole batch.
        """
        dice = random.Random(f"{given['_partition'][0]} {given['_offset'][0]} {given.num_rows}")
        for _ in range(2):
            cuts = sorted(dice.sample(range(1, given.num_rows), min(CUTS, given.num_rows) - 1))
            parts = [
                given.slice(low, high - low) for low, high in zip([0, *cuts], [*cuts, given.num_rows], strict=True)
            ]
            free = replace(self, poison_limit=None, _raised={})
            made = [one for part in parts for one, error in free._run(name, step, part) if error is None]
            again = self._joined(made) if made else given.slice(0, 0)
            if _sorted(again) != _sorted(whole):
                raise UserCodeFailed(
                    f"{name} depends on where batches are cut",
                    where=f"{given['_topic'][0]}-{given['_partition'][0]}, from offset {given['_offset'][0]}",
                    why=f"{given.num_rows} rows at once, and cut before rows {cuts}, gave different rows",
                    command="let it look at each row alone: a replay cuts elsewhere",
                )


def _in_micros(column: pa.Array, _: pa.DataType | None = None) -> pa.Array:
    """Return timestamps of nanoseconds in microseconds and dates of milliseconds in days, rounded down, also within
    nested values; everything else as it is.
    """
    kind = column.type
    if not _has_time(kind):
        return column
    if pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        column = column.cast(pa.list_(kind.value_field))
    made = _micros(kind)
    if is_rebuilt(made):
        return rebuilt(column, made, _in_micros)
    if made == kind:
        return column
    whole = np.asarray(pc.fill_null(column.cast(pa.int64()), 0)) // (86_400_000 if pa.types.is_date(kind) else 1_000)
    found = pa.array(whole, mask=np.asarray(column.is_null()))
    return (found.cast(pa.int32()) if pa.types.is_date(kind) else found).cast(made)


def _micros(kind: pa.DataType, units: Collection[str] = ("ns",)) -> pa.DataType:
    """Return a type whose timestamps of some units are of microseconds, and whose dates are of days."""
    if pa.types.is_timestamp(kind) and kind.unit in units:
        return pa.timestamp("us", kind.tz)
    return pa.date32() if pa.types.is_date64(kind) else retyped(kind, partial(_micros, units=units))


def _has_time(kind: pa.DataType) -> bool:
    """Return whether a type is a timestamp or a date, or has one within."""
    return contains(kind, lambda one: pa.types.is_timestamp(one) or pa.types.is_date(one))


def _misfits(column: pa.Array) -> list[int]:
    """Return the rows with a time that no timestamp of microseconds has, or a date that is none."""
    kind = _micros(column.type, ("s", "ms", "ns"))

    def misfits(low: int, high: int) -> bool:
        try:
            _in_micros(column.slice(low, high - low)).cast(kind)  # nothing but times is another than before
        except pa.ArrowInvalid:
            return True
        return False

    return list(faulty_rows(len(column), misfits))


def _said(fields: Iterable[pa.Field]) -> str:
    return ", ".join(f"{one.name} {one.type}" for one in fields)


def step_name(number: int, step: Step) -> str:
    """Return how errors call a step.

    Args:
        number: From 0.
        step: The step.
    """
    names = [name for name in step.what if name]
    return f"step {number + 1}, {step.kind}({', '.join(names)})"


def schema_after(steps: tuple[Step, ...], schema: pa.Schema) -> pa.Schema:
    """Return the fields behind steps.

    Raises:
        ValueError: A step does not take what comes to it, by name.
    """
    for number, step in enumerate(steps):
        schema = step.schema_after(schema, step_name(number, step))
    return schema


def _evaluate(what: Any, table: pa.Table) -> pa.Array:
    if isinstance(what, pc.Expression):
        from pyarrow import acero  # which imports pandas

        source = acero.Declaration("table_source", acero.TableSourceNodeOptions(table))
        project = acero.Declaration("project", acero.ProjectNodeOptions([what], ["found"]))
        found = acero.Declaration.from_sequence([source, project]).to_table(use_threads=False).column(0)
    else:
        found = what(table)
    if not isinstance(found, pa.Array | pa.ChunkedArray) or len(found) != table.num_rows:
        said = f"{len(found)} values" if isinstance(found, pa.Array | pa.ChunkedArray) else type(found).__name__
        raise ValueInvalid(
            "a function of where and with_columns must give an Arrow array with one value for each row",
            why=f"it gave {said} for {table.num_rows} rows",
        )
    return one_chunk(found)


def _text(value: Any) -> str:
    if value is None or isinstance(value, pc.Expression):
        return "" if value is None else str(value)
    if not inspect.isfunction(value) and not inspect.ismethod(value):
        return ""  # what a partial or another object does is not in the text of its class
    try:
        return textwrap.dedent(inspect.getsource(value)).strip()
    except (OSError, TypeError):
        return ""


def _places(table: pa.Table) -> pd.MultiIndex:
    import pandas as pd  # a second of a core, and most of what imports this module runs no step

    names = ("_topic", "_partition", "_offset")
    return pd.MultiIndex.from_arrays([table.column(name).to_pandas() for name in names])


def _sorted(table: pa.Table) -> list[Any]:
    rows = zip(*(table.column(name).to_pylist() for name in ("_topic", "_partition", "_offset")), strict=True)
    return sorted(zip(rows, map(repr, python_rows(table)), strict=True))
