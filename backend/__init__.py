"""Rewind's public names."""
