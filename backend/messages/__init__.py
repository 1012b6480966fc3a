"""The message store (SAMZA-552): `layout` chooses the key, `keys` builds it, `rows` stores, reads and expires."""

from backend.messages.keys import (
    OFFSET_BYTES,
    TIME_BYTES,
    clock_bytes,
    index_keys,
    message_key_column,
    message_keys,
    message_order,
)
from backend.messages.layout import MATRIX, OFFSET_FIRST, TIME_FIRST, MessageLayout, Part, choose_layout
from backend.messages.rows import (
    MessageCodec,
    delete_messages,
    digest,
    expire_messages,
    find_messages,
    sorted_rows,
)

__all__ = [
    "MATRIX",
    "OFFSET_BYTES",
    "OFFSET_FIRST",
    "TIME_BYTES",
    "TIME_FIRST",
    "MessageLayout",
    "Part",
    "choose_layout",
    "message_key_column",
    "message_keys",
    "index_keys",
    "message_order",
    "clock_bytes",
    "sorted_rows",
    "MessageCodec",
    "expire_messages",
    "find_messages",
    "delete_messages",
    "digest",
]
