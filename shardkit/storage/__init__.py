"""shardkit.storage."""
