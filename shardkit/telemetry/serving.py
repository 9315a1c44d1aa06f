"""Pages over HTTP, and what watches a live run from inside one of its processes.

A server listens on 127.0.0.1 unless another address is named (SPEC.md §4).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, TypeAlias

from shardkit.errors import ConfigurationError, MissingDependency, StoreError
from shardkit.telemetry.anomalies import KINDS, AnomalyWatch, find_anomalies
from shardkit.telemetry.prometheus import exposition
from shardkit.telemetry.recorder import EventLog, Recorder, StackWriter, Telemetry, TelemetrySettings
from shardkit.telemetry.records import Record, RunTelemetry, read_run

Answer: TypeAlias = tuple[int, str, bytes]
"""Status, content type, body."""

NOT_FOUND: Final[Answer] = (404, "text/plain", b"not found\n")
_LOCAL: Final = ("127.0.0.1", "localhost", "::1")
_TAIL_BYTES: Final = 64 << 10


def parse_listen(text: str) -> tuple[str, int]:
    """Host and port of ``127.0.0.1:9400``; an address must be named, so that no one serves the world by accident.

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
    given = header or ""
    name, _, port = given.rpartition(":")
    if not port.isdigit():
        name = given
    return name.removeprefix("[").removesuffix("]").lower() in _LOCAL


class PageServer:
    """Answers GET requests, each in a thread of its own.

    Args:
        host, port: where to listen; port 0 takes a free one.
        answer: path of a request, as it came → its answer.
        headers: of every answer.

    Raises:
        StoreError: the port is taken.
    """

    def __init__(
        self, host: str, port: int, answer: Callable[[str], Answer], headers: Mapping[str, str] | None = None
    ) -> None:
        settings = {"pages": staticmethod(answer), "bound": host, "added": headers or {}}
        try:
            self._server = _Server((host, port), type("_PageHandler", (_Handler,), settings))
        except OSError as error:
            raise StoreError(
                f"{host}:{port} cannot be listened on: {error.strerror}; name another port"
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread: threading.Thread | None = None

    def serve(self) -> None:
        """Answer until the process is interrupted."""
        self._server.serve_forever()

    def start(self) -> PageServer:
        """Answer in the background, until it is closed."""
        self._thread = threading.Thread(target=self.serve, name="shardkit-pages", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 16


class _Handler(BaseHTTPRequestHandler):
    pages: Callable[[str], Answer]
    bound: str
    added: Mapping[str, str]
    timeout = 10.0

    def do_GET(self) -> None:
        if self.request_version == "HTTP/0.9":
            return  # an answer to it has no status
        if not host_allowed(self.headers.get("Host"), self.bound):
            self._answer(403, "text/plain", b"this server answers to its own name only\n")
            return
        # `self.path` has leading slashes joined
        self._answer(*self.pages(self.requestline.split()[1].partition("?")[0]))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # any other method
            return lambda: self._answer(405, "text/plain", b"only GET is answered\n")
        raise AttributeError(name)

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response_only(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in (headers | dict(self.added)).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no request is answered by the base class; without pages of HTML."""
        self.close_connection = True
        if self.request_version != "HTTP/0.9":
            self._answer(code, "text/plain", b"no such request\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Not every probe is worth a line."""


# ---- Health and metrics of a run


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
