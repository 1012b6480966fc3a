"""Recovery: changelogs, planner, replay, supervisor, drills and the `rewind` command."""
