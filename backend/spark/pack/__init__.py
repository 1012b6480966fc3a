"""How messages travel to the shards: one frame per slice and shard."""
