"""Recovery: changelogs, planner, replay, supervisor, drills and the `rewind` command."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""Directory that both packages lie in: on the path of processes that are started."""
