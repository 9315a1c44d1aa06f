"""Watches a live run from inside one of its processes: records, stacks, anomalies, /metrics and /healthz of its node.

They are served on 127.0.0.1 unless another address is named (SPEC.md §4).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from shardkit.errors import ConfigurationError, MissingDependency, StoreError
from shardkit.telemetry.anomalies import KINDS, AnomalyWatch, find_anomalies
from shardkit.telemetry.prometheus import exposition
from shardkit.telemetry.reading import RunTelemetry, read_run
from shardkit.telemetry.recorder import EventLog, Recorder, StackWriter, Telemetry, TelemetrySettings
from shardkit.telemetry.records import Record

_LOCAL: Final = ("127.0.0.1", "localhost", "::1")


def parse_listen(text: str) -> tuple[str, int]:
    """Host and port of ``127.0.0.1:9400``; an address must be named, so that nobody serves the world by accident.

    Raises:
        ConfigurationError: it is something else.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 0 <= int(port) < 65536:
        raise ConfigurationError(f"listen = {text!r}: expected HOST:PORT, such as 127.0.0.1:9400")
    return host, int(port)


def host_allowed(header: str | None, host: str) -> bool:
    """Whether a request's Host header names this server: against pages that rebind their name to 127.0.0.1."""
    if host not in _LOCAL:
        return True  # served to others on purpose, under names that only they know
    name = (
        (header or "").rpartition(":")[0] if (header or "").rpartition(":")[2].isdigit() else (header or "")
    )
    return name.removeprefix("[").removesuffix("]").lower() in _LOCAL


def health(telemetry: RunTelemetry, now: float, host: str | None = None) -> dict[str, Any]:
    """Whether every rank (of a host) is heard of and makes steps.

    Returns:
        {"healthy": bool, "ranks": n, "problems": [{"rank", "kind", …evidence}]}.
    """
    ranks = {
        rank: records for rank, records in telemetry.ranks.items() if host is None or records[-1].host == host
    }
    stalls = [one for one in find_anomalies(ranks, now) if one.kind == "stall"]
    problems = [{"rank": one.rank, "kind": one.kind, **one.evidence} for one in stalls]
    return {"healthy": not problems, "ranks": len(ranks), "problems": problems}


def anomaly_counts(telemetry: RunTelemetry, now: float) -> dict[str, int]:
    """Kind → how many are found now, zeros included."""
    found = find_anomalies(telemetry.ranks, now)
    return {kind: sum(one.kind == kind for one in found) for kind in KINDS}


def run_metrics(telemetry: RunTelemetry, now: float, host: str | None = None) -> bytes:
    """The exposition of a run as its files tell it; with `host`, of the ranks there, so that no rank is scraped twice.

    Raises:
        MissingDependency: prometheus-client is not installed.
    """
    newest = [
        records[-1]
        for records in telemetry.series.values()
        if records[-1].rank < telemetry.world and host in (None, records[-1].host)
    ]
    return exposition(newest, lambda: anomaly_counts(telemetry, now))


class HealthServer:
    """Serves one node of a run, from its files; a daemon thread that sleeps between requests.

    Args:
        run: directory.
        listen: ``host:port``; port 0 takes a free one.

    Raises:
        StoreError: the port is taken.
    """

    def __init__(self, run: Path, listen: str) -> None:
        host, port = parse_listen(listen)
        handler = type("_Handler", (_Handler,), {"run": run, "bound": host})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise StoreError(
                f"{listen} cannot be listened on: {error.strerror}; name another port"
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="shardkit-health", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 16


class _Handler(BaseHTTPRequestHandler):
    run: Path
    bound: str
    timeout = 10.0

    def do_GET(self) -> None:
        if not host_allowed(self.headers.get("Host"), self.bound):
            self._answer(403, "text/plain", b"this server answers to its own name only\n")
        elif self.path == "/healthz":
            found = health(read_run(self.run, tail_bytes=64 << 10), time.time(), socket.gethostname()[:200])
            self._answer(
                200 if found["healthy"] else 503, "application/json", json.dumps(found).encode() + b"\n"
            )
        elif self.path == "/metrics":
            self._metrics()
        else:
            self._answer(404, "text/plain", b"expected /metrics or /healthz\n")

    def _metrics(self) -> None:
        try:
            body = run_metrics(
                read_run(self.run, tail_bytes=64 << 10), time.time(), socket.gethostname()[:200]
            )
        except MissingDependency as error:
            self._answer(503, "text/plain", f"{error}\n".encode())
            return
        self._answer(200, "text/plain; version=0.0.4; charset=utf-8", body)

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Not every probe is worth a line."""


_BETWEEN_STACKS_S: Final = 60.0


class RunWatch:
    """What runs beside a loader in one process, on one thread that sleeps.

    Args:
        run: directory.
        telemetry: polled.
        settings: see there.
        events: of the run.
        more_hooks: such as the control file's.
    """

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
        hooks += more_hooks
        self._server: HealthServer | None = None
        if settings.listen is not None and telemetry.worker == 0 and os.environ.get("LOCAL_RANK", "0") == "0":
            try:
                self._server = HealthServer(run, settings.listen)
            except StoreError as error:  # another run of this node has it: no reason to end the training
                events.record("health_not_served", reason=str(error))
        self._recorder = Recorder(telemetry, run, settings, hooks)

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
