"""Stores and workspaces against plain dicts, with crashes between stage and confirm as rules."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from backend.errors import BoundViolated, StateCorrupted
from backend.rocks import RocksStore
from backend.store.bounds import reclaim, stored_bounds
from backend.store.protocol import Changes, Staged
from backend.store.workspace import Workspace
from tests.support.twin import MemoryTwin

Store = MemoryTwin | RocksStore
REGIONS = (1, 2, 0x40)
TAILS = [b"", b"\x00", b"\x00\x00", b"\x01", b"a", b"a\x00", b"aa", b"b", b"\xfe", b"\xff", b"\xff\xff"]
KEYS = [bytes([region]) + tail for region in REGIONS for tail in TAILS]
keys = st.sampled_from(KEYS)
values = st.sampled_from([b"", b"\x00", b"0", b"value", b"x" * 300])
ends = st.one_of(st.none(), keys, st.sampled_from([b"\x02", b"\x03", b"\xff"]))
rows = st.dictionaries(keys, st.one_of(st.none(), values), max_size=8)


def visible(model: dict[bytes, bytes], bounds: dict[int, bytes]) -> dict[bytes, bytes]:
    return {key: value for key, value in model.items() if key >= bounds.get(key[0], b"")}


def copy_running(source: Path, target: Path) -> None:
    """Copy what a process that is killed now would leave: the files as they are while the store is open."""

    def listed() -> list[tuple[str, int]]:
        return sorted((path.name, path.stat().st_size) for path in source.iterdir())

    while True:  # a compaction may move files meanwhile
        try:
            before = listed()
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("LOCK"))
            if listed() == before:
                return
        except (shutil.Error, FileNotFoundError):
            pass
        shutil.rmtree(target, ignore_errors=True)


class StoreMachine(RuleBasedStateMachine):
    """One store, at most one workspace over it, at most one staged file that waits."""

    make: Callable[[Path], Store]
    again: Callable[[Store, Path], tuple[Store, Path]]  # what is there after the process was killed

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="rewind-model-"))
        self.names = itertools.count()
        self.path = self.new_path()
        self.store = type(self).make(self.path)
        self.model: dict[bytes, bytes] = {}
        self.bounds: dict[int, bytes] = {}
        self.waiting: tuple[Staged, dict[bytes, bytes], dict[int, bytes]] | None = None
        self.begin()

    def new_path(self) -> Path:
        return self.home / str(next(self.names))

    def begin(self) -> None:
        """Start an attempt over what is committed."""
        self.work = Workspace(self.store, stored_bounds(self.store))
        self.view, self.view_bounds = visible(self.model, self.bounds), dict(self.bounds)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.home)

    # ---- the workspace

    @rule(key=keys, value=values)
    def put(self, key: bytes, value: bytes) -> None:
        if key < self.view_bounds.get(key[0], b""):
            with pytest.raises(BoundViolated):
                self.work.put(key, value)
        else:
            self.work.put(key, value)
            self.view[key] = value

    @rule(pairs=st.lists(st.tuples(keys, values), max_size=12))
    def put_many(self, pairs: list[tuple[bytes, bytes]]) -> None:
        call = [key for key, _ in pairs], [value for _, value in pairs]
        if any(key < self.view_bounds.get(key[0], b"") for key in call[0]):
            with pytest.raises(BoundViolated):
                self.work.put_many(*call)
        else:
            self.work.put_many(*call)
            self.view |= dict(pairs)

    @rule(some=st.lists(keys, min_size=1, max_size=6))
    def delete(self, some: list[bytes]) -> None:
        if len(some) == 1:
            self.work.delete(some[0])
        else:
            self.work.delete_many(some)
        for key in some:
            self.view.pop(key, None)

    @rule(key=keys)
    def raise_bound(self, key: bytes) -> None:
        self.work.raise_bound(key[0], key)
        self.view_bounds[key[0]] = max(key, self.view_bounds.get(key[0], bytes([key[0]])))
        if self.view_bounds[key[0]] == bytes([key[0]]):
            del self.view_bounds[key[0]]
        self.view = visible(self.view, self.view_bounds)

    @rule(start=keys, end=ends, reverse=st.booleans(), wanted=st.lists(keys, max_size=12))
    def read(self, start: bytes, end: bytes | None, reverse: bool, wanted: list[bytes]) -> None:
        for source, model in ((self.work, self.view), (self.store, self.model)):
            expected = sorted(row for row in model.items() if start <= row[0] and (end is None or row[0] < end))
            got_keys, got_values = source.scan_arrays(start, end)
            assert list(zip(got_keys, got_values, strict=True)) == expected
            assert list(source.scan(start, end, reverse=reverse)) == expected[:: -1 if reverse else 1]
            assert source.get_many(wanted) == [model.get(key) for key in wanted]
            assert [source.get(key) for key in wanted] == [model.get(key) for key in wanted]

    # ---- commits

    @rule()
    @precondition(lambda self: self.waiting is None)
    def stage(self) -> None:
        changes = self.work.changes()
        assert list(changes.keys) == sorted(set(changes.keys))
        assert all(key >= self.view_bounds.get(key[0], b"") for key in changes.keys)
        assert dict(changes.bounds) == self.view_bounds
        after = dict(self.model)
        for key, value in zip(changes.keys, changes.values, strict=True):
            if value is None:
                after.pop(key, None)
            else:
                after[key] = value
        assert visible(after, self.view_bounds) == self.view
        self.waiting = self.store.stage(changes, self.new_path()), after, dict(self.view_bounds)
        self.begin()

    @rule(twice=st.booleans())
    @precondition(lambda self: self.waiting is not None)
    def confirm(self, twice: bool) -> None:
        staged, self.model, self.bounds = self.waiting
        for _ in range(1 + twice):
            self.store.confirm(staged)
        self.waiting = None
        self.begin()

    @rule()
    @precondition(lambda self: self.waiting is not None)
    def forget_staged(self) -> None:
        self.waiting[0].path.unlink()
        self.waiting = None

    @rule(at=st.floats(0, 0.999))
    @precondition(lambda self: self.waiting is not None)
    def damage_staged(self, at: float) -> None:
        staged = self.waiting[0]
        data = bytearray(staged.path.read_bytes())
        data[int(at * len(data))] ^= 0x55
        staged.path.write_bytes(data)
        with pytest.raises(StateCorrupted):
            self.store.confirm(staged)
        self.waiting = None

    @rule()
    def commit_at_once(self) -> None:
        if self.waiting is not None:
            self.forget_staged()
        self.stage()
        staged, self.model, self.bounds = self.waiting
        staged.path.unlink()
        self.waiting = None
        changes = self.work.changes()
        assert len(changes) == 0
        # what was staged, written without a file
        missing = dict.fromkeys(set(dict(self.store.scan(b"\x01", None))) - set(self.model))
        final = dict(sorted((self.model | missing).items()))
        self.store.write(Changes(list(final), list(final.values()), self.bounds))
        self.begin()

    # ---- the store's own life

    @rule(start=keys, end=keys)
    def delete_range(self, start: bytes, end: bytes) -> None:
        if self.waiting is not None:
            self.forget_staged()
        self.store.delete_range(start, end)
        self.model = {key: value for key, value in self.model.items() if not start <= key < end}
        self.begin()

    @rule()
    def janitor(self) -> None:
        if self.waiting is not None:
            self.forget_staged()
        cleaned = reclaim(self.store, stored_bounds(self.store))
        hidden = {key[0] for key in self.model if key < self.bounds.get(key[0], b"")}
        assert set(cleaned) == hidden
        self.model = visible(self.model, self.bounds)
        assert reclaim(self.store, stored_bounds(self.store)) == []
        self.begin()

    @rule()
    def killed(self) -> None:
        """The process dies: the attempt is gone, a staged file may wait for the next one."""
        self.store, self.path = type(self).again(self.store, self.new_path())
        self.begin()

    @rule()
    def move_to_checkpoint(self) -> None:
        path = self.new_path()
        self.store.checkpoint(path)
        self.store.close()
        self.store, self.path = type(self.store).open(path), path  # type: ignore[attr-defined]
        self.begin()

    @invariant()
    def bounds_are_stored(self) -> None:
        assert stored_bounds(self.store) == self.bounds


class MemoryMachine(StoreMachine):
    @staticmethod
    def make(_: Path) -> Store:
        return MemoryTwin()

    @staticmethod
    def again(store: Store, path: Path) -> tuple[Store, Path]:
        store.checkpoint(path)
        store.close()
        return MemoryTwin.open(path), path


class RocksMachine(StoreMachine):
    make = staticmethod(RocksStore.open)

    @staticmethod
    def again(store: Store, path: Path) -> tuple[Store, Path]:
        assert isinstance(store, RocksStore)
        copy_running(store.path, path)
        store.close()
        return RocksStore.open(path), path


@pytest.mark.parametrize(("machine", "examples"), [(MemoryMachine, 60), (RocksMachine, 25)])
@pytest.mark.slow
def test_a_store_is_a_dict(machine: type[StoreMachine], examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.store.workspace.RUN_ROWS", 4)  # runs are met by small examples
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None))
