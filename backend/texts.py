"""Text that comes from data, made fit to be shown: it moves no cursor, begins no line and marks nothing up."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

MAX_CHARACTERS = 2_000
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories that are not shown but act: controls, formats (bidi overrides, zero widths), surrogates, line and
paragraph separators."""


def visible(text: str) -> str:
    r"""Return a text with every character that acts on a terminal, or hides, written as its escape.

    >>> visible("a\x1b[31mb\u202ec"), visible("[/x] stays"), visible("two\nlines")
    ('a\\x1b[31mb\\u202ec', '[/x] stays', 'two\\nlines')
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(one) if unicodedata.category(one) in _HIDDEN else one for one in text)


def one_line(text: str, most: int = MAX_CHARACTERS) -> str:
    r"""Return a text as one visible line of at most `most` characters, for logs and errors.

    >>> one_line("a\n[rewind:X] b", most=5)
    'a\\n[r...'
    """
    short = visible(text[: most + 1])
    return short if len(text) <= most else f"{short[:most]}..."


def source_partition(stream: int, partition: int, topics: Mapping[int, str]) -> str:
    """Return what people call a source partition: by its topic, or by its stream's number where that is not known.

    >>> source_partition(0, 3, {0: "orders"}), source_partition(1, 3, {})
    ('orders partition 3', 'stream 1 partition 3')
    """
    return f"{visible(topics.get(stream, f'stream {stream}'))} partition {partition}"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
