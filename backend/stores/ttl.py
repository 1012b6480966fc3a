"""TTL for state variables, after Spark's `TTLState`: a primary index, and a secondary one in the order of expiration.

Layout behind region byte and sub-byte (see `backend.stores.named`)::

    BY_TIME   | expiration, 8 bytes big-endian | element key |                    | -> empty      one to one
    BY_KEY    | element key |                                                     | -> expiration, 8 bytes | value

    BY_TIME   | expiration, 8 bytes big-endian | element key | sequence, 8 bytes  | -> empty      one to many
    BY_KEY    | element key | sequence, 8 bytes |                                 | -> expiration, 8 bytes | value

An *element key* is what one value belongs to: the grouping key of a value or a list, grouping key and map key of a
map's entry. It must be prefix-free bytes, such as `backend.keys.encode` gives. A value without TTL has the expiration
`NEVER` and no index row; every other value has exactly one. Both rows are written by the same call into the same
workspace, so they are committed together or not at all.

These classes never encode or decode what the user stores: the state variables do (`backend.stores.state_variables`).

* expired: `now >= expiration`, on every read, at once; `now` is Spark's batch time; standalone, the caller sets it.
* only a write refreshes: its expiration is `now + ttl`.
* cleaning up reads the index rows that have expired and no others.

>>> from backend.store.memory import MemoryStore
>>> from backend.store.workspace import Workspace
>>> state = OneToOneTTLState(Workspace(MemoryStore()), 0x40, ttl_ms=100, now_ms=1_000)
>>> state.update_primary_and_secondary_indices(b"anna", b"v")
>>> state.now_ms = 1_099; state.get(b"anna")
b'v'
>>> state.now_ms = 1_100; state.get(b"anna") is None, state.clear_expired_state_for_all_keys()
(True, 1)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from backend.batch import MAX_TIME
from backend.errors import ValueInvalid
from backend.keys import prefix_end
from backend.store.protocol import MAX_VALUE_BYTES
from backend.store.workspace import Workspace
from backend.stores.named import BEYOND, BY_KEY, BY_TIME, KEY_AT, ROWS_AT, TIME_BYTES, time_bytes, time_of

NEVER = 2**63 - 1
"""Expiration of what does not expire."""

_NEVER_BYTES = time_bytes(NEVER)


class TTLRow(NamedTuple):
    """A row of the TTL index.

    Attributes:
        expiration_ms: The element is expired from this time on.
        element_key: The element; with the sequence behind it where an element has many values.
    """

    expiration_ms: int
    element_key: bytes


class TTLState(ABC):
    """What every state variable with TTL has: the TTL index, `(expiration, element key) -> empty`.

    Args:
        work: Where every read and write goes.
        region: The region that the state variable owns.
        ttl_ms: How long a value lives from its last write on; None for ever.
        now_ms: Time of the micro-batch.

    Attributes:
        now_ms: May be set anew. It may go back, as a wall clock may: what was cleaned up stays gone.
    """

    def __init__(self, work: Workspace, region: int, *, ttl_ms: int | None, now_ms: int) -> None:
        self.work, self.ttl_ms, self.now_ms = work, ttl_ms, now_ms
        self._by_time = bytes([region]) + BY_TIME
        self._by_key = bytes([region]) + BY_KEY

    def expiration(self) -> int:
        """Give the expiration of what is written now."""
        return NEVER if self.ttl_ms is None else min(self.now_ms + self.ttl_ms, MAX_TIME)

    def insert_into_ttl_index(self, expiration_ms: int, element_key: bytes) -> None:
        """Add an element to the index; what never expires is not in it."""
        if expiration_ms != NEVER:
            self.work.put(self._by_time + time_bytes(expiration_ms) + element_key, b"")

    def delete_from_ttl_index(self, expiration_ms: int, element_key: bytes) -> None:
        """Take an element out of the index."""
        if expiration_ms != NEVER:
            self.work.delete(self._by_time + time_bytes(expiration_ms) + element_key)

    def ttl_index_iterator(self) -> Iterator[TTLRow]:
        """Iterate over the whole index in the order of expiration."""
        return _ttl_rows(self.work.scan(self._by_time, self._by_key))

    def ttl_eviction_iterator(self) -> Iterator[TTLRow]:
        """Iterate over what has expired now: it ends before the first row that lives."""
        return _ttl_rows(self.work.scan(self._by_time, self._by_time + time_bytes(self.now_ms + 1)))

    @abstractmethod
    def clear_expired_state_for_all_keys(self, limit: int | None = None) -> int:
        """Remove what has expired, from both indexes, reading nothing that lives.

        Args:
            limit: Remove at most so many, the earliest first; the rest stays invisible.

        Returns:
            The number of values removed.
        """

    @abstractmethod
    def clear_all_state_for_element_key(self, element_key: bytes) -> int:
        """Remove everything of one element, from both indexes; give the number of values removed."""

    def _clear_expired(self, limit: int | None) -> int:
        """Remove expired rows: the index says where each primary row is, so none of them is read."""
        expired = list(islice(self.ttl_eviction_iterator(), limit))
        self.work.delete_many([self._by_time + time_bytes(at) + element for at, element in expired])
        self.work.delete_many(sorted(self._by_key + element for _, element in expired))
        return len(expired)

    def _delete_rows(self, keys: list[bytes], rows: list[bytes]) -> int:
        """Delete primary rows and the index rows that they name."""
        self.work.delete_many(keys)
        self.work.delete_many(
            sorted(
                self._by_time + row[:TIME_BYTES] + key[len(self._by_key) :]
                for key, row in zip(keys, rows, strict=True)
                if row[:TIME_BYTES] != _NEVER_BYTES
            )
        )
        return len(keys)


def _is_live(row: bytes, now_ms: int) -> bool:
    return now_ms < time_of(row[:TIME_BYTES])


def _check_room(values: Sequence[bytes]) -> None:
    """Refuse values that are too large with their expiration before anything is changed.

    Raises:
        ValueInvalid: One is.
    """
    length = max(map(len, values), default=0) + TIME_BYTES
    if length > MAX_VALUE_BYTES:
        raise ValueInvalid("a value is over the size bound", why=f"{length} bytes, allowed {MAX_VALUE_BYTES}")


class OneToOneTTLState(TTLState):
    """TTL where an element has one value: values, and the entries of maps."""

    def update_primary_and_secondary_indices(
        self, element_key: bytes, value: bytes, expiration_ms: int | None = None
    ) -> None:
        """Write the element's value, and its expiration into both indexes.

        Args:
            element_key: Prefix-free bytes.
            value: Encoded by the state variable.
            expiration_ms: Default: now and the TTL.
        """
        _check_room([value])
        expiration = self.expiration() if expiration_ms is None else expiration_ms
        self._forget_expiration(element_key, expiration)  # also without TTL: the value may have had one before
        self.work.put(self._by_key + element_key, time_bytes(expiration) + value)
        self.insert_into_ttl_index(expiration, element_key)

    def get(self, element_key: bytes) -> bytes | None:
        """Return the element's value; None when there is none or it has expired."""
        row = self.work.get(self._by_key + element_key)
        return row[TIME_BYTES:] if row is not None and _is_live(row, self.now_ms) else None

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the live elements whose keys begin with `prefix`, as (element key, value); a snapshot."""
        rows, now = self.work.scan(self._by_key + prefix, prefix_end(self._by_key + prefix)), self.now_ms
        return ((key[len(self._by_key) :], row[TIME_BYTES:]) for key, row in rows if _is_live(row, now))

    def clear_expired_state_for_all_keys(self, limit: int | None = None) -> int:
        """Remove the elements that have expired; reads one index row for each and nothing else."""
        return self._clear_expired(limit)

    def clear_all_state_for_element_key(self, element_key: bytes) -> int:
        """Remove an element and its index row; reads its own row only."""
        row = self.work.get(self._by_key + element_key)
        if row is None:
            return 0
        self.delete_from_ttl_index(time_of(row[:TIME_BYTES]), element_key)
        self.work.delete(self._by_key + element_key)
        return 1

    def clear_all_state_below(self, prefix: bytes) -> int:
        """Remove every element whose key begins with `prefix`, such as a map's entries, expired ones too."""
        keys, rows = self.work.scan_arrays(self._by_key + prefix, prefix_end(self._by_key + prefix))
        return self._delete_rows(keys, rows)

    def _forget_expiration(self, element_key: bytes, unless: int) -> None:
        row = self.work.get(self._by_key + element_key)
        if row is not None and (old := time_of(row[:TIME_BYTES])) != unless:
            self.delete_from_ttl_index(old, element_key)


class OneToManyTTLState(TTLState):
    """TTL where an element has many values in an order, each expiring at its own time: lists.

    Every value has a row and an index row of its own, so a list is never read to let one of its values go.
    """

    def __init__(self, work: Workspace, region: int, *, ttl_ms: int | None, now_ms: int) -> None:
        super().__init__(work, region, ttl_ms=ttl_ms, now_ms=now_ms)
        self._next: dict[bytes, int] = {}  # sequence of the next value, of elements that this attempt appended to

    def update_primary_and_secondary_indices(
        self,
        overwrite_primary_index: bool,
        element_key: bytes,
        values: Sequence[bytes],
        expiration_ms: int | None = None,
    ) -> None:
        """Write values of an element, and their expiration into both indexes.

        Args:
            overwrite_primary_index: True replaces what the element had, False puts the values behind it.
            element_key: Prefix-free bytes.
            values: Encoded by the state variable.
            expiration_ms: Default: now and the TTL.
        """
        _check_room(values)
        expiration = self.expiration() if expiration_ms is None else expiration_ms
        if overwrite_primary_index:
            self.clear_all_state_for_element_key(element_key)
            first = 0
        else:
            first = self._next_sequence(element_key)
        rows = [element_key + time_bytes(first + number) for number in range(len(values))]
        stamp = time_bytes(expiration)
        self.work.put_many([self._by_key + row for row in rows], [stamp + value for value in values])
        if expiration != NEVER:
            self.work.put_many([self._by_time + stamp + row for row in rows], [b""] * len(rows))
        if rows:
            self._next[element_key] = first + len(rows)

    def values(self, element_key: bytes) -> Iterator[bytes]:
        """Iterate over the live values of an element in their order; a snapshot."""
        prefix = self._by_key + element_key
        rows, now = self.work.scan(prefix, prefix + BEYOND), self.now_ms
        return (row[TIME_BYTES:] for _, row in rows if _is_live(row, now))

    def scan(self) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the live values of all elements, as (element key, value); a snapshot."""
        rows, now = self.work.scan(self._by_key, prefix_end(self._by_key)), self.now_ms
        return ((key[len(self._by_key) : -TIME_BYTES], row[TIME_BYTES:]) for key, row in rows if _is_live(row, now))

    def clear_expired_state_for_all_keys(self, limit: int | None = None) -> int:
        """Remove the values that have expired; reads one index row for each and nothing else."""
        self._next.clear()  # the last values of an element may go, and its sequence back with them
        return self._clear_expired(limit)

    def clear_all_state_for_element_key(self, element_key: bytes) -> int:
        """Remove all values of an element and their index rows; reads its own rows only."""
        self._next.pop(element_key, None)
        prefix = self._by_key + element_key
        return self._delete_rows(*self.work.scan_arrays(prefix, prefix + BEYOND))

    def _next_sequence(self, element_key: bytes) -> int:
        known = self._next.get(element_key)
        if known is not None:
            return known
        prefix = self._by_key + element_key
        last = next(self.work.scan(prefix, prefix + BEYOND, reverse=True), None)
        return 0 if last is None else time_of(last[0][-TIME_BYTES:]) + 1


def _ttl_rows(rows: Iterator[tuple[bytes, bytes]]) -> Iterator[TTLRow]:
    return (TTLRow(time_of(key[ROWS_AT:KEY_AT]), key[KEY_AT:]) for key, _ in rows)
