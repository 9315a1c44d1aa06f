"""Telemetry of a run: polled numbers, records on disk, and rules over records (SPEC.md).

Numbers are polled from sources that loaders and trainers register. Rules and views are functions of the records on
disk.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardkit.notebook import pages
from shardkit.telemetry.recorder import Recorder, Telemetry, TelemetrySettings
from shardkit.telemetry.records import Record, RunTelemetry, parse_record, read_events, read_run

if TYPE_CHECKING:
    from shardkit.telemetry.diagnosis import Anomaly, Bottleneck, find_anomalies, find_bottleneck
    from shardkit.telemetry.summary import summarise

__all__ = [
    "Anomaly",
    "Bottleneck",
    "Record",
    "Recorder",
    "RunTelemetry",
    "Telemetry",
    "TelemetrySettings",
    "find_anomalies",
    "find_bottleneck",
    "parse_record",
    "read_events",
    "read_run",
    "summarise",
]

# Every loader imports this package; modules that diagnose and show runs are imported on first use.
_OF_READERS = {
    "Anomaly": "diagnosis", "Bottleneck": "diagnosis", "find_anomalies": "diagnosis", "find_bottleneck": "diagnosis",
    "summarise": "summary",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _OF_READERS:
        return getattr(importlib.import_module(f"shardkit.telemetry.{_OF_READERS[name]}"), name)
    raise AttributeError(f"module 'shardkit.telemetry' has no attribute {name!r}")


def _run_page(telemetry: RunTelemetry) -> str:
    from shardkit.telemetry.summary import run_page

    return run_page(telemetry)


pages[RunTelemetry] = _run_page
