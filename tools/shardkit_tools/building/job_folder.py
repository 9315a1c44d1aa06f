"""Where workers leave finished work: a folder that all of them see, or objects of the root (SPEC.md of dataset §6).

What travels is picklable; a worker asks it for a place to write a part, hands the part over when it is whole, and
leaves the record last.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from typing import Protocol

import xxhash

from shardkit.dataset.scratch_reading import Part, PartFiles, Parts
from shardkit.stores.file_operations import active
from shardkit.stores.os_errors import explained
from shardkit.stores.store import Store
from shardkit.stores.temporaries import private_folder, temporary_name, writer_is_dead

__all__ = [
    "CHECK_BYTES",
    "NO_FOLDER",
    "SCRATCH",
    "ClosableParts",
    "JobFolder",
    "LocalFolder",
    "StoreFolder",
    "write_record",
]

SCRATCH = "scratch"
"""Folder of a root for the scratch of builds over several machines."""

CHECK_BYTES = 8
"""Of the XXH3-64 in front of a record."""

_PIECE_BYTES = 8 * 2**20
_OWN_FOLDER = "travelling"


class ClosableParts(Parts, Protocol):
    """Parts that hold files."""

    def close(self) -> None:
        """Let go of them."""


class JobFolder(Protocol):
    """The job directory as workers see it."""

    @property
    def path(self) -> str:
        """The folder of this machine in which parts are written; "" where nothing is kept."""

    def new_part(self, kind: str) -> str:
        """Name of a part that nobody has; "" where nothing is kept."""

    def keep(self, part: str) -> int:
        """Take over a part that was written whole; its size in bytes.

        Raises:
            StoreError: it cannot be kept; it is gone then.
        """

    def put_record(self, name: str, data: bytes) -> None:
        """Make a record appear, whole or not at all.

        Raises:
            StoreFullError, StoreError: there is no room, or the store fails.
        """

    def parts(self, names: Sequence[str]) -> ClosableParts:
        """Parts that were kept, by number."""


class LocalFolder:
    """A folder of this machine, or one that all machines mount; "" keeps nothing."""

    def __init__(self, path: str) -> None:
        self.path = path

    def new_part(self, kind: str) -> str:
        """See `JobFolder`."""
        return f"{kind}-{os.getpid()}-{secrets.token_hex(8)}" if self.path else ""

    def keep(self, part: str) -> int:
        """See `JobFolder`."""
        return os.stat(f"{self.path}/{part}").st_size if part else 0

    def put_record(self, name: str, data: bytes) -> None:
        """See `JobFolder`."""
        temporary = f"{name}.{os.getpid()}-{secrets.token_hex(4)}.new"
        with explained(f"write {self.path}/{name}", writing=True):
            root = active().open_root(self.path)
            try:
                file = active().create_file(root, temporary)
                try:
                    rest = memoryview(checked(data))
                    while rest:
                        rest = rest[active().write(file, rest) :]
                finally:
                    active().close(file)
                active().rename(root, temporary, root, name)
            except OSError:
                with contextlib.suppress(OSError):
                    active().unlink(root, temporary)
                raise
            finally:
                active().close(root)

    def parts(self, names: Sequence[str]) -> ClosableParts:
        """See `JobFolder`."""
        return PartFiles(self.path, names)


NO_FOLDER = LocalFolder("")
"""Keeps nothing: for a dry run."""


class StoreFolder:
    """Objects of the root below a prefix; parts are written on the worker's own disk and put when they are whole.

    Args:
        store: of the root.
        prefix: of the build, ending in "/".
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._path: str | None = None

    def __getstate__(self) -> tuple[Store, str, None]:
        return self._store, self._prefix, None  # another machine has another folder

    def __setstate__(self, state: tuple[Store, str, None]) -> None:
        self._store, self._prefix, self._path = state

    @property
    def path(self) -> str:
        """A private folder of this machine, made and cleaned of what dead workers left at the first use."""
        if self._path is None:
            path = os.path.join(private_folder(self._store.url), _OWN_FOLDER)
            with explained(f"make {path}", writing=True):
                os.makedirs(path, exist_ok=True)
                _sweep(path)
            self._path = path
        return self._path

    def new_part(self, kind: str) -> str:
        """See `JobFolder`; the name says whose it is, so that what a killed worker leaves can be told."""
        return temporary_name(kind)

    def keep(self, part: str) -> int:
        """See `JobFolder`."""
        path = f"{self.path}/{part}"
        try:
            with (
                explained(f"read {path}"),
                open(path, "rb") as file,
                self._store.stage("part") as stage,
            ):
                while piece := file.read(_PIECE_BYTES):
                    stage.write(piece)
                stage.publish(self._prefix + part)
                return stage.size
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def put_record(self, name: str, data: bytes) -> None:
        """See `JobFolder`."""
        self._store.replace(self._prefix + name, checked(data))

    def parts(self, names: Sequence[str]) -> ClosableParts:
        """See `JobFolder`."""
        return _StoreParts(self._store, [self._prefix + name for name in names])


class _StoreParts:
    """Parts in a store, read by range."""

    def __init__(self, store: Store, names: Sequence[str]) -> None:
        self._store = store
        self._names = names

    def __getitem__(self, number: int, /) -> Part:
        return _StorePart(self._store, self._names[number])

    def close(self) -> None:
        """See `ClosableParts`: nothing is held."""


class _StorePart:
    """See `Part`."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `Part`.

        Raises:
            StoreError: the store fails, or the part is gone: another build of the same has ended meanwhile.
            IntegrityError: the part is shorter.
        """
        if len(buffer):
            buffer[:] = self._store.get_range(self._name, offset, len(buffer))

    def close(self) -> None:
        """See `Part`: nothing is held."""


def checked(data: bytes) -> bytes:
    """A record as it is kept: its XXH3-64, then itself."""
    return xxhash.xxh3_64_digest(data) + data


def write_record(folder: JobFolder | str, name: str, data: bytes) -> None:
    """Make a record appear in a job folder, whole or not at all; any process of the build may."""
    (LocalFolder(folder) if isinstance(folder, str) else folder).put_record(name, data)


def _sweep(path: str) -> None:
    root = active().open_root(path)
    try:
        for name in os.listdir(path):
            with contextlib.suppress(OSError):
                if writer_is_dead(active(), root, name):
                    active().unlink(root, name)
    finally:
        active().close(root)
