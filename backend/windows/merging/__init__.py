"""Session windows by event time: windows that messages make longer, and merge."""
