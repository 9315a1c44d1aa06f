"""Documents of the root that say where adopted files are, and which files form a group.

A place is ``locations/<digest>.json``, a group ``locations/<digest>.files``. Many small files can form one shard, a
group. Its bytes are, block by block, some whole files and then the values of their rows that no file contains (labels,
captions, metadata). The document of a group says which; blocks are verified as the blocks of any shard, and a file by
its size and XXH3, so that an error names the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import unquote

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from shardkit.arrays import Int64s
from shardkit.documents import Digest, Document, Natural, Record, convert, decode, encode, parse_digest
from shardkit.errors import FormatError, NotFoundError, UsageError
from shardkit.formats import Texts
from shardkit.formats.columns import pack_columns, unpack_columns
from shardkit.stores.store import Store, find_checked, put_over, scheme_of

_MAX_BYTES: Final = 64 * 2**10


class _Place(Document, frozen=True, kw_only=True, tag="shardkit-adopted/1"):
    digest: Digest
    urls: Annotated[tuple[Annotated[str, Meta(max_length=8_000)], ...], Meta(min_length=1, max_length=16)]
    etag: Annotated[str, Meta(max_length=1_000)] = ""
    files: Natural = 0


def location_name(digest: str) -> str:
    """Return the name of the document with the place of a part (given its manifest id) or of an adopted file."""
    return f"locations/{parse_digest(digest)}.json"


def group_name(digest: str) -> str:
    """Return the name of the document of a `FileGroup`, given the digest of its shard."""
    return f"locations/{parse_digest(digest)}.files"


def resolved(root: str, place: str) -> str:
    """Return the path or URL of a recorded place; relative paths are relative to the root."""
    if place.lower().startswith("file:///"):
        return unquote(place[len("file://") :])
    joined = place if scheme_of(place) else os.path.join(root, place)
    return joined if scheme_of(joined) else os.path.normpath(joined)


def put_adopted(
    root: Store, digest: str, place: str, etag: str = "", *, group: FileGroup | None = None
) -> None:
    """Record the place of an adopted file, or the folder of a group of files, durably; replace any earlier record.

    Raises:
        UsageError: The document of the group is too large.
    """
    if group is not None:
        document = group.to_bytes()
        if len(document) > MAX_GROUP_BYTES:
            raise UsageError(
                f"{place}: {len(document)} bytes of names and values for {len(group)} files, expected at most "
                f"{MAX_GROUP_BYTES}; read them into shards instead: shardkit build"
            )
        put_over(root, group_name(digest), document)
    _put_place(
        root, _Place(digest=digest, urls=(), etag=etag, files=0 if group is None else len(group)), place
    )


def move_adopted(root: Store, digest: str, folder: str) -> bool:
    """Record where the folder of a group of files is now; return False if the root knows no such group."""
    known = read_adopted_place(root, digest)
    if known is None or not known.files:
        return False
    _put_place(root, _Place(digest=digest, urls=(), files=known.files), folder)
    return True


def _put_place(root: Store, record: _Place, place: str) -> None:
    if scheme_of(place):
        from shardkit.stores.remote.addresses import split_url

        split_url(place)
        urls = [place]
    else:
        urls = [os.path.abspath(place)]
        if not scheme_of(root.url):  # so that root and files may move together
            urls.insert(0, os.path.relpath(urls[0], root.url))
    put_over(root, location_name(record.digest), encode(msgspec.structs.replace(record, urls=tuple(urls))))


class AdoptedFile(NamedTuple):
    """An adopted file.

    Attributes:
        digest: ``sha256:<hex>``.
        places: absolute paths and URLs, tried in order.
        etag: ETag of the file in its store when it was adopted; empty if unknown.
        files: number of files of a group, whose folder the places are; 0 for a single file.
    """

    digest: str
    places: tuple[str, ...]
    etag: str
    files: int = 0

    @property
    def place(self) -> str:
        """The first place that is a URL or an existing file; otherwise the last one."""
        return next((one for one in self.places if scheme_of(one) or os.path.exists(one)), self.places[-1])

    @property
    def is_far(self) -> bool:
        """True if the file is read from a URL."""
        return scheme_of(self.place) is not None

    def gone(self, root: str) -> NotFoundError:
        """Return the error for a file that is missing from all its places."""
        return NotFoundError(
            f"adopted file {self.digest} is gone from where it was ({', '.join(dict.fromkeys(self.places))}); put it "
            f"back, or name where it is now: shardkit adopt SOURCE… {root}"
        )


def read_adopted_place(store: Store, digest: str) -> AdoptedFile | None:
    """Return the recorded place of an adopted file, or None if the root has no record of it."""

    def parse(data: bytes, where: str) -> AdoptedFile:
        place = decode(_Place, data, where, max_bytes=_MAX_BYTES)
        if place.digest != digest:
            raise FormatError(f"{where}: it is of another file; adopt that file again")
        return AdoptedFile(
            digest, tuple(resolved(store.url, url) for url in place.urls), place.etag, place.files
        )

    return find_checked(store, location_name(digest), parse, max_bytes=_MAX_BYTES)


# ---- Groups of files

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
