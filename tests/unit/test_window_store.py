"""KIP-428, rule by rule, over the persistent store and the one in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from backend.batch import MAX_TIME, MIN_TIME, NO_TIME
from backend.errors import KeyInvalid, ManifestMismatch, StoreClosed, StoreLocked, ValueInvalid
from backend.store.memory import MemoryStore
from backend.store.workspace import Workspace
from backend.stores import named
from backend.stores.memory_window_store import InMemoryWindowStore, in_memory_window_store
from backend.stores.standalone import StoreSet
from backend.stores.window_store import WindowOptions, WindowStore
from tests.support.counting_store import CountingStore

Make = Callable[..., Any]


def _persistent(**options: Any) -> WindowStore:
    return WindowOptions("w", **options).bind(Workspace(MemoryStore()), 0x40, 0)


def _in_memory(**options: Any) -> InMemoryWindowStore:
    return InMemoryWindowStore(WindowOptions("w", **options))


@pytest.fixture(params=[_persistent, _in_memory], ids=["persistent", "memory"])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param  # type: ignore[no-any-return]


def _rows(rows: Iterator[Any]) -> list[tuple[object, int, object]]:
    return [(row.key, row.start, value) for row, value in rows]


# validation


def test_the_messages_are_those_of_the_kip() -> None:
    with pytest.raises(TypeError, match=r"^name cannot be null$"):
        in_memory_window_store(None, 10, 10, 10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^retentionPeriod cannot be negative"):
        in_memory_window_store("w", -1, 10, 10)
    with pytest.raises(ValueError, match=r"^windowSize cannot be negative"):
        in_memory_window_store("w", 10, -1, 10)
    with pytest.raises(ValueError, match=r"^gracePeriod cannot be negative"):
        in_memory_window_store("w", 10, 10, -1)
    with pytest.raises(ValueError) as error:
        in_memory_window_store("w", 10, 11, 10)
    assert str(error.value) == (
        "The retention period of the window store w must be no smaller than its window size. "
        "Got size=[11], retention=[10]"
    )
    with pytest.raises(ValueError) as error:
        in_memory_window_store("w", 10, 10, 11)
    assert str(error.value) == (
        "The grace period of the window store w must not exceed its retention period. "
        "Got grace period=[11], retention=[10]"
    )


def test_limits_may_be_reached() -> None:
    assert in_memory_window_store("w", 10, 10, 10).options.grace_ms == 10
    assert in_memory_window_store("w", 0, 0, 0).options.retention_ms == 0
    options = in_memory_window_store("w", "1 hour", timedelta(minutes=1), 5).options
    assert (options.retention_ms, options.window_size_ms, options.grace_ms) == (3_600_000, 60_000, 5)


@pytest.mark.parametrize("option", ["retention", "window_size", "grace"])
@pytest.mark.parametrize(("value", "error"), [(1.5, TypeError), (True, TypeError), (2**63, ValueError)])
def test_durations_are_checked_for_type_and_overflow(option: str, value: object, error: type[Exception]) -> None:
    options: dict[str, Any] = {"retention": 10, "window_size": 1, "grace": 1, option: value}
    with pytest.raises(error, match="Invalid value for parameter"):
        in_memory_window_store("w", **options)


def test_other_bad_options_are_refused() -> None:
    with pytest.raises(TypeError, match="name must be a str"):
        in_memory_window_store(5, 10, 10, 10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name cannot be empty"):
        in_memory_window_store("", 10, 10, 10)
    with pytest.raises(TypeError, match="retain_duplicates"):
        WindowOptions("w", 10, 10, 10, "yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        WindowOptions("w", None, 10)  # type: ignore[arg-type]


# retention and grace, at the limit and either side of it


@pytest.mark.parametrize(("start", "visible"), [(89, False), (90, False), (91, True), (190, True)])
def test_a_row_is_visible_while_its_start_is_newer_than_stream_time_less_retention(
    make: Make, start: int, visible: bool
) -> None:
    store = make(retention=100, window_size=10)
    assert store.put("a", 1, start)
    store.put("b", 2, 190)
    expected = [("a", start, 1)] if visible else []
    assert store.fetch_one("a", start) == (1 if visible else None)
    assert list(store.fetch("a")) == [(at, value) for _, at, value in expected]
    assert list(store.fetch("a", MIN_TIME, MAX_TIME)) == [(at, value) for _, at, value in expected]
    for backward in (False, True):
        assert _rows(store.fetch_range("a", "b", backward=backward)) == expected
        assert [row for row in _rows(store.fetch_range("a", None, backward=backward)) if row[0] == "a"] == expected
        assert [row for row in _rows(store.fetch_all(backward=backward)) if row[0] == "a"] == expected
        assert [row for row in _rows(store.all(backward=backward)) if row[0] == "a"] == expected


@pytest.mark.parametrize(("start", "taken"), [(69, False), (70, False), (71, True), (100, True), (101, True)])
@pytest.mark.parametrize("value", [1, None])
def test_a_write_is_taken_while_its_start_is_newer_than_stream_time_less_grace(
    make: Make, start: int, taken: bool, value: object
) -> None:
    store = make(retention=100, window_size=10, grace=30)
    store.put("a", "old", start) if start < 100 else None
    store.put("z", 0, 100)
    assert store.put("a", value, start) is taken
    assert store.dropped == (0 if taken else 1)
    assert store.fetch_one("a", start) == (value if taken else "old")


def test_a_grace_period_of_zero_takes_the_newest_start_and_no_other(make: Make) -> None:
    store = make(retention=100, window_size=10, grace=0)
    assert [store.put("a", at, at) for at in (5, 5, 4, 6)] == [True, True, False, True]
    assert store.put("b", 1, 6)
    assert store.dropped == 1
    assert _rows(store.all()) == [("a", 5, 5), ("a", 6, 6), ("b", 6, 1)]


def test_a_retention_of_zero_keeps_nothing_and_drops_nothing_in_order(make: Make) -> None:
    store = make(retention=0, window_size=0)
    assert store.put("a", 1, 5)
    assert (list(store.all()), store.fetch_one("a", 5), store.dropped) == ([], None, 0)
    assert not store.put("a", 1, 4)


def test_stream_time_is_the_newest_start_and_advances_on_deletes_too(make: Make) -> None:
    store = make(retention=100, window_size=10)
    assert store.stream_time == NO_TIME
    store.put("a", 1, 10)
    store.put("a", 1, 5)
    assert store.stream_time == 10
    store.put("b", None, 110)
    assert store.stream_time == 110
    assert list(store.all()) == []


def test_the_ends_of_time(make: Make) -> None:
    store = make(retention=2**63 - 1, window_size=1)
    for start in (MIN_TIME, MIN_TIME + 2, -1, 0, MAX_TIME - 2):
        assert store.put("a", 1, start)
    assert [at for at, _ in store.fetch("a")] == [MIN_TIME, MIN_TIME + 2, -1, 0, MAX_TIME - 2]
    assert store.put("a", 1, MAX_TIME)  # 2**63 - 1 ms after the first two
    assert [at for at, _ in store.fetch("a")] == [MIN_TIME + 2, -1, 0, MAX_TIME - 2, MAX_TIME]
    for start in (MIN_TIME - 1, MAX_TIME + 1):
        with pytest.raises(KeyInvalid, match="out of range"):
            store.put("a", 1, start)


# values


def test_none_deletes_and_empty_values_are_values(make: Make) -> None:
    store = make(retention=100, window_size=10)
    for key, value in (("n", 0), ("s", ""), ("f", False), ("l", []), ("b", b"")):
        store.put(key, value, 5)
        assert store.fetch_one(key, 5) == value
        assert type(store.fetch_one(key, 5)) is type(value)
        store.put(key, None, 5)
        assert store.fetch_one(key, 5) is None
    store.put("not there", None, 5)
    assert list(store.all()) == []


def test_the_last_value_counts(make: Make) -> None:
    store = make(retention=100, window_size=10)
    store.put("a", 1, 5)
    store.put("a", 2, 5)
    assert list(store.fetch("a")) == [(5, 2)]


def test_what_a_caller_does_with_a_value_afterwards_does_not_reach_the_store(make: Make) -> None:
    store = make(retention=100, window_size=10)
    value = [1]
    store.put("a", value, 5)
    value.append(2)
    store.fetch_one("a", 5).append(3)
    assert store.fetch_one("a", 5) == [1]


def test_a_value_type_comes_back_as_it_went_in(make: Make) -> None:
    store = make(retention=100, window_size=10, value_type=tuple[int, str])
    store.put("a", (1, "x"), 5)
    assert store.fetch_one("a", 5) == (1, "x")
    with pytest.raises(ValueInvalid):
        store.put("a", (1, 2), 6)
    assert store.stream_time == 5


def test_duplicates_are_kept_in_the_order_of_their_puts(make: Make) -> None:
    store = make(retention=100, window_size=10, retain_duplicates=True)
    for value in (3, 1, 2, 1):
        store.put("a", value, 5)
    store.put("aa", 9, 5)
    store.put("a", None, 5)  # deletes nothing
    assert list(store.fetch("a")) == [(5, 3), (5, 1), (5, 2), (5, 1)]
    assert list(store.fetch("a", backward=True)) == [(5, 1), (5, 2), (5, 1), (5, 3)]
    assert store.fetch_one("a", 5) == 1
    assert store.fetch_one("b", 5) is None
    assert _rows(store.all()) == [("a", 5, 3), ("a", 5, 1), ("a", 5, 2), ("a", 5, 1), ("aa", 5, 9)]
    assert _rows(store.fetch_range("aa", None)) == [("aa", 5, 9)]


# reads


@pytest.fixture
def filled(make: Make) -> Any:
    store = make(retention=1_000, window_size=10)
    for key in ("user_12", "user_2", "user_1", ""):
        for start in (20, 10, 0):
            store.put(key, f"{key}@{start}", start)
    return store


def test_ranges_of_time_are_half_open(filled: Any) -> None:
    assert [at for at, _ in filled.fetch("user_1", 0, 20)] == [0, 10]
    assert [at for at, _ in filled.fetch("user_1", 1, 21)] == [10, 20]
    assert [at for at, _ in filled.fetch("user_1", 10, None)] == [10, 20]
    assert [at for at, _ in filled.fetch("user_1", None, 10)] == [0]
    assert list(filled.fetch("user_1", 10, 10)) == []
    assert list(filled.fetch("user_1", 20, 10)) == []
    assert [at for at, _ in filled.fetch("user_1", 0, 20, backward=True)] == [10, 0]
    assert {row.start for row, _ in filled.fetch_all(0, 20)} == {0, 10}
    assert list(filled.fetch_all(20, 0)) == []


def test_ranges_of_keys_are_half_open_and_rows_come_by_start_then_key(filled: Any) -> None:
    expected = [("user_1", at, f"user_1@{at}") for at in (0, 10, 20)]
    assert _rows(filled.fetch_range("user_1", "user_12")) == expected
    both = [(key, at, f"{key}@{at}") for at in (10, 20) for key in ("user_1", "user_12")]
    assert _rows(filled.fetch_range("user_1", "user_2", 10)) == both
    assert _rows(filled.fetch_range("user_1", "user_2", 10, backward=True)) == both[::-1]
    assert list(filled.fetch_range("user_2", "user_1")) == []
    assert _rows(filled.fetch_range(None, "user_1", 0, 1)) == [("", 0, "@0")]
    everything = [(key, at, f"{key}@{at}") for at in (0, 10, 20) for key in ("", "user_1", "user_12", "user_2")]
    assert _rows(filled.all()) == _rows(filled.fetch_range(None, None)) == everything
    assert _rows(filled.all(backward=True)) == everything[::-1]


@pytest.mark.parametrize("duplicates", [False, True])
def test_a_segment_of_many_keys_is_like_one_of_few(make: Make, duplicates: bool) -> None:
    store = make(retention=1_000, window_size=10, retain_duplicates=duplicates)
    keys = [(7 * number) % 101 for number in range(101)]
    for number, key in enumerate(keys):
        store.put(key, key, 5)
        assert len(list(store.fetch_range(10, 50))) == sum(10 <= one < 50 for one in keys[: number + 1])
    assert _rows(store.all()) == [(key, 5, key) for key in range(101)]
    assert _rows(store.fetch_range(40, None, backward=True)) == [(key, 5, key) for key in range(100, 39, -1)]
    assert list(store.fetch(50)) == [(5, 50)]
    for key in keys:
        store.put(key, None, 5)
    assert len(list(store.all())) == (101 if duplicates else 0)


def test_a_row_knows_its_window(filled: Any) -> None:
    row, _ = next(filled.all())
    assert (row.key, row.start, row.end) == ("", 0, 10)


def test_keys_of_all_types_come_back_as_they_were(make: Make) -> None:
    store = make(retention=1_000, window_size=10)
    keys = [
        False,
        True,
        -(2**63),
        -1,
        2**63 - 1,
        -1.5,
        2.5,
        "",
        "a\0b",
        "a",
        "ä",
        b"\0\xff",
        ("a", "bc"),
        ("ab", "c"),
        (),
    ]
    for key in keys:
        store.put(key, repr(key), 1)
    found = [(row.key, value) for row, value in store.all()]
    assert len(found) == len(keys)
    assert all(repr(key) == value and type(key) in {bool, int, float, str, bytes, tuple} for key, value in found)
    assert all(list(store.fetch(key)) == [(1, repr(key))] for key in keys)


def test_iterators_are_snapshots(make: Make) -> None:
    store = make(retention=100, window_size=10, grace=100)
    for at in (1, 2, 3):
        store.put("a", at, at)
    expected = [("a", 1, 1), ("a", 2, 2), ("a", 3, 3)]
    open_now = [store.all(), store.fetch_all(0, 10), store.fetch_range("a", "b")]
    of_key = store.fetch("a")
    begun = store.all()
    next(begun)
    store.put("a", 9, 2)
    store.put("a", None, 3)
    store.put("b", 4, 3)
    store.put("z", 5, 1_000)  # everything before expires
    assert [_rows(rows) for rows in open_now] == [expected] * 3
    assert list(of_key) == [(1, 1), (2, 2), (3, 3)]
    assert _rows(begun) == expected[1:]
    assert _rows(store.all()) == [("z", 1_000, 5)]


# bad input


@pytest.mark.parametrize("key", [None, [1], {"a": 1}, object(), 2**63, "\ud800", "x" * 70_000])
def test_a_bad_key_changes_nothing(make: Make, key: object) -> None:
    store = make(retention=100, window_size=10)
    store.put("a", 1, 5)
    with pytest.raises(KeyInvalid):
        store.put(key, 1, 500)
    with pytest.raises(KeyInvalid):
        store.fetch(key)
    with pytest.raises(KeyInvalid):
        store.fetch_one(key, 5)
    assert store.stream_time == 5
    assert _rows(store.all()) == [("a", 5, 1)]


@pytest.mark.parametrize("start", [None, 1.0, "1", True])
def test_a_bad_start_changes_nothing(make: Make, start: object) -> None:
    store = make(retention=100, window_size=10)
    with pytest.raises(KeyInvalid, match="milliseconds as an int"):
        store.put("a", 1, start)
    with pytest.raises(KeyInvalid):
        store.fetch_one("a", start)
    assert store.stream_time == NO_TIME


@pytest.mark.parametrize("value", [(1, 2), {1}, object(), 2**64, 1j, {"a": (1,)}, {(1, 2): 3}])
def test_a_bad_value_changes_nothing(make: Make, value: object) -> None:
    store = make(retention=100, window_size=10)
    with pytest.raises(ValueInvalid):
        store.put("a", value, 5)
    assert (store.stream_time, list(store.all())) == (NO_TIME, [])


def test_a_closed_store_says_so(make: Make) -> None:
    store = make(retention=100, window_size=10)
    store.close()
    store.close()
    for use in (lambda: store.put("a", 1, 5), lambda: store.fetch_one("a", 5), store.all):
        with pytest.raises(StoreClosed):
            use()


# what is read, and what is left


def test_a_read_of_one_key_touches_no_other() -> None:
    base, options = CountingStore(), WindowOptions("w", 10_000, 10)
    stores = StoreSet(base, [options])
    for key in ("a", "b", "c"):
        for start in range(100):
            stores["w"].put(key, start, start)
    stores.flush()
    base.read.clear()
    assert [at for at, _ in stores["w"].fetch("b", 10, 13)] == [10, 11, 12]
    assert len(base.read) == 6  # three rows of the index, three values
    base.read.clear()
    assert stores["w"].fetch_one("b", 10) == 10
    assert len(base.read) == 1
    base.read.clear()
    assert len(list(stores["w"].fetch_all(10, 13))) == 9
    assert len(base.read) == 9


def test_reclaiming_reads_what_expired_and_leaves_nothing_of_it() -> None:
    base, options = CountingStore(), WindowOptions("w", 100, 10)
    stores = StoreSet(base, [options])
    for start in range(150):
        stores["w"].put("a", start, start)
        stores["w"].put("b", start, start)
    stores.flush()
    stores["w"].put("a", 0, 159)  # 50 to 59 expire: 20 rows, and 198 live
    base.read.clear()
    stores.flush()
    assert len(base.read) <= 20 + 1  # and the janitor's one look
    left = [key for key, _ in MemoryStore.scan(base, b"\x40\x00", b"\x40\x02")]
    assert len(left) == 2 * 181  # 60 to 149 of two keys, and 159: a row and an index row each


def test_a_delete_leaves_nothing_behind() -> None:
    base = CountingStore()
    stores = StoreSet(base, [WindowOptions("w", 100, 10)])
    stores["w"].put("a", 1, 5)
    stores["w"].put("b", 1, 5)
    stores.flush()
    stores["w"].put("a", None, 5)
    stores["w"].put("b", None, 5)
    stores["w"].put("b", 2, 5)
    stores.flush()
    assert len(list(MemoryStore.scan(base, b"\x40\x00", b"\x40\x02"))) == 2


def test_reclaiming_is_bounded_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "RECLAIM_ROWS", 4)
    base, options = CountingStore(), WindowOptions("w", 100, 10)
    stores = StoreSet(base, [options])
    for start in range(10):
        stores["w"].put("a", start, start)
    stores["w"].put("b", 1, 1_000)
    counts = []
    for _ in range(4):
        stores.flush()
        counts.append(sum(1 for _ in MemoryStore.scan(base, b"\x40\x00", b"\x40\x02")))
        assert list(stores["w"].fetch("a")) == []
        assert _rows(stores["w"].all()) == [("b", 1_000, 1)]
    assert counts == [14, 6, 2, 2]


# with a database of its own


def _open(path: Path, **options: Any) -> WindowStore:
    return WindowStore.open(path, **{"retention": 100, "window_size": 10, **options})


def test_what_was_flushed_survives_and_what_was_not_is_lost(tmp_path: Path) -> None:
    with _open(tmp_path / "w", grace=50) as store:
        store.put("a", 1, 1_000)
        store.put("a", 2, 900)  # too late
        store.flush()
        store.put("a", 3, 2_000)
        store.close(flush=False)
    with _open(tmp_path / "w", grace=50) as store:
        assert (store.stream_time, store.dropped) == (1_000, 1)
        assert _rows(store.all()) == [("a", 1_000, 1)]
        assert not store.put("a", 0, 950)
    with _open(tmp_path / "w", grace=50) as store:
        assert store.dropped == 2  # closing flushes


def test_an_error_inside_with_flushes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), _open(tmp_path / "w") as store:
        store.put("a", 1, 5)
        raise RuntimeError
    with _open(tmp_path / "w") as store:
        assert list(store.all()) == []


def test_a_longer_retention_brings_nothing_back_and_a_shorter_one_hides_at_once(tmp_path: Path) -> None:
    with _open(tmp_path / "w", retention=100) as store:
        for at in (100, 150, 199, 200):
            store.put("a", at, at)
    with _open(tmp_path / "w", retention=1_000) as store:
        assert [at for at, _ in store.fetch("a")] == [150, 199, 200]
        assert not store.put("a", 1, 100)  # below what had expired
        assert store.put("a", 1, 101)
        assert store.dropped == 1
    with _open(tmp_path / "w", retention=10) as store:
        assert [at for at, _ in store.fetch("a")] == [199, 200]


def test_iterators_outlive_a_flush_and_end_with_their_store(tmp_path: Path) -> None:
    with _open(tmp_path / "w") as store:
        for at in range(50, 100):
            store.put("a", at, at)
        store.flush()
        rows, late = store.all(), store.all()
        assert next(rows)[1] == 50
        store.put("a", None, 60)
        store.put("b", 1, 199)
        store.flush()
        assert [value for _, value in rows] == list(range(51, 100))
    with pytest.raises(StoreClosed):
        next(late)
    with _open(tmp_path / "w"):
        pass  # nothing held the LOCK


def test_another_store_at_the_same_place_is_refused(tmp_path: Path) -> None:
    _open(tmp_path / "w").close()
    with pytest.raises(ManifestMismatch, match="declared window 'other'"):
        _open(tmp_path / "w", name="other")
    with pytest.raises(ManifestMismatch, match="another layout"):
        _open(tmp_path / "w", retain_duplicates=True)
    _open(tmp_path / "w").close()  # a refusal leaves no LOCK


def test_two_writers_are_one_too_many(tmp_path: Path) -> None:
    with _open(tmp_path / "w") as store:
        store.put("a", 1, 5)
        with pytest.raises(StoreLocked):
            _open(tmp_path / "w", wait_s=0.05)
        assert store.fetch_one("a", 5) == 1


def test_duplicates_keep_their_order_over_restarts(tmp_path: Path) -> None:
    for value in (3, 1, 2):
        with _open(tmp_path / "w", retain_duplicates=True) as store:
            store.put("a", value, 5)
    with _open(tmp_path / "w", retain_duplicates=True) as store:
        assert [value for _, value in store.fetch("a")] == [3, 1, 2]
