"""The index of a shard: offsets of its blocks and samples, and their checksums (SPEC.md §5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, cast

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from shardkit.documents import Natural, Positive, Record, Text, convert
from shardkit.errors import ConfigurationError, FormatError, NotFoundError

from .columns import Texts, pack_columns, unpack_columns
from .compression import normalise_compression
from .schema import Schema

KIND = "index"
_Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_MAX_SOURCES = 2**24


class _Facts(Record, frozen=True, kw_only=True):
    """The header of an index without its columns; fields are named as the attributes of `ShardIndex`."""

    schema: Schema
    format: Literal["tar", "arrow", "rows"]
    compression: Text
    rows: Natural
    block_rows: Positive
    shard_size: Natural
    head_size: Natural
    head_sha256: _Sha256
    tail_sha256: _Sha256
    source_names: Annotated[tuple[str, ...], Meta(max_length=_MAX_SOURCES)] = ()
    first_ordinal: Natural | None = None
    encoding: Literal["parquet", "arrow", "jsonl", "csv", "npz", "zstd"] | None = None
    constants: dict[str, str] | None = None


_FIRST_ORDINAL = "first_ordinal"  # replaces the columns of the keys if they are numbers
_ENCODED = ("encoding", "constants")  # only for blocks that need decoding
_FACTS = tuple(name for name in _Facts.__struct_fields__ if name not in (_FIRST_ORDINAL, *_ENCODED))


def generated_key(ordinal: int) -> str:
    """Return the key of a row that was added without one; `ordinal` is its number in the dataset."""
    return f"{ordinal:010d}"


def generated_keys(ordinals: Iterable[int]) -> list[str]:
    """Return the `generated_key` of each ordinal."""
    return [f"{ordinal:010d}" for ordinal in ordinals]  # a call per key takes twice as long


@dataclass(frozen=True, slots=True)
class NumberedKeys:
    """Keys of consecutive rows that were given none; they take no memory.

    Attributes:
        first: Ordinal of the first row.
        rows: Number of rows.
    """

    first: int
    rows: int

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, position: int) -> str:
        return generated_key(self.first + position)

    def to_list(self) -> list[str]:
        return generated_keys(range(self.first, self.first + self.rows))


class BlockSpan(NamedTuple):
    """One block: offset, sizes and checksum of its bytes in the shard, and its rows [first_row, end_row)."""

    offset: int
    size: int
    raw_size: int
    xxh3: int
    first_row: int
    end_row: int


class FieldRange(NamedTuple):
    """The bytes of one field in a block: offset in the shard, size, XXH3-64 and SHA-256."""

    offset: int
    size: int
    xxh3: int
    sha256: bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardIndex:
    """Layout and checksums of one shard: everything needed to read it, except its bytes.

    Arrays are read-only. Offsets of blocks count from the start of the shard, offsets of fields from the start of the
    raw block. A block is a run of rows; blocks are contiguous between head and tail.

    Raises:
        FormatError: Values contradict each other.
    """

    format: str  # tar, arrow or rows
    compression: str  # normalised: none or zstd:LEVEL
    schema: Schema
    rows: int
    block_rows: int  # most rows of a block
    shard_size: int  # bytes
    head_size: int  # bytes before the first block (Arrow: magic and schema; rows: the file's own header)
    head_sha256: str
    tail_sha256: str  # digest of the bytes after the last block (tar: end of archive; Arrow: footer)
    block_offset: NDArray[np.uint64]  # (blocks,)
    block_size: NDArray[np.uint64]  # (blocks,) stored bytes
    block_raw_size: NDArray[np.uint64]  # (blocks,) bytes of the decompressed block
    block_start: NDArray[np.int64]  # (blocks + 1,) first row of each block, then `rows`
    block_xxh3: NDArray[np.uint64]  # (blocks,) XXH3-64 of the stored bytes
    block_sha256: NDArray[np.uint8]  # (blocks, 32)
    key_texts: Texts | NumberedKeys
    # (rows, fields), of a tar, and of rows of unequal size; 0 for an optional field without a value
    field_offset: NDArray[np.uint64] | None = None
    field_size: NDArray[np.uint64] | None = None  # (rows, fields): bytes of the member's content
    source_names: tuple[str, ...] = ()
    source_id: NDArray[np.int32] | None = None  # (rows,) index into `source_names`, -1 for none
    source_row: NDArray[np.int64] | None = None  # (rows,) row number in the source
    original_rows: NDArray[np.int64] | None = None  # rows whose key was rewritten, ascending
    original_texts: Texts | None = None  # the keys of these rows in the source
    row_stratum: NDArray[np.int32] | None = None  # (rows,) -1 for none; only with pooled strata
    # (fields,) adopted files only: 1 if offset and size locate the payload itself, after any npy header; 0 if they
    # locate the member's content
    field_is_payload: NDArray[np.uint8] | None = None
    # format rows: how the rows of a block are encoded (SPEC.md); None if their payloads are in the block
    encoding: str | None = None
    constants: Mapping[str, str] | None = None  # field → text of the value that all rows of the file have
    common: NDArray[np.uint8] | None = None  # bytes that every block needs to be decoded, such as a footer
    # (blocks, fields): the bytes of one field in a block, from the start of the block; size 0 if the file lacks it
    range_offset: NDArray[np.uint64] | None = None
    range_size: NDArray[np.uint64] | None = None
    range_xxh3: NDArray[np.uint64] | None = None
    range_sha256: NDArray[np.uint8] | None = None  # (blocks, fields, 32)

    def __post_init__(self) -> None:
        for check in (_check_numbers, _check_blocks, _check_rows, _check_fields):
            check(self)

    @property
    def blocks(self) -> int:
        return len(self.block_offset)

    @cached_property
    def spans(self) -> list[BlockSpan]:
        """All blocks as Python integers, for code that reads one block at a time."""
        columns = (self.block_offset, self.block_size, self.block_raw_size, self.block_xxh3)
        starts = self.block_start.tolist()
        return [
            BlockSpan(*values)
            for values in zip(*(column.tolist() for column in columns), starts[:-1], starts[1:], strict=True)
        ]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row if a block is an array of rows, each its payloads in schema order; otherwise 0."""
        if self.format != "rows" or self.field_offset is not None or self.encoding is not None:
            return 0
        return sum(kind.item_bytes or 0 for kind in self.schema.values())

    def field_range(self, block: int, name: str) -> FieldRange:
        """Return the bytes of a field in a block whose fields have ranges of their own."""
        place = self.schema.position(name)
        offset, size, fast = (
            int(cast("NDArray[np.uint64]", column)[block, place])
            for column in (self.range_offset, self.range_size, self.range_xxh3)
        )
        strong = cast("NDArray[np.uint8]", self.range_sha256)[block, place].tobytes()
        return FieldRange(int(self.block_offset[block]) + offset, size, fast, strong)

    @cached_property
    def member_places(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Offsets in the raw block, and sizes, of the members of each field: int64 (rows,) each."""
        # `_check_fields` has checked that every member is inside its block, so the values fit int64.
        offsets, sizes = (
            cast("NDArray[np.uint64]", column) for column in (self.field_offset, self.field_size)
        )
        return [(_column(offsets, field), _column(sizes, field)) for field in range(offsets.shape[1])]

    @cached_property
    def member_ends(self) -> list[NDArray[np.int64]]:
        """Ends of the members of each field in their raw blocks: int64 (rows,), contiguous."""
        return [starts + sizes for starts, sizes in self.member_places]

    def block_of(self, row: int) -> tuple[int, int]:
        """Return (block, row inside the block) of a row.

        Raises:
            NotFoundError: The shard has no such row; `key`, `source` and the like raise the same.
        """
        self._check_row(row)
        block = int(np.searchsorted(self.block_start, row, side="right")) - 1
        return block, row - int(self.block_start[block])

    def key(self, row: int) -> str:
        self._check_row(row)
        return self.key_texts[row]

    def keys(self) -> list[str]:
        """Return the keys of all rows, in order."""
        return self.key_texts.to_list()

    def original_key(self, row: int) -> str:
        """Return the key of a row in its source, which differs from `key(row)` if it was rewritten."""
        self._check_row(row)
        if self.original_rows is not None and self.original_texts is not None:
            place = int(np.searchsorted(self.original_rows, row))
            if place < len(self.original_rows) and int(self.original_rows[place]) == row:
                return self.original_texts[place]
        return self.key_texts[row]

    def source(self, row: int) -> tuple[str, int] | None:
        """Return (source name, row number in the source) of a row, or None if they are not recorded."""
        self._check_row(row)
        if self.source_id is None or self.source_row is None or self.source_id[row] < 0:
            return None
        return self.source_names[int(self.source_id[row])], int(self.source_row[row])

    def stratum(self, row: int) -> int | None:
        """Return the stratum number of a row in a shard with pooled strata, otherwise None."""
        self._check_row(row)
        if self.row_stratum is None or self.row_stratum[row] < 0:
            return None
        return int(self.row_stratum[row])

    @cached_property
    def _bytes(self) -> bytes:
        meta = {name: getattr(self, name) for name in _FACTS}
        meta["schema"] = self.schema.to_json()
        if isinstance(self.key_texts, NumberedKeys):
            meta[_FIRST_ORDINAL] = self.key_texts.first
        meta |= {name: getattr(self, name) for name in _ENCODED if getattr(self, name) is not None}
        columns: dict[str, NDArray[Any] | None] = {
            **{name: getattr(self, name) for name in _BLOCK_COLUMNS},
            **(_text_columns("key", self.key_texts) if isinstance(self.key_texts, Texts) else {}),
            **{name: getattr(self, name) for name in _OPTIONAL_COLUMNS},
            **(_text_columns("original", self.original_texts) if self.original_texts is not None else {}),
        }
        return pack_columns(KIND, meta, {name: array for name, array in columns.items() if array is not None})

    def to_bytes(self) -> bytes:
        """Return the stored form of the index, which is the same for equal indexes."""
        return self._bytes

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> ShardIndex:
        """Parse an index whose digest has been checked.

        Raises:
            FormatError: The bytes are not a valid index.
        """
        unpacked = unpack_columns(data, KIND)
        arrays = dict(unpacked.arrays)
        facts = convert(_Facts, unpacked.meta, "index")
        key_texts: Texts | NumberedKeys | None = _take_texts(arrays, "key")
        if facts.first_ordinal is not None:
            if key_texts is not None:
                raise FormatError("index: it has keys and says that they are numbers")
            key_texts = NumberedKeys(facts.first_ordinal, facts.rows)
        original_texts = _take_texts(arrays, "original")
        if key_texts is None or any(name not in arrays for name in _BLOCK_COLUMNS):
            raise FormatError("index: a column is missing")
        unknown = set(arrays) - {*_BLOCK_COLUMNS, *_OPTIONAL_COLUMNS}
        if unknown:
            raise FormatError(f"index: unknown columns {sorted(unknown)}; a newer shardkit may read it")
        return cls(
            **{name: getattr(facts, name) for name in (*_FACTS, *_ENCODED)},
            key_texts=key_texts,
            original_texts=original_texts,
            **cast(dict[str, Any], arrays),
        )

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.rows:
            raise NotFoundError(f"row {row}: the shard has rows 0 to {self.rows - 1}")


def _column(table: NDArray[np.uint64], field: int) -> NDArray[np.int64]:
    """Return one column as a contiguous, read-only array."""
    values = table[:, field].astype(np.int64)
    values.flags.writeable = False
    return values


_BLOCK_COLUMNS = ("block_offset", "block_size", "block_raw_size", "block_start", "block_xxh3", "block_sha256")
_OPTIONAL_COLUMNS = (
    *("field_offset", "field_size", "field_is_payload", "source_id", "source_row", "original_rows"),
    "row_stratum",
    *("common", "range_offset", "range_size", "range_xxh3", "range_sha256"),
)


def block_starts(segment_rows: Sequence[int], block_rows: int) -> NDArray[np.int64]:
    """Return the first row of each block, then the number of rows; blocks restart at segment borders.

    Args:
        segment_rows: Number of rows of each segment, in shard order.
        block_rows: Rows of a full block.
    """
    starts = [0]
    for rows in segment_rows:
        begin = starts[-1]
        starts.extend(range(begin + block_rows, begin + rows, block_rows))
        if rows:
            starts.append(begin + rows)
    return np.array(starts, np.int64)


def _text_columns(name: str, texts: Texts) -> dict[str, NDArray[Any] | None]:
    return {f"{name}_data": texts.data, f"{name}_offset": texts.offsets}


def _take_texts(arrays: dict[str, NDArray[Any]], name: str) -> Texts | None:
    data, offsets = arrays.pop(f"{name}_data", None), arrays.pop(f"{name}_offset", None)
    if (data is None) != (offsets is None):
        raise FormatError(f"index: column {name}_data or {name}_offset is missing")
    return None if data is None or offsets is None else Texts(data, offsets)


MAX_BLOCK_BYTES = 8 << 30
"""Maximum stored and raw size of a block: a sample of 5 GiB and its framing fit."""


def _check_array(name: str, array: NDArray[Any] | None, dtype: type, shape: tuple[int, ...]) -> None:
    if array is None or array.dtype != np.dtype(dtype) or array.shape != shape:
        got = "nothing" if array is None else f"{array.dtype.name}{list(array.shape)}"
        raise FormatError(f"index: column {name} is {got}, expected {np.dtype(dtype).name}{list(shape)}")


def _check_numbers(index: ShardIndex) -> None:
    try:
        normal = "none" if index.format == "rows" else normalise_compression(index.format, index.compression)
    except ConfigurationError as error:
        raise FormatError(f"index: {error}") from None
    if normal != index.compression:
        raise FormatError(f"index: compression {index.compression!r}, expected {normal!r}")
    if index.rows < 0 or index.block_rows < 1 or not 0 <= index.head_size <= index.shard_size < 2**63:
        raise FormatError(
            f"index: {index.rows} rows in blocks of {index.block_rows}, a shard of {index.shard_size} bytes"
        )
    for digest in (index.head_sha256, index.tail_sha256):
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise FormatError(f"index: {digest!r:.80} is no SHA-256")


def _check_blocks(index: ShardIndex) -> None:
    blocks = index.block_offset.size
    for name in ("block_offset", "block_size", "block_raw_size", "block_xxh3"):
        _check_array(name, getattr(index, name), np.uint64, (blocks,))
    _check_array("block_start", index.block_start, np.int64, (blocks + 1,))
    _check_array("block_sha256", index.block_sha256, np.uint8, (blocks, 32))
    steps = np.diff(index.block_start)
    if index.block_start[0] != 0 or index.block_start[-1] != index.rows:
        raise FormatError(f"index: blocks do not cover rows 0 to {index.rows}")
    if blocks and not 1 <= int(steps.min()) <= int(steps.max()) <= index.block_rows:
        raise FormatError(f"index: a block does not hold 1 to {index.block_rows} rows")
    sizes = [*index.block_size.tolist(), *index.block_raw_size.tolist()]
    if sizes and not 1 <= min(sizes) <= max(sizes) <= MAX_BLOCK_BYTES:
        raise FormatError(
            f"index: a block of {min(sizes)} or {max(sizes)} bytes, expected 1 to {MAX_BLOCK_BYTES}"
        )
    ends = index.head_size + np.cumsum(index.block_size, dtype=np.uint64)
    begins = ends - index.block_size
    if not np.array_equal(begins, index.block_offset) or (blocks and int(ends[-1]) > index.shard_size):
        raise FormatError("index: blocks do not follow one another inside the shard")


def _check_rows(index: ShardIndex) -> None:
    rows = index.rows
    if isinstance(index.key_texts, NumberedKeys):
        if index.format != "rows" or len(index.key_texts) != rows or index.key_texts.first >= _MAX_ORDINAL:
            raise FormatError(
                f"index: keys of {len(index.key_texts)} numbers for {rows} rows of {index.format}"
            )
    else:
        _check_keys(index.key_texts, rows)
    if (index.source_id is None) != (index.source_row is None) or (index.source_id is None) != (
        not index.source_names
    ):
        raise FormatError("index: sources need source_id, source_row and names, or none of them")
    if index.source_id is not None:
        _check_array("source_id", index.source_id, np.int32, (rows,))
        _check_array("source_row", index.source_row, np.int64, (rows,))
        if rows and not -1 <= int(index.source_id.min()) <= int(index.source_id.max()) < len(
            index.source_names
        ):
            raise FormatError("index: source_id names a source that is not listed")
    if index.row_stratum is not None:
        _check_array("row_stratum", index.row_stratum, np.int32, (rows,))
    if (index.original_rows is None) != (index.original_texts is None):
        raise FormatError("index: original keys need rows and texts")
    if index.original_rows is not None:
        count = index.original_rows.size
        _check_array("original_rows", index.original_rows, np.int64, (count,))
        cast(Texts, index.original_texts).check("original keys", count)
        inside = count == 0 or 0 <= int(index.original_rows[0]) <= int(index.original_rows[-1]) < rows
        if not inside or bool((np.diff(index.original_rows) <= 0).any()):
            raise FormatError("index: rows of original keys are not ascending rows of the shard")


def _check_keys(texts: Texts, rows: int) -> None:
    texts.check("keys", rows)
    lengths = np.diff(texts.offsets)
    if rows and (
        int(lengths.min()) < 1 or int(lengths.max()) > 80 or texts.data.tobytes().translate(None, _KEY_BYTES)
    ):
        raise FormatError("index: a key is not 1 to 80 of A-Z a-z 0-9 _ -")


def _check_row_size(index: ShardIndex) -> None:
    """Check that every block of an array of rows has the size of its rows."""
    if any(kind.item_bytes is None or kind.optional for kind in index.schema.values()):
        raise FormatError(
            f"index: rows of {index.schema.to_json()} have no fixed size, and it does not locate them"
        )
    rows = np.diff(index.block_start).tolist()
    expected = [count * index.row_bytes for count in rows]
    if index.block_size.tolist() != expected or index.block_raw_size.tolist() != expected:
        raise FormatError(f"index: a block does not hold rows of {index.row_bytes} bytes")


def _check_ranges(index: ShardIndex) -> None:
    """Check that the range of every field is inside its block."""
    common = index.common
    if common is None or common.dtype != np.uint8 or common.ndim != 1:
        raise FormatError("index: encoded blocks need the column common")
    if set(index.constants or ()) - set(index.schema):
        raise FormatError("index: a constant is of no field")
    ranges = (index.range_offset, index.range_size, index.range_xxh3, index.range_sha256)
    if index.encoding != "npz" and all(column is None for column in ranges):
        return
    shape = (index.blocks, len(index.schema))
    for name in ("range_offset", "range_size", "range_xxh3"):
        _check_array(name, getattr(index, name), np.uint64, shape)
    _check_array("range_sha256", index.range_sha256, np.uint8, (*shape, 32))
    offset, size = cast(NDArray[np.uint64], index.range_offset), cast(NDArray[np.uint64], index.range_size)
    whole = index.block_size[:, None]
    # Subtraction, because a sum of hostile offsets could wrap around.
    if bool((offset > whole).any()) or bool((size > whole - np.minimum(offset, whole)).any()):
        raise FormatError("index: the range of a field lies outside its block")


def _check_fields(index: ShardIndex) -> None:
    if index.format == "arrow":
        if index.field_offset is not None or index.field_size is not None:
            raise FormatError("index: an arrow shard has no field offsets")
        if index.field_is_payload is not None:
            raise FormatError("index: an arrow shard cannot be adopted")
        return
    located = (index.field_offset, index.field_size, index.field_is_payload)
    if index.encoding is not None and index.format != "rows":
        raise FormatError("index: encoded blocks are for the format rows")
    if index.encoding not in (None, "zstd"):
        if any(column is not None for column in located):
            raise FormatError(f"index: blocks of {index.encoding} have no field offsets")
        _check_ranges(index)
        return
    if index.format == "rows" and all(column is None for column in located):
        _check_row_size(index)
        return
    if index.field_is_payload is not None or index.format == "rows":
        _check_array("field_is_payload", index.field_is_payload, np.uint8, (len(index.schema),))
        if int(cast(NDArray[np.uint8], index.field_is_payload).max()) > 1:
            raise FormatError("index: a flag of the fields of an adopted file is neither 0 nor 1")
    shape = (index.rows, len(index.schema))
    _check_array("field_offset", index.field_offset, np.uint64, shape)
    _check_array("field_size", index.field_size, np.uint64, shape)
    offset, size = cast(NDArray[np.uint64], index.field_offset), cast(NDArray[np.uint64], index.field_size)
    raw = np.repeat(index.block_raw_size, np.diff(index.block_start))[:, None]
    # Subtraction, because a sum of hostile offsets could wrap around.
    if bool((offset > raw).any()) or bool((size > raw - np.minimum(offset, raw)).any()):
        raise FormatError("index: a field lies outside its block")
    optional = [kind.optional for kind in index.schema.values()]
    if any(optional) and bool(((offset == 0) & (size != 0))[:, optional].any()):
        raise FormatError("index: a field that has no member has a size")


_MAX_ORDINAL = 1 << 62
_KEY_BYTES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
