"""Payloads that stay where the source has them: scratch holds where that is, and the shard is read from there.

An extent is a run of bytes of a source file that is the canonical payload of a field as it stands.
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

__all__ = ["EXTENT_BYTES", "IN_SOURCE", "SIZE", "Extent", "ExtentColumn", "ExtentReader"]

_PACKED = struct.Struct("<QQQ")
EXTENT_BYTES = _PACKED.size
"""Of an extent in a scratch record: file, offset, XXH3-64 of the bytes; each of 8 bytes."""

IN_SOURCE = 1 << 63
"""Marks the size of a payload that is not in the record: an extent stands there instead."""

SIZE = IN_SOURCE - 1
"""Takes the mark off a size: what is left is the number of bytes."""

_MAX_OPEN = 128


class Extent(NamedTuple):
    """A payload in a source file.

    Attributes:
        file: place of the file among those of the task.
        offset, size: of the payload, in bytes.
        check: XXH3-64 of it.
    """

    file: int
    offset: int
    size: int
    check: int

    def packed(self) -> bytes:
        """As it stands in a scratch record."""
        return _PACKED.pack(self.file, self.offset, self.check)


@dataclass(frozen=True, slots=True, eq=False)
class ExtentColumn:
    """The payloads of one field of many rows, equally long, in one source file.

    Attributes:
        file: as in `Extent`. offset: int64[n]. size: of each of them. check: uint64[n].
    """

    file: int
    offset: NDArray[np.int64]
    size: int
    check: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.offset)

    def packed(self) -> NDArray[np.uint8]:
        """As they stand in scratch records: uint8 (n, `EXTENT_BYTES`)."""
        words = np.empty((len(self), 3), "<u8")
        words[:, 0] = self.file
        words[:, 1] = self.offset
        words[:, 2] = self.check
        return words.view(np.uint8)


class ExtentReader:
    """Reads payloads from source files, of which only so many are open at a time.

    Args:
        files: part of scratch → paths of its task's files.
    """

    def __init__(self, files: Mapping[int, Sequence[str]]) -> None:
        self._files = files
        self._open: dict[tuple[int, int], int] = {}

    def read(
        self,
        part: NDArray[np.int32],
        packed: NDArray[np.uint64],
        begin: NDArray[np.int64],
        size: NDArray[np.int64],
        view: memoryview,
    ) -> None:
        """Fill a buffer with payloads, verified.

        Args:
            part: of each row.
            packed: uint64 (n, 3), the extents as scratch has them.
            begin: of each payload in ``view``.
            size: of each payload.
            view: the buffer.

        Raises:
            SourceError: a file cannot be read, or does not hold any more what it held when its row was noted.
        """
        opened, preadv, hashed = self._open, os.preadv, xxhash.xxh3_64_intdigest
        places = zip(begin.tolist(), (begin + size).tolist(), strict=True)
        for number, (file, offset, check), (start, stop) in zip(
            part.tolist(), packed.tolist(), places, strict=True
        ):
            payload, wanted = view[start:stop], stop - start
            descriptor = opened.get((number, file))
            if descriptor is None:
                descriptor = self._opened(number, file)
            try:
                found = preadv(descriptor, (payload,), offset)
                while 0 < found < wanted:  # a read may end early, at the latest after 2 GiB
                    more = preadv(descriptor, (payload[found:],), offset + found)
                    found = found + more if more else -1
            except OSError as error:
                raise SourceError(
                    f"{self._files[number][file]}: cannot be read ({error.strerror}); run the build again"
                ) from error
            if found != wanted or hashed(payload) != check:
                raise SourceError(
                    f"{self._files[number][file]}: changed while the build was at work; build from a source that "
                    "nobody writes to"
                )

    def close(self) -> None:
        """Let go of the files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _opened(self, part: int, file: int) -> int:
        if len(self._open) >= _MAX_OPEN:
            self.close()
        path = self._files[part][file]
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
        self._open[part, file] = descriptor
        return descriptor
