"""shardkit.dataset."""
