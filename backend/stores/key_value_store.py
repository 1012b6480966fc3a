"""A plain key-value store: nothing expires, keys are in order.

Layout of the rows behind region byte and sub-byte BY_KEY (see `backend.stores.named`)::

    | key | -> value

>>> from backend.store.memory import MemoryStore
>>> from backend.store.workspace import Workspace
>>> store = KeyValueOptions("totals", value_type=int).bind(Workspace(MemoryStore()), 0x40, 0)
>>> store.put("user_2", 5); store.put("user_12", 0); store.put("user_1", 7); store.put("user_2", None)
>>> store.get("user_12"), store.get("user_2"), list(store.range("user_1", "user_12"))
(0, None, [('user_1', 7)])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from backend.keys import decode
from backend.rocks import RocksOptions
from backend.store.workspace import Workspace
from backend.stores.named import BEYOND, ROWS_AT, NamedStore, check_name, described, encode_key
from backend.stores.standalone import StoreSet
from backend.stores.values import ValueCodec


@dataclass(frozen=True, slots=True)
class KeyValueOptions:
    """A key-value store by name and options: what `process(stores=[...])` takes.

    Args:
        name: Name of the store.
        value_type: As in `values.ValueCodec`.

    Raises:
        TypeError: The name is None or no string, or msgspec does not support the type.
        ValueError: The name is empty.
    """

    kind: ClassVar[str] = "key-value"

    name: str
    value_type: Any = None

    def __post_init__(self) -> None:
        check_name(self.name)
        ValueCodec(self.value_type)

    def bind(self, work: Workspace, region: int, time_ms: int) -> KeyValueStore:
        """Give the store over one attempt's workspace."""
        return KeyValueStore(work, region, self)

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry."""
        return described(self)


class KeyValueStore(NamedStore):
    """A key-value store over a workspace; `open` gives one with a database of its own.

    Args:
        work: Where every read and write goes.
        region: The region that the store owns.
        options: Name and value type.
    """

    options: KeyValueOptions

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        value_type: Any = None,
        name: str = "key-value",
        options: RocksOptions | None = None,
        wait_s: float = 10.0,
    ) -> Self:
        """Open or make a key-value store of its own at `path`, without Spark.

        Raises:
            StoreLocked: Another process holds it for longer than `wait_s` seconds.
            ManifestMismatch: There is another store at `path`.
        """
        declared = KeyValueOptions(name, value_type)
        return cast(Self, StoreSet.open(path, [declared], options=options, wait_s=wait_s)[name])

    def get(self, key: object) -> Any:
        """Return the value of a key, None when there is none."""
        return self._values.decode(self._work.get(self._by_key + encode_key(key)))

    def get_many(self, keys: Sequence[object]) -> list[Any]:
        """Return the values of many keys, in their order."""
        return list(map(self._values.decode, self._work.get_many([self._by_key + encode_key(key) for key in keys])))

    def put(self, key: object, value: object) -> None:
        """Set the value of a key; None deletes it.

        Raises:
            KeyInvalid: The key is None or has no order.
            ValueInvalid: The value cannot be stored.
        """
        row = self._by_key + encode_key(key)
        if value is None:
            self._work.delete(row)
        else:
            self._work.put(row, self._values.encode(value))

    def put_if_absent(self, key: object, value: object) -> Any:
        """Set the value of a key that has none; return the value that was there."""
        found = self.get(key)
        if found is None:
            self.put(key, value)
        return found

    def delete(self, key: object) -> Any:
        """Remove a key; return the value that was there."""
        found = self.get(key)
        self._work.delete(self._by_key + encode_key(key))
        return found

    def range(self, first: object, last: object, *, backward: bool = False) -> Iterator[tuple[Any, Any]]:
        """Iterate over the keys in `[first, last)` and their values, in order; None is no limit; a snapshot."""
        low = self._by_key + (b"" if first is None else encode_key(first))
        high = self._by_key + (BEYOND if last is None else encode_key(last))
        rows = self._work.scan(low, max(low, high), reverse=backward)
        decode_value = self._values.decode
        return self._iterate((decode(key[ROWS_AT:]), decode_value(value)) for key, value in rows)

    def all(self, *, backward: bool = False) -> Iterator[tuple[Any, Any]]:
        """Iterate over everything."""
        return self.range(None, None, backward=backward)
