"""What a process is sent and may never use: bytes, which become what it is at its first use.

When a query starts Spark starts processes on the driver that only ask: a data source for its name, its schema and its
offsets, a stateful processor for its state. Made there too, what tasks need would have each of them import all of
Rewind, one behind the other, before the first micro-batch.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from pyspark.serializers import CloudPickleSerializer

T = TypeVar("T")
_SERIALIZER = CloudPickleSerializer()
"""With what Spark sends the functions that refer to it; nothing that was stored is ever read with it."""


class Deferred(Generic[T]):
    """Gives what it was made of; in another process, that is made when it is first asked for."""

    __slots__ = ("_made", "_sent")

    def __init__(self, made: T) -> None:
        self._made: list[T] = [made]
        self._sent = b""

    def __call__(self) -> T:
        """Return it."""
        if not self._made:
            self._made.append(_SERIALIZER.loads(self._sent))
        return self._made[0]

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as bytes, onwards too."""
        return _received, (self._sent or _SERIALIZER.dumps(self._made[0]),)


def _received(sent: bytes) -> Deferred[Any]:
    one: Deferred[Any] = Deferred.__new__(Deferred)
    one._made, one._sent = [], sent
    return one
