"""Groups of adopted files: many small files, with values that are stored next to them, are one shard.

The bytes of such a shard are, block by block, some whole files and then the values of their rows that no file
contains (labels, captions, metadata). The document of a group says which; blocks are verified as the blocks of any
shard, and a file by its size and XXH3, so that an error names the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Int64s
from shardkit.documents import Digest, Record, convert
from shardkit.errors import FormatError
from shardkit.formats import Texts
from shardkit.formats.columns import pack_columns, unpack_columns

KIND: Final = "files"
MAX_GROUP_BYTES: Final = 256 << 20
"""Maximum size of the document of a group."""
_MAX_SHARD_BYTES: Final = 1 << 62


class _Facts(Record, frozen=True, kw_only=True):
    digest: Digest


class Piece(NamedTuple):
    """A run of bytes of a shard.

    Attributes:
        file: number of the file that contains them; -1 for stored values.
        start: offset of the first byte in the file, or in the values.
        stop: end offset.
    """

    file: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class FileGroup:
    """The files and values of a shard.

    Attributes:
        digest: ``sha256:<hex>`` of the shard.
        names: names of the files, relative to their folder, in the order of their bytes.
        xxh3: (files,) uint64 XXH3-64 of each file.
        piece_size: (pieces,) int64 bytes of each piece of the shard: a file, or values.
        piece_is_file: (pieces,) uint8: 1 for a file.
        values: uint8, the values of all pieces that are not files.
    """

    digest: str
    names: Texts
    xxh3: NDArray[np.uint64]
    piece_size: Int64s
    piece_is_file: NDArray[np.uint8]
    values: NDArray[np.uint8]

    def __post_init__(self) -> None:
        files = int(np.count_nonzero(self.piece_is_file))
        self.names.check("names of files", files)
        if self.xxh3.shape != (files,) or self.xxh3.dtype != np.uint64:
            raise FormatError(f"files of {self.digest}: {self.xxh3.shape} checksums of {files} files")
        if self.piece_size.dtype != np.int64 or self.piece_size.shape != self.piece_is_file.shape:
            raise FormatError(f"files of {self.digest}: {self.piece_size.shape} sizes of pieces")
        if self.piece_size.size and not 0 <= int(self.piece_size.min()) <= int(self.piece_size.max()) < 2**40:
            raise FormatError(f"files of {self.digest}: a piece has no size, or 1 TiB and more")
        if float(self.piece_size.sum(dtype=np.float64)) >= _MAX_SHARD_BYTES:  # the exact sum may wrap
            raise FormatError(f"files of {self.digest}: all pieces have {_MAX_SHARD_BYTES} bytes and more")
        stored = int(self.piece_size[self.piece_is_file == 0].sum())
        if self.values.dtype != np.uint8 or self.values.shape != (stored,):
            raise FormatError(f"files of {self.digest}: {self.values.shape} values, expected {stored} bytes")

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def sizes(self) -> Int64s:
        """(files,) bytes of each file."""
        found: Int64s = self.piece_size[self.piece_is_file != 0]
        return found

    @cached_property
    def _ends(self) -> Int64s:
        ends: Int64s = np.cumsum(self.piece_size)
        return ends

    @cached_property
    def _offsets(self) -> tuple[Int64s, Int64s]:
        """Number of files, and bytes of values, before each piece."""
        is_file = self.piece_is_file != 0
        files = np.cumsum(is_file) - is_file
        stored = np.where(is_file, 0, self.piece_size)
        return files, np.cumsum(stored) - stored

    @property
    def size(self) -> int:
        """Bytes of the shard."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def name(self, file: int) -> str:
        """Return the name of a file.

        Raises:
            FormatError: The name leads out of the folder.
        """
        name = self.names[file]
        if not name or name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise FormatError(f"files of {self.digest}: {name!r} is not the name of a file in a folder")
        return name

    def pieces(self, offset: int, length: int) -> Iterator[Piece]:
        """Yield the pieces of a range of the shard, in order."""
        files, stored = self._offsets
        first = int(np.searchsorted(self._ends, offset, side="right"))
        stop = offset + length
        for number in range(first, len(self._ends)):
            end, size = int(self._ends[number]), int(self.piece_size[number])
            begin = end - size
            if begin >= stop:
                return
            is_file = bool(self.piece_is_file[number])
            base = 0 if is_file else int(stored[number])
            yield Piece(
                int(files[number]) if is_file else -1,
                base + max(0, offset - begin),
                base + min(size, stop - begin),
            )

    def to_bytes(self) -> bytes:
        """Return the document of the group."""
        columns: dict[str, NDArray[Any]] = {
            "name_data": self.names.data,
            "name_offset": self.names.offsets,
            "xxh3": self.xxh3,
            "piece_size": self.piece_size,
            "piece_is_file": self.piece_is_file,
            "value_data": self.values,
        }
        return pack_columns(KIND, {"digest": self.digest}, columns)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> FileGroup:
        """Parse a document.

        Raises:
            FormatError: The bytes are not the document of a group.
        """
        meta, arrays = unpack_columns(data, KIND)
        expected = {"name_data", "name_offset", "xxh3", "piece_size", "piece_is_file", "value_data"}
        if arrays.keys() != expected:
            raise FormatError(f"{where}: columns {sorted(arrays)}, expected {sorted(expected)}")
        return cls(
            digest=convert(_Facts, meta, where).digest,
            names=Texts(arrays["name_data"], arrays["name_offset"]),
            xxh3=arrays["xxh3"],
            piece_size=arrays["piece_size"],
            piece_is_file=arrays["piece_is_file"],
            values=arrays["value_data"],
        )
