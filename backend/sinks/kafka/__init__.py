"""The sink that writes to topics, once."""
