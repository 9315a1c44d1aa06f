"""A run's directory as one document: the same for the terminal, the page and scripts."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, Final

from shardkit.telemetry import read_events, read_run, summarise
from shardkit.telemetry.json_lines import read_documents
from shardkit.telemetry.reading import check_run

__all__ = ["run_facts", "view_run"]

_MAX_RUN_JSON: Final = 1 << 20
_EVENT_BYTES: Final = 256 << 10
_METRICS_BYTES: Final = 64 << 10


def view_run(run: Path, now: float | None = None) -> dict[str, Any]:
    """The summary of a run at a moment, with its name and what run.json says.

    Raises:
        NotFoundError: there is no run.
    """
    check_run(run)
    now = time.time() if now is None else now
    document = summarise(read_run(run), read_events(run, tail_bytes=_EVENT_BYTES), now)
    loss = _last_loss(run)
    return {"run": run.absolute().name, **run_facts(run), "loss": loss, **document}


def run_facts(run: Path) -> dict[str, Any]:
    """Manifest, plan and versions of a run, from run.json; empty texts where it has none."""
    path = run / "run.json"
    try:
        if path.stat().st_size > _MAX_RUN_JSON:
            return {"manifest": "", "plan": "", "software": {}}
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        found = {}
    if not isinstance(found, dict):
        found = {}
    software = found.get("software")
    return {
        "manifest": str(found.get("manifest", ""))[:100],
        "plan": str(found.get("plan", ""))[:100],
        "software": {str(name)[:40]: str(value)[:80] for name, value in software.items()}
        if isinstance(software, dict)
        else {},
    }


def _last_loss(run: Path) -> float | None:
    for line in reversed(read_documents(run / "metrics" / "train.jsonl", _METRICS_BYTES)):
        loss = line.get("loss")
        if isinstance(loss, (int, float)) and math.isfinite(loss):
            return float(loss)
    return None
