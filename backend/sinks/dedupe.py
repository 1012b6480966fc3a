"""How a consumer tells rows that came twice: for topics that are written at least once.

A micro-batch that runs again is written again, and what an attempt that failed has brought may be any part of it, in
any order, also late: when the next attempt, or the next micro-batch, is already there. What holds is this:

* A row of one (query, shard, version) has one `sequence`, whichever attempt wrote it, and goes to one partition.
* Spark begins a micro-batch only when all rows of the one before are acknowledged. So in each partition all rows of a
  version come before the first row of the next one, and what comes of an older version later is a copy.

So of each (topic, partition, query, shard) the newest version is remembered, and which of its rows came: a number below
which all came, and one bit for each above it. Nothing is concluded from the rows that did not come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backend.errors import UNDECODABLE, UnknownFormat
from backend.sinks.kafka.rows import QUERY

FORMAT = 2
"""Of `Dedupe.state`; 1 was release 0.1's, which took each attempt for a prefix."""

_PIECE_ROWS = 1024
_WHOLE = (1 << _PIECE_ROWS) - 1


@dataclass(slots=True)
class _Seen:
    """What came of one version.

    Attributes:
        version: The newest.
        whole: All pieces below this number are complete.
        pieces: The others: number -> bit set of its `_PIECE_ROWS` sequences.
    """

    version: int
    whole: int = 0
    pieces: dict[int, int] = field(default_factory=dict)

    def add(self, sequence: int) -> bool:
        """Return whether a sequence is new, and keep it."""
        number, place = divmod(sequence, _PIECE_ROWS)
        piece, bit = self.pieces.get(number, 0), 1 << place
        if 0 <= number < self.whole or piece & bit:
            return False
        self.pieces[number] = piece | bit
        while self.pieces.get(self.whole) == _WHOLE:
            del self.pieces[self.whole]
            self.whole += 1
        return True


class Dedupe:
    """Tells a consumer which rows it has seen.

    A topic must keep its number of partitions, since rows go where their key sends them; it may have had several
    queries, one after the other. Memory: one bit per row of the newest micro-batch, per topic, partition and shard.

    Args:
        seen: `state` of before; a consumer keeps it where it keeps its offsets, in one step with them.

    Raises:
        UnknownFormat: `seen` is of another release.

    >>> dedupe = Dedupe()
    >>> row = {"query_id": "q", "shard": 0, "version": 7, "sequence": 5}
    >>> dedupe.is_new(row, "windows", 2), dedupe.is_new(row, "windows", 2)
    (True, False)
    >>> dedupe.is_new(row | {"sequence": 0}, "windows", 2)
    True
    """

    def __init__(self, seen: Mapping[str, Any] | None = None) -> None:
        self._seen: dict[str, _Seen] = _decode(seen) if seen else {}

    def is_new(self, row: Mapping[str, Any], topic: str, partition: int) -> bool:
        """Return whether a row comes for the first time, and remember it.

        Args:
            row: A message's value, decoded.
            topic: Where it was.
            partition: Where it was.
        """
        name = f"{topic}/{partition}/{row.get(QUERY, '')}/{row['shard']}"
        version, sequence = int(row["version"]), int(row["sequence"])
        seen = self._seen.get(name)
        if seen is None or version > seen.version:
            seen = self._seen[name] = _Seen(version)
        return version == seen.version and seen.add(sequence)

    @property
    def state(self) -> dict[str, Any]:
        """What is remembered, as JSON takes it."""
        entries = {
            name: [seen.version, seen.whole, {str(number): f"{piece:x}" for number, piece in seen.pieces.items()}]
            for name, seen in self._seen.items()
        }
        return {"format": FORMAT, "seen": entries}


def _decode(state: Mapping[str, Any]) -> dict[str, _Seen]:
    """Return what `Dedupe.state` held.

    Raises:
        UnknownFormat: It is of another release, or damaged.
    """
    found, why = state.get("format"), ""
    if found != FORMAT:
        why = f"format {found if 'format' in state else 1}, this release reads {FORMAT}"
    else:
        try:
            return {
                name: _Seen(int(version), int(whole), {int(number): int(piece, 16) for number, piece in pieces.items()})
                for name, (version, whole, pieces) in state["seen"].items()
            }
        except UNDECODABLE as error:
            why = str(error)
    raise UnknownFormat(
        "a state of Dedupe cannot be read",
        where="Dedupe(seen)",
        why=why,
        command="go on with Dedupe() from the offsets beside it: of the micro-batch that was being read, copies may"
        " come through; or read the topic again from its beginning",
    )
