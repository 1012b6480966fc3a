"""Group keys as numbers: dictionary-encoded once per micro-batch, so that folding works on integers.

Layout of the keys that start with a window's or pane's time (format 1)::

    +--------+--------------------------------+-----------------+-----------+
    | region | start time, ms                 | skip            | group key |
    | 1 byte | 8 bytes, sign-flipped, big-end | 0, 2 or 8 bytes | >= 0      |
    +--------+--------------------------------+-----------------+-----------+

They sort by expiry, so one bound hides everything that is out of retention. The group key is `backend.keys`' encoding
of its fields, empty when the operator groups by none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend import keys as codec
from backend.chunks import decoded, one_chunk
from backend.keys.codes import undecodable
from backend.store.protocol import Region
from backend.windows.columns.arrays import IntArray, compress, firsts

_TIME = 9


def start_bytes(region: Region, start: int) -> bytes:
    """Give the first key of a region at or after a start time."""
    return bytes([region]) + ((start & (2**64 - 1)) ^ (1 << 63)).to_bytes(8, "big")


def start_of(key: bytes) -> int:
    """Inverse of `start_bytes`; of any key of such a region, the start time in it."""
    return int.from_bytes(key[1:9], "big") - (1 << 63)


def join_keys(
    region: Region, starts: IntArray, group_keys: pa.Array, skips: IntArray | None = None, *, skip_bytes: int = 0
) -> list[bytes]:
    """Build keys from their parts; `skips` is for the regions that have one, in `skip_bytes` bytes."""
    skipped = [] if skips is None else [codec.pack_fixed(skips.astype(f"u{skip_bytes}"))]
    keys: list[bytes] = codec.key_column(bytes([region]), codec.pack_fixed(starts), *skipped, group_keys).to_pylist()
    return keys


def split_keys(keys: Sequence[bytes], *, skip_bytes: int = 0) -> tuple[IntArray, IntArray, pa.Array]:
    """Take keys apart: start times, skips (zeros without), group keys. The inverse of `join_keys`."""
    width = _TIME + skip_bytes
    short = next((key for key in keys if len(key) < width), None)
    if short is not None:
        raise undecodable(short, f"{len(short)} bytes, at least {width} were expected")
    head = codec.to_rows([key[:width] for key in keys], width)
    skips = np.zeros(len(keys), np.int64)
    if skip_bytes:
        skips = codec.unpack_fixed(head[:, _TIME:], f"u{skip_bytes}").astype(np.int64)
    return codec.unpack_fixed(head[:, 1:_TIME], np.int64), skips, pa.array([key[width:] for key in keys], pa.binary())


class GroupKeys:
    """Encoder of the group key's fields.

    Args:
        fields: The fields, in order; none groups everything together.
    """

    def __init__(self, fields: Sequence[pa.Field]) -> None:
        self._fields = list(fields)

    def encode(self, messages: pa.Table) -> tuple[IntArray, pa.Array]:
        """Number the messages' group keys.

        Returns:
            For each message the number of its key, and the distinct encoded keys (binary) by number.
        """
        count = messages.num_rows
        if not self._fields or not count:
            return np.zeros(count, np.int64), pa.array([b""] if count else [], pa.binary())
        numbers, rows = self._numbers(messages)
        distinct = [decoded(one_chunk(messages.column(f.name))).take(pa.array(rows)) for f in self._fields]
        encoded = codec.encode_columns(distinct).dictionary_encode()
        if len(encoded.dictionary) < len(rows):  # 0.0 and -0.0 are two values for Arrow and one key
            numbers = encoded.indices.to_numpy().astype(np.int64)[numbers]
        return numbers, encoded.dictionary

    def _numbers(self, messages: pa.Table) -> tuple[IntArray, IntArray]:
        numbers: IntArray | None = None
        for field in self._fields:
            coded = pc.dictionary_encode(decoded(one_chunk(messages.column(field.name))), null_encoding="encode")
            one = coded.indices.to_numpy().astype(np.int64)
            # below 2**62, because each factor is at most the number of rows
            numbers = one if numbers is None else compress(numbers * len(coded.dictionary) + one)[0]
        assert numbers is not None
        return numbers, firsts(numbers, int(numbers.max()) + 1)

    def decode(self, encoded: pa.Array) -> list[pa.Array]:
        """Give the fields of encoded keys."""
        if not self._fields:
            return []
        columns = codec.decode_columns(encoded, [f.type for f in self._fields])
        return [array.cast(f.type) for array, f in zip(columns, self._fields, strict=True)]


class KeySpace:
    """One numbering, in order of encoding, over encoded keys from several places.

    Args:
        parts: Binary arrays; a key may occur any number of times.
    """

    def __init__(self, parts: Sequence[pa.Array]) -> None:
        both = pa.concat_arrays([part.cast(pa.binary()) for part in parts]).dictionary_encode()
        order = pc.array_sort_indices(both.dictionary)
        rank = np.empty(len(order), np.int64)
        rank[order.to_numpy()] = np.arange(len(order))
        self.keys: pa.Array = both.dictionary.take(order)
        """The distinct keys, ascending."""
        numbers = rank[both.indices.to_numpy()] if len(both) else np.empty(0, np.int64)
        self.numbers: list[npt.NDArray[np.int64]] = np.split(numbers, np.cumsum([len(part) for part in parts])[:-1])
        """Per part the number of each of its keys."""

    def __len__(self) -> int:
        return len(self.keys)

    def extended(self, encoded: pa.Array) -> tuple[KeySpace, IntArray | None, IntArray]:
        """Give a space that has more keys too.

        Returns:
            The space, this one when it has them already; what its numbers have become (None: the same); the numbers of
            the keys.
        """
        found = self.find(encoded)
        if not len(found) or int(found.min()) >= 0:
            return self, None, found
        space = KeySpace([self.keys, encoded])
        return space, space.numbers[0], space.numbers[1]

    def find(self, encoded: pa.Array) -> IntArray:
        """Give the numbers of keys, -1 for unknown ones."""
        found: IntArray = pc.index_in(encoded, self.keys).fill_null(-1).to_numpy().astype(np.int64)
        return found
