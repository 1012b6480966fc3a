"""Benchmarks, each a command of its own that prints a table and writes JSON below `bench/results/`."""
