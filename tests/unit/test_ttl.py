"""Spark's TTLState, rule by rule: the two indexes, and the state variables on top."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend.errors import KeyInvalid, ManifestMismatch, StoreClosed, ValueInvalid
from backend.store.memory import MemoryStore
from backend.store.protocol import MAX_VALUE_BYTES
from backend.store.workspace import Workspace
from backend.stores.standalone import StoreSet
from backend.stores.state_variables import ListState, MapState, TTLOptions, ValueState
from backend.stores.ttl import NEVER, OneToManyTTLState, OneToOneTTLState, TTLRow, TTLState
from tests.support.counting_store import CountingStore

INDEX, PRIMARY = b"\x40\x00", b"\x40\x01"


def _one(base: MemoryStore | None = None, **options: Any) -> OneToOneTTLState:
    return OneToOneTTLState(Workspace(base or MemoryStore()), 0x40, **{"ttl_ms": 100, "now_ms": 1_000, **options})


def _many(base: MemoryStore | None = None, **options: Any) -> OneToManyTTLState:
    return OneToManyTTLState(Workspace(base or MemoryStore()), 0x40, **{"ttl_ms": 100, "now_ms": 1_000, **options})


def _state(kind: str, **options: Any) -> Any:
    return TTLOptions(kind, "s", **options).bind(Workspace(MemoryStore()), 0x40, 1_000)


def _big_endian(number: int) -> bytes:
    return (number + 2**63).to_bytes(8, "big")


# the layout, and both indexes in step


def test_the_index_is_expiration_big_endian_then_element_key_to_nothing() -> None:
    state = _one()
    state.update_primary_and_secondary_indices(b"k", b"value")
    rows = dict(state.work.scan(b"\x40", b"\x41"))
    assert rows == {
        INDEX + _big_endian(1_100) + b"k": b"",
        PRIMARY + b"k": _big_endian(1_100) + b"value",
    }


def test_many_values_have_a_row_and_an_index_row_each() -> None:
    state = _many()
    state.update_primary_and_secondary_indices(False, b"k", [b"a", b"b"])
    state.now_ms = 1_050
    state.update_primary_and_secondary_indices(False, b"k", [b"c"])
    rows = dict(state.work.scan(b"\x40", b"\x41"))
    assert rows == {
        INDEX + _big_endian(1_100) + b"k" + _big_endian(0): b"",
        INDEX + _big_endian(1_100) + b"k" + _big_endian(1): b"",
        INDEX + _big_endian(1_150) + b"k" + _big_endian(2): b"",
        PRIMARY + b"k" + _big_endian(0): _big_endian(1_100) + b"a",
        PRIMARY + b"k" + _big_endian(1): _big_endian(1_100) + b"b",
        PRIMARY + b"k" + _big_endian(2): _big_endian(1_150) + b"c",
    }


def test_a_write_moves_the_index_row() -> None:
    state = _one()
    state.update_primary_and_secondary_indices(b"k", b"1")
    state.now_ms = 1_050
    state.update_primary_and_secondary_indices(b"k", b"2")
    assert list(state.ttl_index_iterator()) == [TTLRow(1_150, b"k")]
    state.ttl_ms = None  # and a write without TTL takes it out: what it said must not evict the new value
    state.update_primary_and_secondary_indices(b"k", b"3")
    assert list(state.ttl_index_iterator()) == []
    state.now_ms = 10_000
    assert state.clear_expired_state_for_all_keys() == 0
    assert state.get(b"k") == b"3"
    state.update_primary_and_secondary_indices(b"k", b"4", 10_001)
    assert list(state.ttl_index_iterator()) == [TTLRow(10_001, b"k")]


def test_the_trait_asks_for_two_methods_only() -> None:
    assert TTLState.__abstractmethods__ == {"clear_expired_state_for_all_keys", "clear_all_state_for_element_key"}

    class Flags(TTLState):
        """Elements without a value of their own."""

        def clear_expired_state_for_all_keys(self, limit: int | None = None) -> int:
            rows = list(self.ttl_eviction_iterator())
            for row in rows:
                self.delete_from_ttl_index(*row)
            return len(rows)

        def clear_all_state_for_element_key(self, element_key: bytes) -> int:
            return 0

    flags = Flags(Workspace(MemoryStore()), 0x40, ttl_ms=100, now_ms=1_000)
    flags.insert_into_ttl_index(1_000, b"old")
    flags.insert_into_ttl_index(1_001, b"new")
    flags.insert_into_ttl_index(NEVER, b"eternal")
    assert flags.clear_expired_state_for_all_keys() == 1
    assert list(flags.ttl_index_iterator()) == [TTLRow(1_001, b"new")]


# expiration: expired iff now >= expiration


@pytest.mark.parametrize(("now", "live"), [(1_000, True), (1_099, True), (1_100, False), (1_101, False)])
def test_expired_from_its_expiration_on(now: int, live: bool) -> None:
    one, many = _one(), _many()
    one.update_primary_and_secondary_indices(b"k", b"v")
    many.update_primary_and_secondary_indices(True, b"k", [b"v"])
    one.now_ms = many.now_ms = now
    assert one.get(b"k") == (b"v" if live else None)
    assert list(one.scan(b"")) == ([(b"k", b"v")] if live else [])
    assert list(many.values(b"k")) == ([b"v"] if live else [])
    assert list(many.scan()) == ([(b"k", b"v")] if live else [])
    assert one.clear_expired_state_for_all_keys() == many.clear_expired_state_for_all_keys() == (0 if live else 1)
    assert len(list(one.work.scan(b"\x40", b"\x41"))) == len(list(many.work.scan(b"\x40", b"\x41"))) == 2 * live


def test_each_value_of_a_list_expires_at_its_own_time() -> None:
    pages = _state("list", ttl=100)
    pages.append_value("a", 1)
    pages.set_time(1_060)
    pages.append_list("a", [2, 3])
    pages.set_time(1_100)
    assert list(pages.get("a")) == [2, 3]
    assert pages.clear_expired_state_for_all_keys() == 1
    pages.append_value("a", 4)
    assert list(pages.get("a")) == [2, 3, 4]
    pages.set_time(1_160)
    assert list(pages.get("a")) == [4]
    pages.set_time(1_200)
    assert not pages.exists("a")
    assert pages.clear_expired_state_for_all_keys() == 3
    pages.append_value("a", 5)
    assert list(pages.get("a")) == [5]


def test_reads_do_not_refresh() -> None:
    last = _state("value", ttl=100)
    last.update("a", 1)
    for now in (1_050, 1_099):
        last.set_time(now)
        assert last.get("a") == 1
        assert last.exists("a")
    last.set_time(1_100)
    assert last.get("a") is None


@pytest.mark.parametrize("time", [1.5, None, True, 2**63])
def test_a_time_that_is_none_changes_nothing(time: Any) -> None:
    declared = [TTLOptions("value", "s", ttl=100)]
    stores = StoreSet(MemoryStore(), declared, time_ms=0)
    state: Any = stores["s"]
    state.update("a", 1)
    for take in (stores.begin, state.set_time, lambda time: StoreSet(MemoryStore(), declared, time_ms=time)):
        with pytest.raises(KeyInvalid, match="the time"):
            take(time)
    assert state.get("a") == 1
    stores.begin(100)
    assert state.get("a") is None
    stores.flush()
    assert list(state.ttl_state.ttl_index_iterator()) == []


def test_what_expires_while_it_is_iterated_over_is_given_still() -> None:
    last, pages, seen = (_state(kind, ttl=100) for kind in ("value", "list", "map"))
    for key in ("a", "b"):
        last.update(key, 1)
        pages.append_value("k", key)
        seen.update_value("k", key, 1)
    rows = [last.items(), pages.get("k"), pages.items(), seen.items("k")]
    assert [next(one) for one in rows] == [("a", 1), "a", ("k", "a"), ("a", 1)]
    for state in (last, pages, seen):
        state.set_time(10_000)
    assert [list(one) for one in rows] == [[("b", 1)], ["b"], [("k", "b")], [("b", 1)]]
    assert list(last.items()) == []


def test_without_ttl_nothing_expires() -> None:
    for kind in ("value", "list", "map"):
        state = _state(kind)
        {
            "value": lambda one=state: one.update("a", 1),
            "list": lambda one=state: one.put("a", [1]),
            "map": lambda one=state: one.update_value("a", "b", 1),
        }[kind]()
        state.set_time(2**62)
        assert state.exists("a")
        assert state.clear_expired_state_for_all_keys() == 0
        assert list(state.ttl_state.ttl_index_iterator()) == []


# what cleaning up reads


def _filled(kind: str) -> tuple[CountingStore, StoreSet]:
    base = CountingStore()
    stores = StoreSet(base, [TTLOptions(kind, "s", ttl=1_000)], time_ms=0)
    for now in range(100):
        stores.begin(now)
        for key in ("a", "b", "c"):
            if kind == "value":
                stores["s"].update(f"{key}{now}", now)  # type: ignore[attr-defined]
            elif kind == "list":
                stores["s"].append_value(key, now)  # type: ignore[attr-defined]
            else:
                stores["s"].update_value(key, now, now)  # type: ignore[attr-defined]
    stores.flush()
    base.read.clear()
    return base, stores


@pytest.mark.parametrize("kind", ["value", "list", "map"])
def test_clearing_what_expired_reads_that_and_nothing_else(kind: str) -> None:
    base, stores = _filled(kind)
    state: Any = stores["s"]
    state.set_time(999)
    assert state.clear_expired_state_for_all_keys() == 0
    assert base.read == []
    state.set_time(1_004)
    assert state.clear_expired_state_for_all_keys() == 15
    assert len(base.read) == 15  # of 300 rows and as many index rows
    assert all(key.startswith(INDEX) for key in base.read)
    stores.flush()
    assert len([key for key, _ in MemoryStore.scan(base, INDEX, b"\x40\x02")]) == 2 * 285


@pytest.mark.parametrize(("kind", "rows"), [("value", 1), ("list", 100), ("map", 100)])
def test_clearing_a_key_reads_its_rows_and_nothing_else(kind: str, rows: int) -> None:
    base, stores = _filled(kind)
    state: Any = stores["s"]
    state.clear("b50" if kind == "value" else "b")
    assert len(base.read) == rows
    assert all(key.startswith(PRIMARY) for key in base.read)
    stores.flush()
    assert len([key for key, _ in MemoryStore.scan(base, INDEX, b"\x40\x02")]) == 2 * (300 - rows)


@pytest.mark.parametrize("again", [False, True])
def test_the_rows_of_a_list_do_not_depend_on_where_attempts_end(again: bool) -> None:
    work = Workspace(MemoryStore())
    state = OneToManyTTLState(work, 0x40, ttl_ms=100, now_ms=1_000)
    steps = [
        (1_000, lambda one: one.update_primary_and_secondary_indices(False, b"k", [b"1", b"2"])),
        (1_100, lambda one: one.clear_expired_state_for_all_keys()),
        (1_100, lambda one: one.update_primary_and_secondary_indices(False, b"k", [b"3"])),
        (1_150, lambda one: one.clear_all_state_for_element_key(b"k")),
        (1_150, lambda one: one.update_primary_and_secondary_indices(False, b"k", [b"4", b"5"])),
        (1_160, lambda one: one.update_primary_and_secondary_indices(True, b"k", [b"6", b"7"])),
        (1_170, lambda one: one.update_primary_and_secondary_indices(False, b"k", [b"8"])),
    ]
    sequences = []
    for now, step in steps:
        if again:
            state = OneToManyTTLState(work, 0x40, ttl_ms=100, now_ms=now)
        state.now_ms = now
        step(state)
        sequences.append([int.from_bytes(key[-8:], "big") - 2**63 for key, _ in work.scan(PRIMARY, b"\x40\x02")])
    assert sequences == [[0, 1], [], [0], [], [0, 1], [0, 1], [0, 1, 2]]


def test_what_never_expires_leaves_no_deletes_in_the_index() -> None:
    state = _many(ttl_ms=None)
    state.update_primary_and_secondary_indices(False, b"k", [b"1", b"2"])
    state.clear_all_state_for_element_key(b"k")
    assert all(key.startswith(PRIMARY) for key in state.work.changes().keys)


def test_cleaning_up_can_be_bounded() -> None:
    state = _many()
    state.update_primary_and_secondary_indices(True, b"k", [b"%d" % number for number in range(10)])
    state.now_ms = 5_000
    assert [state.clear_expired_state_for_all_keys(limit=4) for _ in range(4)] == [4, 4, 2, 0]


# state variables


def test_null_deletes_and_empty_values_are_values() -> None:
    last, seen = _state("value", ttl=100), _state("map", ttl=100)
    for value in (0, "", False, [], b""):
        last.update("a", value)
        seen.update_value("a", "b", value)
        assert last.get("a") == seen.get_value("a", "b") == value
        assert last.exists("a") and seen.contains_key("a", "b")
    last.update("a", None)
    seen.update_value("a", "b", None)
    assert not last.exists("a") and not seen.contains_key("a", "b") and not seen.exists("a")
    for state in (last, seen):
        assert list(state.ttl_state.ttl_index_iterator()) == []


def test_lists_are_replaced_appended_and_cleared() -> None:
    pages = _state("list", ttl=100)
    pages.put("a", [1, 2])
    pages.append_list("a", iter([3]))
    pages.append_list("a", [])
    pages.put("ab", [9])
    assert list(pages.get("a")) == [1, 2, 3]
    pages.put("a", ["x"])
    assert list(pages.items()) == [("a", "x"), ("ab", 9)]
    pages.put("a", [])
    assert not pages.exists("a")
    pages.append_value("a", 0)
    pages.clear("a")
    assert list(pages.items()) == [("ab", 9)]
    assert len(list(pages.ttl_state.ttl_index_iterator())) == 1


def test_entries_of_a_map_belong_to_their_key() -> None:
    seen = _state("map", ttl=100)
    for key, map_key in (("a", "bc"), ("ab", "c"), ("a", 2), ("a", 1), ("a", ("x", 1))):
        seen.update_value(key, map_key, f"{key}.{map_key}")
    assert list(seen.keys("a")) == [1, 2, "bc", ("x", 1)]
    assert list(seen.values("ab")) == ["ab.c"]
    seen.remove_key("a", 1)
    seen.clear("ab")
    seen.clear("not there")
    assert list(seen.items("a")) == [(2, "a.2"), ("bc", "a.bc"), (("x", 1), "a.('x', 1)")]
    assert not seen.exists("ab")


def test_iterators_are_snapshots() -> None:
    pages, seen = _state("list"), _state("map")
    pages.put("a", [1, 2, 3])
    for map_key in (1, 2, 3):
        seen.update_value("a", map_key, map_key)
    rows, entries = pages.get("a"), seen.items("a")
    next(rows)
    pages.clear("a")
    seen.clear("a")
    assert list(rows) == [2, 3]
    assert list(entries) == [(1, 1), (2, 2), (3, 3)]


def test_bad_input_changes_nothing() -> None:
    last, pages, seen = _state("value"), _state("list", value_type=int), _state("map")
    pages.put("a", [1])
    for use in (
        lambda: last.update(None, 1),
        lambda: last.get([1]),
        lambda: pages.append_value(None, 1),
        lambda: seen.update_value("a", None, 1),
        lambda: seen.get_value(None, "b"),
    ):
        with pytest.raises(KeyInvalid):
            use()
    for use in (
        lambda: last.update("a", {1}),
        lambda: pages.put("a", None),
        lambda: pages.put("a", [2, None]),
        lambda: pages.append_list("a", [2, "text"]),
        lambda: pages.put("a", "text"),
    ):
        with pytest.raises(ValueInvalid):
            use()
    assert list(pages.items()) == [("a", 1)]
    assert list(last.items()) == []


def test_bad_options_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^name cannot be null$"):
        TTLOptions("value", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="allowed are value, list, map"):
        TTLOptions("set", "s")
    for ttl in (0, -1):
        with pytest.raises(ValueError, match="ttl="):
            TTLOptions("value", "s", ttl)
    with pytest.raises(TypeError):
        TTLOptions("value", "s", 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        TTLOptions("value", "s", None, lambda: 0)


# with a database of its own


def test_both_indexes_survive_together_or_not_at_all(tmp_path: Path) -> None:
    with ValueState.open(tmp_path / "s", ttl=100, time_ms=1_000) as last:
        last.update("a", 1)
        last.flush()
        last.update("a", 2)
        last.update("b", 3)
        last.close(flush=False)
    with ValueState.open(tmp_path / "s", ttl=100, time_ms=1_099) as last:
        assert list(last.items()) == [("a", 1)]
        assert next(last.ttl_state.ttl_index_iterator()).expiration_ms == 1_100
        last.set_time(1_100)
        last.flush()  # cleans up
        assert list(last.ttl_state.ttl_index_iterator()) == []
        last.set_time(1_000)
        assert last.get("a") is None  # what was cleaned up stays gone
    with pytest.raises(ManifestMismatch, match="declared list"):
        ListState.open(tmp_path / "s", name="state")
    with pytest.raises(StoreClosed):
        last.get("a")
    with MapState.open(tmp_path / "m") as seen, ListState.open(tmp_path / "l") as pages:
        seen.update_value("a", "b", 1)
        pages.append_value("a", 1)
    with MapState.open(tmp_path / "m") as seen, ListState.open(tmp_path / "l") as pages:
        assert list(seen.items("a")) == [("b", 1)]
        assert list(pages.get("a")) == [1]


def test_a_value_that_is_too_large_with_its_expiration_changes_nothing() -> None:
    work = Workspace(MemoryStore())
    one = OneToOneTTLState(work, 0x40, ttl_ms=100, now_ms=0)
    many = OneToManyTTLState(work, 0x42, ttl_ms=100, now_ms=0)
    one.update_primary_and_secondary_indices(b"a", b"v")
    many.update_primary_and_secondary_indices(True, b"a", [b"v"])
    before = dict(work.scan(b"\x00", None))
    one.now_ms = many.now_ms = 50
    large = bytes(MAX_VALUE_BYTES - 4)
    with pytest.raises(ValueInvalid, match="size bound"):
        one.update_primary_and_secondary_indices(b"a", large)
    with pytest.raises(ValueInvalid, match="size bound"):
        many.update_primary_and_secondary_indices(True, b"a", [large])
    assert dict(work.scan(b"\x00", None)) == before
