"""Rows of a store as two columns: what a replay makes and a restore takes, without an object for each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True, slots=True)
class StoreRows:
    """Keys and values, in any order or sorted.

    Attributes:
        keys: large_binary, none is null.
        values: large_binary, one for each key.
    """

    keys: pa.LargeBinaryArray
    values: pa.LargeBinaryArray

    @classmethod
    def of(cls, keys: Sequence[bytes], values: Sequence[bytes]) -> StoreRows:
        """Make columns of lists."""
        return cls(pa.array(keys, pa.large_binary()), pa.array(values, pa.large_binary()))

    @classmethod
    def joined(cls, parts: Sequence[StoreRows]) -> StoreRows:
        """Put one or several behind each other."""
        if len(parts) == 1:
            return parts[0]
        return cls(pa.concat_arrays([part.keys for part in parts]), pa.concat_arrays([part.values for part in parts]))

    def __len__(self) -> int:
        return len(self.keys)

    def lists(self) -> tuple[list[bytes], list[bytes]]:
        """Give the rows as lists."""
        return self.keys.to_pylist(), self.values.to_pylist()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(int(starts[-1] - starts[0]) for starts in (_starts(self.keys), _starts(self.values)))

    def part(self, start: int, end: int | None = None) -> StoreRows:
        """Give the rows of `[start, end)`, without a copy."""
        length = (len(self) if end is None else end) - start
        return StoreRows(self.keys.slice(start, length), self.values.slice(start, length))

    def detached(self) -> StoreRows:
        """Give the rows for longer than the moment: copied, if they would keep more in memory than twice themselves.

        Buffers are shared with those that this is a part of, and stay whole while one of the parts is there.
        """
        behind = [buffer.size for texts in (self.keys, self.values) for buffer in texts.buffers() if buffer is not None]
        own = self.nbytes + 16 * (len(self) + 1)
        if sum(behind) <= 2 * own:
            return self
        return StoreRows(*(pa.concat_arrays([texts, texts[:0]]) for texts in (self.keys, self.values)))

    def find(self, key: bytes) -> int:
        """Give how many keys are below one; they must be sorted."""
        return bisect_left(range(len(self)), key, key=lambda at: self.keys[at].as_py())

    def increasing(self) -> bool:
        """Say whether the keys are sorted and each is there once."""
        return bool(pc.all(pc.less(self.keys[:-1], self.keys[1:]), min_count=0).as_py())

    def sorted(self) -> StoreRows:
        """Sort the rows by key and drop duplicates (the last one stays); cheap when they are sorted already."""
        if self.increasing():
            return self
        starts = _starts(self.keys)
        width = int(starts[1] - starts[0])
        if width and (np.diff(starts) == width).all():  # of one length: numpy finds the parts that are sorted already
            data = np.frombuffer(self.keys.buffers()[2], np.uint8)[starts[0] : starts[-1]]
            order = pa.array(np.argsort(data.view(f"S{width}"), kind="stable"))
        else:
            order = pc.array_sort_indices(self.keys)
        rows = StoreRows(self.keys.take(order), self.values.take(order))
        last = np.append(pc.not_equal(rows.keys[:-1], rows.keys[1:]).to_numpy(zero_copy_only=False), True)
        return rows if last.all() else StoreRows(rows.keys.filter(pa.array(last)), rows.values.filter(pa.array(last)))


def _starts(texts: pa.LargeBinaryArray) -> npt.NDArray[np.int64]:
    """Give where each one begins in the buffer, and where the last one ends."""
    if not len(texts):
        return np.zeros(1, np.int64)
    return np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]
