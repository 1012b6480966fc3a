"""The operator's own row: closing clock, totals of the message store, and when something waits to be sent.

One row, `Region.OPERATOR` + `b"ledger"`, MessagePack, format version first. It is committed with the state that it
speaks of, so it never needs to be derived again.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from backend.batch import NO_TIME
from backend.errors import UNDECODABLE, StateCorrupted, UnknownFormat
from backend.staging import VERIFY
from backend.store import Readable, Region

FORMAT = 1

Row = TypeVar("Row")

KEY = bytes([Region.OPERATOR]) + b"ledger"


class Ledger(msgspec.Struct, array_like=True):
    """What an operator knows of itself between micro-batches.

    Attributes:
        format: Format version of this row.
        clock: The closing clock: windows that end at or before it are closed. Never goes back.
        messages: Live messages in the message store.
        digest: Their digest.
        due_ms: Batch time at which the oldest unsent update is to be sent, None when nothing waits. May be early, when
            what waited was sent with a full result.
        sent_open: Windows may have been sent while they were open (early or drain), so their revisions are not the
            usual ones.
        counted: Messages accepted so far.
        kind_format: Format version of the kind's rows; 1 where a row does not say.
        open: Windows that are open; None where an older release wrote the row. `WindowOperator` then counts them.
    """

    format: int = FORMAT
    clock: int = NO_TIME
    messages: int = 0
    digest: int = 0
    due_ms: int | None = None
    sent_open: bool = False
    counted: int = 0
    kind_format: int = 1
    open: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ledger)


def encode(ledger: Ledger) -> bytes:
    """Encode the row."""
    return _encoder.encode(ledger)


def read(state: Readable, kind_format: int | None = None) -> Ledger:
    """Read the row; a fresh one where there is none.

    Args:
        state: Where.
        kind_format: What the kind can read; None does not look at its rows.

    Raises:
        UnknownFormat: Another release wrote it, or the kind's rows.
        StateCorrupted: It cannot be decoded.
    """
    data = state.get(KEY)
    if data is None:
        return Ledger(kind_format=kind_format or 1, open=0)
    ledger = decode_row(data, _decoder, FORMAT, "the operator's ledger")
    if kind_format not in (None, ledger.kind_format):
        raise UnknownFormat(
            "the windows' state has an unknown format",
            why=f"it is format {ledger.kind_format}, known is {kind_format}",
            command="install the release that wrote it, or read the source anew",
        )
    return ledger


def decode_row(data: bytes, decoder: msgspec.msgpack.Decoder[Row], known: int, what: str) -> Row:
    """Decode a MessagePack array whose first element is its format version; the struct calls it `format`.

    Raises:
        UnknownFormat: Another release wrote it.
        StateCorrupted: It cannot be decoded.
    """
    try:
        row = decoder.decode(data)
    except UNDECODABLE as error:
        _check_format(data, known, what)
        raise StateCorrupted(f"{what} cannot be decoded", why=str(error), command=VERIFY) from error
    if getattr(row, "format", known) != known:
        _check_format(data, known, what)
    return row


def _check_format(data: bytes, known: int, what: str) -> None:
    try:
        found = msgspec.msgpack.decode(data)
    except UNDECODABLE as error:
        raise StateCorrupted(f"{what} cannot be decoded", why=str(error), command=VERIFY) from error
    version = found[0] if isinstance(found, list) and found else found
    if version != known:
        raise UnknownFormat(
            f"{what} has an unknown format",
            why=f"it starts with {version!r}, known is {known}",
            command="install the release that wrote it",
        )
