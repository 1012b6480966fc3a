"""Named stores without Spark: one directory, one writer, changes made durable by `flush`.

>>> from backend.store.memory import MemoryStore
>>> from backend.stores.window_store import WindowOptions
>>> visits = WindowOptions("visits", retention="1 hour", window_size="1 minute")
>>> with StoreSet(MemoryStore(), [visits]) as stores:
...     stores["visits"].put("anna", 3, 60_000)
...     stores.flush()
...     stores["visits"].fetch_one("anna", 60_000)
True
3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from backend.boundary import in_order
from backend.errors import ManifestMismatch, StoreClosed
from backend.rocks import RocksOptions, RocksStore
from backend.store.bounds import FORMAT_KEY, reclaim, stored_bounds
from backend.store.protocol import Region, Store, region_range
from backend.store.storage import storage
from backend.store.workspace import Workspace
from backend.stores.named import Declaration, NamedStore, event_time

MAX_STORES = 0xFF - Region.USER
"""A region each, from `Region.USER` to 0xfe."""


def bind_all(declarations: Sequence[Declaration], work: Workspace, time_ms: int) -> dict[str, NamedStore]:
    """Bind stores to their regions, numbered from `Region.USER` in the order of declaration."""
    return {
        declaration.name: declaration.bind(work, Region.USER + number, time_ms)
        for number, declaration in enumerate(declarations)
    }


def check_declarations(declarations: Sequence[Declaration]) -> None:
    """Check that the stores of a job can live beside each other.

    Raises:
        ValueError: Something is no declaration; two stores of one name, or more than `MAX_STORES`.
    """
    given = in_order(declarations)  # they are numbered in their order
    if given is None or not all(callable(getattr(one, "bind", None)) for one in given):
        raise ValueError(f"stores={declarations!r}: must be a list of declarations such as window_store('name', ...)")
    names = [declaration.name for declaration in declarations]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"stores: the names {doubled} stand for two stores each; a name is given once")
    if len(names) > MAX_STORES:
        raise ValueError(f"stores: {len(names)} stores, at most {MAX_STORES} are allowed")


class StoreSet(Mapping[str, NamedStore]):
    """Named stores over one store of bytes, which they own.

    Args:
        store: Closed with the set.
        declarations: The stores, in the order in which they were declared the first time.
        time_ms: The time that TTL state goes by, until `begin`.
    """

    def __init__(self, store: Store, declarations: Sequence[Declaration], *, time_ms: int = 0) -> None:
        check_declarations(declarations)
        _refuse_shard(store)
        self._store: Store | None = store
        bounds = stored_bounds(store)
        reclaim(store, bounds)
        self._work = Workspace(store, bounds)
        self._stores = bind_all(declarations, self._work, time_ms)
        for named in self._stores.values():
            named._home = self

    @classmethod
    def open(
        cls,
        path: Path | str,
        declarations: Sequence[Declaration],
        *,
        time_ms: int = 0,
        options: RocksOptions | None = None,
        wait_s: float = 10.0,
    ) -> Self:
        """Open or make the database at `path`, and the directories above it.

        Raises:
            StoreLocked: Another process holds it for longer than `wait_s` seconds.
            ManifestMismatch: It holds other stores, or is a shard of a query.
        """
        with storage(str(path)):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        store = RocksStore.open(Path(path), options=options or RocksOptions(), wait_s=wait_s)
        with ExitStack() as undo:
            undo.callback(store.close)
            opened = cls(store, declarations, time_ms=time_ms)
            undo.pop_all()
        return opened

    def __getitem__(self, name: str) -> NamedStore:
        return self._stores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stores)

    def __len__(self) -> int:
        return len(self._stores)

    def begin(self, time_ms: int) -> None:
        """Set the time that TTL state goes by: what it would be of a micro-batch in Spark.

        Raises:
            KeyInvalid: It is no integer, or out of range.
        """
        time_ms = event_time(time_ms, "the time")
        for named in self._stores.values():
            named.set_time(time_ms)

    def flush(self) -> None:
        """Write all changes of all stores to disk: at once, atomically, durable on return."""
        if self._store is None:
            raise StoreClosed("the stores are closed", where=", ".join(self))
        for named in self._stores.values():
            named.save()
        changes = self._work.changes()
        self._store.write(changes)
        reclaim(self._store, changes.bounds)
        self._work = Workspace(self._store, changes.bounds)
        for named in self._stores.values():
            named._rebind(self._work)

    def close(self, *, flush: bool = True) -> None:
        """Close the stores; with `flush=False` what was not flushed is lost, as in a crash. Twice does nothing."""
        if self._store is None:
            return
        try:
            if flush:
                self.flush()
        finally:
            store, self._store = self._store, None
            for named in self._stores.values():
                named.release()
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(flush=kind is None)


def _refuse_shard(store: Store) -> None:
    """Refuse the database of a query's shard: a change outside of its commits would be lost, or counted twice."""
    start, end = region_range(Region.COMMIT)
    for key, _ in store.scan(start, end):
        if key != FORMAT_KEY and key[1:-1] != b"bound":
            raise ManifestMismatch(
                "the database belongs to a shard of a query",
                why=f"it has the row {key!r}",
                command="read it through the query, or choose another path",
            )
