"""Files in the page cache, or out of it."""

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
    """Read every file that is not there as a whole."""
    buffer = bytearray(_BUFFER_BYTES)
    for path in _files(directory):
        with path.open("rb", buffering=0) as file:
            pages, resident = _resident(file.fileno())
            while resident < pages and file.readinto(buffer):
                pass


def drop(directory: Path) -> float:
    """Ask for every file to leave the page cache; returns the share of pages that stayed.

    What another process has mapped and touched stays, and what a file system keeps elsewhere.
    """
    pages = stayed = 0
    for path in _files(directory):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not on the disk yet would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total, resident = _resident(file.fileno())
            pages, stayed = pages + total, stayed + resident
    return stayed / pages if pages else 0.0


def _resident(descriptor: int) -> tuple[int, int]:
    """Pages of a file, and how many are in memory (mincore)."""
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
