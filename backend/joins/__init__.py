"""Windowed joins of two streams."""
