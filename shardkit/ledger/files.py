"""Read and write files of a run directory, which is not trusted: any file may have been replaced."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardkit.errors import FormatError
from shardkit.stores.file_operations import explained


def read_file(path: Path, most: int, *, size: int | None = None) -> bytes | None:
    """Return the bytes of a regular file, or None if it does not exist.

    Args:
        path: path of the file.
        most: largest number of bytes accepted.
        size: number of bytes to read from the start; by default, the whole file.

    Raises:
        FormatError: the path names a folder, a pipe or a device, or more than `most` bytes would be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block us
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise FormatError(f"{path} cannot be read ({error.strerror}); restore it from a copy") from error
    with explained(f"read {path}"), os.fdopen(descriptor, "rb", closefd=True) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path} is not a regular file; restore it from a copy")
        length = status.st_size if size is None else min(size, status.st_size)
        if length > most:
            raise FormatError(f"{path}: {length} bytes, expected at most {most}; restore it from a copy")
        return file.read(length)


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file and yield its descriptor."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes, flag: int) -> None:
    """Write data to a file and sync it. `flag` is O_APPEND or O_TRUNC."""
    with opened(path, os.O_WRONLY | os.O_CREAT | flag) as descriptor:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Replace a file durably and atomically."""
    temporary = path.with_name(path.name + ".new")
    write(temporary, data, os.O_TRUNC)
    os.replace(temporary, path)
    with opened(path.parent) as folder:
        os.fsync(folder)
