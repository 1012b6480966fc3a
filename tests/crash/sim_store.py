"""A shard's database on a simulated disk: the dict twin behind RocksDB's way of opening, for many runs a minute.

What was written is durable at once and whole; a directory that is removed is gone, as a disk would have it. The nightly
simulation runs the real RocksDB instead.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, ClassVar

from backend.errors import StateUnavailable
from backend.store.protocol import Changes, Staged
from tests.support.twin import MemoryTwin

_MARK = "CURRENT"
_ROWS = "rows.msgpack"


class SimStore:
    """The part of `RocksStore` that recovery uses, over a `MemoryTwin` that outlives its handle."""

    _disks: ClassVar[dict[str, MemoryTwin]] = {}

    def __init__(self, twin: MemoryTwin) -> None:
        self._twin: MemoryTwin | None = twin

    @classmethod
    def open(cls, path: Path, *, create: bool = True, **_: Any) -> SimStore:
        """Open the store in a directory, or make it."""
        mark = path / _MARK
        if mark.exists() and mark.read_text() in cls._disks:
            return cls(cls._disks[mark.read_text()])
        if (path / _ROWS).exists():  # a copy that arrived in a snapshot
            twin = MemoryTwin.open(path)
        elif create:
            path.mkdir(exist_ok=True)
            twin = MemoryTwin()
        else:
            raise StateUnavailable("there is no store here", where=str(path))
        name = uuid.uuid4().hex
        mark.write_text(name)
        cls._disks[name] = twin
        return cls(twin)

    @classmethod
    def forget(cls) -> None:
        """Drop all simulated disks."""
        cls._disks.clear()

    @property
    def twin(self) -> MemoryTwin:
        """The open store."""
        assert self._twin is not None, "the store is closed"
        return self._twin

    def __getattr__(self, name: str) -> Any:
        return getattr(self.twin, name)

    def check_files(self) -> None:
        """Read every row: there are no files."""
        assert all(self.twin.scan(b"", None))

    def write(self, changes: Changes) -> None:
        """Apply changes at once."""
        self.twin.write(changes)

    def confirm(self, staged: Staged) -> None:
        """Check a staged file, then apply it."""
        self.twin.confirm(staged)

    def settle(self) -> None:
        """Nothing is compacted."""

    def property(self, name: str) -> None:
        """Nothing of RocksDB's is known."""

    def close(self) -> None:
        """Release the handle; the disk stays."""
        self._twin = None

    def __enter__(self) -> SimStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
