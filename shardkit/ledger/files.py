"""Read and write files of a run directory, which is not trusted: any file may have been replaced."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from shardkit.errors import FormatError
from shardkit.stores.file_operations import explained

_NAME: Final = re.compile(r"(\d{5,9})-(\d{5,9})\.([a-z]+)")


class RankFile(NamedTuple):
    """A file ``<rank>-<number>.<suffix>`` that one start of a rank appends to."""

    rank: int
    number: int
    path: Path

    @classmethod
    def of(cls, path: Path, suffix: str) -> RankFile | None:
        """Parse the name of a rank's file with this suffix; None for any other name."""
        match = _NAME.fullmatch(path.name)
        return cls(int(match[1]), int(match[2]), path) if match and match[3] == suffix else None


def rank_files(directory: Path, suffix: str) -> list[RankFile]:
    """Return the files of all ranks, ordered by rank and number; none if there is no such directory."""
    with explained(f"list {directory}"):
        names = os.listdir(directory) if directory.is_dir() else []
    found = (RankFile.of(directory / name, suffix) for name in names)
    return sorted(one for one in found if one is not None)


def new_rank_file(directory: Path, rank: int, suffix: str) -> tuple[Path, int]:
    """Create and open the next file of a rank. The newest file is never removed, so no number is used twice."""
    number = max((one.number for one in rank_files(directory, suffix) if one.rank == rank), default=-1) + 1
    while True:
        path = directory / f"{rank:05d}-{number:05d}.{suffix}"
        try:
            return path, os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
        except FileExistsError:
            number += 1


def read_file(path: Path, most: int, *, size: int | None = None, offset: int = 0) -> bytes | None:
    """Return the bytes of a regular file, or None if it does not exist.

    Args:
        path: path of the file.
        most: largest number of bytes accepted.
        size: number of bytes to read; by default, the rest of the file.
        offset: first byte to read.

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


@contextmanager
def open_file(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file and yield its descriptor."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes, flag: int) -> None:
    """Write data to a file and sync it. `flag` is O_APPEND or O_TRUNC."""
    with open_file(path, os.O_WRONLY | os.O_CREAT | flag) as descriptor:
        append(descriptor, data)
        os.fsync(descriptor)


def append(descriptor: int, data: bytes) -> None:
    """Write all of the data; one system call may write a part."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def replace(path: Path, data: bytes) -> None:
    """Replace a file durably and atomically."""
    temporary = path.with_name(path.name + ".new")
    write(temporary, data, os.O_TRUNC)
    os.replace(temporary, path)
    with open_file(path.parent) as folder:
        os.fsync(folder)
