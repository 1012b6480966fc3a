"""What a drill's comparison sees: the last revision of each window, errors, doubles; and nothing that time makes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from backend import key_value_store, list_state, value_state
from backend.batch import EDGES
from backend.process import ProcessOperator
from backend.store.memory import MemoryStore
from backend.stores.standalone import StoreSet
from backend.windows.definitions import Window, sliding, tumbling
from recovery.drill.run import Run, unmoved
from recovery.drill.scenarios import CATALOGUE, choose
from recovery.inspect.compare import (
    Output,
    _rounded,
    compare,
    last_revisions,
    not_compared,
    state_digest,
    window_columns,
)

PLACE = ("window_start", "window_end", "k")
ROW = {"reason": "full", "revision": 0, "window_start": 0, "window_end": 10, "k": "a", "n": 1, "mean": 0.1, "shard": 0}


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist([{**ROW, **row} for row in rows])


def test_the_last_revision_counts() -> None:
    last, doubled = last_revisions(table({"revision": 1, "n": 3}, {}, {"k": "b"}), PLACE)
    assert last == {(0, 10, "a"): (3, 0.1), (0, 10, "b"): (1, 0.1)}
    assert doubled == 0


def test_a_row_that_is_there_twice_is_doubled() -> None:
    last, doubled = last_revisions(table({}, {"shard": 1}), PLACE)
    assert len(last) == 1
    assert doubled == 1


def test_a_retracted_window_is_gone() -> None:
    last, _ = last_revisions(table({}, {"reason": "retracted", "revision": 1}), PLACE)
    assert last == {}


def test_the_last_digits_of_floats_do_not_count() -> None:
    one, _ = last_revisions(table({"mean": 0.1 + 0.2}), PLACE)
    two, _ = last_revisions(table({"mean": 0.3}), PLACE)
    three, _ = last_revisions(table({"mean": 0.3001}), PLACE)
    assert one == two != three


def test_nan_is_equal_to_itself() -> None:
    one, other = ([_rounded(value) for value in (math.nan, -math.nan, [math.nan, 1.0])] for _ in range(2))
    assert one == other
    assert _rounded(math.nan) != _rounded(0.0)


def test_windows_by_number_are_known_by_their_messages() -> None:
    """The first sliding windows of a key begin alike; another source partition has the same offsets."""

    def row(start: tuple[int, int], last: tuple[int, int], **more: Any) -> dict[str, Any]:
        edges = dict(zip(EDGES, start + last, strict=True))
        return {**ROW, "window_start": None, "window_end": None, **edges, **more}

    def place(window: Window, route: str) -> list[str]:
        operator = {"operator": "window", "window": window.describe(), "keys": [["k", "string"], ["id", "string"]]}
        return [name for name in window_columns({"operator": operator, "route": route}) if name != "id_"]

    rows = pa.Table.from_pylist([row((0, 5), (0, 5)), row((0, 5), (0, 6), n=2), row((1, 5), (0, 6), n=3)])
    last, doubled = last_revisions(rows, place(sliding(messages=3), "key"))
    assert (last, doubled) == (
        {(0, 5, 0, 5, "a"): (1, 0.1), (0, 5, 0, 6, "a"): (2, 0.1), (1, 5, 0, 6, "a"): (3, 0.1)},
        0,
    )
    grown = [row((0, 5), (0, 5), reason="early"), row((0, 5), (0, 7), revision=1, n=3), row((1, 5), (0, 9), n=3)]
    last, doubled = last_revisions(pa.Table.from_pylist(grown), place(tumbling(messages=3), "partition"))
    assert (last, doubled) == ({(0, 0, 5, "a"): (3, 0.1), (0, 1, 5, "a"): (3, 0.1)}, 0)


def test_where_a_source_partition_is_a_shard_each_has_windows_of_its_own() -> None:
    rows = table({}, {"shard": 1})
    assert last_revisions(rows, ("shard", *PLACE))[1] == 0
    assert window_columns({"operator": {"operator": "process"}, "route": "partition"}) == []


def test_rows_without_windows_are_counted() -> None:
    rows = pa.Table.from_pylist([{"x": 1, "shard": 0}, {"x": 1, "shard": 1}, {"x": 2, "shard": 0}])
    assert last_revisions(rows, [])[0] == {(1,): (2,), (2,): (1,)}


def test_columns_of_a_jobs_own_are_compared_whatever_their_names() -> None:
    schema = pa.schema([(name, pa.string()) for name in ("reason", "revision", "retracts")])
    operator = ProcessOperator(lambda messages, context: None, schema)
    apart = not_compared({"operator": operator.describe()})

    def rows(**wrong: str) -> Any:
        row = {"reason": "a", "revision": "b", "retracts": "c", "shard": 0, "id": "0-0-1", **wrong}
        return last_revisions(pa.Table.from_pylist([row]), [], apart)[0]

    assert rows() == rows(id="0-0-2") == {("a", "b", "c"): (1,)}
    for name in schema.names:
        assert rows(**{name: "wrong"}) != rows(), name
    wrong = last_revisions(table({"retracts": 1}), PLACE)[0]
    assert wrong != last_revisions(table({"retracts": 2}), PLACE)[0], "an aggregate of that name"


CONTROL = Output({("w", 1): (5,), ("w", 2): (6,)}, {(0, 0, 7, "malformed"): 1}, {0: (1, 2, 3)}, 0)


def output(**change: Any) -> Output:
    base = {"windows": CONTROL.windows, "errors": CONTROL.errors, "state": CONTROL.state, "doubled": 0}
    return Output(**{**base, **change})


@pytest.mark.parametrize(
    ("faulty", "wrong"),
    [
        (output(), {}),
        (output(windows={("w", 1): (5,)}), {"lost": 1}),
        (output(windows={**CONTROL.windows, ("w", 3): (1,)}), {"extra": 1}),
        (output(windows={**CONTROL.windows, ("w", 2): (7,)}), {"changed": 1}),
        (output(errors={}), {"lost": 1}),
        (output(errors={**CONTROL.errors, (0, 0, 8, "malformed"): 1}), {"extra": 1}),
        (output(doubled=2), {"doubled": 2}),
        (output(state={0: (1, 2, 4)}), {"state_equal": False}),
        (output(state={}), {"state_equal": False}),
    ],
)
def test_every_difference_is_seen(faulty: Output, wrong: dict[str, Any]) -> None:
    found = compare(CONTROL, faulty)
    assert found.equal == (not wrong)
    told = {"lost": 0, "extra": 0, "changed": 0, "doubled": 0, "state_equal": True, **wrong}
    assert {name: getattr(found, name) for name in told} == told
    assert bool(found.samples) == bool(set(wrong) - {"doubled"})


def digest_of(time_ms: int, value: str = "x") -> tuple[int, int, int]:
    """Give the digest of a shard of `process()` whose stores were written to at a batch time."""
    declared = [value_state("v", ttl="1 hour"), list_state("l", ttl="1 hour"), key_value_store("k")]
    store = MemoryStore()
    stores = StoreSet(store, declared, time_ms=time_ms)
    stores["v"].update("anna", value)
    stores["l"].append_list("anna", [1, 2])
    stores["k"].put("anna", 3)
    stores.flush()
    rows = [*store.scan(b"", None)]
    record = SimpleNamespace(message_count=0, message_digest=0)
    history = SimpleNamespace(chunks=lambda: [([key for key, _ in rows], [value for _, value in rows])], record=record)
    operator = ProcessOperator(lambda messages, context: None, pa.schema([("n", pa.int64())]), stores=declared)
    checkpoint: Any = SimpleNamespace(
        committed=lambda shard: "a commit",
        changelog=SimpleNamespace(read=lambda shard, commit: history),
        manifest=SimpleNamespace(entries={"operator": operator.describe()}),
    )
    return state_digest(checkpoint, 0)


def test_when_a_state_expires_is_no_difference_and_what_it_holds_is() -> None:
    """It is the batch time plus a TTL: no two runs of a job have the same."""
    assert digest_of(1_000) == digest_of(2_000)
    assert digest_of(1_000) != digest_of(1_000, value="y")


def test_nothing_is_not_equal_to_nothing() -> None:
    nothing = Output({}, {}, {0: (0, 0, 0)}, 0)
    assert not compare(nothing, nothing).equal


def test_scenarios_are_chosen_by_name() -> None:
    assert [one.name for one in choose(["zombie", "lose-all"])] == ["zombie", "lose-all"]
    assert [one.name for one in choose(["lose-all", "zombie", "lose-all"])] == ["lose-all", "zombie"]
    assert choose([]) == list(CATALOGUE)
    with pytest.raises(ValueError, match="lose-all"):
        choose(["lose-everything"])


def test_rows_of_a_join_are_compared_one_by_one():
    pairs = [
        {"reason": "full", "revision": 0, "left_time": 1, "right_time": right, "user": "a", "id": f"0-0-{n}"}
        for n, right in enumerate([1, 2, 2])
    ]
    copies, _ = last_revisions(pa.Table.from_pylist(pairs), [], not_compared({"operator": {"operator": "join"}}))
    assert sorted(copies.items()) == [((1, 1, "a"), (1,)), ((1, 2, "a"), (2,))]


def test_an_output_without_a_single_row_has_no_columns_to_read(tmp_path):
    from recovery.inspect.compare import _rows, _table

    (tmp_path / "errors").mkdir()
    assert _rows(_table(tmp_path / "errors"), ("stream", "partition")) == []


def fetched(at: float, shard: int) -> dict[str, Any]:
    return {"event": "fetched", "at": at, "shard": shard}


def test_moves_before_an_executor_is_lost_prove_nothing() -> None:
    (scenario,) = choose(["lose-executor-with-snapshots"])
    early = Run(events=[fetched(1.0, 0)], broken_at=10.0)
    assert "0 times, at least 1 expected" in unmoved(scenario, early)
    assert unmoved(scenario, Run(events=[fetched(1.0, 0), fetched(11.0, 0)], broken_at=10.0)) == ""


def test_with_turns_each_shard_moves() -> None:
    (scenario,) = choose(["move"])
    progress = [{"event": "progress", "at": 2.0 + at, "version": at} for at in range(5)]
    ended = {"event": "ended", "at": 9.0, "commits": {"0": "", "1": ""}}
    one = Run(events=[*progress, *(fetched(3.0, 0) for _ in range(6)), ended], broken_at=1.0)
    assert unmoved(scenario, one) == "never moved: 1"
    both = Run(events=[*progress, *(fetched(3.0, at % 2) for at in range(6)), ended], broken_at=1.0)
    assert unmoved(scenario, both) == ""
