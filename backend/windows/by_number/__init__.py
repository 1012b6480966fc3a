"""Windows by number of messages."""
