"""The changelog: a log with bases."""
