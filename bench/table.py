"""What the benchmarks share: a table on the terminal, the same as JSON in `bench/results/`, and the machine."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def report(name: str, title: str, rows: Sequence[dict[str, Any]], notes: Sequence[str] = ()) -> None:
    """Print rows as a table and write them to `bench/results/<name>.json`."""
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    console = Console(width=140)
    console.print(table)
    for note in notes:
        console.print(note)
    RESULTS.mkdir(exist_ok=True)
    data = {
        "title": title,
        "rows": list(rows),
        "notes": list(notes),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        "date": time.strftime("%Y-%m-%d"),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
