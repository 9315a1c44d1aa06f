"""shardkit.audit."""
