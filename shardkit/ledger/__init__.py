"""What a run consumed, recorded so that it can be proven.

::

    journal   one rank's steps and events as they happened: append-only, torn tails recognised
    merkle    trees of RFC 6962: roots, inclusion and consistency proofs
    records   the bytes of the ledger's files, and the digest of a step
    ledger    one record per step, one line per event, committed in one step
    merging   from the ranks' journals to the ledger: one leaf per step on any topology

SPEC.md says the bytes, the order of writes and what is promised.
"""

from shardkit.ledger.journal import CellRecord, Journal, journal_paths, read_journal
from shardkit.ledger.ledger import Ledger
from shardkit.ledger.merging import Merge, ledger_head, merge_journals
from shardkit.ledger.records import step_digest, step_digests

__all__ = [
    "CellRecord",
    "Journal",
    "Ledger",
    "Merge",
    "journal_paths",
    "ledger_head",
    "merge_journals",
    "read_journal",
    "step_digest",
    "step_digests",
]
