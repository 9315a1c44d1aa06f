"""shardkit.loader."""
