"""What a run consumed, recorded so that it can be proven.

::

    journal          one rank's steps and events as they happen: append-only
    journal_format   its bytes
    journal_reading  torn tails recognised, everything else checked
    merkle           trees of RFC 6962: roots, inclusion and consistency proofs
    records          the bytes of the ledger's files, and the digest of a step
    state            what is committed
    ledger           one record per step, one line per event, committed in one step
    collecting       a step whose cells are not all known yet
    merging          from the ranks' journals to the ledger: one leaf per step on any topology
    heads            the head for a checkpoint
    bindings         settings and checkpoints as events

SPEC.md says the bytes, the order of writes and what is promised.
"""

from shardkit.ledger.bindings import bind_checkpoint, bind_configuration, bound_settings, setting_differences
from shardkit.ledger.heads import ledger_head
from shardkit.ledger.journal import Journal
from shardkit.ledger.journal_format import CellRecord
from shardkit.ledger.journal_reading import journal_paths, read_journal
from shardkit.ledger.ledger import Ledger
from shardkit.ledger.merging import Merge, merge_journals
from shardkit.ledger.records import MASKED, SUBSTITUTED, step_digest, step_digests

__all__ = [
    "MASKED",
    "SUBSTITUTED",
    "CellRecord",
    "Journal",
    "Ledger",
    "Merge",
    "bind_checkpoint",
    "bind_configuration",
    "bound_settings",
    "journal_paths",
    "ledger_head",
    "merge_journals",
    "read_journal",
    "setting_differences",
    "step_digest",
    "step_digests",
]
