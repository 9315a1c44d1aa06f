"""The container of indexes, manifest pages and selections: a header and named integer columns.

Bytes (SPEC.md §2): magic, header length, canonical-JSON header, then the columns at 64-byte boundaries,
little-endian, each plain or one zstd frame. Readers validate every size before they allocate memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from shardkit.documents import Natural, Record, check_plain, convert, decode, encode
from shardkit.errors import FormatError, UsageError

from .compression import compress_frame, decompress_frame

MAGIC = b"SHRDCOL1"
ALIGNMENT = 64
MAX_HEADER = 16 << 20
MAX_RAW_BYTES = 4 << 30
"""Maximum size of all columns of a container, decompressed."""

MAX_RATIO = 256  # raw bytes per byte of the file; above it the writer stores plain columns
FREE_RAW_BYTES = 1 << 20  # allowed in a file of any size
LEVEL = 3
_PREFIX = len(MAGIC) + 8


class _Column(Record, frozen=True, kw_only=True):
    """Where a column is stored; offsets count from the first 64-byte boundary after the header."""

    name: Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]{0,63}\Z")]
    dtype: Literal["|u1", "<u2", "<u4", "<u8", "|i1", "<i2", "<i4", "<i8"]
    shape: Annotated[tuple[Natural, ...], Meta(max_length=8)]
    codec: Literal["none", "zstd"]
    offset: Natural
    size: Natural
    raw: Natural

    def __post_init__(self) -> None:
        if self.codec == "none" and self.raw != self.size:
            raise ValueError(
                f"column {self.name!r}: {self.size} stored and {self.raw} raw bytes, expected equal sizes"
            )
        if prod(self.shape) * int(self.dtype[-1]) != self.raw:
            raise ValueError(
                f"column {self.name!r} of shape {self.shape} and dtype {self.dtype} is not {self.raw} bytes"
            )


class _Header(Record, frozen=True, kw_only=True):
    kind: str
    version: Literal[1]
    meta: dict[str, Any]
    columns: tuple[_Column, ...]

    def __post_init__(self) -> None:
        check_plain(self.meta)


class Columns(NamedTuple):
    """The content of a container.

    `arrays` are read-only and little-endian; uncompressed columns are views of the data.
    """

    meta: dict[str, Any]
    arrays: dict[str, np.ndarray[Any, Any]]


def pack_columns(
    kind: str, meta: Mapping[str, Any], columns: Mapping[str, np.ndarray[Any, Any]], *, compress: bool = True
) -> bytes:
    """Return the bytes of a container; equal arguments give equal bytes for one release of zstd.

    Args:
        kind: Kind of the container, such as ``index``; `unpack_columns` compares it.
        meta: Values that canonical JSON can hold.
        columns: Integer arrays of any shape; written little-endian in C order.
        compress: Store a column as a zstd frame if that is shorter.

    Raises:
        UsageError: The name or dtype of a column cannot be written, or the header is too large.
    """
    entries: list[_Column] = []
    stored: list[bytes] = []
    offset = 0
    total_raw = 0
    for name, array in columns.items():
        array = np.asarray(array)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        raw = array.tobytes()
        frame = compress_frame(raw, LEVEL) if compress and len(raw) > ALIGNMENT else raw
        codec, data = ("zstd", frame) if len(frame) < len(raw) else ("none", raw)
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
        entry = {
            "codec": codec, "dtype": array.dtype.str, "name": name, "offset": offset, "raw": len(raw),
            "shape": array.shape, "size": len(data),
        }  # fmt: skip
        try:
            entries.append(convert(_Column, entry, f"column {name!r} of {array.dtype.str}"))
        except FormatError as error:
            raise UsageError(str(error)) from None
        stored.append(data)
        offset += len(data)
        total_raw += len(raw)
    if compress and total_raw > FREE_RAW_BYTES + MAX_RATIO * offset:
        return pack_columns(kind, meta, columns, compress=False)
    header = encode(_Header(kind=kind, version=1, meta=dict(meta), columns=tuple(entries)))
    if len(header) > MAX_HEADER:
        raise UsageError(f"{kind}: header of {len(header)} bytes, expected at most {MAX_HEADER}")
    parts = [MAGIC, len(header).to_bytes(8, "little"), header]
    size = _PREFIX + len(header)
    for data in stored:
        padding = -size % ALIGNMENT
        parts += [bytes(padding), data]
        size += padding + len(data)
    return b"".join(parts)


def unpack_columns(
    data: bytes | bytearray | memoryview, kind: str, *, max_raw_bytes: int = MAX_RAW_BYTES
) -> Columns:
    """Parse a container whose digest has been checked.

    Args:
        data: The container; uncompressed columns are views of it, so it must not change afterwards.
        kind: Expected kind.
        max_raw_bytes: Maximum size of all columns together, decompressed.

    Raises:
        FormatError: The bytes are not what `pack_columns` writes, or exceed a limit.
    """
    view = memoryview(data).cast("B")
    header, start = _read_header(view, kind)
    total = sum(entry.raw for entry in header.columns)
    cap = min(max_raw_bytes, FREE_RAW_BYTES + MAX_RATIO * len(view))
    if total > cap:
        raise FormatError(
            f"{kind}: columns of {total} bytes, expected at most {cap} in a file of {len(view)}"
        )
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    end = start
    first = -(-start // ALIGNMENT) * ALIGNMENT
    for entry in header.columns:
        begin = first + entry.offset
        if entry.name in arrays or begin != -(-end // ALIGNMENT) * ALIGNMENT:
            raise FormatError(
                f"{kind}: column {entry.name!r} appears twice or begins at {begin}, not after {end}"
            )
        if begin + entry.size > len(view) or any(view[end:begin]):
            raise FormatError(f"{kind}: column {entry.name!r} runs past the end, or padding is not zero")
        end = begin + entry.size
        arrays[entry.name] = _read_column(view[begin:end], entry, kind)
    if end != len(view):
        raise FormatError(f"{kind}: {len(view) - end} bytes after the last column")
    return Columns(header.meta, arrays)


def _read_header(view: memoryview, kind: str) -> tuple[_Header, int]:
    if len(view) < _PREFIX or view[: len(MAGIC)] != MAGIC:
        raise FormatError(f"{kind}: not a shardkit container (expected magic {MAGIC.decode()})")
    length = int.from_bytes(view[len(MAGIC) : _PREFIX], "little")
    if length > min(MAX_HEADER, len(view) - _PREFIX):
        raise FormatError(f"{kind}: header of {length} bytes in a file of {len(view)}, cap {MAX_HEADER}")
    header = decode(_Header, view[_PREFIX : _PREFIX + length], kind, max_bytes=MAX_HEADER)
    if header.kind != kind:
        raise FormatError(f"expected {kind}, got a container of kind {header.kind!r:.60}")
    return header, _PREFIX + length


def _read_column(stored: memoryview, entry: _Column, kind: str) -> np.ndarray[Any, Any]:
    raw: bytes | memoryview = stored
    if entry.codec == "zstd":
        raw = decompress_frame(stored, entry.raw, f"{kind}: column {entry.name!r}")
    dtype = np.dtype(entry.dtype)
    octets = np.frombuffer(raw, np.uint8)
    octets = octets if octets.ctypes.data % dtype.itemsize == 0 else octets.copy()
    try:
        array: np.ndarray[Any, Any] = octets.view(dtype).reshape(entry.shape)
    except (ValueError, OverflowError) as error:
        raise FormatError(f"{kind}: column {entry.name!r}: {error}") from None
    array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Many short texts in one buffer; text i is ``data[offsets[i]:offsets[i + 1]]``, UTF-8."""

    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]

    @classmethod
    def pack(cls, texts: Sequence[str]) -> Texts:
        """Store texts in one buffer; lone surrogates, from file names that are not UTF-8, are kept."""
        joined = "".join(texts)
        offsets = np.zeros(len(texts) + 1, np.int64)
        if joined.isascii():  # keys are ASCII: one byte per character
            np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)), out=offsets[1:])
            return cls(np.frombuffer(joined.encode("ascii"), np.uint8), offsets)
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        np.cumsum([len(text) for text in encoded], out=offsets[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, position: int) -> str:
        raw = self.data[self.offsets[position] : self.offsets[position + 1]].tobytes()
        return raw.decode("utf-8", "surrogatepass")

    def to_list(self) -> list[str]:
        raw, ends = self.data.tobytes(), self.offsets.tolist()
        return [raw[start:end].decode("utf-8", "surrogatepass") for start, end in itertools.pairwise(ends)]

    def check(self, what: str, count: int) -> None:
        """Raise FormatError if the offsets do not divide the buffer into `count` texts; `what` names them."""
        if self.offsets.dtype != np.int64 or self.offsets.shape != (count + 1,):
            raise FormatError(f"index: {count} {what} need {count + 1} int64 offsets")
        if self.data.dtype != np.uint8 or self.data.ndim != 1:
            raise FormatError(f"index: {what} are no run of bytes")
        if (
            self.offsets[0] != 0
            or self.offsets[-1] != len(self.data)
            or bool((np.diff(self.offsets) < 0).any())
        ):
            raise FormatError(f"index: offsets of {what} do not fit their {len(self.data)} bytes")
