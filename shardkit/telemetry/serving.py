"""Health and metrics of a run over HTTP, and what watches a live run from inside one of its processes (SPEC.md §4).

The metrics by their standard names are one table; exposing them needs prometheus-client.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardkit.errors import MissingDependency, StoreError
from shardkit.telemetry.anomalies import KINDS, Anomaly, find_anomalies
from shardkit.telemetry.intervals import cost_skew
from shardkit.telemetry.pages import Answer, PageServer, parse_listen
from shardkit.telemetry.recorder import EventLog, Recorder, StackWriter, Telemetry, TelemetrySettings
from shardkit.telemetry.records import Record, RunTelemetry, read_run

_TAIL_BYTES: Final = 64 << 10


def health(telemetry: RunTelemetry, now: float, host: str | None = None) -> Answer:
    """Whether every rank (of a host) is heard of and makes steps.

    Returns:
        Status 200 or 503, with {"healthy": bool, "ranks": n, "problems": [{"rank", "kind", …evidence}]}.
    """
    ranks = {rank: found for rank, found in telemetry.ranks.items() if host in (None, found[-1].host)}
    stalls = [one for one in find_anomalies(ranks, now) if one.kind == "stall"]
    problems = [{"rank": one.rank, "kind": one.kind, **one.evidence} for one in stalls]
    document = {"healthy": not problems, "ranks": len(ranks), "problems": problems}
    return 503 if problems else 200, "application/json", json.dumps(document).encode() + b"\n"


def run_metrics(telemetry: RunTelemetry, now: float, host: str | None = None) -> Answer:
    """The exposition of a run as its files tell it; with `host`, of the ranks there, so that no rank is scraped twice.

    Status 503 where prometheus-client is not installed.
    """
    newest = [
        records[-1]
        for records in telemetry.series.values()
        if records[-1].rank < telemetry.world and host in (None, records[-1].host)
    ]
    found = [one.kind for one in find_anomalies(telemetry.ranks, now)]
    try:
        body = exposition(newest, {kind: found.count(kind) for kind in KINDS})
    except MissingDependency as error:
        return 503, "text/plain", f"{error}\n".encode()
    return 200, "text/plain; version=0.0.4; charset=utf-8", body


def serve_health(run: Path, listen: str) -> PageServer:
    """/healthz and /metrics of one node of a run, from its files.

    Args:
        run: directory.
        listen: ``host:port``; port 0 takes a free one.

    Raises:
        StoreError: the port is taken.
    """
    pages = {"/healthz": health, "/metrics": run_metrics}

    def answer(path: str) -> Answer:
        if path not in pages:
            return 404, "text/plain", b"expected /metrics or /healthz\n"
        return pages[path](read_run(run, tail_bytes=_TAIL_BYTES), time.time(), socket.gethostname()[:200])

    return PageServer(*parse_listen(listen), answer).start()


_LOOK_INTERVALS: Final = 5
_SHARE_OF_TIME: Final = 1 / 200
_OWN_RECORDS: Final = 400
_MOST_TOLD: Final = 8  # of one kind at a time: a switch that fails stalls a thousand ranks


class AnomalyWatch:
    """A hook of rank 0's recorder.

    Args:
        run: directory, where the other ranks' records are.
        record_event: appends an event to the run.
    """

    def __init__(self, run: Path, record_event: Callable[..., None]) -> None:
        self._run, self._record_event = run, record_event
        self._own: deque[Record] = deque(maxlen=_OWN_RECORDS)
        self._open: dict[tuple[str, int], float] = {}  # (kind, rank) → since when
        self._next_look = 0.0

    def __call__(self, record: Record) -> None:
        """Keep the record; look, if it is time to."""
        self._own.append(record)
        started = time.monotonic()
        if started < self._next_look:
            return
        ranks: dict[int, Sequence[Record]] = dict(read_run(self._run, tail_bytes=_TAIL_BYTES).ranks)
        ranks[record.rank] = list(self._own)
        self.settle(find_anomalies(ranks, record.time), record.time)
        took = time.monotonic() - started
        self._next_look = started + max(_LOOK_INTERVALS * record.interval_s, took / _SHARE_OF_TIME)

    def settle(self, found: Sequence[Anomaly], now: float) -> None:
        """Tell what is new and what is over."""
        told: Counter[str] = Counter()
        for one in found:
            if one.key not in self._open and told[one.kind] < _MOST_TOLD:  # the others at the next look
                told[one.kind] += 1
                self._open[one.key] = now
                details = one.to_json()
                self._record_event("anomaly", anomaly=details.pop("kind"), **details)
        present = {one.key for one in found}
        for kind, rank in [key for key in self._open if key not in present]:
            seconds = round(now - self._open.pop((kind, rank)), 1)
            self._record_event("anomaly_over", anomaly=kind, rank=rank, seconds=seconds)


_BETWEEN_STACKS_S: Final = 60.0


class RunWatch:
    """What runs beside a loader on one thread that sleeps: records, stacks, anomalies, the pages of its node."""

    def __init__(
        self,
        run: Path,
        telemetry: Telemetry,
        settings: TelemetrySettings,
        events: EventLog,
        more_hooks: Sequence[Callable[[Record], None]] = (),
    ) -> None:
        self._stacks = StackWriter(run, telemetry.rank, telemetry.worker)
        self._stalls, self._next_stacks = 0.0, 0.0
        hooks: list[Callable[[Record], None]] = [self._stacks, self._note_stalls]
        if telemetry.rank == 0 and telemetry.worker == 0:
            hooks.append(AnomalyWatch(run, events.record))
        self._server: PageServer | None = None
        if settings.listen is not None and telemetry.worker == 0 and os.environ.get("LOCAL_RANK", "0") == "0":
            try:
                self._server = serve_health(run, settings.listen)
            except StoreError as error:  # another run of this node has it: no reason to end the training
                events.record("health_not_served", reason=str(error))
        self._recorder = Recorder(telemetry, run, settings, [*hooks, *more_hooks])

    @property
    def port(self) -> int | None:
        """Where /metrics and /healthz are served."""
        return None if self._server is None else self._server.port

    def _note_stalls(self, record: Record) -> None:
        """The watchdog has spoken since the last record: write what every thread is doing."""
        stalls, self._stalls = self._stalls, record.value("loader.stalls")
        if self._stalls > stalls and time.monotonic() >= self._next_stacks:
            self._next_stacks = time.monotonic() + _BETWEEN_STACKS_S
            self._stacks.write()

    def close(self) -> None:
        """Write the last record, stop; may be called twice."""
        self._recorder.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()


@dataclass(frozen=True)
class Metric:
    """One metric."""

    name: str  # with unit, without ``_total``
    help: str
    values: tuple[tuple[str, str], ...]  # label value → value of a record, or a prefix that ends in ``*``
    label: str = ""  # its name; a metric without one has the one label value ""
    gauge: bool = False  # whether it may fall

    @property
    def exposed(self) -> str:
        """The name of its samples."""
        return self.name if self.gauge else f"{self.name}_total"

    def samples(self, record: Record) -> Iterator[tuple[str, float]]:
        """Label value and value of each sample."""
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
        "circuit_closed healed heal_failed rebuilt stale_log coalesced", "reads.remote_{}"),
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
    """Names of all samples that can be exposed."""
    return {one.exposed for one in METRICS} | {_HEARTBEAT[0], _ANOMALY[0], _SKEW[0]}


def exposition(records: Iterable[Record], anomalies: Mapping[str, int]) -> bytes:
    """The text format of Prometheus.

    Args:
        records: the newest one of each rank and worker.
        anomalies: kind → how many are found now.

    Raises:
        MissingDependency: prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise MissingDependency(
            "metrics need prometheus-client; run: pip install 'shardkit[metrics]'"
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
