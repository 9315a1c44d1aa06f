"""shardkit.manifest."""
