"""An HTTP proxy that treats requests as bad networks and bad servers do, on the word of a test.

::

    with FaultProxy(endpoint) as proxy:
        proxy.faults = lambda request: Fault("lost") if request.method == "PUT" else None
        …  # a client that uses proxy.endpoint

The lost answer is the one that matters most: the server has done what was asked, and the client is told nothing.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from tests.servers.serving import Requests, serving

__all__ = ["Fault", "FaultProxy", "Request"]

Kind = Literal["delay", "stall", "reset", "lost", "truncate", "flip", "status"]


@dataclass(frozen=True)
class Fault:
    """What happens to one request.

    Attributes:
        kind: "delay" (answer late), "stall" (keep silent, then reset), "reset" (before the server sees it), "lost"
            (after the server has carried it out), "truncate" (close in the middle of the body), "flip" (one bit of the
            body), "status" (answer with `status` and do nothing).
        seconds: of a delay or stall.
        status: see there.
        code: S3 error code that goes with it.
    """

    kind: Kind
    seconds: float = 0.0
    status: int = 503
    code: str = "SlowDown"


@dataclass(frozen=True)
class Request:
    """One request as the proxy sees it."""

    number: int
    """Counted from 0 over the whole proxy."""
    method: str
    path: str
    """With the query."""
    headers: dict[str, str]
    """Names in lower case."""


class FaultProxy:
    """Forwards to `endpoint`; `faults` decides about each request, None means none."""

    def __init__(self, endpoint: str, faults: Callable[[Request], Fault | None] | None = None) -> None:
        self.faults = faults or (lambda _request: None)
        self.counts: Counter[str] = Counter()
        self.body_bytes = 0
        """Bytes of answers passed on."""
        parts = urlsplit(endpoint)
        assert parts.hostname == "127.0.0.1", "tests stay on this machine"
        self._upstream = (parts.hostname, parts.port or 80)
        self._lock = threading.Lock()
        self._number = 0
        self._closing = threading.Event()
        proxy = self

        class Handler(Requests):
            def setup(self) -> None:
                super().setup()
                self.upstream = http.client.HTTPConnection(*proxy._upstream, timeout=60)

            def finish(self) -> None:
                super().finish()
                self.upstream.close()

            def respond(self) -> None:
                proxy._handle(self, self.upstream)

        self._serving = serving(Handler)
        self.endpoint = ""

    def __enter__(self) -> FaultProxy:
        self.endpoint = self._serving.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.set()
        self._serving.__exit__(*error)

    def _handle(self, handler: Requests, upstream: http.client.HTTPConnection) -> None:
        with self._lock:
            number, self._number = self._number, self._number + 1
        headers = {name.lower(): value for name, value in handler.headers.items()}
        body = handler.rfile.read(int(headers.get("content-length", 0)))
        request = Request(number, handler.command, handler.path, headers)
        fault = self.faults(request)
        with self._lock:
            self.counts[fault.kind if fault else "passed"] += 1
        if fault is None:
            self._answer(handler, *_forward(upstream, request, body))
        else:
            self._spoil(handler, upstream, request, body, fault)

    def _spoil(
        self,
        handler: Requests,
        upstream: http.client.HTTPConnection,
        request: Request,
        body: bytes,
        fault: Fault,
    ) -> None:
        if fault.kind == "delay":
            self._closing.wait(fault.seconds)
            self._answer(handler, *_forward(upstream, request, body))
        elif fault.kind == "stall":
            self._closing.wait(fault.seconds)
            _reset(handler)
        elif fault.kind == "reset":
            _reset(handler)
        elif fault.kind == "lost":
            _forward(upstream, request, body)
            _reset(handler)
        elif fault.kind == "status":
            told = f"<Error><Code>{fault.code}</Code></Error>".encode()
            self._answer(handler, fault.status, {"Content-Length": str(len(told))}, told)
        else:
            status, headers, data = _forward(upstream, request, body)
            if fault.kind == "truncate" and data:
                self._answer(handler, status, headers, data[: len(data) // 2])
                _reset(handler)
                return
            if fault.kind == "flip" and data and status < 300:
                spoiled = bytearray(data)
                spoiled[request.number % len(spoiled)] ^= 1 << request.number % 8
                data = bytes(spoiled)
            self._answer(handler, status, headers, data)

    def _answer(self, handler: Requests, status: int, headers: dict[str, str], data: bytes) -> None:
        handler.reply(status, headers, data)
        if handler.command != "HEAD":
            with self._lock:
                self.body_bytes += len(data)


def _forward(
    upstream: http.client.HTTPConnection, request: Request, body: bytes
) -> tuple[int, dict[str, str], bytes]:
    try:
        upstream.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            if name not in ("connection", "expect"):
                upstream.putheader(name, value)
        upstream.endheaders(body or None)
        answer = upstream.getresponse()
        headers = {name: value for name, value in answer.getheaders()
                   if name.lower() not in ("connection", "transfer-encoding", "date", "server")}  # fmt: skip
        data = answer.read()
        if request.method != "HEAD":
            headers = {n: v for n, v in headers.items() if n.lower() != "content-length"}
            headers["Content-Length"] = str(len(data))
        return answer.status, headers, data
    except OSError:
        upstream.close()
        told = b"<Error><Code>ServiceUnavailable</Code></Error>"
        return 502, {"Content-Length": str(len(told))}, told


def _reset(handler: Requests) -> None:
    """Close with RST, as a router or a dying process does."""
    handler.close_connection = True
    with contextlib.suppress(OSError):
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        handler.connection.shutdown(socket.SHUT_RD)
    handler.connection.close()
