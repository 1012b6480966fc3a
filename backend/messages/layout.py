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
ANY = "any"
MATRIX: tuple[tuple[str, str, str, str, str, tuple[Part, ...]], ...] = (
    # measure, purpose, equal fields, time range, window, message key
    ("tuple", "aggregate", ANY, ANY, ANY, (_O,)),
    ("tuple", "join", "no", ANY, ANY, (_O,)),
    ("tuple", "join", "yes", ANY, "small", (_O,)),
    ("tuple", "join", "yes", ANY, "large", (_E, _O)),
    ("time", "aggregate", ANY, ANY, ANY, (_T, _O)),
    ("time", "join", "no", ANY, ANY, (_T, _O)),
    ("time", "join", "yes", "no", ANY, (_E, _T, _O)),
    ("time", "join", "yes", "yes", "small", (_T, _E, _O)),
    ("time", "join", "yes", "yes", "large", (_E, _T, _O)),
)
"""SAMZA-552, "Message Store": the first row that fits gives the message key."""
TIME_FIRST = MessageLayout((_T, _O))
"""`<timestamp>_<offset>`: time windows, aggregates."""
OFFSET_FIRST = MessageLayout((_O,))
"""`<offset>`: tuple windows."""


def choose_layout(
    measure: str,
    purpose: str,
    *,
    equal_fields: bool = False,
    time_range: bool = False,
    large: bool = False,
    session: bool = False,
) -> MessageLayout:
    """Choose the message key.

    Args:
        measure: `time` or `tuple`: in what windows are measured.
        purpose: `aggregate` or `join`.
        equal_fields: The join has equal fields.
        time_range: The join has a time range.
        large: The window is large: a join should not iterate through it, or `setKeyedMessageStore(joinKeys)` is asked.
        session: Windows are sessions, so the session key comes first.

    Raises:
        ValueError: The measure or purpose is neither.
    """
    if measure not in ("time", "tuple"):
        raise ValueError(f"measure={measure!r}: allowed are 'time' and 'tuple'")
    if purpose not in ("aggregate", "join"):
        raise ValueError(f"purpose={purpose!r}: allowed are 'aggregate' and 'join'")
    size = "large" if large else "small"
    asked = (measure, purpose, "yes" if equal_fields else "no", "yes" if time_range else "no", size)
    parts = next(row[5] for row in MATRIX if all(cell in (ANY, want) for cell, want in zip(row, asked, strict=False)))
    return MessageLayout((_S, *parts) if session else parts)
