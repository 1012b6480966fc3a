"""Messages that no sliding window shows yet: too late for their own window, and without a later one of their key.

They are in the state, because a message may still come that makes a window which shows them; then they are forgotten
here. When the last such window is out of retention, or the input ends, they go to the errors: an accepted message is in
a window or in the errors. The decision is not made when they come, because then it would depend on where micro-batches
are cut.

Key: `Region.OPERATOR`, `b"u"`, event time and offset as in the message's own key (backend.messages). Value:
MessagePack, format version first: skip (backend.windows.sliding.kind), encoded group key, the row of the
errors output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from backend.batch import ERROR_SCHEMA, TIME, MicroBatch
from backend.messages.keys import message_keys
from backend.messages.layout import TIME_FIRST
from backend.store.protocol import Region
from backend.store.workspace import Workspace
from backend.windows.columns.arrays import IntArray
from backend.windows.columns.grouping import start_bytes, start_of
from backend.windows.columns.rows import Rows
from backend.windows.ledger import decode_row
from backend.windows.micro_batch import error_rows, numbers, stamped

FORMAT = 1
_TAG = bytes([Region.OPERATOR]) + b"u"


class _Row(msgspec.Struct, array_like=True):
    format: int
    skip: int
    code: bytes
    error: Mapping[str, Any]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Row)


@dataclass(frozen=True, slots=True)
class Unseen(Rows):
    """Some of these messages; all as long as one another.

    Attributes:
        keys: Keys in the message store, whether they are in it or not.
        time: Event times.
        skip: The windows before `time + skip` do not see them.
        codes: Encoded group keys.
        errors: Their rows of the errors output.
    """

    keys: list[bytes]
    time: IntArray
    skip: IntArray
    codes: pa.Array
    errors: pa.Table

    def put(self, work: Workspace) -> None:
        """Remember them."""
        errors, skips, codes = self.errors.to_pylist(), self.skip.tolist(), self.codes.to_pylist()
        rows = [_Row(FORMAT, skip, code, row) for skip, code, row in zip(skips, codes, errors, strict=True)]
        work.put_many([*map(_mark, self.keys)], [*map(_encoder.encode, rows)])

    def drop(self, work: Workspace) -> None:
        """Forget them."""
        work.delete_many([*map(_mark, self.keys)])


def arrived(batch: MicroBatch, messages: pa.Table, skip: IntArray, codes: pa.Array, detail: str) -> Unseen:
    """Return messages that just came, with a micro-batch. When they are refused their own timestamps are long gone."""
    errors = stamped(error_rows(messages, "out_of_retention", detail), batch.messages, batch.timestamps)
    return Unseen(message_keys(TIME_FIRST, messages), numbers(messages, TIME), skip, codes, errors)


def read(work: Workspace, low: int, high: int) -> Unseen:
    """Read the messages of a half-open range of event times, in order of time."""
    start, end = (_mark(start_bytes(Region.MESSAGES, time)) for time in (low, max(low, high)))
    keys, values = work.scan_arrays(start, end)
    rows = [decode_row(value, _decoder, FORMAT, "a message that no window shows") for value in values]
    found = [bytes([Region.MESSAGES]) + key[len(_TAG) :] for key in keys]
    return Unseen(
        found,
        np.array([start_of(key) for key in found], np.int64),
        np.array([row.skip for row in rows], np.int64),
        pa.array([row.code for row in rows], pa.binary()),
        pa.Table.from_pylist([dict(row.error) for row in rows], schema=ERROR_SCHEMA),
    )


def _mark(key: bytes) -> bytes:
    return _TAG + key[1:]
