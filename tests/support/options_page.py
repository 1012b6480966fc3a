"""The tables of docs/options.md, made from signatures and docstrings: `python -m tests.support.options_page`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import backend
from backend.spark.stream import Pipeline, Stream

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"
NAMES = (
    *("tumbling", "hopping", "sliding", "session", "stream", "policies", "join", "archive", "kafka", "results_of"),
    *("kafka_sink", "delta_sink", "iceberg_sink", "sql_sink", "foreach_batch"),
)
TABLES: dict[str, Callable[..., Any]] = {
    **{name: getattr(backend, name) for name in NAMES},
    "window": Stream.window,
    "process": Stream.process,
    "start": Pipeline.start,
}
"""Under each name the page has a marker."""
_UNITS = (("day", 86_400_000), ("hour", 3_600_000), ("minute", 60_000), ("second", 1_000))
_TABLE = re.compile(r"<!-- options of (\w+) -->\n.*?<!-- end -->\n", re.S)


def said(function: Callable[..., Any]) -> dict[str, str]:
    """Return what a docstring's `Args:` says, by argument."""
    text = inspect.getdoc(function) or ""
    found = re.search(r"^Args:\n((?:    .*\n|\n)*)", f"{text}\n", re.M)
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", found[1] if found else "", re.M)
    return {name: re.sub(r"\s+", " ", meaning).strip() for name, meaning in entries}


def default(parameter: inspect.Parameter) -> str:
    """Return a default as a reader writes it.

    >>> default(inspect.Parameter("idle_after", inspect.Parameter.KEYWORD_ONLY, default=120_000, annotation="Duration"))
    '`"2 minutes"`'
    """
    value = parameter.default
    if value is inspect.Parameter.empty:
        return "required"
    if value in (None, "", ()):
        return ""
    if "Duration" in str(parameter.annotation) and isinstance(value, int) and value:
        unit, size = next((unit, size) for unit, size in _UNITS if value % size == 0)
        value = f"{value // size} {unit}{'s' * (value != size)}"
    return f"`{value:,}`" if type(value) is int else f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def table(function: Callable[..., Any]) -> Iterator[str]:
    """Return the lines of a table; every option must be in the docstring."""
    yield "| option | type | default | meaning |"
    yield "|---|---|---|---|"
    meanings = said(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        kind = re.sub(r"\b(?:Callable\[.*\]|Consumer|BatchFunction)", "function", str(parameter.annotation))
        cells = [f"`{name}`", kind.replace(" | ", " or "), default(parameter), meanings[name]]
        yield f"| {' | '.join(cells)} |"


def page(text: str) -> str:
    """Return the page with its tables made anew.

    Raises:
        ValueError: It has not a table of each function, once.
    """
    names = [found[1] for found in _TABLE.finditer(text)]
    if sorted(names) != sorted(TABLES):
        raise ValueError(f"tables of {sorted(names)}; there must be one each of {sorted(TABLES)}")

    def made(found: re.Match[str]) -> str:
        return "\n".join([f"<!-- options of {found[1]} -->", "", *table(TABLES[found[1]]), "", "<!-- end -->", ""])

    return _TABLE.sub(made, text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
