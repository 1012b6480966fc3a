"""What the named stores share: their layout inside a region, their row of metadata, and the clock of a stream.

A named store owns one region of a shard (`Region.USER` and up). Layout of its keys (format 1)::

    +--------+------+----------------------------------------+
    | region | 0x00 | rows in the order in which they expire | the region's bound moves through here
    +--------+------+----------------------------------------+
    | region | 0x01 | rows in the order of the user's keys   |
    +--------+------+----------------------------------------+
    | region | 0x02 | -> metadata: format byte, MessagePack  |
    +--------+------+----------------------------------------+

What a bound hides is at the front of its region, so what expires by time has to come first. Times are 8 bytes,
big-endian, with 2**63 added: they sort as bytes, negative ones too. A user's key is `backend.keys.encode`: ordered and
prefix-free, so fixed-width fields may follow it and be cut off from the end again.

Everything goes through a `Workspace`: nothing is durable before its changes are committed. Inside Spark the
micro-batch's commit does that; standalone `flush` does.
"""

from __future__ import annotations

import datetime as dt
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import msgspec
import numpy as np

from backend import keys as key_codec
from backend.batch import MAX_TIME, MIN_TIME, NO_TIME
from backend.errors import UNDECODABLE, KeyInvalid, ManifestMismatch, StateCorrupted, StoreClosed, unknown_format
from backend.store.protocol import MAX_KEY_BYTES
from backend.store.workspace import Workspace
from backend.stores.values import ValueCodec, describe_type

FORMAT = 1
"""Version of the layouts of all named stores; a store's own layout is described in its module."""

BY_TIME = b"\x00"
BY_KEY = b"\x01"
META = b"\x02"

TIME_BYTES = 8
ROWS_AT = 2
"""Where a row begins: behind region byte and sub-byte."""
KEY_AT = ROWS_AT + TIME_BYTES
"""Where a key begins in rows that are in order of time."""
BEYOND = b"\xff"
"""Greater than every time, segment and sequence that is accepted; no encoded key starts with it."""

_BIAS = 2**63
_FORMAT_BYTE = bytes([FORMAT])

RECLAIM_ROWS = 1_000_000
"""Rows that one commit reclaims at most: what is beyond waits, invisible, for the next one."""

MAX_USER_KEY_BYTES = (MAX_KEY_BYTES - 64) // 2
"""Half of what a row's key may have: a map's rows hold two keys."""

T = TypeVar("T")


def time_bytes(time: int) -> bytes:
    """Give a time, or a counter, as 8 bytes that sort as the numbers do; beyond int64 the nearest end is taken.

    >>> time_bytes(-1) < time_bytes(0) < time_bytes(1), time_of(time_bytes(-5))
    (True, -5)
    """
    return min(max(time + _BIAS, 0), 2**64 - 1).to_bytes(TIME_BYTES, "big")


def time_of(data: bytes) -> int:
    """Inverse of `time_bytes`."""
    return int.from_bytes(data, "big") - _BIAS


def event_time(time: object, what: str) -> int:
    """Check a time that a caller gave.

    Raises:
        KeyInvalid: Not an integer, or outside of `batch.MIN_TIME` to `batch.MAX_TIME`.
    """
    if isinstance(time, np.integer):
        time = int(time)
    if isinstance(time, bool) or not isinstance(time, int):
        raise KeyInvalid(f"{what} is milliseconds as an int", why=f"{type(time).__name__} was given")
    if not MIN_TIME <= time <= MAX_TIME:
        raise KeyInvalid(f"{what} is out of range", why=f"{time}, allowed {MIN_TIME} to {MAX_TIME}")
    return time


def encode_key(key: object) -> bytes:
    """Encode a user's key; a numpy scalar is taken as the Python value it holds.

    Raises:
        KeyInvalid: None, a type without an order, or so long that no room is left for what a store puts beside it.
    """
    if isinstance(key, np.datetime64 | np.timedelta64) and not isinstance(key.item(), dt.date):
        raise KeyInvalid("a time of a key is none, or finer than a microsecond", why=f"{key} of {key.dtype}")
    if isinstance(key, np.generic):
        key = key.item()
    if key is None:
        raise KeyInvalid("key cannot be null")
    encoded = key_codec.encode(key)
    if len(encoded) > MAX_USER_KEY_BYTES:
        raise KeyInvalid("a key is over the size bound", why=f"{len(encoded)} bytes, allowed {MAX_USER_KEY_BYTES}")
    return encoded


def check_name(name: object) -> str:
    """Check a store's name.

    Raises:
        TypeError: None (KIP-428's `requireNonNull`) or no string.
        ValueError: Empty.
    """
    if name is None:
        raise TypeError("name cannot be null")
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {type(name).__name__}")
    if not name:
        raise ValueError("name cannot be empty: a store is found by its name")
    return name


@dataclass(slots=True)
class StreamClock:
    """Stream time of a store, and what has expired by it.

    Attributes:
        keep_ms: Times at or above `stream_time - keep_ms` are visible.
        stream_time: Newest time seen, `NO_TIME` before the first; never back.
        floor: Oldest visible time; never back, also when a store is opened again with a longer retention.
        dropped: Late writes that were dropped, ever.

    >>> clock = StreamClock(keep_ms=10)
    >>> clock.advance(100); clock.advance(50); clock.stream_time, clock.floor
    (100, 90)
    """

    keep_ms: int
    stream_time: int = NO_TIME
    floor: int = NO_TIME
    dropped: int = 0

    def advance(self, time: int) -> None:
        """See a time; older than the newest one changes nothing."""
        if time > self.stream_time:
            self.stream_time = time
            self.floor = max(self.floor, time - self.keep_ms)


class _Meta(msgspec.Struct, frozen=True):
    """A store's row of metadata."""

    kind: str
    name: str
    layout: dict[str, int | str | bool]
    stream_time: int = NO_TIME
    floor: int = NO_TIME
    dropped: int = 0
    sequence: int = 0


_meta_encoder = msgspec.msgpack.Encoder()
_meta_decoder = msgspec.msgpack.Decoder(_Meta)


class Declaration(Protocol):
    """A store by name and options, before there is a shard to hold it."""

    @property
    def name(self) -> str:
        """Name of the store, unique in its job."""

    @property
    def kind(self) -> str:
        """Kind of the store, as in its metadata."""

    @property
    def value_type(self) -> Any:
        """As in `values.ValueCodec`."""

    def bind(self, work: Workspace, region: int, time_ms: int) -> NamedStore:
        """Give the store over one attempt's workspace, at batch time `time_ms`."""

    def describe(self) -> dict[str, object]:
        """Give the manifest's entry of the store."""


def described(
    store: Declaration, layout: Mapping[str, int | str | bool] | None = None, **durations: int | None
) -> dict[str, object]:
    """Give the manifest's entry of a store: its layout must stay the same, its durations in ms may change."""
    value_type = describe_type(store.value_type)
    return {"name": store.name, "kind": store.kind, "layout": layout or {}, "value_type": value_type, **durations}


class Clocked:
    """A store whose time is that of what was put there."""

    _clock: StreamClock

    @property
    def stream_time(self) -> int:
        """Newest window start, or session end, that was put or deleted, ms; `batch.NO_TIME` before the first."""
        return self._clock.stream_time

    @property
    def dropped(self) -> int:
        """Late writes that were dropped since the store was made."""
        return self._clock.dropped


class _Home(Protocol):
    """What a store of its own was opened with (`backend.stores.standalone.StoreSet`)."""

    def flush(self) -> None:
        """Make all changes durable."""

    def close(self, *, flush: bool = True) -> None:
        """Close everything."""


class NamedStore:
    """Base of the named stores.

    Args:
        work: Where every read and write goes.
        region: The region that the store owns.
        options: Name, kind and value type.
        layout: What the bytes depend on; it is kept from the first save on and must not change.
        clock: The stream's clock of stores that have one.

    Raises:
        ManifestMismatch: The region holds another store, or one of another layout.
        UnknownFormat: A newer release wrote the store.
    """

    options: Declaration

    def __init__(
        self,
        work: Workspace,
        region: int,
        options: Declaration,
        *,
        layout: Mapping[str, int | str | bool] | None = None,
        clock: StreamClock | None = None,
    ) -> None:
        self.options, self.name = options, options.name
        self._region = region
        self._prefix = bytes([region])
        self._by_time = self._prefix + BY_TIME
        self._by_key = self._prefix + BY_KEY
        self._values = ValueCodec(options.value_type)
        self._clock = clock if clock is not None else StreamClock(0)
        self._sequence = 0
        self._expired = 0
        self._layout = dict(layout or {})
        self._home: _Home | None = None
        self._iterators: weakref.WeakSet[_Iterator[Any]] = weakref.WeakSet()
        self._workspace: Workspace | None = work
        self._saved: _Meta | None = None
        self._load()
        self._dropped_before = self._clock.dropped

    @property
    def _work(self) -> Workspace:
        if self._workspace is None:
            raise StoreClosed("the store is closed", where=self.name, why="a store of process() ends with its call")
        return self._workspace

    def flush(self) -> None:
        """Write the changes to disk, atomically and durably, where the store was opened with `open`.

        Inside `process()` the micro-batch's commit makes them durable, together with everything else of the shard.
        """
        if self._home is not None:
            self._home.flush()
        else:
            self.save()

    def close(self, *, flush: bool = True) -> None:
        """Close the store, and those of its `StoreSet` with it; closing twice does nothing.

        Args:
            flush: False drops what was not flushed.
        """
        if self._home is not None:
            self._home.close(flush=flush)
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(flush=kind is None)

    def save(self) -> None:
        """Put the store's metadata and the reclaiming of what has expired into the workspace's changes."""
        self._reclaim()
        meta = self._meta()
        if meta != self._saved:
            self._work.put(self._prefix + META, _FORMAT_BYTE + _meta_encoder.encode(meta))
            self._saved = meta

    def counters(self) -> dict[str, float]:
        """Give what this attempt did: late writes `dropped`, rows that `expired` and were given back."""
        return {"dropped": self._clock.dropped - self._dropped_before, "expired": self._expired}

    def set_time(self, time_ms: int) -> None:
        """Take the time of a micro-batch; only stores with TTL go by it."""

    def _reclaim(self) -> None:
        """Give back the space of what has expired; a store without expiry has nothing to do."""

    def release(self) -> None:
        """Let go of the workspace and of every iterator: the store ends here, its changes stay in the workspace."""
        for iterator in list(self._iterators):
            iterator.close()
        self._workspace = None

    def _rebind(self, work: Workspace) -> None:
        """Go on over a new workspace that holds what the old one's changes made."""
        self._workspace = work

    def _iterate(self, rows: Iterator[T]) -> Iterator[T]:
        """Hand an iterator to the user, remembered so that closing the store releases what it holds."""
        iterator = _Iterator(rows)
        self._iterators.add(iterator)
        return iterator

    def _meta(self) -> _Meta:
        clock, kind = self._clock, self.options.kind
        return _Meta(kind, self.name, self._layout, clock.stream_time, clock.floor, clock.dropped, self._sequence)

    def _load(self) -> None:
        data = self._work.get(self._prefix + META)
        if data is None:
            return
        meta = _decode_meta(data, self.name)
        if (meta.kind, meta.name) != (self.options.kind, self.name):
            raise ManifestMismatch(
                f"region 0x{self._region:02x} holds another store",
                where=self.name,
                why=f"found {meta.kind} {meta.name!r}, declared {self.options.kind} {self.name!r}",
                command="declare the stores in the order of the first start",
            )
        self._layout = self._settle_layout(meta.layout)
        self._clock.floor, self._clock.dropped = meta.floor, meta.dropped
        self._clock.advance(meta.stream_time)
        self._sequence = meta.sequence
        self._saved = meta

    def _settle_layout(self, stored: dict[str, int | str | bool]) -> dict[str, int | str | bool]:
        """Give the layout to go on with: the stored one, when the declared one does not contradict it."""
        if stored != self._layout:
            raise ManifestMismatch(
                "the store was made with another layout",
                where=self.name,
                why=f"found {stored}, declared {self._layout}",
                command="declare it as it was, or give the new store another checkpoint",
            )
        return stored


class _Iterator(Iterator[T]):
    """An iterator that can be let go of; after that it is at its end."""

    __slots__ = ("__weakref__", "_rows")

    def __init__(self, rows: Iterator[T]) -> None:
        self._rows: Iterator[T] | None = rows

    def __next__(self) -> T:
        if self._rows is None:
            raise StoreClosed("the store of this iterator is closed")
        return next(self._rows)

    def close(self) -> None:
        """Release what the iterator holds."""
        self._rows = None


def _decode_meta(data: bytes, name: str) -> _Meta:
    if data[:1] != _FORMAT_BYTE:
        found = f"format {data[:1].hex() or 'missing'}"
        raise unknown_format("a named store has an unknown format", found, f"{FORMAT:02x}", name)
    try:
        return _meta_decoder.decode(memoryview(data)[1:])
    except UNDECODABLE as error:
        raise StateCorrupted("the metadata of a named store cannot be decoded", where=name, why=str(error)) from error
