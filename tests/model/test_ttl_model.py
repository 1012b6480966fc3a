"""TTL state against plain dicts and lists: time in both directions, cleaning up, restarts and crashes as rules."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from backend.store.memory import MemoryStore
from backend.stores.standalone import StoreSet
from backend.stores.state_variables import TTLOptions

KEYS = st.sampled_from(["", "a", "ab", "a\0", "b"])
MAP_KEYS = st.sampled_from([1, "", "b", "bc", ("x", 1)])
VALUES = st.one_of(st.integers(-3, 3), st.sampled_from(["", False, "x"]))
TTLS = st.one_of(st.none(), st.integers(1, 30))
KINDS = ("value", "list", "map")


class TTLMachine(RuleBasedStateMachine):
    """One store of each kind in one database, so that a slip into a neighbour's region shows.

    The model: (kind, key, map key) -> [(value, expiration)], None for never.
    """

    @initialize(ttl=TTLS)
    def begin(self, ttl: int | None) -> None:
        self.now, self.ttl = 1_000, ttl
        self.model: dict[tuple[str, str, Any], list[tuple[Any, int | None]]] = {}
        self.committed = copy.deepcopy(self.model)
        self.make()

    def make(self) -> None:
        self.base = MemoryStore()
        self.open()

    def declared(self) -> list[TTLOptions]:
        return [TTLOptions(kind, kind, ttl=self.ttl) for kind in KINDS]

    def open(self) -> None:
        self.stores = StoreSet(self.base, self.declared(), time_ms=self.now)

    def end_process(self) -> None:
        """Crash: what was not flushed is in no one's hands any more."""

    @property
    def one(self) -> Any:
        return self.stores["value"]

    @property
    def many(self) -> Any:
        return self.stores["list"]

    @property
    def map(self) -> Any:
        return self.stores["map"]

    def stamp(self, values: Sequence[Any]) -> list[tuple[Any, int | None]]:
        return [(value, None if self.ttl is None else self.now + self.ttl) for value in values]

    def live(self, at: tuple[str, str, Any]) -> list[Any]:
        return [value for value, ends in self.model.get(at, []) if ends is None or self.now < ends]

    @rule(key=KEYS, value=st.none() | VALUES)
    def update(self, key: str, value: Any) -> None:
        self.one.update(key, value)
        self.model["value", key, None] = [] if value is None else self.stamp([value])

    @rule(key=KEYS, values=st.lists(VALUES, max_size=3), replace=st.booleans())
    def write_list(self, key: str, values: list[Any], replace: bool) -> None:
        (self.many.put if replace else self.many.append_list)(key, values)
        at = ("list", key, None)
        self.model[at] = ([] if replace else self.model.get(at, [])) + self.stamp(values)

    @rule(key=KEYS, map_key=MAP_KEYS, value=st.none() | VALUES)
    def update_entry(self, key: str, map_key: Any, value: Any) -> None:
        self.map.update_value(key, map_key, value)
        self.model["map", key, map_key] = [] if value is None else self.stamp([value])

    @rule(kind=st.sampled_from(KINDS), key=KEYS)
    def clear(self, kind: str, key: str) -> None:
        self.stores[kind].clear(key)  # type: ignore[attr-defined]
        self.model = {at: values for at, values in self.model.items() if at[:2] != (kind, key)}

    @rule(step=st.integers(-15, 40))
    def time_passes(self, step: int) -> None:
        self.now += step
        self.stores.begin(self.now)

    @rule(kind=st.sampled_from(KINDS))
    def clear_expired(self, kind: str) -> None:
        removed = self.stores[kind].clear_expired_state_for_all_keys()  # type: ignore[attr-defined]
        assert removed == self.clean(kind)

    def clean(self, kind: str) -> int:
        before = sum(len(values) for at, values in self.model.items() if at[0] == kind)
        for at, values in self.model.items():
            if at[0] == kind:
                self.model[at] = [(value, ends) for value, ends in values if ends is None or self.now < ends]
        return before - sum(len(values) for at, values in self.model.items() if at[0] == kind)

    @rule()
    def flush(self) -> None:
        self.stores.flush()
        for kind in KINDS:
            self.clean(kind)
        self.committed = copy.deepcopy(self.model)

    @rule(ttl=TTLS, flush=st.booleans())
    def start_again(self, ttl: int | None, flush: bool) -> None:
        if flush:
            self.flush()
        self.end_process()
        self.model = copy.deepcopy(self.committed)
        self.ttl = ttl
        self.open()

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "stores"):
            return
        for key in ("", "a", "ab", "a\0", "b"):
            values = self.live(("value", key, None))
            assert self.one.get(key) == (values[0] if values else None)
            assert self.one.exists(key) is bool(values)
            assert list(self.many.get(key)) == self.live(("list", key, None))
            entries = {at[2]: self.live(at)[0] for at in self.model if at[:2] == ("map", key) and self.live(at)}
            assert dict(self.map.items(key)) == entries
            assert self.map.exists(key) is bool(entries)

    @invariant()
    def one_index_row_for_each_value_that_ends(self) -> None:
        if not hasattr(self, "stores"):
            return
        for kind in KINDS:
            index = [row.expiration_ms for row in self.stores[kind].ttl_state.ttl_index_iterator()]  # type: ignore[attr-defined]
            ends = [end for at, values in self.model.items() if at[0] == kind for _, end in values if end is not None]
            assert index == sorted(ends)


class RocksMachine(TTLMachine):
    """The same on disk."""

    def make(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="ttl-state-"))
        self.open()

    def open(self) -> None:
        self.stores = StoreSet.open(self.path / "store", self.declared(), time_ms=self.now)

    def end_process(self) -> None:
        self.stores.close(flush=False)

    def teardown(self) -> None:
        if hasattr(self, "path"):
            self.stores.close(flush=False)
            shutil.rmtree(self.path)


TestPersistent = TTLMachine.TestCase
TestPersistent.settings = settings(max_examples=40, stateful_step_count=30)
TestOnDisk = RocksMachine.TestCase
TestOnDisk.settings = settings(max_examples=6, stateful_step_count=25)
