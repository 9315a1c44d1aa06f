"""Load files into the page cache, or drop them from it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

__all__ = ["drop", "warm"]

_BUFFER_BYTES = 1 << 20


def warm(directory: Path) -> None:
    """Read every file that is not fully in the page cache."""
    buffer = bytearray(_BUFFER_BYTES)
    for path in _files(directory):
        with path.open("rb", buffering=0) as file:
            pages, resident = _resident(file.fileno())
            while resident < pages and file.readinto(buffer):
                pass


def drop(directory: Path) -> float:
    """Ask the kernel to drop every file from the page cache; return the share of pages that stayed.

    Pages that another process has mapped and touched stay, as do pages that a file system caches elsewhere.
    """
    pages = stayed = 0
    for path in _files(directory):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # dirty pages would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total, resident = _resident(file.fileno())
            pages, stayed = pages + total, stayed + resident
    return stayed / pages if pages else 0.0


def _resident(descriptor: int) -> tuple[int, int]:
    """Return the number of pages of a file, and how many of them are in memory (mincore)."""
    size = os.fstat(descriptor).st_size
    if not size:
        return 0, 0
    count = -(-size // mmap.PAGESIZE)
    found = np.empty(count, np.uint8)
    with mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(start)),
            ctypes.c_size_t(size),
            ctypes.c_void_p(found.ctypes.data),
        )
        del start  # the map cannot be closed before
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return count, int((found & 1).sum())


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file())
