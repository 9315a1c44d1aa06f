"""Record the samples that a run consumed, in a form that can be proven.

Each rank appends digests and events to its own journal. Merging the journals gives one record per step, the same on
any topology. A torn tail is recognised; any other damage is an error. SPEC.md defines the bytes, the order of writes
and the guarantees.
"""

from shardkit.ledger.bindings import (
    bind_assignment,
    bind_checkpoint,
    bind_configuration,
    bound_assignment,
    bound_settings,
    ledger_head,
    recorded_plan,
    setting_differences,
)
from shardkit.ledger.events import MASKED, SUBSTITUTED
from shardkit.ledger.journal import CellRecord, Journal, journal_paths, read_journal
from shardkit.ledger.ledger import Ledger, step_digest, step_digests
from shardkit.ledger.merging import Merge, merge_journals

__all__ = [
    "MASKED",
    "SUBSTITUTED",
    "CellRecord",
    "Journal",
    "Ledger",
    "Merge",
    "bind_assignment",
    "bind_checkpoint",
    "bind_configuration",
    "bound_assignment",
    "bound_settings",
    "journal_paths",
    "ledger_head",
    "merge_journals",
    "read_journal",
    "recorded_plan",
    "setting_differences",
    "step_digest",
    "step_digests",
]
