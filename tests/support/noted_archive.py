"""An archive whose reader notes when Spark asked it for its end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.sources.archive import ArchiveSource
from backend.sources.archive_reader import ArchiveStreamReader


class Noting(ArchiveStreamReader):
    """Notes beside the archive when it was asked, seconds."""

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        """Give the end."""
        with Path(self._path + "-asked").open("a") as file:
            file.write(f"{time.time()}\n")
        return super().latestOffset(start, limit)


@dataclass(frozen=True)
class Noted(ArchiveSource):
    """The source, for tasks as well."""

    def stream_reader(self, names: Any = None, first: Any = None) -> Noting:
        """Return the reader."""
        return Noting(self, names)
