"""shardkit.telemetry."""
