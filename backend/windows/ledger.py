"""The operator's own row: watermark, totals of the message store, and when something waits to be sent.

One row, `Region.OPERATOR` + `b"ledger"`, MessagePack, format version first. It is committed with the state that it
speaks of, so it never needs to be derived again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from backend.batch import NO_TIME
from backend.errors import UNDECODABLE, StateCorrupted, UnknownFormat
from backend.store.protocol import Readable, Region
from backend.windows.columns.arrays import IntArray, Mask
from backend.windows.policies import Policies

FORMAT = 1

Row = TypeVar("Row")

KEY = bytes([Region.OPERATOR]) + b"ledger"


class Ledger(msgspec.Struct, array_like=True):
    """What an operator knows of itself between micro-batches.

    Attributes:
        format: Format version of this row.
        clock: The watermark: windows that end at or before it are closed. Never goes back.
        messages: Live messages in the message store.
        digest: Their digest.
        due_ms: Batch time at which the oldest unsent update is to be sent, None when nothing waits. May be early, when
            what waited was sent with a full result.
        sent_open: Windows may have been sent while they were open (early or drain), so their revisions are not the
            usual ones.
        counted: Messages accepted so far.
        kind_format: Format version of the kind's rows; 1 where a row does not say.
        open: Windows that are open; None where an older release wrote the row. `WindowOperator` then counts them.
        policies: Early, full and late policy of the last micro-batch; None where an older release wrote the row.
        full_since: Whether windows were sent in full, ascending: (watermark, whether those that closed after it
            were). Of windows in retention; before the first entry as it says.
        drained: A drain has sent what is open, and no message came since, to any shard.
        early_messages: The early policy's number of messages in the last micro-batch.
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
    policies: tuple[int | None, bool, int | None] | None = None
    full_since: list[tuple[int, bool]] = []
    drained: bool = False
    early_messages: int | None = None

    def run_under(self, policies: Policies, time_ms: int) -> bool:
        """Go on under policies; when they are others than before, what waits is looked at now.

        Args:
            policies: Of this micro-batch.
            time_ms: Its batch time.

        Returns:
            True when full results are turned off with this micro-batch: what is open waited for them.
        """
        asked, old = (policies.early_ms, policies.full, policies.late_ms), self.policies
        counted, self.early_messages = self.early_messages, policies.early_messages
        if asked == old and counted == policies.early_messages:
            return False
        if old is None or old[1] != policies.full:
            self.full_since = [*self.full_since, (self.clock, policies.full)]
        self.policies = asked
        if self.due_ms is not None or counted is not None:  # what waits for a number of messages is due at no time
            self.due_ms = time_ms if self.due_ms is None else min(self.due_ms, time_ms)
        return old is not None and old[1] and not policies.full

    def count_stored(self, messages: int, digest: int) -> None:
        """Note that so many more messages are stored, or fewer, and their digest."""
        self.messages += messages
        self.digest = (self.digest + digest) % 2**64

    def full_sent(self, closes_at: IntArray) -> Mask:
        """Return for windows that are closed whether they were sent in full, if they had a message in time.

        Args:
            closes_at: The smallest watermark at which each is closed.
        """
        clocks = np.array([clock for clock, _ in self.full_since], np.int64)
        sent = np.array([full for _, full in self.full_since], np.bool_)
        found: Mask = sent[np.maximum(np.searchsorted(clocks, closes_at, "left") - 1, 0)]
        return found

    def forget_before(self, closed_at: int) -> None:
        """Forget how windows were sent that closed at or before a clock: they are gone."""
        later = [at for at, (clock, _) in enumerate(self.full_since) if at and clock <= closed_at]
        self.full_since = self.full_since[later[-1] if later else 0 :]


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


def decode_row(
    data: bytes, decoder: msgspec.msgpack.Decoder[Row], known: int, what: str, *, older: Sequence[int] = ()
) -> Row:
    """Decode a MessagePack array whose first element is its format version; the struct calls it `format`.

    Args:
        data: The row.
        decoder: Decodes it.
        known: The format version.
        what: What it is, for errors.
        older: Format versions that are read, too.

    Raises:
        UnknownFormat: Another release wrote it.
        StateCorrupted: It cannot be decoded.
    """
    try:
        row = decoder.decode(data)
    except UNDECODABLE as error:
        _check_format(data, known, what)
        raise StateCorrupted(f"{what} cannot be decoded", why=str(error)) from error
    if getattr(row, "format", known) not in (known, *older):
        _check_format(data, known, what)
    return row


def _check_format(data: bytes, known: int, what: str) -> None:
    try:
        found = msgspec.msgpack.decode(data)
    except UNDECODABLE as error:
        raise StateCorrupted(f"{what} cannot be decoded", why=str(error)) from error
    version = found[0] if isinstance(found, list) and found else found
    if version != known:
        raise UnknownFormat(f"{what} has an unknown format", why=f"it starts with {version!r}, known is {known}")
