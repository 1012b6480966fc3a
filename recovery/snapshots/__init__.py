"""Copies of a shard's database on the checkpoint's filesystem."""
