"""Scratch files, written and removed."""

from __future__ import annotations

import contextlib

from shardkit.stores.file_operations import active
from shardkit.stores.os_errors import explained

__all__ = ["ScratchFile", "remove_scratch"]


class ScratchFile:
    """A scratch file that is being written."""

    def __init__(self, folder: str, name: str) -> None:
        self.folder = folder
        self.name = name
        self.size = 0
        with explained(f"create scratch file {folder}/{name}", writing=True):
            root = active().open_root(folder)
            try:
                self._file = active().create_file(root, name)
            finally:
                active().close(root)
        with contextlib.suppress(OSError):  # tells the sweep of a store's tmp/ that we live
            active().try_lock(self._file)

    def write(self, data: bytes | memoryview) -> None:
        """Append all of ``data``.

        Raises:
            StoreFullError, StoreError: the scratch disk does not take it; names the file.
        """
        rest = memoryview(data).cast("B")
        with explained(f"write scratch file {self.folder}/{self.name}", writing=True):
            while len(rest):
                rest = rest[active().write(self._file, rest) :]
        self.size += len(data)

    def close(self) -> None:
        """Close; the file stays."""
        active().close(self._file)


def remove_scratch(folder: str, name: str) -> None:
    """Remove a scratch file if it is there; one that cannot be removed is left to the sweep."""
    with contextlib.suppress(OSError):
        root = active().open_root(folder)
        try:
            active().unlink(root, name)
        finally:
            active().close(root)
