"""shardkit.plan."""
