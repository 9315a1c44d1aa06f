"""Summarise a run directory as one document for terminal, web page and scripts; describe events as text."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from shardkit.telemetry import read_events, read_run, summarise
from shardkit.telemetry.records import check_run, read_documents
from shardkit_tools.console import clean, duration_text

_MAX_RUN_JSON: Final = 16 << 20
_EVENT_BYTES: Final = 256 << 10
_METRICS_BYTES: Final = 64 << 10
_LONGEST: Final = 60
_DIGEST: Final = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")


def view_run(run: Path) -> dict[str, Any]:
    """Return the current summary of a run, with its name, last loss, and identifiers from run.json."""
    check_run(run)
    settings = run_settings(run)
    software = settings.get("software")
    losses = (line.get("loss") for line in read_documents(run / "metrics" / "train.jsonl", _METRICS_BYTES))
    known = [float(loss) for loss in losses if isinstance(loss, (int, float)) and math.isfinite(loss)]
    return {
        "run": run.absolute().name,
        "manifest": str(settings.get("manifest", ""))[:100],
        "plan": str(settings.get("plan", ""))[:100],
        "software": {str(name)[:40]: str(value)[:80] for name, value in software.items()}
        if isinstance(software, dict)
        else {},
        "loss": known[-1] if known else None,
        **summarise(read_run(run), read_events(run, tail_bytes=_EVENT_BYTES), time.time()),
    }


def run_settings(run: Path) -> dict[str, Any]:
    """Return the contents of run.json; empty if it is missing or unreadable."""
    try:
        path = run / "run.json"
        found = json.loads(path.read_bytes()) if path.stat().st_size < _MAX_RUN_JSON else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def clock_text(seconds: float) -> str:
    """Return the local time of day, HH:MM:SS, of a time in seconds since 1970."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def anomaly_text(anomaly: Mapping[str, Any]) -> str:
    """Return a sentence on an anomaly, such as ``rank 1 has made no step for 30 s, at step 7``."""
    found = anomaly.get("evidence")
    evidence: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    who = f"rank {anomaly.get('rank')}"
    try:
        return clean(_sentence(str(anomaly.get("kind") or anomaly.get("anomaly")), who, evidence))
    except (KeyError, TypeError, ValueError):
        return clean(f"{who}: {_pairs(evidence)}")


def _sentence(kind: str, who: str, evidence: Mapping[str, Any]) -> str:
    if kind == "stall" and "silent_s" in evidence:
        return (f"{who} on {evidence['host']} has been silent for {evidence['silent_s']:.0f} s, since step "
                f"{evidence['step']}")  # fmt: skip
    if kind == "stall":
        stage = f" in {evidence['stage']}" if evidence.get("stage") else ""
        return f"{who} has made no step for {evidence['stuck_s']:.0f} s{stage}, at step {evidence['step']}"
    if kind == "straggler":
        return (f"{who} takes {duration_text(evidence['cell_s'])} per cell, the others "
                f"{duration_text(evidence['others_cell_s'])} ({evidence['times']:.1f} times)")  # fmt: skip
    if kind == "skew":
        return (f"{who} works {duration_text(evidence['busiest_step_s'])} per step, the ranks "
                f"{duration_text(evidence['mean_step_s'])} on average: {100 * evidence['lost_share']:.0f} % of the "
                "step is waiting")  # fmt: skip
    if kind == "slowdown":
        return (f"{evidence['samples_per_s']:,.0f} samples/s, {100 * evidence['share']:.0f} % of the "
                f"{evidence['before_samples_per_s']:,.0f} before; {evidence['bottleneck']}")  # fmt: skip
    return f"{who}: {evidence['failures']} blocks failed verification in {evidence['seconds']:.0f} s"


def event_text(event: Mapping[str, Any]) -> str:
    """Return the details of an event on one line of printable text."""
    if event.get("event") == "anomaly":
        kind, action = (clean(str(event.get(name))) for name in ("anomaly", "action"))
        return f"{kind}: {anomaly_text(event)} → {action}"
    hidden = ("time", "event", "rank", "owner", "configuration")
    return _pairs({name: value for name, value in event.items() if name not in hidden})


def grouped_events(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return events for display, oldest first: time, rank, event, text and count.

    Consecutive events with the same text, such as one from each rank, are one entry with the time of the last; its rank
    is None if they have several.
    """
    found: list[dict[str, Any]] = []
    for event in events:
        text, rank = event_text(event), event.get("rank")
        last = found[-1] if found else {}
        if (last.get("event"), last.get("text")) == (event["event"], text):
            last |= {
                "time": event["time"],
                "count": last["count"] + 1,
                "rank": rank if rank == last["rank"] else None,
            }
        else:
            found.append(
                {"time": event["time"], "rank": rank, "event": event["event"], "text": text, "count": 1}
            )
    return found


def _pairs(values: Mapping[str, Any]) -> str:
    return "  ".join(
        f"{clean(str(name))}={_short(value)}"
        for name, value in values.items()
        if value not in ("", None) and not isinstance(value, Mapping)
    )


def _short(value: object) -> str:
    text = clean(f"{value:.4g}" if isinstance(value, float) else str(value))
    text = _DIGEST.sub(r"\1…", text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
