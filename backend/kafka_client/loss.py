"""The connector's "some data may have been lost" as a named error that says what to do next.

Where offsets are gone is known before anything is read (`KafkaSource.batch`, `KafkaSource.check_positions`). What a
topic's retention takes away afterwards, the connector finds in the middle of a micro-batch or of a replay; it stops as
it was told to (`failOnDataLoss`), with an error of its own whose advice would drop messages silently.
"""

from __future__ import annotations

import re

from backend.errors import HistoryLost, RewindError, SourceWentBack

KEEP = (
    "keep the topic's retention longer than the windows' and the longest pause of the job;"
    " rewind reset <checkpoint> accepts the loss and begins anew"
)
"""What helps when offsets are gone."""

_LOSS = re.compile(r"\[KAFKA_DATA_LOSS(?:\.([A-Z_]+))?\]")
_CHANGED = re.compile(r"offset was changed from (\d+) to (\d+)")
_WHY_CHARACTERS = 300


def named_loss(text: str) -> RewindError | None:
    """Name the connector's error by its message, from its beginning; None when it is another.

    >>> named_loss("[KAFKA_DATA_LOSS.START_OFFSET_RESET] ... Reason: Starting offset for t-0 was 3").code
    'HistoryLost'
    >>> named_loss("what a message says: [KAFKA_DATA_LOSS]") is None
    True
    """
    found = _LOSS.match(text)
    if found is None:
        return None
    kind = found.group(1) or ""
    reason = text[found.end() :].partition("Reason:")[2].strip() or text[found.end() :].strip()
    why = f"{kind}: {' '.join(reason.split())[:_WHY_CHARACTERS]}"
    changed = _CHANGED.search(reason)
    if "DELETED" in kind or (changed is not None and int(changed.group(2)) < int(changed.group(1))):
        return SourceWentBack(
            "a topic lost offsets at its end, or was deleted and made again",
            why=why,
            command="start anew with another checkpoint",
        )
    return HistoryLost("the topic no longer holds offsets that are needed", why=why, command=KEEP)
