"""How a run is: polled numbers, records on disk, rules over them (SPEC.md).

registry     — the sources of one loader or trainer, polled; nothing global
records      — one moment of one rank as a JSON line; parsed without trust
recorder     — the thread that writes them, the heartbeat, bounded files
reading      — a run's records and events, as they are on disk
intervals    — differences of records: rates, busy time, shares
bottleneck   — what the run waits for
anomalies    — five rules, pure functions of the records
watching     — rules applied to a live run, told as events
summary      — everything that `top` and the dashboard show, as one document
prometheus   — the metrics by their standard names
serving      — /metrics and /healthz on 127.0.0.1
slow_blocks  — which blocks took longest, which shards are hot, what loading cost by lane
stacks       — what every thread is doing
redaction    — texts without credentials
"""

from shardkit.telemetry.anomalies import Anomaly, find_anomalies
from shardkit.telemetry.bottleneck import Bottleneck, find_bottleneck
from shardkit.telemetry.reading import RunTelemetry, read_events, read_run
from shardkit.telemetry.recorder import Recorder, TelemetrySettings
from shardkit.telemetry.records import Record, parse_record
from shardkit.telemetry.redaction import redact
from shardkit.telemetry.registry import Telemetry
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
    "redact",
    "summarise",
]
