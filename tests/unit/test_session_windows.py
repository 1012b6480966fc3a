"""KIP-94, rule by rule: the windows, the processor and the DSL."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from backend.batch import MAX_TIME, MIN_TIME
from backend.errors import KeyInvalid, ValueInvalid
from backend.store.memory import MemoryStore
from backend.store.workspace import Workspace
from backend.stores.session_store import SessionKey
from backend.stores.session_windows import (
    DEFAULT_RETENTION_MS,
    SessionAggregation,
    SessionProcessor,
    SessionWindows,
    aggregate,
    count,
    reduce,
)


def _bound(aggregation: SessionAggregation) -> tuple[SessionProcessor, Any]:
    store = aggregation.store.bind(Workspace(MemoryStore()), 0x40, 0)
    return aggregation.processor(store), store


def _values(gap: int = 5, until: int = 100) -> SessionAggregation:
    return aggregate(
        list,
        lambda _key, value, so_far: [*so_far, value],
        lambda _key, first, second: sorted(first + second),
        SessionWindows.inactivity_gap(gap).until(until),
        "values",
    )


def test_windows() -> None:
    windows = SessionWindows.inactivity_gap("5 minutes")
    assert (windows.gap_ms, windows.retention_ms) == (300_000, DEFAULT_RETENTION_MS)
    assert windows.until("1 hour").retention_ms == 3_600_000
    assert SessionWindows.inactivity_gap("2 days").retention_ms == 172_800_000  # at least the gap
    assert SessionWindows.inactivity_gap(1).until(1).retention_ms == 1
    for gap in (0, -1):
        with pytest.raises(ValueError, match="Gap time cannot be zero or negative"):
            SessionWindows.inactivity_gap(gap)
    with pytest.raises(ValueError, match="cannot be smaller than window gap"):
        SessionWindows.inactivity_gap(10).until(9)
    with pytest.raises(TypeError):
        SessionWindows.inactivity_gap(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        SessionWindows.inactivity_gap(1).until(1.5)  # type: ignore[arg-type]


def test_records_at_most_a_gap_apart_are_one_session() -> None:
    processor, store = _bound(_values(gap=5))
    assert processor.process("a", 1, 10) == [(SessionKey("a", 10, 10), [1])]
    assert processor.process("a", 2, 15) == [(SessionKey("a", 10, 10), None), (SessionKey("a", 10, 15), [1, 2])]
    assert processor.process("a", 3, 21) == [(SessionKey("a", 21, 21), [3])]
    assert processor.process("b", 4, 12) == [(SessionKey("b", 12, 12), [4])]
    assert [tuple(key) for key, _ in store.fetch("a")] == [("a", 10, 15), ("a", 21, 21)]


def test_a_record_between_two_sessions_makes_them_one_and_retracts_both_first() -> None:
    processor, store = _bound(_values(gap=5))
    for value, time in ((1, 10), (2, 20)):
        processor.process("a", value, time)
    assert processor.process("a", 3, 15) == [
        (SessionKey("a", 10, 10), None),
        (SessionKey("a", 20, 20), None),
        (SessionKey("a", 10, 20), [1, 2, 3]),
    ]
    assert list(store.all()) == [(SessionKey("a", 10, 20), [1, 2, 3])]


def test_a_record_inside_a_session_retracts_nothing() -> None:
    processor, _ = _bound(_values(gap=5))
    processor.process("a", 1, 10)
    processor.process("a", 2, 14)
    assert processor.process("a", 3, 12) == [(SessionKey("a", 10, 14), [1, 2, 3])]
    assert processor.process("a", 4, 10) == [(SessionKey("a", 10, 14), [1, 2, 3, 4])]


@pytest.mark.parametrize(("time", "taken"), [(899, False), (900, True), (901, True)])
def test_a_late_record_alone_is_dropped_after_the_retention(time: int, taken: bool) -> None:
    processor, store = _bound(_values(gap=5, until=100))
    processor.process("z", 0, 1_000)
    assert bool(processor.process("a", 1, time)) is taken
    assert store.dropped == (0 if taken else 1)


def test_a_late_record_that_reaches_a_session_that_is_kept_belongs_to_it() -> None:
    processor, store = _bound(_values(gap=5, until=100))
    processor.process("a", 1, 900)
    processor.process("z", 0, 1_000)
    assert processor.process("a", 2, 895)[-1] == (SessionKey("a", 895, 900), [1, 2])
    processor.process("z", 0, 1_001)
    assert processor.process("a", 3, 890) == []  # the session has gone, and no one is near
    assert store.dropped == 1


def test_records_without_a_key_are_left_out_and_counted() -> None:
    processor, store = _bound(_values())
    assert processor.process(None, 1, 10) == []
    assert (processor.skipped, list(store.all())) == (1, [])


def test_a_record_that_cannot_be_stored_changes_nothing() -> None:
    processor, store = _bound(
        aggregate(
            lambda: 0,
            lambda _key, value, so_far: value,
            lambda _key, first, second: second,
            SessionWindows.inactivity_gap(5).until(100),
            "s",
            value_type=int,
        )
    )
    processor.process("a", 1, 10)
    with pytest.raises(ValueInvalid):
        processor.process("a", "text", 12)
    with pytest.raises(KeyInvalid):
        processor.process("a", 1, 1.5)  # type: ignore[arg-type]
    assert list(store.all()) == [(SessionKey("a", 10, 10), 1)]


def test_the_ends_of_time() -> None:
    processor, _ = _bound(count(SessionWindows.inactivity_gap(5).until(2**63 - 1), "s"))
    for time in (MIN_TIME, MAX_TIME):
        assert processor.process("a", 1, time) == [(SessionKey("a", time, time), 1)]


def test_count_and_reduce() -> None:
    counter, counted = _bound(count(SessionWindows.inactivity_gap(5), "n"))
    largest, reduced = _bound(reduce(max, SessionWindows.inactivity_gap(5), "max"))
    for value, time in ((3, 10), (0, 20), (2, 15), (9, 100)):
        counter.process("a", value, time)
        largest.process("a", value, time)
    assert list(counted.all()) == [(SessionKey("a", 10, 20), 3), (SessionKey("a", 100, 100), 1)]
    assert list(reduced.all()) == [(SessionKey("a", 10, 20), 3), (SessionKey("a", 100, 100), 9)]


def test_bad_arguments_are_refused() -> None:
    windows = SessionWindows.inactivity_gap(5)
    with pytest.raises(TypeError, match="windows must be"):
        count(5, "n")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reducer=5: must be a function of"):
        reduce(5, windows, "n")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="session_merger=None: must be a function of"):
        aggregate(list, lambda *_: 0, None, windows, "n")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name cannot be null"):
        count(windows, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "far"), [(pa.timestamp("us"), 2**60), (pa.timestamp("ms", "UTC"), -(2**55)),
                                           (pa.date32(), 3_000_000), (pa.date32(), -1_000_000)])  # fmt: skip
def test_keys_and_values_that_python_has_no_date_for_are_counted_as_any(kind: pa.DataType, far: int) -> None:
    def known(key: object, value: object, count: int) -> int:
        return count + (value == key is not None)

    seen = aggregate(int, known, lambda key, first, second: first + second, SessionWindows.inactivity_gap(5), "seen")
    _, store = _bound(seen)
    ticks = pa.array([far, 7, far], pa.int32() if pa.types.is_date32(kind) else pa.int64()).cast(kind)
    messages = pa.table({"at": ticks, "_time": [10, 11, 12]})
    results = seen.function("at", "at", key_type=kind, value_type=pa.int64())(messages, {"seen": store})
    number = pa.int32() if pa.types.is_date32(kind) else pa.int64()
    shown = (results["reason"], results["key"].cast(number), results["value"])
    assert list(zip(*(column.to_pylist() for column in shown), strict=True)) == [
        ("update", far, 1),
        ("update", 7, 1),
        ("retracted", far, None),
        ("update", far, 2),
    ]


def test_the_function_gives_a_changelog_of_sessions() -> None:
    visits = count(SessionWindows.inactivity_gap(5).until(100), "visits")
    _, store = _bound(visits)
    function = visits.function("user", None, key_type=pa.string(), value_type=pa.int64())
    messages = pa.table({"user": ["a", None, "a", "a"], "_time": [10, 11, 12, 40]})
    results = function(messages, {"visits": store})
    assert results.schema == visits.result_schema(pa.string(), pa.int64())
    assert [tuple(row.values()) for row in results.to_pylist()] == [
        ("update", "a", 10, 10, 1),
        ("retracted", "a", 10, 10, None),
        ("update", "a", 10, 12, 2),
        ("update", "a", 40, 40, 1),
    ]
    assert function(messages.slice(0, 0), {"visits": store}).num_rows == 0
