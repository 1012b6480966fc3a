"""Arrays that the kinds of windows share: group keys as numbers, runs, blocks."""
