"""Which key a message gets: SAMZA-552's matrix, as data (`MATRIX`), read by one function (`choose_layout`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Part(StrEnum):
    """What a message key is made of."""

    SESSION = "session"
    EQUAL = "equal"
    TIME = "time"
    OFFSET = "offset"


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """The order of the parts of a message key.

    Attributes:
        parts: Each at most once, OFFSET last.
    """

    parts: tuple[Part, ...]

    @classmethod
    def named(cls, name: str) -> MessageLayout:
        """Give the layout that is called so in the manifest; the inverse of `name`."""
        return cls(tuple(map(Part, name.split("_"))))

    @property
    def timed(self) -> bool:
        """Whether messages expire by event time; by offset otherwise."""
        return Part.TIME in self.parts

    @property
    def clock(self) -> Part:
        """The first part by which messages expire: TIME or OFFSET."""
        return Part.TIME if self.timed else Part.OFFSET

    @property
    def leading(self) -> tuple[Part, ...]:
        """The parts before that one."""
        return self.parts[: self.parts.index(self.clock)]

    @property
    def indexed(self) -> bool:
        """Whether a key begins with another message's key, so that expiry needs the index."""
        return bool(self.leading)

    @property
    def name(self) -> str:
        """Name for the manifest, such as `equal_time_offset`."""
        return "_".join(self.parts)


_T, _E, _O, _S = Part.TIME, Part.EQUAL, Part.OFFSET, Part.SESSION
MATRIX: tuple[tuple[bool, bool, bool | None, bool | None, tuple[Part, ...]], ...] = (
    # by number, equal fields, time range, large window, message key; None is either
    (True, False, None, None, (_O,)),
    (True, True, None, False, (_O,)),
    (True, True, None, True, (_E, _O)),
    (False, False, None, None, (_T, _O)),
    (False, True, False, None, (_E, _T, _O)),
    (False, True, True, False, (_T, _E, _O)),
    (False, True, True, True, (_E, _T, _O)),
)
"""SAMZA-552, "Message Store", of joins: the first row that fits gives the message key."""
TIME_FIRST = MessageLayout((_T, _O))
"""`<timestamp>_<offset>`: aggregates in time windows."""
OFFSET_FIRST = MessageLayout((_O,))
"""`<offset>`: aggregates in tuple windows."""


def choose_layout(
    *, by_number: bool, equal_fields: bool, time_range: bool, large: bool, session: bool = False
) -> MessageLayout:
    """Choose the message key of a join.

    Args:
        by_number: Windows are measured by number of messages; by event time otherwise.
        equal_fields: The join has equal fields.
        time_range: The join has a time range.
        large: The window is large: a join should not iterate through it, or `setKeyedMessageStore(joinKeys)` is asked.
        session: Windows are sessions, so the session key comes first.
    """
    asked = (by_number, equal_fields, time_range, large)
    parts = next(row[4] for row in MATRIX if all(cell in (None, want) for cell, want in zip(row, asked, strict=False)))
    return MessageLayout((_S, *parts) if session else parts)
