"""For jobs of a few micro-batches: a base of the changelog comes after a few deltas.

Loaded by every Python process whose path leads here, workers of Spark included.
"""

from __future__ import annotations

from recovery.changelog.file import FileChangelog

FileChangelog.max_deltas = 3
