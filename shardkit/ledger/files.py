"""Files of a run directory, which is not trusted: any file may have been replaced."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from pathlib import Path

from shardkit.errors import FormatError
from shardkit.stores.file_operations import explained


def read_file(path: Path, most: int, *, size: int | None = None, offset: int = 0) -> bytes | None:
    """Return `size` bytes from `offset` of a regular file, by default the rest; None if it does not exist.

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
        left = max(0, status.st_size - offset)
        length = left if size is None else min(size, left)
        if length > most:
            raise FormatError(f"{path}: {length} bytes, expected at most {most}; restore it from a copy")
        file.seek(offset)
        return file.read(length)


def append(path: Path, data: bytes | bytearray) -> None:
    """Append data to a file and sync it."""
    _write(path, data, "ab")


def _write(path: Path, data: bytes | bytearray, mode: str) -> None:
    with path.open(mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Replace a file durably and atomically."""
    temporary = path.with_name(path.name + ".new")
    _write(temporary, data, "wb")
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def lock_holder(path: Path) -> int:
    """Return the id of the process of this machine that holds the lock (`flock`) of a file; 0 if none is known.

    The kernel's table names only processes that this process can see: a lock that a machine left in a network
    file system has no holder.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return 0
            except BlockingIOError:
                inode = os.fstat(file.fileno()).st_ino
        table = Path("/proc/locks").read_text()
        holders = re.findall(rf"FLOCK +ADVISORY +WRITE +(\d+) +\S+:{inode} ", table)
        return next((int(one) for one in holders if _is_alive(one)), 0)
    except OSError:
        return 0


def _is_alive(process: str) -> bool:
    """Return False for a dead process: the kernel's table keeps its name while children have its files."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
