"""Payloads that stay where the source has them: scratch holds where that is, and the shard is read from there.

An extent is a run of bytes of a source file that is the canonical payload of a field as it stands. It is verified by
the XXH3-64 of its bytes, where they were read before; otherwise its file is watched: what the file system says of it
must be the same before its first row was noted and after its last was written.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.errors import SourceError

_PACKED = struct.Struct("<QQQ")
EXTENT_BYTES = _PACKED.size
"""Of an extent in a scratch record: file, offset, XXH3-64 of the bytes or state of the file; each of 8 bytes."""

IN_SOURCE = 1 << 63
"""Marks the size of a payload that is not in the record: an extent stands there instead."""

WATCHED = 1 << 62
"""Marks the size of an extent that has the state of its file in the place of a hash of its bytes."""

SIZE = WATCHED - 1
"""Takes the marks off a size: what is left is the number of bytes."""

_MAX_OPEN = 128


class Extent(NamedTuple):
    """A payload in a source file."""

    file: int  # place of the file among those of the task
    offset: int  # of the payload, in bytes
    size: int
    check: int  # XXH3-64 of it

    def packed(self) -> bytes:
        """As it stands in a scratch record."""
        return _PACKED.pack(self.file, self.offset, self.check)


@dataclass(frozen=True, slots=True, eq=False)
class ExtentColumn:
    """The payloads of one field of many rows, equally long, in one source file."""

    file: int  # as in `Extent`
    offset: NDArray[np.int64]  # (n,)
    size: int  # of each of them
    state: int  # of the file, see `file_state`

    def __len__(self) -> int:
        return len(self.offset)

    def packed(self) -> NDArray[np.uint8]:
        """As they stand in scratch records: uint8 (n, `EXTENT_BYTES`)."""
        words = np.empty((len(self), 3), "<u8")
        words[:, 0] = self.file
        words[:, 1] = self.offset
        words[:, 2] = self.state
        return words.view(np.uint8)


def file_state(path: str) -> int:
    """A number that is another one after any write to a file, also by somebody who sets its times back.

    Raises:
        SourceError: the file is gone.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise SourceError(
            f"{path}: cannot be read ({error.strerror}); put it back, then run the build again"
        ) from error
    text = f"{found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
    return xxhash.xxh3_64_intdigest(text.encode())


class ExtentReader:
    """Reads payloads from source files, of which only so many are open at a time.

    Args:
        files: part of scratch → paths of its task's files.
    """

    def __init__(self, files: Mapping[int, Sequence[str]]) -> None:
        self._files = files
        self._open: dict[str, int] = {}

    def read(
        self,
        part: NDArray[np.int32],
        packed: NDArray[np.uint64],
        watched: NDArray[np.bool_],
        begin: NDArray[np.int64],
        size: NDArray[np.int64],
        view: memoryview,
    ) -> None:
        """Fill a buffer with payloads.

        Args:
            part: of each row.
            packed: uint64 (n, 3), the extents as scratch has them.
            watched: of which rows the files are watched; the others are verified.
            begin: of each payload in ``view``.
            size: of each payload.
            view: the buffer.

        Raises:
            SourceError: a file cannot be read, or does not hold any more what it held when its row was noted.
        """
        opened, files, preadv, hashed = self._open, self._files, os.preadv, xxhash.xxh3_64_intdigest
        for number, (file, offset, check), is_watched, start, wanted in zip(
            part.tolist(), packed.tolist(), watched.tolist(), begin.tolist(), size.tolist(), strict=True
        ):
            path = files[number][file]
            descriptor = opened.get(path)
            if descriptor is None:
                descriptor = self._opened(path)
            payload = view[start : start + wanted]
            try:
                found = preadv(descriptor, (payload,), offset)
                if found != wanted:
                    found = _read_on(descriptor, payload, found, offset)
            except OSError as error:
                raise SourceError(
                    f"{path}: cannot be read ({error.strerror}); run the build again"
                ) from error
            if found != wanted or not (is_watched or hashed(payload) == check):
                raise changed_source(path)

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _opened(self, path: str) -> int:
        if len(self._open) >= _MAX_OPEN:
            self.close()
        try:
            # O_NONBLOCK: a name that has become a pipe since it was listed must not hang the build
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SourceError(
                f"{path}: cannot be read ({error.strerror}); put it back, then run the build again"
            ) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise SourceError(f"{path}: no file any more; put it back, then run the build again")
        self._open[path] = descriptor
        return descriptor


def changed_source(path: str) -> SourceError:
    """What to raise where a file is not what it was."""
    return SourceError(
        f"{path}: changed while the build was at work; build from a source that nobody writes to"
    )


def _read_on(descriptor: int, payload: memoryview, found: int, offset: int) -> int:
    """The bytes that there are: a read may end early, at the latest after 2 GiB."""
    while 0 < found < len(payload):
        more = os.preadv(descriptor, (payload[found:],), offset + found)
        if not more:
            break
        found += more
    return found
