"""What a run consumed, recorded so that it can be proven.

journal  — one rank's cells as it handed them out: append-only, torn tails recognised
"""

from shardkit.ledger.journal import CellRecord, Journal, read_journal

__all__ = ["CellRecord", "Journal", "read_journal"]
