"""A workspace: one attempt's view over a store. Reads see own writes; nothing reaches the store before the commit.

Bounds hide: whatever lies below a region's bound is invisible on every read path, and writes below it are refused.

Own writes lie in layers, newest first: single rows in a dict, and each large `put_many` as a sorted run, because a
micro-batch brings its messages sorted, and keeping them so costs nothing until `changes` merges the layers::

    reads ->  recent (dict)  ->  runs[-1] ... runs[0] (sorted lists)  ->  base (committed)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain
from types import MappingProxyType

from sortedcontainers import SortedList

from backend.errors import BoundViolated, KeyInvalid, ValueInvalid
from backend.store.layers import (
    ABSENT,
    Finder,
    Run,
    Slice,
    increasing,
    merge_layers,
    merge_scan,
    merge_visible,
    sorted_rows,
)
from backend.store.limits import check_key, check_keys, check_value, check_values
from backend.store.protocol import Changes, Readable, Region

RUN_ROWS = 512
"""From this many rows on a `put_many` becomes a sorted run of its own instead of going to the dict."""


class Workspace:
    """Overlay of changes over a readable store.

    Not safe for use by several threads. Everything written stays in memory until `changes` is applied elsewhere.

    Args:
        base: Committed state; never written, and not to change while the workspace lives.
        bounds: Region -> full key, as committed.

    Raises:
        KeyInvalid: A bound is not a key of its region.
    """

    def __init__(self, base: Readable, bounds: Mapping[int, bytes] | None = None) -> None:
        self._base = base
        self._bounds: dict[int, bytes] = {}
        self._recent: dict[bytes, bytes | None] = {}
        self._order: SortedList | None = None  # keys of `_recent`, kept only from the first scan on
        self._runs: list[Run] = []
        for region, key in (bounds or {}).items():
            self.raise_bound(region, key)

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key; None when absent, deleted here, or below its region's bound."""
        check_key(key)
        if self._hidden(key):
            return None
        found: object = self._recent.get(key, ABSENT)
        if found is not ABSENT:
            return found  # type: ignore[return-value]
        for run in reversed(self._runs):
            found = run.find(key)
            if found is not ABSENT:
                return found  # type: ignore[return-value]
        return self._base.get(key)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of many keys, in their order."""
        if not len(keys):
            return []
        check_keys(keys)
        first, last = min(keys), max(keys)
        layers = [run.finder(len(keys)) for run in self._runs if run.meets(first, last)]
        if self._recent:
            layers.append(lambda key: self._recent.get(key, ABSENT))
        found = self._base.get_many(keys) if not layers else self._get_layered(keys, layers)
        for region, bound in self._bounds.items():
            start = bytes([region])
            if first < bound and start <= last:
                found = [None if start <= key < bound else value for key, value in zip(keys, found, strict=True)]
        return found

    def _get_layered(self, keys: Sequence[bytes], layers: Sequence[Finder]) -> list[bytes | None]:
        answers: list[object] = [ABSENT] * len(keys)
        missing: list[int] | range = range(len(keys))
        for find in reversed(layers):
            still = []
            for at in missing:
                value = find(keys[at])
                if value is ABSENT:
                    still.append(at)
                else:
                    answers[at] = value
            missing = still
        if missing:
            for at, value in zip(missing, self._base.get_many([keys[at] for at in missing]), strict=True):
                answers[at] = value
        return answers  # type: ignore[return-value]

    def scan(self, start: bytes, end: bytes | None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over `[start, end)` as it was when the scan began, own writes included."""
        parts = []
        for low, high in self._visible(start, end):
            own = self._own(low, high, reverse=reverse)
            rows = self._base.scan(low, high, reverse=reverse)
            parts.append(merge_scan(rows, own, reverse=reverse) if own[0] else rows)
        if len(parts) == 1:
            return parts[0]
        return chain.from_iterable(parts[::-1] if reverse else parts)

    def scan_arrays(self, start: bytes, end: bytes | None) -> tuple[list[bytes], list[bytes]]:
        """Return keys and values of `[start, end)` as two lists."""
        keys: list[bytes] = []
        values: list[bytes] = []
        for low, high in self._visible(start, end):
            part = merge_visible(self._base.scan_arrays(low, high), self._own(low, high))
            if not keys:
                keys, values = part
            else:
                keys += part[0]
                values += part[1]
        return keys, values

    def put(self, key: bytes, value: bytes) -> None:
        """Set one key. Raises `BoundViolated` below the region's bound, `KeyInvalid` / `ValueInvalid` over a size."""
        check_key(key)
        check_value(value)
        if self._hidden(key):
            raise _below(key, self._bounds[key[0]])
        self._set(key, value)

    def put_many(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Set many keys; fastest when `keys` are sorted.

        Of equal keys the last one counts. Nothing is written when any row is refused.

        Raises:
            BoundViolated: A key lies below its region's bound.
            KeyInvalid: A key is not bytes, empty, or over the size bound.
            ValueInvalid: A value is not bytes or over the size bound, or there are not as many as keys.
        """
        if len(keys) != len(values):
            raise ValueInvalid("as many values as keys are needed", why=f"{len(keys)} keys, {len(values)} values")
        check_keys(keys)
        check_values(values)
        self._write(keys, values, refuse=True)

    def delete(self, key: bytes) -> None:
        """Delete one key; deleting what is not there, or is expired already, is allowed."""
        check_key(key)
        if not self._hidden(key):
            self._set(key, None)

    def delete_many(self, keys: Sequence[bytes]) -> None:
        """Delete many keys."""
        check_keys(keys)
        self._write(keys, [None] * len(keys), refuse=False)

    def replace_keys(self, before: Set[bytes], after: Set[bytes]) -> None:
        """Change the rows without values from what they were to what they are; those of both are left alone."""
        self.delete_many(sorted(before - after))
        fresh = sorted(after - before)
        self.put_many(fresh, [b""] * len(fresh))

    def raise_bound(self, region: int, key: bytes) -> None:
        """Expire everything of a region below the full key `key`; bounds never go back (a lower one is ignored).

        Raises:
            KeyInvalid: The key is neither in the region nor its end, or the region is `Region.COMMIT`.
        """
        if not Region.COMMIT < region < 0xFF:
            raise KeyInvalid("a bound's region must be 1 to 254", why=f"region {region}")
        if not isinstance(key, bytes) or not bytes([region]) <= key <= bytes([region + 1]):
            raise KeyInvalid("a bound is a full key of its region", where=f"region {region}", why=repr(key))
        if key > self._bounds.get(region, bytes([region])):
            self._bounds[region] = key

    @property
    def bounds(self) -> Mapping[int, bytes]:
        """Bounds as they will be committed."""
        return MappingProxyType(self._bounds)

    def changes(self) -> Changes:
        """Give everything done so far as sorted changes; the workspace stays usable.

        Rows that were written and then expired by a higher bound are left out.
        """
        layers: list[Slice] = [(run.keys, run.values) for run in self._runs]
        if self._recent:
            layers.append(sorted_rows(self._recent))
        return Changes(*self._cut(merge_layers(layers), refuse=False), dict(self._bounds))

    def apply(self, changes: Changes) -> None:
        """Take over the changes of a workspace whose base is this one."""
        self._write(changes.keys, changes.values, refuse=False)
        for region, key in changes.bounds.items():
            self.raise_bound(region, key)

    def _hidden(self, key: bytes) -> bool:
        bound = self._bounds.get(key[0])
        return bound is not None and key < bound

    def _visible(self, start: bytes, end: bytes | None) -> list[tuple[bytes, bytes | None]]:
        """Cut what bounds hide out of a range; what is left, in order (usually one range)."""
        parts: list[tuple[bytes, bytes | None]] = []
        for region in sorted(self._bounds):
            low, high = bytes([region]), self._bounds[region]
            if high <= start or (end is not None and end <= low):
                continue
            if start < low:
                parts.append((start, low))
            start = high
        if end is None or start < end or not parts:
            parts.append((start, end if end is None or start < end else start))
        return parts

    def _own(self, start: bytes, end: bytes | None, *, reverse: bool = False) -> Slice:
        """Give own rows of a range, merged over the layers; deletes are None."""
        cuts = [cut for run in self._runs if (cut := run.cut(start, end))[0]]
        if self._recent:
            if self._order is None:
                self._order = SortedList(self._recent)
            recent = list(self._order.irange(start, end, inclusive=(True, False)))
            if recent:
                cuts.append((recent, [self._recent[key] for key in recent]))
        keys, values = merge_layers(cuts)
        return (keys[::-1], values[::-1]) if reverse else (keys, values)

    def _set(self, key: bytes, value: bytes | None) -> None:
        if self._order is not None and key not in self._recent:
            self._order.add(key)
        self._recent[key] = value

    def _write(self, keys: Sequence[bytes], values: Sequence[bytes | None], *, refuse: bool) -> None:
        if not len(keys):
            return
        if not increasing(keys):
            keys, values = sorted_rows(dict(zip(keys, values, strict=True)))
        keys, values = self._cut((keys, values), refuse=refuse)
        if len(keys) < RUN_ROWS:
            for key, value in zip(keys, values, strict=True):
                self._set(key, value)
        else:
            self._add_run(Run(list(keys), list(values)))

    def _cut(self, rows: Slice, *, refuse: bool) -> Slice:
        """Cut what bounds hide out of sorted rows, or refuse it."""
        keys, values = rows
        for region, bound in self._bounds.items():
            low = bisect_left(keys, bytes([region]))
            high = bisect_left(keys, bound, low)
            if high > low and refuse:
                raise _below(keys[low], bound)
            if high > low:
                keys, values = [*keys[:low], *keys[high:]], [*values[:low], *values[high:]]
        return keys, values

    def _add_run(self, run: Run) -> None:
        if self._recent:  # the dict is read first, so it must not hold older values of these keys
            for key in [key for key in self._recent if run.find(key) is not ABSENT]:
                del self._recent[key]
                if self._order is not None:
                    self._order.remove(key)
        self._runs.append(run)
        # runs grow geometrically, so that there are few of them and each row is merged few times
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            newer, older = self._runs.pop(), self._runs.pop()
            self._runs.append(Run(*merge_layers([(older.keys, older.values), (newer.keys, newer.values)])))


def _below(key: bytes, bound: bytes) -> BoundViolated:
    return BoundViolated(
        "a write below what is already expired was refused", where=f"region {key[0]}", why=f"{key!r} < {bound!r}"
    )
