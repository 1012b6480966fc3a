"""What data says on a terminal: as it is, without markup, and no characters that act; and how far work is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from threading import Timer
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.text import Text

from backend.texts import visible

_T = TypeVar("_T")
BAR_AFTER_S = 2.0
"""Seconds that a command may take before it shows how far it is."""


def plain(value: object, style: str = "") -> Text:
    r"""Return a value for rich to draw: never read as markup, and control characters written as escapes.

    >>> plain("[/x] [link=a]b[/link] \x1b[2J").plain
    '[/x] [link=a]b[/link] \\x1b[2J'
    """
    return Text(visible(str(value)), style=style)


def tracked(items: Iterable[_T], what: str, console: Console | None = None) -> Iterator[_T]:
    """Give the items, and draw how many are done once that takes more than `BAR_AFTER_S`.

    Args:
        items: Of unknown number unless they have a length.
        what: Their name, in the plural.
        console: Where to draw; standard error unless told. Nothing is drawn where that is no terminal.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield from items
        return
    bar = Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console, transient=True)
    task = bar.add_task(what, total=len(items) if isinstance(items, Sized) else None)
    late = Timer(BAR_AFTER_S, bar.start)
    late.daemon = True
    late.start()
    try:
        for item in items:
            yield item
            bar.advance(task)
    finally:
        late.cancel()
        late.join()
        bar.stop()
