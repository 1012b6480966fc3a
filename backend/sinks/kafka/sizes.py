"""What a topic takes at most, and what goes to it in place of a row that is larger: pure, no client.

A broker refuses a record batch above the topic's `max.message.bytes`, and the producer's own limits are lower still. So
every row is measured before it is sent, and one that does not fit is replaced by a row that does:

* `id`, `version`, `shard`, `sequence` and `query_id` as they were, so that it is counted, and told from copies;
* its columns, ours first (window, reason, coordinates), then the smallest, as long as they fit; others are left out;
* `too_large`: `bytes` and `digest` (xxh3-128, hex) of the whole value, `columns`: how many were left out, `cut`: their
  names, the largest first, as many as fit.

A key of more than half the limit is replaced by its digest (xxh3-128, 16 bytes). No whole row has such a key, since the
key's columns are in the value too: so all rows of one key lie in one partition, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import xxhash

from backend.batch import ERROR_SCHEMA, RESULT_FIELDS
from backend.sinks.kafka.rows import MARK, NAMES, Message

BATCH_BYTES = 61
"""A record batch (message format 2) without its records."""
RECORD_BYTES = 36
"""A record without key and value, at most: lengths, attributes, offset and time as varints; no headers."""
LEAST_LIMIT = 1024
"""A topic that takes less is refused: a row without its columns has to fit beside half a kilobyte of key."""
LARGEST_LIMIT = 64 * 1024 * 1024
"""What a topic takes above this is not used: a broker's `socket.request.max.bytes` (100 MB) closes the connection."""
BATCH_TARGET_BYTES = 1_000_000
"""What a producer puts into one batch where topics take more."""

_OURS = [field.name for field in (*RESULT_FIELDS, *ERROR_SCHEMA) if field.name not in ("detail", "key", "value")]
_OURS += ["left_time", "right_time"]


def batch_bytes(key: bytes, value: bytes) -> int:
    """Return the bytes of a batch that holds one record, at most; compression only makes it smaller.

    >>> batch_bytes(b"k", b"12")
    100
    """
    return BATCH_BYTES + RECORD_BYTES + len(key) + len(value)


def producer_sizes(limits: Mapping[str, int]) -> dict[str, int]:
    """Return the settings of a producer that writes to topics with these limits, in bytes.

    `batch.size` does not hold for the first message of a batch, so it is the smallest topic's and the largest row still
    goes out, alone. `message.max.bytes` is what the client refuses by itself, by an estimate above ours.

    >>> producer_sizes({"results": 5000, "errors": 2_000_000})
    {'message.max.bytes': 2001000, 'batch.size': 5000}
    """
    return {
        # what says what was published grows with the shards, and goes to a topic of its own
        "message.max.bytes": max([BATCH_TARGET_BYTES, *limits.values()]) + 1000,
        "batch.size": min([BATCH_TARGET_BYTES, *limits.values()]),
    }


def fit(message: Message, limit: int) -> Message:
    """Return a message that a topic takes: the same one, or one in place of a row that is too large.

    Args:
        message: Of `to_messages`.
        limit: The topic's, in bytes; at least `LEAST_LIMIT`.
    """
    if batch_bytes(message.key, message.value) <= limit:
        return message
    key = message.key if len(message.key) <= limit // 2 else xxhash.xxh3_128_digest(message.key)
    return replace(message, key=key, value=_cut(message.value, limit - batch_bytes(key, b"")))


def digest_of(value: bytes) -> str:
    """Return the digest of a whole value, as `too_large` names it."""
    return xxhash.xxh3_128_hexdigest(value)


def _cut(value: bytes, room: int) -> bytes:
    """Return as much of a row as goes into so many bytes."""
    row: dict[str, Any] = msgspec.json.decode(value)
    reduced = {name: row.pop(name) for name in NAMES if name in row}
    sizes = {name: len(msgspec.json.encode({name: content})) for name, content in row.items()}
    mark: dict[str, Any] = {"bytes": len(value), "digest": digest_of(value), "columns": len(row), "cut": []}
    room -= len(msgspec.json.encode(reduced | {MARK: mark}))
    for name in sorted(sizes, key=lambda name: (name not in _OURS, sizes[name])):
        if sizes[name] > room:  # with its comma in place of a brace
            continue
        room -= sizes[name]
        reduced[name] = row.pop(name)
    mark["columns"] = len(row)
    for name in sorted(row, key=lambda name: -sizes[name]):
        length = len(msgspec.json.encode(name)) + 1
        if length > room:
            break
        room -= length
        mark["cut"].append(name)
    return msgspec.json.encode(reduced | {MARK: mark})
