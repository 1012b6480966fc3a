"""A user's function as an operator: stores, results, and one commit for all of it."""

from __future__ import annotations

import datetime as dt
import json
import pickle
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from backend.batch import ERROR_SCHEMA, MESSAGE_FIELDS, MicroBatch
from backend.errors import (
    ManifestMismatch,
    SourceInvalid,
    StorageFailed,
    StoreClosed,
    UnknownFormat,
    UserCodeFailed,
    ValueInvalid,
)
from backend.process import (
    ProcessContext,
    ProcessOperator,
    key_value_store,
    list_state,
    map_state,
    session_store,
    value_state,
    window_store,
)
from backend.rocks.options import RocksOptions
from backend.store.memory import MemoryStore
from backend.store.protocol import Changes
from backend.store.workspace import Workspace
from backend.stores.key_value_store import KeyValueStore
from backend.stores.session_store import SessionKey
from backend.stores.session_windows import SessionWindows, aggregate, count
from backend.stores.standalone import MAX_STORES, StoreSet
from recovery.files import open_files

RESULT = pa.schema([pa.field("user", pa.string(), nullable=False), ("n", pa.int32())])


def _batch(rows: list[tuple[str, int]], *, version: int = 1, time_ms: int = 1_000, drain: bool = False) -> MicroBatch:
    users, times = zip(*rows, strict=True) if rows else ((), ())
    numbers = list(range(len(rows)))
    schema = pa.schema([*MESSAGE_FIELDS, ("user", pa.string())])
    zero = [0] * len(rows)
    messages = pa.table([zero, zero, numbers, list(times), zero, list(users)], schema=schema)
    due = None if rows else time_ms  # without rows the function is called because it asked for it
    return MicroBatch(version, time_ms, messages, {}, {}, drain, due_ms=due)


class Shard:
    """One shard's store, attempt by attempt."""

    def __init__(self, operator: ProcessOperator) -> None:
        self.operator, self.store = operator, MemoryStore()
        self.bounds: dict[int, bytes] = {}

    def attempt(self, batch: MicroBatch, *, commit: bool = True) -> Any:
        work = Workspace(self.store, self.bounds)
        outcome = self.operator.process(batch, work)
        if commit:
            changes = work.changes()
            self.store.write(changes)
            self.bounds = dict(changes.bounds)
        return outcome


def _everything(messages: pa.Table, context: ProcessContext) -> pa.Table:
    stores = context.stores
    for user, time in zip(messages["user"].to_pylist(), messages["_time"].to_pylist(), strict=True):
        stores["windows"].put(user, (stores["windows"].fetch_one(user, time) or 0) + 1, time)
        stores["sessions"].put(SessionKey(user, time, time), 1)
        stores["last"].update(user, time)
        stores["list"].append_value(user, time)
        stores["map"].update_value(user, time, 1)
        stores["totals"].put(user, (stores["totals"].get(user) or 0) + 1)
    rows = list(stores["totals"].all())
    return pa.table({"n": [n for _, n in rows], "user": [user for user, _ in rows]})


def _all_stores() -> list[Any]:
    return [
        window_store("windows", retention=100, window_size=10),
        session_store("sessions", retention=100),
        value_state("last", ttl=500),
        list_state("list", ttl=500),
        map_state("map", ttl=500),
        key_value_store("totals"),
    ]


def test_an_attempt_that_is_not_committed_leaves_no_trace() -> None:
    shard = Shard(ProcessOperator(_everything, RESULT, stores=_all_stores(), fields=["user"]))
    batch = _batch([("a", 10), ("b", 20), ("a", 10)])
    first = shard.attempt(batch, commit=False)
    again = shard.attempt(batch)
    assert first.results.equals(again.results)
    assert again.results.to_pylist() == [{"user": "a", "n": 2}, {"user": "b", "n": 1}]
    assert again.results.schema == RESULT
    assert again.errors.equals(ERROR_SCHEMA.empty_table())
    after = shard.attempt(_batch([("a", 500)], version=2, time_ms=1_500))
    assert after.results.to_pylist() == [{"user": "a", "n": 3}, {"user": "b", "n": 1}]
    assert after.metrics == {"windows.expired": 2, "last.expired": 1, "list.expired": 3, "map.expired": 2}
    assert shard.attempt(_batch([("a", 399)], version=3, time_ms=1_500)).metrics == {
        "windows.dropped": 1,
        "sessions.dropped": 1,
    }


def test_each_store_has_a_region_of_its_own_in_the_order_of_declaration() -> None:
    shard = Shard(ProcessOperator(_everything, RESULT, stores=_all_stores(), fields=["user"]))
    shard.attempt(_batch([("a", 10)]))
    keys, _ = shard.store.scan_arrays(b"\x01", None)
    assert {key[0] for key in keys} == set(range(0x40, 0x46))
    described: Any = shard.operator.describe()
    assert [(name, one["kind"], one["region"]) for name, one in described["stores"].items()] == [
        ("windows", "window", 0x40),
        ("sessions", "session", 0x41),
        ("last", "value", 0x42),
        ("list", "list", 0x43),
        ("map", "map", 0x44),
        ("totals", "key-value", 0x45),
    ]
    assert described["free"]["result_schema"] == [["user", "string"], ["n", "int32"]]


def _settled(first: ProcessOperator, then: ProcessOperator) -> None:
    from recovery.commit.manifest import Manifest, record, settle

    checkpoint = f"memory://process-{uuid.uuid4().hex}"
    for operator in (first, then):
        wanted = Manifest(1, (0,), {"operator": operator.describe()})
        record(checkpoint, settle(checkpoint, wanted, used=operator is then))


def test_a_changed_job_goes_on_where_the_state_allows_it() -> None:
    before = ProcessOperator(
        print, RESULT, stores=[window_store("w", retention=10, window_size=1), value_state("v", ttl=5)]
    )
    longer = [window_store("w", retention=20, window_size=2, grace=3), value_state("v")]
    _settled(before, ProcessOperator(max, pa.schema([("x", pa.int64())]), stores=longer, fields=["user"]))
    for changed, what in (
        ([window_store("w", retention=10, window_size=1, retain_duplicates=True), value_state("v")], "w.layout"),
        ([window_store("w", retention=10, window_size=1, value_type=int), value_state("v")], "w.value_type"),
        ([value_state("v"), window_store("w", retention=10, window_size=1)], "region"),
        ([window_store("w", retention=10, window_size=1), list_state("v")], "v.kind"),
        ([window_store("w", retention=10, window_size=1)], "stores.v"),
    ):
        with pytest.raises(ManifestMismatch, match=what):
            _settled(before, ProcessOperator(print, RESULT, stores=changed))


def test_the_module_of_a_value_s_class_is_no_difference() -> None:
    """`python job.py` calls it `__main__`, the command `job`; manifests of before say it."""
    from recovery.commit.manifest import Manifest, record, settle

    @dataclass
    class Local:
        x: int

    declared = [value_state("v", value_type=list[uuid.UUID]), value_state("w", value_type=Local)]
    entry = ProcessOperator(print, RESULT, stores=declared).describe()
    before = json.loads(json.dumps(entry).replace("list[UUID]", "list[__main__.UUID]"))
    assert before != json.loads(json.dumps(entry))
    checkpoint = f"memory://process-{uuid.uuid4().hex}"
    for described in (before, entry, entry):
        wanted = Manifest(1, (0,), {"operator": described})
        record(checkpoint, settle(checkpoint, wanted, used=described is entry))


def test_stores_in_another_order_are_refused() -> None:
    shard = Shard(ProcessOperator(_everything, RESULT, stores=_all_stores(), fields=["user"]))
    shard.attempt(_batch([("a", 10)]))
    shard.operator = ProcessOperator(_everything, RESULT, stores=_all_stores()[::-1], fields=["user"])
    with pytest.raises(ManifestMismatch, match="found window 'windows', declared key-value 'totals'"):
        shard.attempt(_batch([("a", 10)]))


def test_metadata_of_an_unknown_format_is_refused() -> None:
    shard = Shard(ProcessOperator(lambda *_: None, RESULT, stores=[key_value_store("totals")]))
    shard.store.write(Changes([b"\x40\x02"], [b"\x09"]))
    with pytest.raises(UnknownFormat, match="format 09"):
        shard.attempt(_batch([]))


def test_the_function_sees_batch_time_version_and_drain_and_may_ask_to_run_again() -> None:
    seen = []

    def look(messages: pa.Table, context: ProcessContext) -> None:
        seen.append((messages.num_rows, context.time_ms, context.version, context.drain))
        for due in (5_000, 3_000, 4_000):
            if not context.drain:
                context.run_again_at(due)

    shard = Shard(ProcessOperator(look, RESULT))
    assert shard.attempt(_batch([], version=7, time_ms=2_000)).next_due_ms == 3_000
    assert shard.attempt(_batch([("a", 1)], version=8, time_ms=2_500, drain=True)).next_due_ms is None
    assert seen == [(0, 2_000, 7, False), (1, 2_500, 8, True)]


def test_rows_of_other_shards_alone_do_not_call_the_function_and_what_it_asked_for_stays() -> None:
    seen = []
    shard = Shard(ProcessOperator(lambda rows, context: seen.append((rows.num_rows, context.time_ms)), RESULT))  # type: ignore[arg-type,return-value]
    for due in (None, 3_000):
        outcome = shard.attempt(replace(_batch([]), due_ms=due))
        assert (outcome.next_due_ms, outcome.results.num_rows, seen) == (due, 0, [])
    assert shard.attempt(replace(_batch([], drain=True), due_ms=3_000)).next_due_ms is None
    assert shard.attempt(replace(_batch([("a", 1)], time_ms=2_000), due_ms=3_000)).next_due_ms is None
    assert seen == [(0, 1_000), (1, 2_000)]


def test_ttl_goes_by_the_batch_time_and_windows_by_their_own_puts() -> None:
    def remember(messages: pa.Table, context: ProcessContext) -> pa.Table:
        for user, time in zip(messages["user"].to_pylist(), messages["_time"].to_pylist(), strict=True):
            context["last"].update(user, time)
            context["windows"].put(user, 1, time)
        found = [user for user in ("a", "b") if context["last"].exists(user)]
        return pa.table({"user": found, "n": [len(list(context["windows"].fetch(user))) for user in found]})

    stores = [value_state("last", ttl=500), window_store("windows", retention=100, window_size=10)]
    shard = Shard(ProcessOperator(remember, RESULT, stores=stores, fields=["user"]))
    shard.attempt(_batch([("a", 10)], time_ms=1_000))
    late = shard.attempt(_batch([("b", 100_000)], version=2, time_ms=1_499))
    assert late.results.to_pylist() == [{"user": "a", "n": 0}, {"user": "b", "n": 1}]
    assert shard.attempt(_batch([], version=3, time_ms=1_500)).results.to_pylist() == [{"user": "b", "n": 1}]


def test_stores_and_iterators_end_with_the_call() -> None:
    kept: dict[str, Any] = {}

    def keep(messages: pa.Table, context: ProcessContext) -> None:
        context["totals"].put("a", 1)
        kept.update(store=context["totals"], rows=context["totals"].all())

    shard = Shard(ProcessOperator(keep, RESULT, stores=[key_value_store("totals")]))
    shard.attempt(_batch([]))
    with pytest.raises(StoreClosed):
        kept["store"].get("a")
    with pytest.raises(StoreClosed):
        next(kept["rows"])


def test_the_declarations_are_public_names_that_no_module_hides() -> None:
    import importlib
    import pkgutil

    import backend
    import backend.stores

    for module in pkgutil.iter_modules(backend.stores.__path__, "backend.stores."):
        importlib.import_module(module.name)
    assert backend.session_store("s", retention=10) == session_store("s", retention=10)
    assert backend.window_store("w", retention=10, window_size=1).kind == "window"
    assert backend.key_value_store("k").kind == "key-value"


def test_an_unknown_store_is_named() -> None:
    shard = Shard(ProcessOperator(lambda _, context: context["other"], RESULT, stores=[key_value_store("totals")]))
    with pytest.raises(UserCodeFailed, match=r"KeyError.*no store 'other'; declared are: totals"):
        shard.attempt(_batch([]))


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda context: context["totals"].put(None, 1), r"raised KeyInvalid.*key cannot be null"),
        (lambda context: context["totals"].put("a", {1}), r"raised ValueInvalid"),
        (lambda context: context["other"], r"raised KeyError.*no store 'other'"),
        (lambda context: int("x"), r"raised ValueError"),
        (lambda context: RocksOptions(block_bytes=1), r"raised ValueError.*block_bytes=1"),  # a dataclass of ours
        (lambda context: open_files("nowhere://x"), r"raised ValueError"),  # of a library's, below ours
        (lambda context: replace(RocksOptions(), block_bytes=1), r"raised ValueError"),  # ours, below Python's
        (lambda context: json.loads("x"), r"raised JSONDecodeError"),
        (lambda context: pa.array([1, "x"]), r"raised Arrow"),
        (lambda context: pa.table({"x": [1]}).to_pandas().query("y > 1"), r"raised UndefinedVariableError"),
    ],
)
def test_what_a_store_does_not_take_is_told_with_the_functions_line(
    use: Callable[[ProcessContext], object], said: str
) -> None:
    shard = Shard(ProcessOperator(lambda _, context: use(context), RESULT, stores=[key_value_store("totals")]))  # type: ignore[arg-type,return-value]
    with pytest.raises(UserCodeFailed, match=said) as caught:
        shard.attempt(_batch([]))
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in <lambda>", caught.value.where)
    assert "rewind:" not in caught.value.why
    assert "mend the function" in caught.value.command


def test_the_line_is_that_of_the_functions_own_callback_which_ours_called() -> None:
    def aggregator(*_: object) -> int:
        return int("x")

    windows = SessionWindows.inactivity_gap(10)
    totals = aggregate(lambda: 0, aggregator, lambda *_: 0, windows, "sessions")

    def use(_: object, context: ProcessContext) -> None:
        totals.processor(context["sessions"]).process("a", 1, 5)  # type: ignore[arg-type]

    with pytest.raises(UserCodeFailed) as caught:
        Shard(ProcessOperator(use, RESULT, stores=[totals.store])).attempt(_batch([]))  # type: ignore[arg-type]
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in aggregator", caught.value.where)


@pytest.mark.parametrize("error", [StorageFailed("there is no room to write"), SourceInvalid("no Parquet file")])
def test_what_a_function_cannot_mend_keeps_its_name(error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    with pytest.raises(type(error)):
        Shard(ProcessOperator(fail, RESULT)).attempt(_batch([]))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (5, "int was returned"),
        (pa.table({"user": ["a"]}), "other columns"),
        (pa.table({"user": ["a"], "n": [1], "x": [1]}), "other columns"),
        (pa.table({"user": ["a"], "n": ["x"]}), "does not fit"),
        (pa.table({"user": ["a"], "n": [2**40]}), "does not fit"),
        (pa.table({"user": pa.array([None], pa.string()), "n": [1]}), "null where none is allowed"),
    ],
)
def test_results_are_held_to_their_schema(returned: object, message: str) -> None:
    shard = Shard(ProcessOperator(lambda *_: returned, RESULT))  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueInvalid, match=message):
        shard.attempt(_batch([]))


def test_results_may_be_a_batch_or_nothing() -> None:
    one = pa.record_batch({"n": pa.array([1], pa.int64()), "user": ["a"]})
    assert Shard(ProcessOperator(lambda *_: one, RESULT)).attempt(_batch([])).results.to_pylist() == [
        {"user": "a", "n": 1}
    ]
    assert Shard(ProcessOperator(lambda *_: None, RESULT)).attempt(_batch([])).results.equals(RESULT.empty_table())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ProcessOperator(5, RESULT), ValueError, "function=5: must be a function of"),  # type: ignore[arg-type]
        (lambda: ProcessOperator(print, {"n": "int"}), ValueError, "result={"),
        (lambda: ProcessOperator(print, RESULT, stores=["totals"]), ValueError, "declarations"),  # type: ignore[list-item]
        (lambda: ProcessOperator(print, RESULT, stores=[key_value_store("a"), value_state("a")]), ValueError, "names"),
        (lambda: ProcessOperator(print, RESULT, stores=0), ValueError, "stores=0"),  # type: ignore[arg-type]
        (lambda: ProcessOperator(print, RESULT, stores={key_value_store("a")}), ValueError, "stores={"),  # type: ignore[arg-type]
        (lambda: ProcessOperator(print, RESULT, fields={"a", "b"}), ValueError, "fields={"),  # type: ignore[arg-type]
        (lambda: ProcessOperator(print, RESULT, stores=""), ValueError, "stores=''"),  # type: ignore[arg-type]
        (lambda: ProcessOperator(print, RESULT, fields=""), ValueError, "fields=''"),
        (lambda: ProcessOperator(print, RESULT, fields=b""), ValueError, "fields=b''"),  # type: ignore[arg-type]
        (lambda: ProcessOperator(print, RESULT, fields=0), ValueError, "fields=0"),  # type: ignore[arg-type]
        (lambda: ProcessOperator(print, RESULT, fields=np.array("a")), ValueError, "fields=array"),  # type: ignore[arg-type]
        (lambda: ProcessOperator(print, RESULT, fields=["_time"]), ValueError, "_time"),
        (lambda: ProcessOperator(print, RESULT, fields=["a", "a"]), ValueError, "named once"),
        (lambda: ProcessOperator(print, pa.schema([("shard", pa.int32())])), ValueError, "shard"),
        (lambda: ProcessOperator(print, pa.schema([("batch", pa.int32())])), ValueError, "batch"),
        (lambda: ProcessOperator(print, pa.schema([("a", pa.int32())] * 2)), ValueError, "twice"),
        (
            lambda: ProcessOperator(print, pa.schema([("a", pa.struct([]))])),
            ValueError,
            "result: a: struct<> cannot be",
        ),
        (
            lambda: ProcessOperator(print, RESULT, stores=[key_value_store(str(n)) for n in range(MAX_STORES + 1)]),
            ValueError,
            "at most 191",
        ),
        (lambda: key_value_store(None), TypeError, "name cannot be null"),  # type: ignore[arg-type]
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_an_operator_travels_to_workers() -> None:
    operator = ProcessOperator(_everything, RESULT, stores=_all_stores(), fields=["user"])
    travelled = pickle.loads(pickle.dumps(operator))
    assert travelled.describe() == operator.describe()
    assert Shard(travelled).attempt(_batch([("a", 1)])).results.num_rows == 1


def test_the_last_region_is_used() -> None:
    stores = [key_value_store(str(number)) for number in range(MAX_STORES)]
    shard = Shard(ProcessOperator(lambda _, context: context["190"].put("a", 1), RESULT, stores=stores))
    shard.attempt(_batch([]))
    assert shard.store.get(b"\xfe\x02") is not None


def test_sessions_of_the_dsl_run_in_process() -> None:
    visits = count(SessionWindows.inactivity_gap(5).until(100), "visits")
    function = visits.function("user", None, key_type=pa.string(), value_type=pa.int64())
    schema = visits.result_schema(pa.string(), pa.int64())
    shard = Shard(ProcessOperator(function, schema, stores=[visits.store], fields=["user"]))
    shard.attempt(_batch([("a", 10), ("a", 20)]))
    results = shard.attempt(_batch([("a", 15)], version=2)).results
    assert [tuple(row.values()) for row in results.to_pylist()] == [
        ("retracted", "a", 10, 10, None),
        ("retracted", "a", 20, 20, None),
        ("update", "a", 10, 20, 3),
    ]


def test_sessions_of_the_dsl_lose_nothing_of_a_source_partition_that_another_is_ahead_of() -> None:
    visits = count(SessionWindows.inactivity_gap(5).until(100), "visits")
    function = visits.function("user", None, key_type=pa.string(), value_type=pa.int64())
    schema = visits.result_schema(pa.string(), pa.int64())
    places = [(0, 0, "a", 0), (0, 1, "a", 1_000), (0, 2, "a", 3), (1, 0, "b", 0), (1, 1, "b", 1_000), (1, 2, "b", 990)]
    for cuts in ([places], [[places[0], places[3]], [*places[1:3], *places[4:]]]):
        shard = Shard(ProcessOperator(function, schema, stores=[visits.store], fields=["user"]))
        updates = []
        for version, rows in enumerate(cuts, 1):
            partitions, offsets, users, times = zip(*rows, strict=True)
            zero = [0] * len(rows)
            messages = pa.table(
                [zero, partitions, offsets, times, zero, users],
                schema=pa.schema([*MESSAGE_FIELDS, ("user", pa.string())]),
            )
            outcome = shard.attempt(MicroBatch(version, 1_000, messages, {}, {}, False))
            assert outcome.metrics.get("visits.dropped", 0) == version // len(
                cuts
            )  # its own partition was ahead of a@3
            updates += [tuple(row.values())[1:] for row in outcome.results.to_pylist()]
        assert updates == [
            ("a", 0, 0, 1),
            ("b", 0, 0, 1),
            ("a", 1000, 1000, 1),
            ("b", 1000, 1000, 1),
            ("b", 990, 990, 1),
        ]


def test_several_stores_share_one_database_without_spark(tmp_path: Path) -> None:
    with StoreSet.open(tmp_path / "db", _all_stores(), time_ms=1_000) as stores:
        _everything(_batch([("a", 10)]).messages, ProcessContext(stores, _batch([])))
        stores.flush()
        _everything(_batch([("b", 10)]).messages, ProcessContext(stores, _batch([])))
        stores.close(flush=False)
    with StoreSet.open(tmp_path / "db", _all_stores(), time_ms=1_000) as stores:
        assert list(stores) == ["windows", "sessions", "last", "list", "map", "totals"]
        assert list(stores["totals"].all()) == [("a", 1)]  # type: ignore[attr-defined]
        assert list(stores["last"].items()) == [("a", 10)]  # type: ignore[attr-defined]
        assert stores["windows"].fetch_one("a", 10) == 1  # type: ignore[attr-defined]


def test_the_database_of_a_shard_is_not_opened_beside_its_query() -> None:
    shard = MemoryStore()
    shard.write(Changes([b"\x00commit"], [b"a commit row"], {0x40: b"\x40\x00"}))
    with pytest.raises(ManifestMismatch, match="shard of a query"):
        StoreSet(shard, [key_value_store("totals")])


def test_key_value_store(tmp_path: Path) -> None:
    with KeyValueStore.open(tmp_path / "not" / "there" / "kv") as store:
        for key, value in (("user_2", 2), ("user_12", 12), ("user_1", 1), ("", 0)):
            store.put(key, value)
        assert store.put_if_absent("user_1", 5) == 1
        assert store.put_if_absent("user_3", 3) is None
        assert store.delete("user_3") == 3
        assert store.delete("user_3") is None
        store.flush()
        assert store.get_many(["user_12", "x", ""]) == [12, None, 0]
        assert list(store.range("user_1", "user_2")) == [("user_1", 1), ("user_12", 12)]
        assert list(store.range("user_1", "user_2", backward=True)) == [("user_12", 12), ("user_1", 1)]
        assert list(store.range("user_2", "user_1")) == []
        rows = store.all()
        store.put("user_1", None)
        store.put("zzz", 1)
        assert [key for key, _ in rows] == ["", "user_1", "user_12", "user_2"]
        assert store.get("user_1") is None


WHO = pa.struct([("name", pa.string()), ("total", pa.int64())])


@pytest.mark.parametrize(
    ("declared", "given", "said"),
    [
        (WHO, pa.array([{"name": "anna", "totl": 5}]), r"who\.total: one of"),
        (WHO, pa.array([{"name": "anna"}]), r"who\.total: one of"),
        (WHO, pa.array([{"name": "anna", "total": 5, "more": 1}]), r"who\.more: one of"),
        (pa.list_(WHO), pa.array([[{"name": "anna", "Total": 5}]]), r"who\.Total: one of"),
        (pa.map_(pa.string(), WHO), pa.array([[("k", {"name": "a", "n": 5})]], pa.map_(pa.string(), pa.struct(
            [("name", pa.string()), ("n", pa.int64())]))), r"who\.n: one of"),
        (pa.float32(), pa.array([1e300]), "would lose what it is"),
        (pa.bool_(), pa.array([2]), "would lose what it is"),
        (pa.date32(), pa.array([3_600_000], pa.timestamp("ms")), "would lose what it is"),
    ],
)  # fmt: skip
def test_nothing_within_a_result_is_lost_or_made_null_without_a_word(
    declared: pa.DataType, given: pa.Array, said: str
) -> None:
    schema = pa.schema([("who", declared)])
    shard = Shard(ProcessOperator(lambda *_: pa.table([given], ["who"]), schema))
    with pytest.raises(ValueInvalid, match=said):
        shard.attempt(_batch([]))


@pytest.mark.parametrize(
    ("declared", "given", "wanted"),
    [
        (WHO, pa.array([{"total": 5, "name": "anna"}]), {"name": "anna", "total": 5}),
        (pa.float32(), pa.array([float("inf")]), float("inf")),
        (pa.float32(), pa.array([0.5]), 0.5),
        (pa.bool_(), pa.array([None]), None),
        (pa.date32(), pa.array([86_400_000], pa.timestamp("ms")), dt.date(1970, 1, 2)),
    ],
)
def test_what_fits_a_result_is_taken(declared: pa.DataType, given: pa.Array, wanted: Any) -> None:
    schema = pa.schema([("who", declared)])
    outcome = Shard(ProcessOperator(lambda *_: pa.table([given], ["who"]), schema)).attempt(_batch([]))
    assert outcome.results["who"].to_pylist() == [wanted]
