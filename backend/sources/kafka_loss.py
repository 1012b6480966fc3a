"""The connector's "some data may have been lost" as a named error that says what to do next.

Where offsets are gone is known before anything is read (`KafkaSource.batch`, `KafkaSource.check_positions`). What a
topic's retention takes away afterwards, the connector finds in the middle of a micro-batch or of a replay; it stops as
it was told to (`failOnDataLoss`), with an error of its own whose advice would drop messages silently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    """Name the connector's error in a text, such as the message of Spark's exception; None when it is not there.

    >>> named_loss("[KAFKA_DATA_LOSS.START_OFFSET_RESET] ... Reason: Starting offset for t-0 was 3").code
    'HistoryLost'
    >>> named_loss("something else") is None
    True
    """
    found = _LOSS.search(text)
    if found is None:
        return None
    kind = found.group(1) or ""
    told = text[found.end() :].partition("Reason:")[2].strip() or text[found.end() :].strip()
    why = f"{kind}: {' '.join(told.split())[:_WHY_CHARACTERS]}"
    changed = _CHANGED.search(told)
    if "DELETED" in kind or (changed is not None and int(changed.group(2)) < int(changed.group(1))):
        return SourceWentBack(
            "a topic lost offsets at its end, or was deleted and made again",
            why=why,
            command="start anew with another checkpoint",
        )
    return HistoryLost("the topic no longer holds offsets that are needed", why=why, command=KEEP)


@contextmanager
def losses_named(look_again: Callable[[], object]) -> Iterator[None]:
    """Let what the connector finds gone in the middle of a read come out of a block by its name.

    Its own error may not arrive: where the connector's jars were added to a running session, Spark's driver cannot
    read that exception and tells of a task that failed for an "UnknownReason" (measured). So the source is asked again.

    Args:
        look_again: Raises the named error when what the block reads is not there any more.

    Raises:
        HistoryLost: The topic no longer holds offsets that the block reads.
        SourceWentBack: The topic was deleted, or made again.
    """
    try:
        yield
    except RewindError:
        raise
    except Exception as error:
        named = named_loss(str(error))
        if named is not None:
            raise named from error
        look_again()
        raise
