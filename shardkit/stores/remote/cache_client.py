"""HTTP client of a neighbour's cache, which serves blocks by digest; see `shardkit.reading.cache.serving`."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import weakref
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NoReturn

from shardkit.errors import IntegrityError, NotFoundError, ShardkitError, StoreError, StoreReadOnlyError
from shardkit.stores.remote.addresses import parse_address
from shardkit.stores.store import Stage, check_name

_TIMEOUT_S: Final = 10.0


class CacheClient:
    """Reads blocks from a neighbour; implements the part of `shardkit.stores.store.Store` that such locations need."""

    def __init__(self, url: str) -> None:
        self._address = parse_address(url)
        self._open()

    def _open(self) -> None:
        # process id and its open connections, kept between requests
        self._idle: tuple[int, list[http.client.HTTPConnection]] = (os.getpid(), [])
        weakref.finalize(self, _close_all, self._idle[1])

    def __getstate__(self) -> dict[str, Any]:
        return {"_address": self._address}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    @property
    def url(self) -> str:
        return self._address.url

    def get(self, name: str, *, max_bytes: int) -> bytes:
        check_name(name)
        try:
            return self._request(name, max_bytes)
        except ShardkitError:
            raise
        except (http.client.HTTPException, OSError):
            told = StoreError(
                f"cannot read {name} from {self.url}: no answer; is its loader still running there?"
            )
            told.errno = errno.ETIMEDOUT
            raise told from None

    def _request(self, name: str, max_bytes: int) -> bytes:
        used, connection = self._connection()
        try:
            answer = _ask(connection, name)
        except (http.client.RemoteDisconnected, ConnectionError):
            connection.close()
            if not used:
                raise
            connection = self._connect()  # the server closed the idle connection: try once more on a new one
            answer = _ask(connection, name)
        keep = False
        try:
            if answer.status != 200:
                self._refuse(name, answer.status)
            size = self._size_of(name, answer.getheader("Content-Length") or "")
            if size > max_bytes:
                raise IntegrityError(f"{name} from {self.url}: {size} bytes, expected at most {max_bytes}")
            data = answer.read(size)
            keep = len(data) == size
            return data
        finally:
            if keep:
                self._idle[1].append(connection)
            else:
                answer.close()
                connection.close()

    def _size_of(self, name: str, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise StoreError(
                f"cannot read {name} from {self.url}: Content-Length {text[:20]!r}, expected a size"
            )
        return int(text)

    def _refuse(self, name: str, status: int) -> NoReturn:
        if status == 404:
            raise NotFoundError(f"{name} is not in {self.url}")
        error = StoreError(f"cannot read {name} from {self.url}: HTTP {status}")
        error.errno = errno.EBUSY if status == 503 else errno.EINVAL
        raise error

    def _connection(self) -> tuple[bool, http.client.HTTPConnection]:
        """Return (whether it was used before, a connection)."""
        if self._idle[0] != os.getpid():
            self._open()
        with contextlib.suppress(IndexError):
            return True, self._idle[1].pop()
        return False, self._connect()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._address.scheme == "https" else http.client.HTTPConnection
        return kind(self._address.host, timeout=_TIMEOUT_S)

    # Operations that a cache does not support

    def local_path(self, name: str) -> Path | None:
        return None

    def _only_blocks(self, name: str, *_: object) -> NoReturn:
        raise StoreError(f"{name}: {self.url} is a neighbour's cache and gives out whole blocks only")

    def _only_reading(self, name: str, *_: object) -> NoReturn:
        raise StoreReadOnlyError(f"{name}: {self.url} is a neighbour's cache and cannot be written")

    get_range = head = list_after = _only_blocks
    put_new = replace = delete = _only_reading

    def stage(self, suffix: str = "") -> AbstractContextManager[Stage]:
        self._only_reading(suffix)


def _ask(connection: http.client.HTTPConnection, name: str) -> http.client.HTTPResponse:
    connection.request("GET", f"/{name}")
    return connection.getresponse()


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    for connection in connections:
        connection.close()
