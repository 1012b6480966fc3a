"""Keys that begin with a group key: windows that every key has for itself (by number of messages, sessions).

Layout (format 1)::

    +--------+-----------+-----------------------------------+
    | region | group key | a number: sign-flipped, big-end   |
    | 1 byte | its code  | 8 bytes, or none                  |
    +--------+-----------+-----------------------------------+

The group key's code (backend.keys) ends by itself, so no key's rows lie among another's. Without group fields the code
is the stream's number, 2 bytes: then windows are per stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from backend.batch import STREAM
from backend.keys import Bytes2D, joined, key_column, pack_fixed, to_binary, to_rows, unpack_fixed
from backend.store.protocol import Region
from backend.windows.columns.arrays import IntArray, compress
from backend.windows.columns.grouping import GroupKeys
from backend.windows.micro_batch import numbers

STREAM_BYTES = 2


class WindowKeys:
    """Codes of group keys, or of streams where there are no group fields.

    Args:
        fields: Fields of the group key, in order.
        per_stream: Put the stream in front of the group key too.
    """

    def __init__(self, fields: Sequence[pa.Field], *, per_stream: bool = False) -> None:
        self._keys, self._bare = GroupKeys(fields), not fields
        self._per_stream = per_stream or self._bare

    def encode(self, messages: pa.Table) -> tuple[IntArray, pa.Array]:
        """Number the messages' codes; gives for each message the number of its code, and the distinct codes."""
        found, codes = self._keys.encode(messages)
        if not self._per_stream:
            return found, codes
        stream, streams = compress(numbers(messages, STREAM))
        both, distinct = compress(found * max(len(streams), 1) + stream)
        code, stream = np.divmod(distinct, max(len(streams), 1))
        heads = to_binary(pack_fixed(streams[stream].astype(np.uint16)))
        return both, joined([heads, codes.take(pa.array(code))])

    def decode(self, codes: pa.Array) -> list[pa.Array]:
        """Give the group fields of codes."""
        if self._per_stream:  # distinct codes only, so few; Arrow's binary_slice fails without a stop
            codes = pa.array([code[STREAM_BYTES:] for code in codes.to_pylist()], pa.binary())
        return self._keys.decode(codes)


def keyed(head: bytes, *parts: pa.Array | Bytes2D) -> list[bytes]:
    """Build keys: `head`, then codes and fixed bytes row by row."""
    keys: list[bytes] = key_column(head, *parts).to_pylist() if len(parts[0]) else []
    return keys


def numbered(region: Region, codes: pa.Array, values: IntArray) -> list[bytes]:
    """Build keys `region, code, number`."""
    return keyed(bytes([region]), codes, pack_fixed(values))


def split_numbered(keys: Sequence[bytes]) -> tuple[pa.Array, IntArray]:
    """Take keys of `numbered` apart: codes and numbers."""
    codes = pa.array([key[1:-8] for key in keys], pa.binary())
    return codes, unpack_fixed(to_rows([key[-8:] for key in keys], 8), np.int64)
