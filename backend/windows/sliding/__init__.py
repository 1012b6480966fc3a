"""Windows that end at every event time."""
