"""HTTP server that answers GET and HEAD requests from a function of the path (SPEC.md §4)."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, TypeAlias

from shardkit.errors import ConfigurationError, StoreError

Answer: TypeAlias = tuple[int, str, bytes]
"""Status, content type, body."""

NOT_FOUND: Final[Answer] = (404, "text/plain", b"not found\n")
_LOCAL: Final = ("127.0.0.1", "localhost", "::1")
_IDLE_S: Final = 60.0
_MOST_REQUESTS: Final = 64


def parse_listen(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``; the host is required, so that a server is not public by accident.

    Raises:
        ConfigurationError: ``text`` has another form.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigurationError(f"address {text!r}: expected HOST:PORT, such as 127.0.0.1:9400")
    return host, int(port)


def host_allowed(header: str | None, host: str) -> bool:
    """Return True if a request's Host header is valid for this server.

    A local server accepts only local names, as protection against DNS rebinding.
    """
    if host not in _LOCAL:
        return True  # public on purpose, under unknown names
    given = header or ""
    name, _, port = given.rpartition(":")
    if not port.isdigit():
        name = given
    return name.removeprefix("[").removesuffix("]").lower() in _LOCAL


class PageServer(ThreadingHTTPServer):
    """Server for GET and HEAD requests with one thread per connection.

    Args:
        host, port: address to listen on; port 0 chooses a free port.
        answer: function from the path of a request, not decoded, to its answer.
        headers: headers of every answer.
        most_requests: limit of concurrent requests; more are refused with status 503.

    Raises:
        StoreError: the address cannot be used, for example because the port is taken.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        host: str,
        port: int,
        answer: Callable[[str], Answer],
        headers: Mapping[str, str] | None = None,
        *,
        most_requests: int = _MOST_REQUESTS,
    ) -> None:
        self.host, self.answer, self.headers = host, answer, dict(headers or {})
        self.under_way = threading.BoundedSemaphore(most_requests)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._thread: threading.Thread | None = None
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise StoreError(
                f"{host}:{port} cannot be listened on: {error.strerror}; name another port"
            ) from error
        self.port: int = self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.port}"

    def serve(self) -> None:
        """Answer requests until the process is interrupted or another thread closes the server."""
        self.serve_forever(0.1)

    def start(self) -> PageServer:
        """Answer requests in a background thread until `close`."""
        self._thread = threading.Thread(target=self.serve, name="shardkit-pages", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        self.shutdown()
        if self._thread is not None:
            self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of connections, such as a client that disconnected."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    disable_nagle_algorithm = True  # otherwise a body waits for the acknowledgement of its headers

    def do_GET(self) -> None:
        if self.request_version == "HTTP/0.9":
            return  # its answers have no status
        if not host_allowed(self.headers.get("Host"), self.server.host):
            self._answer(403, "text/plain", b"this server answers to its own name only\n")
        elif not self.server.under_way.acquire(blocking=False):
            self._answer(503, "text/plain", b"too many requests at once\n")
        else:
            try:
                # not `self.path`, in which leading slashes are merged
                self._answer(*self.server.answer(self.requestline.split()[1].partition("?")[0]))
            finally:
                self.server.under_way.release()

    def do_HEAD(self) -> None:
        self.do_GET()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # any other method
            self.close_connection = True  # a request body would not be read
            return lambda: self._answer(405, "text/plain", b"only GET is answered\n")
        raise AttributeError(name)

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response_only(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in (headers | self.server.headers).items():
            self.send_header(name, value)
        with contextlib.suppress(OSError):  # the client disconnected
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer an invalid request in plain text; called by the base class."""
        self.close_connection = True
        if self.request_version != "HTTP/0.9":
            self._answer(code, "text/plain", b"no such request\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""
