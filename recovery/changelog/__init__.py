"""The changelog: a log with bases."""

from __future__ import annotations

import os

from recovery.changelog.file import FileChangelog
from recovery.changelog.protocol import Changelog, Entry, History

__all__ = ["Changelog", "Entry", "FileChangelog", "History", "open_changelog"]


def open_changelog(uri: str | os.PathLike[str]) -> Changelog:
    """Open a changelog by where it is.

    Args:
        uri: A directory: path or fsspec URI.
    """
    return FileChangelog(uri)
