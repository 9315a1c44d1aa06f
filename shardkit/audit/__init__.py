"""Proof of what a run consumed, for anyone with its directory and the manifest.

::

    auditing            the audit: the record against itself, the plan, and the data
    record_checks       checkpoints, signed statements, logs and events
    step_checks         every step against the plan; coverage
    result, findings    what an audit says
    run_record          what a run directory holds, read without trusting it
    checkpoint_records  what its checkpoints claim
    recipe              from recorded settings back to a plan
    plans               the plans of a run, made again
    replay              the plan's own digests of all steps, and which samples they cover
    comparing           two runs: where they part, and why
    trace               which steps saw a sample; what a step was made of
    lineage             where a sample comes from
    signing             in-toto statements in DSSE envelopes
    html_report         an audit as a page

SPEC.md says what is proven, and against whom.
"""

from shardkit.audit.auditing import audit_run
from shardkit.audit.comparing import Comparison, compare_runs
from shardkit.audit.findings import Finding
from shardkit.audit.html_report import html_report
from shardkit.audit.lineage import sample_lineage, version_lineage
from shardkit.audit.plans import RunPlan, find_plans
from shardkit.audit.result import Audit
from shardkit.audit.run_record import RunRecord, load_run
from shardkit.audit.signing import make_statement, read_envelope, sign_statement, verify_envelope
from shardkit.audit.trace import StepSample, Use, resolve_samples, samples_of_step, uses_of, uses_of_many

__all__ = [
    "Audit",
    "Comparison",
    "Finding",
    "RunPlan",
    "RunRecord",
    "StepSample",
    "Use",
    "audit_run",
    "compare_runs",
    "find_plans",
    "html_report",
    "load_run",
    "make_statement",
    "read_envelope",
    "resolve_samples",
    "sample_lineage",
    "samples_of_step",
    "sign_statement",
    "uses_of",
    "uses_of_many",
    "verify_envelope",
    "version_lineage",
]
