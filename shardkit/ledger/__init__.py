"""shardkit.ledger."""
