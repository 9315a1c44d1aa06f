"""The blocks of a cache for neighbours, over HTTP, read-only.

A neighbour verifies what it gets by digest, so it needs not trust this machine; this machine gives out nothing but
files that are called by 64 hexadecimal digits in the cache's own folder, and takes nothing.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import socket
import threading
from typing import Any, Final

from shardkit.errors import NotFoundError, StoreError, UsageError
from shardkit.reading.cache.block_cache import BLOCKS, MARKER
from shardkit.stores.file_operations import Directories, active

_PATH: Final = re.compile(r"/blocks/([0-9a-f]{2})/(\1[0-9a-f]{62})")
_IDLE_S: Final = 60
_PIECE_BYTES: Final = 1 << 20


def parse_bind(text: str) -> tuple[str, int]:
    """``HOST:PORT`` as an address.

    Raises:
        UsageError: Not of that form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(
            f"bind address {text!r}: expected HOST:PORT, such as 127.0.0.1:8450 or 10.0.0.5:8450"
        )
    return host.strip("[]"), int(port)


class CacheServer:
    """Serves ``/blocks/<ab>/<hex>`` of a cache directory.

    Args:
        path: The cache.
        bind: Host and port to listen on; port 0 takes a free one.
        most_connections: More than so many at once are refused with 503.

    Raises:
        NotFoundError: No cache there.
        StoreError: The address cannot be listened on.
    """

    def __init__(
        self, path: str | os.PathLike[str], bind: tuple[str, int], *, most_connections: int = 64
    ) -> None:
        self.path = os.path.abspath(os.fspath(path))
        if not os.path.isfile(os.path.join(self.path, MARKER)):
            raise NotFoundError(
                f"no cache at {self.path}: expected {MARKER} in it; a loader with cache= makes one"
            )
        directories, places = Directories(self.path), threading.BoundedSemaphore(most_connections)

        class Handler(_Handler):
            cache_directories = directories
            connections = places

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in bind[0] else socket.AF_INET

            def handle_error(self, request: Any, client_address: Any) -> None:
                return  # a neighbour that went away

        try:
            self._server = Server(bind, Handler)
        except OSError as error:
            raise StoreError(
                f"cannot listen on {bind[0]}:{bind[1]}: {error.strerror}; choose another"
            ) from error

    @property
    def url(self) -> str:
        """What neighbours give as a location."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def serve(self) -> None:
        """Serve until `close`, in this thread."""
        self._server.serve_forever(0.1)

    def close(self) -> None:
        """Stop serving; from another thread."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "shardkit-cache"
    sys_version = ""
    timeout = _IDLE_S
    cache_directories: Directories
    connections: threading.BoundedSemaphore

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a request per block would drown everything else."""

    def _answer(self, *, body: bool) -> None:
        match = _PATH.fullmatch(self.path)
        if match is None:
            self._refuse(404)
        elif not self.connections.acquire(blocking=False):
            self._refuse(503)
        else:
            try:
                self._send_block(*match.groups(), body=body)
            finally:
                self.connections.release()

    def _send_block(self, head: str, name: str, *, body: bool) -> None:
        operations = active()
        try:
            with self.cache_directories.opened((BLOCKS, head)) as folder:
                file = operations.open_file(folder, name)
        except (OSError, StoreError):
            self._refuse(404)
            return
        try:
            size = operations.stat_open(file).st_size
            self.send_response_only(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(size))
            self.end_headers()
            offset = 0
            while body and offset < size:
                piece = operations.read(file, min(_PIECE_BYTES, size - offset), offset)
                if not piece:
                    self.close_connection = True  # it shrank: the neighbour sees a short body
                    return
                self.wfile.write(piece)
                offset += len(piece)
        except OSError:
            self.close_connection = True
        finally:
            operations.close(file)

    def _refuse(self, status: int) -> None:
        with contextlib.suppress(OSError):
            self.send_response_only(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
