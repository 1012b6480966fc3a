"""The queue of a shard whose state is being restored: what its tasks put aside, and what was decided about it."""
