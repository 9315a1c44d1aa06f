"""shardkit.testing."""
