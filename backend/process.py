"""Bring your own logic: a function over one shard's micro-batch with named stores, inside the same commit.

Everything the function does to its stores goes through the attempt's workspace, so it is committed, changelogged and
restored together with everything else of the shard, and an attempt that Spark did not commit leaves no trace.

>>> import pyarrow as pa
>>> from backend.batch import MicroBatch, MESSAGE_FIELDS
>>> from backend.store.memory import MemoryStore
>>> from backend.store.workspace import Workspace
>>> def totals(messages, context):
...     store = context["totals"]
...     for user in messages["user"].to_pylist():
...         store.put(user, (store.get(user) or 0) + 1)
...     return pa.table({"user": ["anna"], "n": [store.get("anna")]})
>>> schema = pa.schema([("user", pa.string()), ("n", pa.int64())])
>>> operator = ProcessOperator(totals, schema, stores=[key_value_store("totals")], fields=["user"])
>>> rows = [[0, 0], [0, 0], [7, 8], [10, 20], [0, 10], ["anna", "anna"]]
>>> table = pa.table(rows, schema=pa.schema([*MESSAGE_FIELDS, ("user", pa.string())]))
>>> work = Workspace(MemoryStore())
>>> operator.process(MicroBatch(1, 1_000, table, {}, {}), work).results.to_pylist()
[{'user': 'anna', 'n': 2}]
>>> operator.process(MicroBatch(2, 2_000, table, {}, {}), work).results.to_pylist()
[{'user': 'anna', 'n': 4}]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from backend.aggregates.model import check_publishable
from backend.batch import ADDED_BY_SINKS, ERROR_SCHEMA, RESERVED, MicroBatch, Outcome, Proof
from backend.boundary import check_function, check_names, user_code
from backend.chunks import other_field
from backend.errors import ValueInvalid
from backend.store.protocol import Region
from backend.store.rows import StoreRows
from backend.store.workspace import Workspace
from backend.stores.durations import Duration
from backend.stores.key_value_store import KeyValueOptions
from backend.stores.named import Declaration, NamedStore, event_time
from backend.stores.session_store import MIN_SEGMENT_INTERVAL_MS, SessionOptions
from backend.stores.standalone import bind_all, check_declarations
from backend.stores.state_variables import TTLOptions
from backend.stores.window_store import WindowOptions
from backend.windows.combined_rows import check_marks

FORMAT = 1
"""Version of the operator's entry in the manifest."""


def window_store(
    name: str,
    *,
    retention: Duration,
    window_size: Duration,
    grace: Duration | None = None,
    retain_duplicates: bool = False,
    value_type: Any = None,
) -> WindowOptions:
    """Declare a window store (KIP-428); the arguments are those of `stores.window_store.WindowOptions`."""
    return WindowOptions(name, retention, window_size, grace, retain_duplicates, value_type)


def session_store(
    name: str,
    *,
    retention: Duration,
    num_segments: int = 3,
    min_segment_interval: Duration = MIN_SEGMENT_INTERVAL_MS,
    value_type: Any = None,
) -> SessionOptions:
    """Declare a session store (KIP-94); the arguments are those of `stores.session_store.SessionOptions`."""
    return SessionOptions(name, retention, num_segments, min_segment_interval, value_type)


def value_state(name: str, *, ttl: Duration | None = None, value_type: Any = None) -> TTLOptions:
    """Declare a value per key, which expires `ttl` after its last write by the batch time."""
    return TTLOptions("value", name, ttl, value_type)


def list_state(name: str, *, ttl: Duration | None = None, value_type: Any = None) -> TTLOptions:
    """Declare a list per key, of which each element (of `value_type`) expires by itself."""
    return TTLOptions("list", name, ttl, value_type)


def map_state(name: str, *, ttl: Duration | None = None, value_type: Any = None) -> TTLOptions:
    """Declare a map per key, of which each entry (with a value of `value_type`) expires by itself."""
    return TTLOptions("map", name, ttl, value_type)


def key_value_store(name: str, *, value_type: Any = None) -> KeyValueOptions:
    """Declare a plain key-value store."""
    return KeyValueOptions(name, value_type)


class ProcessContext:
    """What a function is given beside the messages; good for one call.

    Args:
        stores: The shard's stores by name.
        batch: The micro-batch.

    Attributes:
        stores: Read-only mapping of the stores; `context["name"]` is short for it.
        time_ms: Batch time that Spark logged: the same when the micro-batch runs again.
        version: Spark's batch id.
        drain: The bounded input ends with this micro-batch.
        next_due_ms: Earliest batch time asked for by `run_again_at`.
    """

    __slots__ = ("drain", "next_due_ms", "stores", "time_ms", "version")

    def __init__(self, stores: Mapping[str, NamedStore], batch: MicroBatch) -> None:
        self.stores: Mapping[str, Any] = MappingProxyType(dict(stores))
        self.time_ms, self.version, self.drain = batch.time_ms, batch.version, batch.drain
        self.next_due_ms: int | None = None

    def __getitem__(self, name: str) -> Any:
        try:
            return self.stores[name]
        except KeyError:
            declared = ", ".join(self.stores) or "none"
            raise KeyError(f"no store {name!r}; declared are: {declared}") from None

    def run_again_at(self, time_ms: int) -> None:
        """Ask for a micro-batch at this batch time, in ms, even when no message comes; the earliest request counts.

        It holds until the next call of the function, which may ask again.
        """
        due = event_time(time_ms, "the time to run again at")
        self.next_due_ms = due if self.next_due_ms is None else min(self.next_due_ms, due)


_FIXED = ("kind", "layout", "value_type")
"""Parts of a store's description that must stay; beside them and the name are its options."""

Function = Callable[[pa.Table, Any], "pa.Table | pa.RecordBatch | None"]
"""(messages, `ProcessContext`) -> results in the declared schema; None for no results."""


class ProcessOperator:
    """A user's function as an operator.

    The function is called once per shard and micro-batch that has rows of the shard, and with no rows where a time that
    it asked for has come, or the input ended; a time that it asked for stands until it is called. It should be a pure
    function of messages, stores and batch time, since Spark may run a micro-batch again.

    Args:
        function: (messages, context) -> results. `messages` has `batch.MESSAGE_FIELDS`, then `fields`, sorted by
            (stream, partition, offset).
        result_schema: Schema of the results.
        stores: Declarations; regions are numbered in their order, so the order must stay.
        fields: The message fields that the function reads: only they travel to the shards.

    Raises:
        ValueError: The function cannot be called, the schema is none, a store is no declaration; two stores or two
            columns of one name, a reserved name, too many stores.
    """

    replays = False
    """Stores are in the changelog: no message is needed again."""

    def __init__(
        self,
        function: Function,
        result_schema: pa.Schema,
        *,
        stores: Sequence[Declaration] = (),
        fields: Sequence[str] = (),
    ) -> None:
        check_function("function", function, ("messages", "context"))
        if not isinstance(result_schema, pa.Schema):
            raise ValueError(f"result={result_schema!r}: must be a pyarrow.Schema")
        self._function = function
        self.result_schema = result_schema.remove_metadata()
        """The schema that the function's results are held to."""
        check_declarations(stores)
        self._stores = tuple(stores)
        self.input_fields = _check_fields(fields)
        """The message fields that the function reads."""
        _check_schema(self.result_schema)

    def process(self, batch: MicroBatch, work: Workspace) -> Outcome:
        """Call the function on one micro-batch, unless nothing came of this shard and nothing is due.

        Raises:
            UserCodeFailed: The function raised.
            ValueInvalid: The function returned something else than the declared results.
            ManifestMismatch: A region holds another store than the declared one.
        """
        stores = bind_all(self._stores, work, batch.time_ms)
        try:
            returned: pa.Table | pa.RecordBatch | None = None
            due = batch.due_ms
            if batch.messages.num_rows or batch.drain or (due is not None and due <= batch.time_ms):
                context = ProcessContext(stores, batch)
                with user_code(f"the function of process(), in micro-batch {batch.version},"):
                    returned = self._function(batch.messages, context)
                due = context.next_due_ms
            results = _checked(returned, self.result_schema)
            for store in stores.values():
                store.save()
            return Outcome(
                results,
                ERROR_SCHEMA.empty_table(),
                next_due_ms=due,
                metrics={
                    f"{name}.{what}": count
                    for name, store in stores.items()
                    for what, count in store.counters().items()
                    if count
                },
            )
        finally:
            for store in stores.values():
                store.release()

    def replay_rows(self, messages: pa.Table) -> StoreRows:
        """Give none: the messages are not kept, the stores are restored from the changelog."""
        return StoreRows.of([], [])

    def proofs(self, work: Workspace) -> Iterable[Proof]:
        """Give none: there is no message store."""
        return ()

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry: what is under `free` may change between starts, the rest must not.

        A store keeps its name, kind, layout, value type and region. The function itself is not in it: that it still
        understands what it stored before is for its author to see to.
        """
        described = [declaration.describe() for declaration in self._stores]
        return {
            "operator": "process",
            "format": FORMAT,
            "stores": {
                one["name"]: {"region": Region.USER + number, **{part: one[part] for part in _FIXED}}
                for number, one in enumerate(described)
            },
            "free": {
                "fields": list(self.input_fields),
                "result_schema": [[field.name, str(field.type)] for field in self.result_schema],
                "stores": {
                    one["name"]: {part: value for part, value in one.items() if part not in ("name", *_FIXED)}
                    for one in described
                },
            },
        }

    def with_options(self, options: Mapping[str, Any]) -> ProcessOperator:
        """Return this operator with other durations of its stores; see `backend.batch.Operator.with_options`.

        Fields and schema of the results go with the function, which is the job's of today.
        """
        durations = options.get("free", {}).get("stores", {})
        stores = [_with_durations(one, durations.get(one.name, {})) for one in self._stores]
        return ProcessOperator(self._function, self.result_schema, stores=stores, fields=self.input_fields)


def _with_durations(declaration: Declaration, durations: Mapping[str, int | None]) -> Declaration:
    """Return a declaration with durations in ms as its `describe` gave them; they were checked when they were said."""
    other = copy(declaration)
    for name, value in durations.items():
        object.__setattr__(other, name, value)
    return other


def _check_fields(fields: Sequence[str]) -> tuple[str, ...]:
    names = check_names("fields", fields)
    reserved = sorted(set(names) & set(RESERVED))
    if reserved:
        raise ValueError(f"fields: {reserved} are in every message already; allowed are the source's own fields")
    check_marks("fields", names)
    if len(set(names)) != len(names):
        raise ValueError(f"fields={list(names)}: a field is named once")
    return names


def _check_schema(schema: pa.Schema) -> None:
    if len(set(schema.names)) != len(schema.names):
        raise ValueError(f"result: the columns {schema.names} have a name twice")
    taken = [name for name in schema.names if name.lower() in ADDED_BY_SINKS]
    if taken:
        raise ValueError(f"result: {taken} are added to each result row; allowed are other names")
    for one in schema:
        check_publishable(one.type, f"result: {one.name}")


def _checked(results: object, schema: pa.Schema) -> pa.Table:
    """Hold what the function returned to its schema: the columns in its order, safe casts only."""
    if results is None:
        return schema.empty_table()
    if isinstance(results, pa.RecordBatch):
        results = pa.Table.from_batches([results])
    if not isinstance(results, pa.Table):
        raise ValueInvalid(
            "the function of process() must return a pyarrow.Table, a RecordBatch or None",
            why=f"{type(results).__name__} was returned",
        )
    if sorted(results.column_names) != sorted(schema.names):
        raise ValueInvalid(
            "the function of process() returned other columns than declared",
            why=f"found {results.column_names}, declared {schema.names}",
        )
    odd = next(filter(None, (other_field(results.column(one.name).type, one.type, one.name) for one in schema)), "")
    if odd:
        raise ValueInvalid(
            "the function of process() returned other fields than declared",
            why=f"{odd}: one of {results.select(schema.names).schema} and the declared {schema} has it",
        )
    nulls = [one.name for one in schema if not one.nullable and results.column(one.name).null_count]
    if nulls:
        raise ValueInvalid("the function of process() returned a null where none is allowed", where=nulls[0])
    try:
        made = results.select(schema.names).cast(schema)
        for name in schema.names:
            if _is_lossy(results.column(name), made.column(name)):
                raise pa.ArrowInvalid(f"{name}: {results.column(name).type} would lose what it is as {made[name].type}")
        return made
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueInvalid(
            "the function of process() returned a column that does not fit its declared type", why=str(error)
        ) from error


def _is_lossy(found: pa.ChunkedArray, made: pa.ChunkedArray) -> bool:
    """Tell whether a cast that Arrow takes for safe changed a value: a number as a boolean, a time as its date, ..."""
    types = pa.types
    if types.is_boolean(made.type):
        return not types.is_boolean(found.type) and not types.is_null(found.type)
    if types.is_floating(made.type) and types.is_floating(found.type):
        return bool(pc.any(pc.and_not(pc.is_inf(made), pc.is_inf(found))).as_py())
    if types.is_date(made.type) and types.is_timestamp(found.type):
        return not made.cast(found.type).equals(found)
    return False
