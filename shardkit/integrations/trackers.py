"""Figures of a loader and of audits for Weights & Biases and MLflow.

Example::

    figures = wandb_figures(loader)             # after wandb.init(); or mlflow_figures(loader)
    for batch in loader:
        figures()
    figures.audit(audit_run("runs/a"))
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from shardkit.audit import Audit
from shardkit.errors import MissingDependency, UsageError
from shardkit.extras import install_command
from shardkit.loader import Loader
from shardkit.ranges import Range
from shardkit.telemetry import Record
from shardkit.telemetry.serving import METRICS

__all__ = ["Figures", "mlflow_figures", "wandb_figures"]

Numbers: TypeAlias = dict[str, float]
Summarise: TypeAlias = Callable[[Numbers, dict[str, str]], Any]


class Figures:
    """Callback of a training loop: call it after each step, on rank 0 or on every rank that has a tracked run.

    The metrics of Prometheus have their names here, too, such as ``shardkit/loader_wait_seconds``. Two figures
    describe the time since the last report: ``shardkit/samples_per_second`` of this rank, and
    ``shardkit/wait_share``, the share of the time in which the trainer waited for the loader.

    Args:
        loader: ``ds.loader(plan)``.
        every: number of calls per report.
        log: function that gets the figures of a report.
        summarise: function that gets the numbers and texts of an audit.
    """

    def __init__(
        self, loader: Loader, every: int, log: Callable[[Numbers], Any], summarise: Summarise
    ) -> None:
        self._loader, self._every = loader, int(Range(1, 1 << 30).check("every", every))
        self._log, self._summarise = log, summarise
        self._calls = 0
        self._last = _totals(loader.telemetry.read())

    def __call__(self) -> None:
        """Count a step, and report if it is the last one of `every`."""
        self._calls += 1
        if self._calls % self._every == 0:
            self._log(self._read())

    def audit(self, audit: Audit) -> None:
        """Report the result of an audit: counts, exit code, verdict, manifest and plan."""
        numbers: Numbers = {"steps": audit.steps, "samples": audit.samples, "recomputed": audit.checked}
        for severity in ("violated", "unknown", "explained"):
            numbers[severity] = sum(finding.severity == severity for finding in audit.findings)
        numbers["exit_code"] = audit.exit_code
        texts = {"verdict": audit.verdict, "manifest": audit.manifest, "plan": audit.plan}
        self._summarise(
            {f"shardkit/audit/{name}": float(number) for name, number in numbers.items()},
            {f"shardkit/audit/{name}": text for name, text in texts.items()},
        )

    def _read(self) -> Numbers:
        record = self._loader.telemetry.read()
        figures = {
            "/".join(filter(None, ("shardkit", metric.name.removeprefix("shardkit_"), label))): value
            for metric in METRICS
            for label, value in metric.samples(record)
        }
        last, self._last = self._last, _totals(record)
        elapsed, samples, waited = (new - old for new, old in zip(self._last, last, strict=True))
        return figures | {
            "shardkit/samples_per_second": samples / elapsed,
            "shardkit/wait_share": waited / elapsed,
        }


def _totals(record: Record) -> tuple[float, float, float]:
    return time.perf_counter(), record.value("loader.samples"), record.value("loader.consumer_wait_s")


def wandb_figures(loader: Loader, every: int = 50) -> Figures:
    """Return a callback that reports to the current run of Weights & Biases.

    A report is part of the row that the loop logs next, so the loop's own steps stay as they are. The result of an
    audit is part of the run's summary. A missing package raises MissingDependency, a missing run UsageError.
    """
    run = _tracker("wandb").run
    if run is None:
        raise UsageError("wandb_figures: no run has begun; call wandb.init() first")
    run.define_metric("shardkit/*", step_metric="shardkit/step")
    return Figures(
        loader, every, lambda figures: run.log(figures, commit=False),
        lambda numbers, texts: run.summary.update({**numbers, **texts}),
    )  # fmt: skip


def mlflow_figures(loader: Loader, every: int = 50) -> Figures:
    """Return a callback that reports to the active run of MLflow, and texts of audits as its tags."""
    mlflow = _tracker("mlflow")
    return Figures(
        loader, every, lambda figures: mlflow.log_metrics(figures, step=int(figures["shardkit/step"])),
        lambda numbers, texts: (mlflow.log_metrics(numbers), mlflow.set_tags(texts)),
    )  # fmt: skip


def _tracker(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependency(f"{name} is not installed; run: {install_command(name)}") from error
