"""Health and metrics of a run over HTTP (SPEC.md §4).

One table defines all metrics and their standard names. Exposing them requires prometheus-client.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardkit.errors import MissingDependency
from shardkit.extras import install_command
from shardkit.telemetry.diagnosis import KINDS, cost_skew, find_anomalies
from shardkit.telemetry.pages import Answer, PageServer, parse_listen
from shardkit.telemetry.records import NEWEST_BYTES, Record, RunTelemetry, read_run


def health(telemetry: RunTelemetry, now: float, host: str | None = None) -> Answer:
    """Report whether every rank, of a host if given, writes records and makes steps.

    Returns:
        Status 200 or 503, with {"healthy": bool, "ranks": n, "problems": [{"rank", "kind", …evidence}]}.
    """
    ranks = {rank: found for rank, found in telemetry.ranks.items() if host in (None, found[-1].host)}
    stalls = [one for one in find_anomalies(ranks, now) if one.kind == "stall"]
    problems = [{"rank": one.rank, "kind": one.kind, **one.evidence} for one in stalls]
    document = {"healthy": not problems, "ranks": len(ranks), "problems": problems}
    return 503 if problems else 200, "application/json", json.dumps(document).encode() + b"\n"


def run_metrics(telemetry: RunTelemetry, now: float, host: str | None = None) -> Answer:
    """Return the Prometheus exposition of a run from its files.

    With ``host``, only of the ranks on that host, so that no rank is scraped twice. The status is 503 if
    prometheus-client is not installed.
    """
    newest = newest_records(telemetry, host)
    found = [one.kind for one in find_anomalies(telemetry.ranks, now)]
    try:
        body = exposition(newest, {kind: found.count(kind) for kind in KINDS})
    except MissingDependency as error:
        return 503, "text/plain", f"{error}\n".encode()
    return 200, "text/plain; version=0.0.4; charset=utf-8", body


def newest_records(telemetry: RunTelemetry, host: str | None = None) -> list[Record]:
    """Return the newest record of each process, of a host if given, without ranks that the run has lost."""
    return [
        records[-1]
        for records in telemetry.series.values()
        if records[-1].rank < telemetry.world and host in (None, records[-1].host)
    ]


def serve_health(run: Path, listen: str) -> PageServer:
    """Serve /healthz and /metrics of this node of a run, from its files."""
    pages = {"/healthz": health, "/metrics": run_metrics}

    def answer(path: str) -> Answer:
        if path not in pages:
            return 404, "text/plain", b"expected /metrics or /healthz\n"
        return pages[path](read_run(run, tail_bytes=NEWEST_BYTES), time.time(), socket.gethostname()[:200])

    return PageServer(*parse_listen(listen), answer).start()


@dataclass(frozen=True)
class Metric:
    """A metric and the record values that it exposes."""

    name: str  # with unit, without ``_total``
    help: str
    values: tuple[tuple[str, str], ...]  # label value → value of a record, or a prefix that ends in ``*``
    label: str = ""  # name of the label; a metric without a label has the single label value ""
    gauge: bool = False  # True if the value may decrease

    @property
    def exposed(self) -> str:
        """Name of the metric's samples."""
        return self.name if self.gauge else f"{self.name}_total"

    def samples(self, record: Record) -> Iterator[tuple[str, float]]:
        """Yield the label value and the value of each sample."""
        for label, name in self.values:
            if name.endswith("*"):
                prefix = name[:-1]
                found = record.values.items()
                yield from (
                    (one.removeprefix(prefix), value) for one, value in found if one.startswith(prefix)
                )
            else:
                yield label, record.value(name)


def _one(name: str, text: str, value: str, *, gauge: bool = False) -> Metric:
    return Metric(name, text, (("", value),), gauge=gauge)


def _by(name: str, text: str, label: str, values: str, pattern: str) -> Metric:
    return Metric(name, text, tuple((one, pattern.format(one)) for one in values.split()), label)


METRICS: Final = (
    _one("shardkit_step", "Step of the run that the rank was handed last", "loader.step", gauge=True),
    _one("shardkit_loader_steps", "Steps handed out", "loader.steps"),
    _one("shardkit_loader_samples", "Samples handed out", "loader.samples"),
    _one("shardkit_loader_wait_seconds", "Time that the trainer waited for the loader", "loader.consumer_wait_s"),
    _one("shardkit_loader_computed_seconds", "Time that the rank computed, if its loop says so", "loader.computed_s"),
    _by("shardkit_loader_stage_seconds", "Time that a stage of the loader was busy or starved", "stage",
        "plan load load_wait gather transform assembly_blocked assembly_starved plan_blocked plan_starved",
        "loader.{}_s"),
    _one("shardkit_loader_block_loads", "Blocks loaded and verified", "loader.block_loads"),
    _one("shardkit_loader_loaded_bytes", "Bytes of blocks loaded, decompressed", "loader.bytes_loaded"),
    _one("shardkit_loader_evictions", "Blocks dropped from memory to make room", "loader.evictions"),
    _one("shardkit_loader_window_bytes", "Bytes of blocks in memory", "loader.window_bytes", gauge=True),
    _one("shardkit_loader_queued_steps", "Finished steps that wait", "loader.queued_steps", gauge=True),
    _one("shardkit_loader_stalls", "Reports of the loader's watchdog", "loader.stalls"),
    _one("shardkit_loader_substitutions", "Rows replaced or masked", "loader.substitutions"),
    Metric("shardkit_read_bytes", "Verified bytes by where they came from",
           (("disk", "blocks.local_bytes"), ("*", "reads.bytes_from_*")), "source"),
    _by("shardkit_read_events", "What reads over a network met with", "kind",
        "requests retries refetches failovers hedges hedges_won missing throttled timeouts circuit_opened "
        "circuit_closed healed heal_failed rebuilt stale_log", "reads.remote_{}"),
    _by("shardkit_cache_events", "What the cache of this machine did", "kind",
        "hits misses fills waits evictions bypassed failed", "reads.cache_{}"),
    Metric("shardkit_verification_failures", "Blocks whose bytes were not those that were written",
           (("location", "reads.remote_mismatches"), ("cache", "reads.cache_damaged"),
            ("disk", "loader.verification_failures")), "source"),
    _by("shardkit_trainer_stage_seconds", "Time of each stage of the trainer's steps", "stage",
        "data prepare exchange compute reduce update checkpoint evaluation", "trainer.{}_s"),
    _one("shardkit_trainer_steps", "Optimizer steps taken", "trainer.steps"),
    _one("shardkit_trainer_cells", "Cells that this rank worked", "trainer.cells"),
    _one("shardkit_trainer_moved_bytes", "Bytes that this rank exchanged with others", "trainer.moved_bytes"),
    _one("shardkit_trainer_loss", "Loss of the last step", "trainer.loss", gauge=True),
    _one("shardkit_replication_lag_bytes", "Bytes below the replication policy", "replication.lag_bytes", gauge=True),
    _one("shardkit_control_changes", "Settings changed by control.toml", "control.changes"),
    _one("shardkit_process_cpu_seconds", "Processor time of the process", "process.cpu_s"),
    _one("shardkit_process_resident_bytes", "Memory of the process", "process.resident_bytes", gauge=True),
    _one("shardkit_telemetry_errors", "Sources that raised when they were polled", "telemetry.errors"),
)  # fmt: skip

_HEARTBEAT: Final = ("shardkit_heartbeat_timestamp_seconds", "When the rank was last heard of")
_ANOMALY: Final = ("shardkit_anomalies", "Anomalies that are found now, by kind")
_SKEW: Final = (
    "shardkit_cost_skew",
    "Dearest rank's cost of a step over the mean rank's, 95th percentile of the last steps; plain: without costs",
)


def metric_names() -> set[str]:
    """Return the names of all samples that can be exposed."""
    return {one.exposed for one in METRICS} | {_HEARTBEAT[0], _ANOMALY[0], _SKEW[0]}


def exposition(records: Iterable[Record], anomalies: Mapping[str, int]) -> bytes:
    """Return records and anomalies in the text format of Prometheus."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise MissingDependency(
            f"metrics need prometheus-client; run: {install_command('metrics')}"
        ) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(list(records), anomalies))
    return bytes(generate_latest(registry))


class _Collector:
    """Implements `prometheus_client.registry.Collector` over records."""

    def __init__(self, records: list[Record], anomalies: Mapping[str, int]) -> None:
        self._records, self._anomalies = records, anomalies

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for metric in METRICS:
            kind = GaugeMetricFamily if metric.gauge else CounterMetricFamily
            label = [metric.label] if metric.label else []
            family = kind(metric.name, metric.help, labels=["rank", "worker", *label])
            for record in self._records:
                for named, value in metric.samples(record):
                    family.add_metric(
                        [str(record.rank), str(record.worker), *([named] if label else [])], value
                    )
            yield family
        heartbeat = GaugeMetricFamily(*_HEARTBEAT, labels=["rank", "worker"])
        for record in self._records:
            heartbeat.add_metric([str(record.rank), str(record.worker)], record.time)
        yield heartbeat
        skew = cost_skew(self._records)
        if skew is not None:
            family = GaugeMetricFamily(*_SKEW, labels=["order"])
            for order in ("plan", "plain"):
                family.add_metric([order], skew[f"{order}_p95"])
            yield family
        family = GaugeMetricFamily(*_ANOMALY, labels=["kind"])
        for anomaly, count in self._anomalies.items():
            family.add_metric([anomaly], count)
        yield family
