"""What stores beyond the local disk share: an address, names checked, and large objects that are put in one piece."""

from __future__ import annotations

import abc
import contextlib
import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from shardkit.stores.file_operations import explained
from shardkit.stores.remote.addresses import Address
from shardkit.stores.store import DirectStore, StagedFile, check_name


class SpooledStage(StagedFile):
    """Collected in an unnamed local file, then put; implements `shardkit.stores.store.Stage`.

    The file has no name, so a killed process leaves nothing behind.
    """

    def __init__(self, store: RemoteStore, file: Any) -> None:
        super().__init__(f"a temporary file in {tempfile.gettempdir()}")
        self._store, self._file = store, file

    def _append(self, data: memoryview) -> int:
        return int(self._file.write(data))

    def publish(self, name: str, *, replace: bool = False) -> bool:
        check_name(name)
        self._check_whole()
        with explained(f"read {self._path}"), self._mapped() as data:
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
            # not the map itself: clients take that for a file, with a position in it
            yield memoryview(mapped)
        finally:
            with contextlib.suppress(BufferError):  # a client still views it: closed with the last view
                mapped.close()


class RemoteStore(DirectStore):
    """Objects below a URL; what is opened is opened per process, so that a store may be pickled."""

    _PICKLED: ClassVar[tuple[str, ...]] = ("_address", "_read_only")

    def __init__(self, address: Address, *, read_only: bool) -> None:
        self._address = address
        self._read_only = read_only
        self._open()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._PICKLED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    @abc.abstractmethod
    def _open(self) -> None:
        """Begin without any client, in a process that may be new."""

    @property
    def url(self) -> str:
        return self._address.url

    def local_path(self, name: str) -> Path | None:
        self._check_name(name)
        return None

    @abc.abstractmethod
    def put_new(self, name: str, data: bytes) -> bool: ...

    @abc.abstractmethod
    def replace(self, name: str, data: bytes) -> None: ...

    @contextlib.contextmanager
    def stage(self, suffix: str = "") -> Iterator[SpooledStage]:
        self._check_writable(suffix or "an object")
        with contextlib.ExitStack() as cleanup:
            with explained(f"make a temporary file in {tempfile.gettempdir()}", writing=True):
                file = cleanup.enter_context(tempfile.TemporaryFile(buffering=0))
            yield SpooledStage(self, file)

    def _check_name(self, name: str) -> None:
        check_name(name)
