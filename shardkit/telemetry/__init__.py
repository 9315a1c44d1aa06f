"""How a run is: polled numbers, records on disk, rules over them (SPEC.md).

Numbers are polled from sources that loaders and trainers hand in; rules and views are functions of the records on
disk. Text that leaves the run directory passes `redaction`.
"""

from shardkit.notebook import pages
from shardkit.telemetry.diagnosis import Anomaly, Bottleneck, find_anomalies, find_bottleneck
from shardkit.telemetry.recorder import Recorder, Telemetry, TelemetrySettings
from shardkit.telemetry.records import Record, RunTelemetry, parse_record, read_events, read_run
from shardkit.telemetry.redaction import redact
from shardkit.telemetry.summary import run_page, summarise

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
    "redact",
    "summarise",
]

pages[RunTelemetry] = run_page
