"""The changelog in a topic."""
