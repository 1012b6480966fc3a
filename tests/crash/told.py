"""What the suites here have tried, for the table at the end of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Told:
    """Outcomes by kind of file and damage, and counts of other suites."""

    cells: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    counts: dict[str, str] = field(default_factory=dict)

    def note(self, row: str, column: str, what: str) -> None:
        """Remember what came of a damage."""
        self.cells.setdefault((row, column), Counter())[what] += 1

    def count(self, what: str, number: str) -> None:
        """Remember how much of something was tried."""
        self.counts[what] = number

    def lines(self) -> list[str]:
        """Give the table: a row per kind, a column per damage, in the order in which they came."""
        rows = list(dict.fromkeys(row for row, _ in self.cells))
        columns = list(dict.fromkeys(column for _, column in self.cells))
        table = [["", *columns], *([row, *(self._cell(row, column) for column in columns)] for row in rows)]
        widths = [max(len(line[at]) for line in table) for at in range(len(columns) + 1)]
        lines = []
        if rows:
            lines += [
                "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
                for line in table
            ]
            tried = sum(n for cell in self.cells.values() for what, n in cell.items() if what != "-")
            lines.append(f"{tried} damages, none of them a wrong result")
        return [*lines, *(f"{number} {what}" for what, number in self.counts.items())]

    def _cell(self, row: str, column: str) -> str:
        found = self.cells.get((row, column), Counter())
        return ", ".join(what if what == "-" else f"{n} {what}" for what, n in found.items())


told = Told()
