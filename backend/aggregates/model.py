"""What an aggregate is, and what it becomes once the schema of the messages is known.

Rules that hold for all of them, Spark SQL's unless said otherwise:

* null values are skipped (`count()` counts messages; `first` and `last` take nulls unless told not to);
* without any value the result is null; counts are 0, lists are empty;
* NaN is greater than every number and equal to itself; `-0.0` is `0.0`;
* an integer or decimal sum outside its result type is null (Spark's `try_sum`), never a wrapped number. The state stays
  exact, so a later message can bring the sum back into range. Spark's ANSI error would stop the query for good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from backend.aggregates.groups import Rows
from backend.batch import MESSAGE_FIELDS, RESULT_FIELDS
from backend.chunks import has_kernels
from backend.texts import one_line


class Incremental(Protocol):
    """An aggregate bound to a schema, kept as flat partial columns."""

    @property
    def accumulator_fields(self) -> list[pa.Field]:
        """Columns of the partial state."""

    @property
    def result_field(self) -> pa.Field:
        """Name and type of the result."""

    def fold(self, rows: Rows) -> list[pa.Array]:
        """Make one partial per group from messages."""

    def merge(self, rows: Rows) -> list[pa.Array]:
        """Make one partial per group from partials."""

    def result(self, accumulators: pa.Table) -> pa.Array:
        """Give one result per partial."""


class Full(Protocol):
    """An aggregate bound to a schema, computed from all messages of a group."""

    @property
    def result_field(self) -> pa.Field:
        """Name and type of the result."""

    @property
    def ordered(self) -> bool:
        """Whether the result depends on the order of the messages."""

    def result(self, rows: Rows) -> pa.Array:
        """Give one result per group."""


@dataclass(frozen=True)
class Aggregate:
    """An aggregate over messages; made by the functions of `backend.aggregates`.

    Attributes:
        kind: Its name in the manifest.
        fields: Message fields it reads.
        options: What else decides its result, for the manifest.
        incremental: It has a mergeable partial state and needs no message store.
        bind: Name of the result and schema of the messages to the bound aggregate. Raises `ValueError`.
    """

    kind: str
    fields: tuple[str, ...]
    incremental: bool
    bind: Callable[[str, pa.Schema], Incremental | Full] = field(repr=False, compare=False)
    options: Mapping[str, object] = field(default_factory=dict)

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry; user functions by qualified name."""
        return {"kind": self.kind, "fields": list(self.fields), **self.options}


def of_field(
    kind: str,
    name: str,
    takes: Types,
    make: Callable[..., Incremental | Full],
    *,
    incremental: bool = True,
    **options: object,
) -> Aggregate:
    """Make an aggregate of one field; binding refuses a field whose type it does not take.

    `make` gets the name of the result, the field, and the options.
    """

    def bind(alias: str, schema: pa.Schema) -> Incremental | Full:
        entry = schema.field(name)
        if not takes.test(entry.type):
            raise _refused(alias, kind, entry, takes.names)
        return make(alias, entry, **options)

    return Aggregate(kind, (name,), incremental, bind, options)


def check(aggregates: Mapping[str, Aggregate], schema: pa.Schema) -> None:
    """Check names, kinds and fields before anything starts.

    Raises:
        ValueError: Names the aggregate, the value, and what is allowed.
    """
    check_kinds(aggregates)
    ours = {entry.name for entry in MESSAGE_FIELDS}
    for name, aggregate in aggregates.items():
        for wanted in aggregate.fields:
            if wanted not in schema.names:
                allowed = ", ".join(sorted(set(schema.names) - ours))
                raise ValueError(
                    f"aggregates[{name!r}]: {aggregate.kind} of unknown field {wanted!r}; allowed are {allowed}"
                )


def check_kinds(aggregates: Mapping[str, Aggregate]) -> None:
    """Check names and kinds, as far as that goes without the fields of the messages.

    Raises:
        ValueError: Names the aggregate, the value, and what is allowed.
    """
    taken = {entry.name for entry in RESULT_FIELDS}
    for name, aggregate in aggregates.items():
        if not isinstance(name, str) or not name or name in taken or any("\ud800" <= one <= "\udfff" for one in name):
            raise ValueError(
                f"aggregates: the name {name!r} is not allowed: a non-empty text of Unicode, none of {sorted(taken)}"
            )
        if not isinstance(aggregate, Aggregate):
            raise ValueError(f"aggregates[{name!r}]: {aggregate!r} is no aggregate: use count(), sum_('field'), ...")


def _refused(name: str, kind: str, entry: pa.Field, allowed: str) -> ValueError:
    """Make the error for a field whose type an aggregate cannot take."""
    if not has_kernels(entry.type) or pa.types.is_float16(entry.type):
        allowed = "types that Arrow compares (no views, intervals, half floats, decimals of 32 or 64 bits); cast it"
    return ValueError(f"aggregates[{name!r}]: {kind} of field {entry.name!r} of type {entry.type}; allowed: {allowed}")


def _is_number(kind: pa.DataType) -> bool:
    """Tell whether a type is an integer, a double, a float or a decimal of at most 38 digits."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal128(kind))


def _is_flat(kind: pa.DataType) -> bool:
    """Tell whether values of a type can be compared and kept in a flat column."""
    plain = not (pa.types.is_nested(kind) or pa.types.is_dictionary(kind) or pa.types.is_null(kind))
    return plain and not pa.types.is_float16(kind) and has_kernels(kind)


class Types(NamedTuple):
    """Types of a field that an aggregate takes: the test, and what errors name."""

    test: Callable[[pa.DataType], bool]
    names: str


NUMBERS = Types(_is_number, "integers, floats, decimals of at most 38 digits")
FLAT = Types(_is_flat, "types without nested values")
ANY = Types(has_kernels, FLAT.names)


def check_publishable(kind: pa.DataType, option: str) -> None:
    """Check that results of a type can be written.

    Raises:
        ValueError: No Parquet file can hold them; names the option.
    """
    try:
        pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([("x", kind)])).close()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{option}: {kind} cannot be written to Parquet: {one_line(str(error))}") from None


def qualified_name(function: Callable[..., object]) -> str:
    """Name a user's function for the manifest: `module:qualified.name`."""
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}:{kind.__qualname__}"
