"""HTTP servers for tests, on 127.0.0.1 only."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from collections.abc import Callable, Iterator, Mapping

__all__ = ["Requests", "free_port", "serving"]


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 at which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Requests(http.server.BaseHTTPRequestHandler):
    """Answers the requests of a connection, which is kept: those of every method by `respond`."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet
    disable_nagle_algorithm = True

    def respond(self) -> None:
        """Answer one request."""
        raise NotImplementedError

    def reply(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Send an answer; `headers` has its length, and an answer to HEAD has no body."""
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def handle_expect_100(self) -> bool:
        """Ask for the body at once: boto3 waits a second for it."""
        asked = super().handle_expect_100()
        self.wfile.flush()
        return asked

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().handle_one_request()
            return
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self.respond
        raise AttributeError(name)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: clients go away in the middle of things."""


@contextlib.contextmanager
def serving(requests: type[Requests]) -> Iterator[str]:
    """Serve requests in threads of this process, and yield the server's URL."""
    server = _Server(("127.0.0.1", 0), requests)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
