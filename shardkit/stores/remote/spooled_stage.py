"""A large object on its way to a store that takes objects in one piece only."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import tempfile
from collections.abc import Iterator
from typing import Any, Protocol

from shardkit.errors import StoreError, UsageError
from shardkit.stores.file_operations import explained
from shardkit.stores.store import check_name

__all__ = ["SpooledStage", "spooled"]


class _Puts(Protocol):
    @property
    def url(self) -> str: ...
    def put_new(self, name: str, data: bytes) -> bool: ...
    def replace(self, name: str, data: bytes) -> None: ...


class SpooledStage:
    """Collected in an unnamed local file, then put; implements `shardkit.stores.store.Stage`.

    The file has no name, so a killed process leaves nothing behind.
    """

    def __init__(self, store: _Puts, file: Any, max_bytes: int) -> None:
        self._store, self._file, self._max_bytes = store, file, max_bytes
        self._hash = hashlib.sha256()
        self._size = 0
        self._broken = False

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._size

    @property
    def digest(self) -> str:
        """SHA-256 of what was written so far, as hex."""
        return self._hash.hexdigest()

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        view = memoryview(data).cast("B")
        if self._size + len(view) > self._max_bytes:
            raise UsageError(
                f"object of more than {self._max_bytes} bytes for {self._store.url}; use smaller samples"
            )
        self._check_whole()
        with explained(f"write a temporary file in {tempfile.gettempdir()}", writing=True):
            self._broken = True
            rest = view
            while len(rest):
                rest = rest[self._file.write(rest) :]
            self._broken = False
        self._hash.update(view)
        self._size += len(view)
        return len(view)

    def publish(self, name: str, *, replace: bool = False) -> bool:
        check_name(name)
        self._check_whole()
        with explained(f"read a temporary file in {tempfile.gettempdir()}"), self._mapped() as data:
            if replace:
                self._store.replace(name, data)
                return True
            return self._store.put_new(name, data)

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[Any]:
        """The bytes without a copy: the file is ours alone, so a map of it cannot be cut short."""
        if not self._size:
            yield b""
            return
        mapped = mmap.mmap(self._file.fileno(), self._size, access=mmap.ACCESS_READ)
        try:
            yield memoryview(
                mapped
            )  # not the map itself: clients take that for a file, with a position in it
        finally:
            with contextlib.suppress(BufferError):  # a client still views it: closed with the last view
                mapped.close()

    def _check_whole(self) -> None:
        if self._broken:
            raise StoreError("an earlier write to a temporary file failed, it is incomplete; start it again")


@contextlib.contextmanager
def spooled(store: _Puts, max_bytes: int) -> Iterator[SpooledStage]:
    """A stage for `store`; what is not published when the context ends is dropped."""
    with contextlib.ExitStack() as cleanup:
        with explained(f"make a temporary file in {tempfile.gettempdir()}", writing=True):
            file = cleanup.enter_context(tempfile.TemporaryFile(buffering=0))
        yield SpooledStage(store, file, max_bytes)
