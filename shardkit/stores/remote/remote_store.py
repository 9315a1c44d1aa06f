"""What stores beyond the local disk share: an address, names checked, and large objects that are put in one piece."""

from __future__ import annotations

import abc
import contextlib
import mmap
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from shardkit.errors import IntegrityError, StoreReadOnlyError, UsageError
from shardkit.stores.file_operations import explained
from shardkit.stores.remote.addresses import Address
from shardkit.stores.staging import StagedFile
from shardkit.stores.store import check_name


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


class RemoteStore(abc.ABC):
    """Objects below a URL; what is opened is opened per process, so that a store may be pickled."""

    _PICKLED: ClassVar[tuple[str, ...]] = ("_address", "_read_only")

    def __init__(self, address: Address, *, read_only: bool) -> None:
        self._address = address
        self._read_only = read_only
        self._open()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, read_only={self._read_only})"

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
        """The URL of the root, such as ``s3://bucket/prefix``."""
        return self._address.url

    @property
    def read_only(self) -> bool:
        return self._read_only

    def local_path(self, name: str) -> Path | None:
        self._check_name(name)
        return None

    @abc.abstractmethod
    def put_new(self, name: str, data: bytes) -> bool:
        """See `Store.put_new`."""

    @abc.abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """See `Store.replace`."""

    @contextlib.contextmanager
    def stage(self, suffix: str = "") -> Iterator[SpooledStage]:
        """A large object, collected in a local temporary file and put in one piece; see `Store.stage`."""
        self._check_writable(suffix or "an object")
        with contextlib.ExitStack() as cleanup:
            with explained(f"make a temporary file in {tempfile.gettempdir()}", writing=True):
                file = cleanup.enter_context(tempfile.TemporaryFile(buffering=0))
            yield SpooledStage(self, file)

    def _check_name(self, name: str) -> None:
        check_name(name)

    def _check_writable(self, name: str) -> None:
        if self._read_only:
            raise StoreReadOnlyError(
                f"cannot write {name}: {self.url} was opened for reading only; open it for writing"
            )

    def _check_size(self, name: str, size: int, max_bytes: int) -> None:
        if size > max_bytes:
            raise IntegrityError(
                f"{name} in {self.url}: {size} bytes, expected at most {max_bytes}; run: shardkit verify {self.url}"
            )

    def _check_length(self, name: str, found: int, expected: int) -> None:
        if found != expected:
            raise IntegrityError(
                f"{name} in {self.url}: {found} bytes came, {expected} were expected; run: shardkit repair {self.url}"
            )


def is_object_name(name: str) -> bool:
    """Whether a listed name is an object's: temporaries and foreign objects are not ours to show."""
    try:
        check_name(name)
    except UsageError:
        return False
    return True


def check_ranges(name: str, ranges: Sequence[tuple[int, int]]) -> None:
    """Refuse negative offsets and lengths.

    Raises:
        UsageError: Names the first such range.
    """
    for offset, length in ranges:
        if offset < 0 or length < 0:
            raise UsageError(
                f"{name}: range ({offset}, {length}): expected an offset and a length of 0 or more"
            )
