"""What the benchmarks share: their options, a table on the terminal, the same as JSON, and the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


class Options(argparse.ArgumentParser):
    """The options of a benchmark: what all have, and its own.

    Args:
        name: The module in `bench`.
        text: Its docstring.
    """

    def __init__(self, name: str, text: str | None) -> None:
        super().__init__(
            prog=f"python -m bench.{name}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.add_argument("--quick", action="store_true", help="small, for correctness only")
        self.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parse arguments, those of the process when there are none; `command` says how to run it again."""
        given = list(sys.argv[1:] if arguments is None else arguments)
        options = self.parse_args(given)
        if "--results" in given:
            at = given.index("--results")
            del given[at : at + 2]
        options.command = " ".join([self.prog, *given])
        return options


def report(
    name: str, options: argparse.Namespace, title: str, rows: Sequence[dict[str, Any]], notes: Sequence[str] = ()
) -> None:
    """Print rows as a table and write them as `<name>.json`, of a quick run as `<name>-quick.json`.

    With `--case`, where a benchmark has that, nothing is written: the file holds all cases.
    """
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    console = Console(width=140)
    console.print(table)
    for note in notes:
        console.print(note)
    if getattr(options, "case", None) is not None:
        return
    data = {
        "title": title,
        "command": options.command,
        "rows": list(rows),
        "notes": list(notes),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        "date": time.strftime("%Y-%m-%d"),
    }
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / f"{name}{'-quick' if options.quick else ''}.json").write_text(json.dumps(data, indent=1) + "\n")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
