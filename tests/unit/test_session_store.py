"""KIP-94, rule by rule: the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.batch import MAX_TIME, MIN_TIME, NO_TIME
from backend.errors import KeyInvalid, ManifestMismatch, StoreClosed, ValueInvalid
from backend.store.memory import MemoryStore
from backend.store.workspace import Workspace
from backend.stores.session_store import (
    MAX_SEGMENTS,
    SessionKey,
    SessionOptions,
    SessionStore,
    segment_index,
    segment_interval,
)
from backend.stores.standalone import StoreSet
from tests.support.counting_store import CountingStore


def _store(**options: Any) -> SessionStore:
    return SessionOptions("s", **{"retention": 1_000, **options}).bind(Workspace(MemoryStore()), 0x40, 0)


def _spans(rows: Iterator[tuple[SessionKey, Any]]) -> list[tuple[object, int, int]]:
    return [tuple(key) for key, _ in rows]  # type: ignore[misc]


# segments


@pytest.mark.parametrize(("end", "segment"), [(0, 0), (500, 0), (1000, 1), (2000, 2)])
def test_the_table_of_the_kip(end: int, segment: int) -> None:
    assert segment_index(end, 1_000) == segment


@pytest.mark.parametrize(
    ("retention", "segments", "shortest", "expected"),
    [
        (3_600_000, 3, 60_000, 1_800_000),
        (3_600_000, 2, 60_000, 3_600_000),
        (119_999, 3, 60_000, 60_000),
        (120_001, 3, 60_000, 60_000),
        (120_002, 3, 60_000, 60_001),
        (2_000, 3, 1_000, 1_000),
        (0, 2, 1, 1),
    ],
)
def test_the_interval_is_the_retention_by_one_segment_less_but_not_too_short(
    retention: int, segments: int, shortest: int, expected: int
) -> None:
    assert segment_interval(retention, segments, shortest) == expected
    assert SessionOptions("s", retention, segments, shortest).interval_ms == expected


def test_bad_options_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^name cannot be null$"):
        SessionOptions(None, 10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^retentionPeriod cannot be negative"):
        SessionOptions("s", -1)
    with pytest.raises(ValueError, match="numSegments cannot be smaller than 2"):
        SessionOptions("s", 10, 1)
    with pytest.raises(ValueError, match=f"allowed are 2 to {MAX_SEGMENTS}"):
        SessionOptions("s", 10, MAX_SEGMENTS + 1)
    with pytest.raises(TypeError, match="num_segments must be an int"):
        SessionOptions("s", 10, 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_segment_interval"):
        SessionOptions("s", 10, 2, 0)
    with pytest.raises(TypeError, match="retentionPeriod"):
        SessionOptions("s", 1.5)  # type: ignore[arg-type]


# find: the KIP's fetch


@pytest.fixture
def kip() -> SessionStore:
    store = _store()
    for start, end in ((0, 99), (101, 200), (201, 300), (301, 400)):
        store.put(SessionKey("a", start, end), f"{start}-{end}")
    store.put(SessionKey("aa", 0, 400), "other")
    return store


@pytest.mark.parametrize(
    ("earliest_end", "latest_start", "expected"),
    [
        (200, 201, [(101, 200), (201, 300)]),  # both ends are included
        (201, 201, [(201, 300)]),
        (200, 200, [(101, 200)]),
        (0, 0, [(0, 99)]),
        (99, 400, [(0, 99), (101, 200), (201, 300), (301, 400)]),
        (100, 400, [(101, 200), (201, 300), (301, 400)]),
        (401, 500, []),
        (0, -1, []),
        (300, 100, []),
    ],
)
def test_find_gives_sessions_that_end_and_start_within(
    kip: SessionStore, earliest_end: int, latest_start: int, expected: list[tuple[int, int]]
) -> None:
    for backward in (False, True):
        found = kip.find("a", earliest_end, latest_start, backward=backward)
        spans = [("a", *span) for span in expected]
        assert _spans(found) == (spans[::-1] if backward else spans)


def test_find_leaves_out_a_start_that_is_too_late_and_goes_on() -> None:
    store = _store()
    store.put(SessionKey("a", 90, 100), 1)  # ends first and starts too late
    store.put(SessionKey("a", 10, 200), 2)
    assert _spans(store.find("a", 0, 50)) == [("a", 10, 200)]


def test_find_over_keys_is_half_open_and_in_the_order_of_end_then_key() -> None:
    store = _store(retention=10_000, num_segments=11, min_segment_interval=10)
    for key, start, end in (("b", 0, 900), ("a", 0, 2_500), ("c", 5, 900), ("a", 10, 900), ("a", 0, 900)):
        store.put(SessionKey(key, start, end), 1)
    expected = [("a", 0, 900), ("a", 10, 900), ("b", 0, 900), ("a", 0, 2_500)]
    assert _spans(store.find_range("a", "c", 0, 100)) == expected
    assert _spans(store.find_range("a", "c", 0, 100, backward=True)) == expected[::-1]
    assert _spans(store.find_range("a", "c", 901, 100)) == [("a", 0, 2_500)]
    assert _spans(store.find_range("a", "c", 0, 4)) == [("a", 0, 900), ("b", 0, 900), ("a", 0, 2_500)]
    assert _spans(store.find_range(None, "b", 0, 100)) == [("a", 0, 900), ("a", 10, 900), ("a", 0, 2_500)]
    assert _spans(store.find_range("c", None, 0, 100)) == [("c", 5, 900)]
    assert _spans(store.find_range("c", "a", 0, 100)) == []


@pytest.mark.parametrize("interval", [1, 7, 100, 10_000])
def test_by_end_is_half_open_and_does_not_depend_on_segments(interval: int) -> None:
    store = _store(retention=20_000, num_segments=1_000, min_segment_interval=interval)
    ends = [-150, -100, -1, 0, 99, 100, 101, 250]
    for end in ends[::-1]:
        for key in ("b", "a"):
            store.put(SessionKey(key, end - 10, end), end)
    for low, high in ((-100, 100), (-101, 101), (0, 0), (100, 0), (None, 0), (100, None), (None, None)):
        expected = [
            (key, end - 10, end)
            for end in ends
            for key in ("a", "b")
            if (low is None or end >= low) and (high is None or end < high)
        ]
        assert _spans(store.fetch_by_end(low, high)) == expected
        assert _spans(store.fetch_by_end(low, high, backward=True)) == expected[::-1]
    assert _spans(store.all()) == [(key, end - 10, end) for end in ends for key in ("a", "b")]


def test_one_session_and_all_of_a_key(kip: SessionStore) -> None:
    assert kip.fetch_session("a", 101, 200) == "101-200"
    assert kip.fetch_session("a", 101, 201) is None
    assert kip.fetch_session("aaa", 101, 200) is None
    assert _spans(kip.fetch("aa")) == [("aa", 0, 400)]
    assert _spans(kip.fetch("a", backward=True)) == [
        ("a", s, e) for s, e in ((301, 400), (201, 300), (101, 200), (0, 99))
    ]


# put, remove, retention


@pytest.mark.parametrize(("end", "kept"), [(899, False), (900, True), (901, True)])
@pytest.mark.parametrize("interval", [1, 100, 60_000])
def test_a_session_is_kept_until_it_ends_before_stream_time_less_retention(end: int, kept: bool, interval: int) -> None:
    store = _store(min_segment_interval=interval)
    store.put(SessionKey("a", 0, end), 1)
    store.put(SessionKey("b", 0, 1_900), 2)
    expected = [("a", 0, end)] if kept else []
    assert _spans(store.find("a", MIN_TIME, MAX_TIME)) == expected
    assert _spans(store.find_range("a", "b", MIN_TIME, MAX_TIME)) == expected
    assert _spans(store.fetch_by_end(MIN_TIME, 1_900)) == expected
    assert _spans(store.all())[:-1] == expected
    assert store.fetch_session("a", 0, end) == (1 if kept else None)
    late = _store(min_segment_interval=interval)
    late.put(SessionKey("b", 0, 1_900), 2)
    assert late.put(SessionKey("a", 0, end), 1) is kept
    assert late.dropped == (0 if kept else 1)
    assert _spans(late.fetch("a")) == expected


def test_a_late_delete_is_dropped_and_counted_too() -> None:
    store = _store()
    store.put(SessionKey("b", 0, 1_900), 2)
    assert not store.put(SessionKey("a", 0, 899), None)
    assert store.dropped == 1


def test_none_and_remove_delete_and_empty_values_are_values() -> None:
    store = _store()
    for value in (0, "", False, [], b""):
        store.put(SessionKey("a", 1, 2), value)
        assert store.fetch_session("a", 1, 2) == value
    store.put(SessionKey("a", 1, 2), None)
    assert store.fetch_session("a", 1, 2) is None
    store.put(SessionKey("a", 1, 2), 1)
    store.remove(SessionKey("a", 1, 3))
    assert _spans(store.all()) == [("a", 1, 2)]
    store.remove(SessionKey("a", 1, 2))
    store.remove(SessionKey("a", 1, 2))
    assert _spans(store.all()) == []


def test_stream_time_is_the_newest_end() -> None:
    store = _store()
    assert store.stream_time == NO_TIME
    assert list(store.fetch("a")) == list(store.all()) == []
    store.put(SessionKey("a", 5, 10), 1)
    store.put(SessionKey("a", 1, 3), 1)
    assert store.stream_time == 10
    store.put(SessionKey("a", 5, 20), None)
    assert store.stream_time == 20
    store.remove(SessionKey("a", 5, 30))
    assert store.stream_time == 30


def test_iterators_are_snapshots() -> None:
    store = _store(min_segment_interval=1)
    for at in (1, 600, 900):
        store.put(SessionKey("a", at, at), at)
    rows = [store.find("a", 0, 1_000), store.find_range("a", "b", 0, 1_000), store.all(), store.fetch_by_end(0, 901)]
    next(rows[0])
    store.remove(SessionKey("a", 600, 600))
    store.put(SessionKey("a", 900, 900), -1)
    store.put(SessionKey("b", 99_999, 99_999), 1)
    assert [[value for _, value in one] for one in rows] == [[600, 900], [1, 600, 900], [1, 600, 900], [1, 600, 900]]


@pytest.mark.parametrize(
    "session",
    [
        SessionKey(None, 1, 2),
        SessionKey([1], 1, 2),
        SessionKey("a", 2, 1),
        SessionKey("a", None, 1),  # type: ignore[arg-type]
        SessionKey("a", 1, 1.5),  # type: ignore[arg-type]
        SessionKey("a", MIN_TIME - 1, 1),
        SessionKey("a", 1, MAX_TIME + 1),
        "a",
        ("a", 1),
    ],
)
def test_a_bad_session_changes_nothing(session: Any) -> None:
    store = _store()
    for use in (lambda: store.put(session, 1), lambda: store.remove(session)):
        with pytest.raises(KeyInvalid):
            use()
    with pytest.raises(ValueInvalid):
        store.put(SessionKey("a", 1, 2), {1, 2})
    assert (store.stream_time, list(store.all())) == (NO_TIME, [])


def test_bad_conditions_are_refused() -> None:
    store = _store()
    with pytest.raises(KeyInvalid):
        store.find("a", None, 1)  # type: ignore[arg-type]
    with pytest.raises(KeyInvalid):
        store.find_range("a", "b", 1, "2")  # type: ignore[arg-type]
    with pytest.raises(KeyInvalid):
        store.fetch(None)


# space, and restarts


def test_find_reads_the_sessions_of_its_key_alone() -> None:
    base = CountingStore()
    stores = StoreSet(base, [SessionOptions("s", 100_000, 11, 1)])
    for at in range(0, 100_000, 1_000):
        for key in ("a", "b", "c"):
            stores["s"].put(SessionKey(key, at, at), 1)
    stores.flush()
    base.read.clear()
    assert len(list(stores["s"].find("b", 50_000, 52_000))) == 3
    assert len(base.read) == 50  # 50,000 to 99,000 of its key: a start says nothing of where to end


def test_expired_segments_go_without_a_look_at_their_rows() -> None:
    base = CountingStore()
    stores = StoreSet(base, [SessionOptions("s", 1_000, 11, 1)])  # segments of 100 ms
    for at in range(1_000):
        stores["s"].put(SessionKey("a", at, at), 1)
    stores.flush()
    stores["s"].put(SessionKey("a", 1_550, 1_550), 1)
    base.read.clear()
    stores.flush()
    assert len(base.read) <= 1  # the janitor's one look
    left = [key for key, _ in MemoryStore.scan(base, b"\x40\x00", b"\x40\x01")]
    assert len(left) == 501  # 500 to 999, and 1550: whole segments have gone
    assert len(list(stores["s"].all())) == 451  # 550 to 999, and 1550


def test_what_was_flushed_survives(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "s", retention=1_000) as store:
        store.put(SessionKey("a", 0, 5_000), [1, 2])
        store.put(SessionKey("a", 0, 10), [])
        store.flush()
        store.put(SessionKey("a", 0, 9_000), [3])
        store.close(flush=False)
    with SessionStore.open(tmp_path / "s", retention=1_000) as store:
        assert list(store.all()) == [(SessionKey("a", 0, 5_000), [1, 2])]
        assert (store.stream_time, store.dropped) == (5_000, 1)
        rows = store.all()
    with pytest.raises(StoreClosed):
        next(rows)
    with pytest.raises(ManifestMismatch):
        SessionStore.open(tmp_path / "s", retention=1_000, name="other")


def test_segments_stay_as_they_were_made_and_a_longer_retention_brings_nothing_back(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "s", retention=1_000, min_segment_interval=100) as store:
        assert store.segment_interval_ms == 500
        for at in (900, 1_000, 1_400, 2_000):
            store.put(SessionKey("a", at, at), 1)
    with SessionStore.open(tmp_path / "s", retention=60_000, min_segment_interval=7) as store:
        assert store.segment_interval_ms == 500
        assert [key.end for key, _ in store.all()] == [1_000, 1_400, 2_000]
        assert not store.put(SessionKey("a", 0, 999), 1)
        assert store.put(SessionKey("a", 0, 1_000), 1)
        assert next((key.start, key.end) for key, _ in store.fetch("a")) == (0, 1_000)


def test_a_retention_that_grew_a_thousandfold_does_not_look_into_empty_segments() -> None:
    base = CountingStore()
    small = StoreSet(base, [SessionOptions("s", 10, 2, 1)])
    small["s"].put(SessionKey("a", 0, 5), 1)
    small.flush()
    store: Any = StoreSet(base, [SessionOptions("s", 2**61, 2, 1)])["s"]
    for end in (7, 10**6, 2**60):
        store.put(SessionKey("a", 0, end), 1)
        store.put(SessionKey("b", 0, end), 1)
    assert store.segment_interval_ms == 10
    expected = [("a", 0, end) for end in (5, 7, 10**6, 2**60)]
    assert _spans(store.fetch("a")) == expected
    assert _spans(store.fetch("a", backward=True)) == expected[::-1]
    assert _spans(store.find_range("a", "b", 6, 0)) == expected[1:]
