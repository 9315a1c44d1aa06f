"""One temporary file on its way to a name."""

from __future__ import annotations

import contextlib
import hashlib

from shardkit.errors import StoreError
from shardkit.stores.directories import Directories
from shardkit.stores.file_operations import Handle, active
from shardkit.stores.os_errors import explained
from shardkit.stores.store import check_name
from shardkit.stores.temporaries import temporary_name

__all__ = ["LocalStage"]


class LocalStage:
    """Written piece by piece, then published or dropped; implements `shardkit.stores.store.Stage`."""

    def __init__(self, directories: Directories, folder: Handle, suffix: str) -> None:
        self._directories = directories
        self._folder = folder
        self._name = temporary_name(suffix)
        self._size = 0
        self._hash = hashlib.sha256()
        self._broken = False
        self._file = active().create_file(folder, self._name)
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: the sweep then goes by process alone
            active().try_lock(self._file)

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
        with explained(f"write {self._file.path}", writing=True):
            self._check_whole()
            self._broken = True
            rest = view
            while len(rest):  # a full disk takes a part and reports no error: only the next call does
                written = active().write(self._file, rest)
                self._hash.update(rest[:written])
                rest = rest[written:]
            self._broken = False
        self._size += len(view)
        return len(view)

    def sync(self) -> None:
        """Make durable what was written so far; another thread may write meanwhile.

        Raises:
            StoreError: the disk does not take it. An error is reported once only, so that it must not be passed over:
                a later sync might find nothing left to complain about.
        """
        with explained(f"write {self._file.path}", writing=True):
            active().fsync(self._file)

    def publish(self, name: str, *, replace: bool = False) -> bool:
        """Make the bytes durable, then give them their name; see `Stage.publish`."""
        components = check_name(name)
        directories = self._directories
        with (
            explained(f"write {name} in {directories.root}", writing=True),
            directories.made(components[:-1]) as folder,
        ):
            return self.publish_into(folder, components[-1], replace=replace)

    def publish_into(self, folder: Handle, name: str, *, replace: bool) -> bool:
        """`publish` into a folder that is open and durable already."""
        operations = active()
        self._check_whole()
        operations.fsync(self._file)
        if replace:
            operations.rename(self._folder, self._name, folder, name)
            created = True
        else:
            created = self._link(folder, name)
        operations.fsync_directory(folder)
        return created

    def drop(self) -> None:
        """Close and remove the temporary; a published name stays. What cannot be removed is swept later."""
        with contextlib.suppress(OSError):
            active().unlink(self._folder, self._name)
        with contextlib.suppress(OSError):
            active().close(self._file)

    def _link(self, folder: Handle, name: str) -> bool:
        try:
            active().link(self._folder, self._name, folder, name)
        except OSError as error:
            # A network file system may repeat a request whose answer was lost and then report that the name
            # exists: the link count tells whether the name is ours.
            if active().stat_open(self._file).st_nlink == 2:
                return True
            if isinstance(error, FileExistsError):
                return False
            raise
        return True

    def _check_whole(self) -> None:
        if self._broken:
            raise StoreError(
                f"{self._file.path}: an earlier write failed, the file is incomplete; start it again"
            )
