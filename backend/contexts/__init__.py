"""Windows and joins without Spark: one call per message."""
