"""Stores with the interfaces of their seeds: windows (KIP-428), sessions (KIP-94), TTL state (Spark), and key-value.

Inside `stream(...).process(...)` they belong to the shard's commit; standalone each opens a database of its own.
From the bottom up: `durations`, `values`, `named` (layout and metadata), `standalone`; then the stores.
"""
