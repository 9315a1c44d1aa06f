"""shardkit.formats."""
