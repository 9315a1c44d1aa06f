"""Health and metrics of a run over HTTP, and what watches a live run from inside one of its processes (SPEC.md §4)."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from shardkit.errors import MissingDependency, StoreError
from shardkit.telemetry.anomalies import KINDS, AnomalyWatch, find_anomalies
from shardkit.telemetry.pages import Answer, PageServer, parse_listen
from shardkit.telemetry.prometheus import exposition
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
