"""What a shard's store is: an ordered map of bytes, changed by whole commits."""
