"""Prove which samples a run consumed, given its directory and the manifest.

The run directory is not trusted. Its records are checked against each other, against the plan rebuilt from the
recorded settings, and against the data. Auditing writes nothing. SPEC.md lists the claims, their evidence and the
attackers considered.
"""

from shardkit.audit.amendments import ChangeRequest, amend_run
from shardkit.audit.auditing import audit_run
from shardkit.audit.comparing import Comparison, compare_runs
from shardkit.audit.plans import RunPlan, find_plans
from shardkit.audit.result import Audit, Finding, html_report
from shardkit.audit.run_record import RunRecord, load_run
from shardkit.audit.signing import make_statement, read_envelope, sign_statement, verify_envelope
from shardkit.audit.spikes import (
    RankedLoss,
    SampleLoss,
    Share,
    Spike,
    describe_ranked,
    find_spikes,
    losses_of_step,
    rank_samples,
)
from shardkit.audit.trace import (
    StepSample,
    Use,
    sample_lineage,
    samples_of_step,
    uses_of,
    uses_of_many,
    version_lineage,
)

__all__ = [
    "Audit",
    "ChangeRequest",
    "Comparison",
    "Finding",
    "RankedLoss",
    "RunPlan",
    "RunRecord",
    "SampleLoss",
    "Share",
    "Spike",
    "StepSample",
    "Use",
    "amend_run",
    "audit_run",
    "compare_runs",
    "describe_ranked",
    "find_plans",
    "find_spikes",
    "html_report",
    "load_run",
    "losses_of_step",
    "make_statement",
    "rank_samples",
    "read_envelope",
    "sample_lineage",
    "samples_of_step",
    "sign_statement",
    "uses_of",
    "uses_of_many",
    "verify_envelope",
    "version_lineage",
]
