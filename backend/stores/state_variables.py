"""Value, list and map state with a time to live, on top of `backend.stores.ttl`.

The state variables encode what the user stores; the TTL classes under them keep both indexes. Each call names its
grouping key, since one function sees all keys of a shard.

>>> from backend.store.memory import MemoryStore
>>> from backend.store.workspace import Workspace
>>> last = TTLOptions("value", "last page", ttl="30 minutes").bind(Workspace(MemoryStore()), 0x40, 0)
>>> last.update("anna", "/home"); last.get("anna")
'/home'
>>> last.set_time(30 * 60 * 1000); last.get("anna") is None
True
>>> pages = TTLOptions("list", "pages").bind(Workspace(MemoryStore()), 0x40, 0)
>>> pages.append_list("anna", ["/home", "/cart"]); list(pages.get("anna"))
['/home', '/cart']
>>> seen = TTLOptions("map", "seen").bind(Workspace(MemoryStore()), 0x40, 0)
>>> seen.update_value("anna", "/home", 2); seen.update_value("anna", "/cart", 0); list(seen.items("anna"))
[('/cart', 0), ('/home', 2)]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

from backend.errors import ValueInvalid
from backend.keys import decode
from backend.rocks import RocksOptions
from backend.store.workspace import Workspace
from backend.stores import named
from backend.stores.durations import Duration, milliseconds
from backend.stores.named import NamedStore, check_name, described, encode_key, event_time
from backend.stores.standalone import StoreSet
from backend.stores.ttl import OneToManyTTLState, OneToOneTTLState, TTLState
from backend.stores.values import ValueCodec


@dataclass(frozen=True, slots=True)
class TTLOptions:
    """A state variable by name and options: what `process(stores=[...])` takes.

    Args:
        kind: `value`, `list` or `map`.
        name: Name of the state variable.
        ttl: How long a value lives from its last write on; None for ever.
        value_type: As in `values.ValueCodec`; of a list the type of one element, of a map that of a value.

    Attributes:
        ttl_ms: The TTL in milliseconds.

    Raises:
        TypeError: The name is None, or an option is of the wrong type.
        ValueError: The TTL is not positive.
    """

    kind: str
    name: str
    ttl: InitVar[Duration | None] = None
    value_type: Any = None
    ttl_ms: int | None = field(init=False)

    def __post_init__(self, ttl: Duration | None) -> None:
        check_name(self.name)
        if self.kind not in _KINDS:
            raise ValueError(f"kind={self.kind!r}: allowed are {', '.join(_KINDS)}")
        ttl_ms = None if ttl is None else milliseconds(ttl, "ttl")
        if ttl_ms is not None and ttl_ms < 1:
            raise ValueError(f"ttl={ttl_ms} ms: allowed is 1 ms and more, or None for no expiration")
        ValueCodec(self.value_type)
        object.__setattr__(self, "ttl_ms", ttl_ms)

    def bind(self, work: Workspace, region: int, time_ms: int) -> Any:
        """Give the state variable over one attempt's workspace, at batch time `time_ms`."""
        return _KINDS[self.kind](work, region, self, time_ms)

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry; a TTL that is changed holds for what is written from then on."""
        return described(self, ttl_ms=self.ttl_ms)


S = TypeVar("S", bound=TTLState)


class _StateVariable(NamedStore, Generic[S]):
    """What the state variables share: their TTL state, its time, and its cleaning up."""

    kind: ClassVar[str]
    options: TTLOptions
    _indexes: type[S]

    def __init__(self, work: Workspace, region: int, options: TTLOptions, time_ms: int) -> None:
        super().__init__(work, region, options)
        now_ms = event_time(time_ms, "the time")
        self._ttl = self._indexes(work, region, ttl_ms=options.ttl_ms, now_ms=now_ms)

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        ttl: Duration | None = None,
        time_ms: int = 0,
        value_type: Any = None,
        name: str = "state",
        options: RocksOptions | None = None,
        wait_s: float = 10.0,
    ) -> Self:
        """Open or make a state variable of its own at `path`, without Spark; its time is `time_ms` until `set_time`.

        Raises:
            StoreLocked: Another process holds it for longer than `wait_s` seconds.
            ManifestMismatch: There is another store at `path`.
        """
        declared = TTLOptions(cls.kind, name, ttl, value_type)
        return cast(Self, StoreSet.open(path, [declared], time_ms=time_ms, options=options, wait_s=wait_s)[name])

    @property
    def ttl_state(self) -> S:
        """The two indexes.

        Raises:
            StoreClosed: The store is closed.
        """
        _ = self._work
        return self._ttl

    def set_time(self, time_ms: int) -> None:
        """Take the time of a micro-batch: what has expired by it is invisible from now on.

        Raises:
            KeyInvalid: It is no integer, or out of range.
        """
        self._ttl.now_ms = event_time(time_ms, "the time")

    def clear_expired_state_for_all_keys(self, limit: int | None = None) -> int:
        """Remove what has expired, reading nothing that lives; `flush` and the end of a micro-batch do so themselves.

        Returns:
            The number of values removed.
        """
        removed = self.ttl_state.clear_expired_state_for_all_keys(limit)
        self._expired += removed
        return removed

    def _rebind(self, work: Workspace) -> None:
        super()._rebind(work)
        self._ttl.work = work

    def _reclaim(self) -> None:
        self.clear_expired_state_for_all_keys(named.RECLAIM_ROWS)


class ValueState(_StateVariable[OneToOneTTLState]):
    """One value per key."""

    kind: ClassVar[str] = "value"
    _indexes = OneToOneTTLState

    def get(self, key: object) -> Any:
        """Return the key's value; None when there is none or it has expired."""
        return self._values.decode(self.ttl_state.get(encode_key(key)))

    def exists(self, key: object) -> bool:
        """Say whether the key has a value; 0, "" and False are values."""
        return self.ttl_state.get(encode_key(key)) is not None

    def update(self, key: object, value: object) -> None:
        """Set the key's value, to expire a TTL from now; None deletes it.

        Raises:
            KeyInvalid: The key is None or has no order.
            ValueInvalid: The value cannot be stored.
        """
        if value is None:
            self.clear(key)
        else:
            self.ttl_state.update_primary_and_secondary_indices(encode_key(key), self._values.encode(value))

    def clear(self, key: object) -> None:
        """Remove the key's value."""
        self.ttl_state.clear_all_state_for_element_key(encode_key(key))

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Iterate over all keys and their values in the order of the keys; a snapshot."""
        decode_value = self._values.decode
        return self._iterate((decode(key), decode_value(value)) for key, value in self.ttl_state.scan(b""))


class ListState(_StateVariable[OneToManyTTLState]):
    """A list per key, of which each element expires a TTL after it was put there."""

    kind: ClassVar[str] = "list"
    _indexes = OneToManyTTLState

    def get(self, key: object) -> Iterator[Any]:
        """Iterate over the key's elements in the order in which they were put; a snapshot."""
        decode_value = self._values.decode
        return self._iterate(decode_value(value) for value in self.ttl_state.values(encode_key(key)))

    def exists(self, key: object) -> bool:
        """Say whether the key has an element."""
        return next(self.ttl_state.values(encode_key(key)), None) is not None

    def put(self, key: object, values: Iterable[object]) -> None:
        """Replace the key's list; an empty one deletes it.

        Raises:
            KeyInvalid: The key is None or has no order.
            ValueInvalid: `values` is None, or an element of it is None or cannot be stored; nothing changed.
        """
        self.ttl_state.update_primary_and_secondary_indices(True, encode_key(key), self._encoded(values))

    def append_value(self, key: object, value: object) -> None:
        """Put one element behind the key's list."""
        self.append_list(key, [value])

    def append_list(self, key: object, values: Iterable[object]) -> None:
        """Put elements behind the key's list; those that are there keep their expiration."""
        self.ttl_state.update_primary_and_secondary_indices(False, encode_key(key), self._encoded(values))

    def clear(self, key: object) -> None:
        """Remove the key's list."""
        self.ttl_state.clear_all_state_for_element_key(encode_key(key))

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Iterate over the elements of all keys, as (key, element), in the order of the keys; a snapshot."""
        decode_value = self._values.decode
        return self._iterate((decode(key), decode_value(value)) for key, value in self.ttl_state.scan())

    def _encoded(self, values: Iterable[object]) -> list[bytes]:
        if values is None or isinstance(values, (str, bytes)):
            raise ValueInvalid("a list state takes a list of values", why=f"{type(values).__name__} was given")
        return [self._values.encode(value) for value in values]


class MapState(_StateVariable[OneToOneTTLState]):
    """A map per key; each entry expires a TTL after it was last written. The element key is (grouping key, map key)."""

    kind: ClassVar[str] = "map"
    _indexes = OneToOneTTLState

    def get_value(self, key: object, map_key: object) -> Any:
        """Return the value of an entry; None when there is none or it has expired."""
        return self._values.decode(self.ttl_state.get(encode_key(key) + encode_key(map_key)))

    def contains_key(self, key: object, map_key: object) -> bool:
        """Say whether the key's map has an entry."""
        return self.ttl_state.get(encode_key(key) + encode_key(map_key)) is not None

    def exists(self, key: object) -> bool:
        """Say whether the key's map has any entry."""
        return next(self.ttl_state.scan(encode_key(key)), None) is not None

    def update_value(self, key: object, map_key: object, value: object) -> None:
        """Set an entry, to expire a TTL from now; None deletes it.

        Raises:
            KeyInvalid: A key is None or has no order.
            ValueInvalid: The value cannot be stored.
        """
        element = encode_key(key) + encode_key(map_key)
        if value is None:
            self.ttl_state.clear_all_state_for_element_key(element)
        else:
            self.ttl_state.update_primary_and_secondary_indices(element, self._values.encode(value))

    def remove_key(self, key: object, map_key: object) -> None:
        """Remove an entry."""
        self.update_value(key, map_key, None)

    def clear(self, key: object) -> None:
        """Remove the key's map; reads its own entries only, the expired ones too."""
        self.ttl_state.clear_all_state_below(encode_key(key))

    def items(self, key: object) -> Iterator[tuple[Any, Any]]:
        """Iterate over the entries of the key's map in the order of the map keys; a snapshot."""
        prefix, decode_value = encode_key(key), self._values.decode
        rows = self.ttl_state.scan(prefix)
        return self._iterate((decode(element[len(prefix) :]), decode_value(value)) for element, value in rows)

    def keys(self, key: object) -> Iterator[Any]:
        """Iterate over the map keys of the key's map."""
        return (map_key for map_key, _ in self.items(key))

    def values(self, key: object) -> Iterator[Any]:
        """Iterate over the values of the key's map, in the order of the map keys."""
        return (value for _, value in self.items(key))


_KINDS: dict[str, type[ValueState | ListState | MapState]] = {
    one.kind: one for one in (ValueState, ListState, MapState)
}
