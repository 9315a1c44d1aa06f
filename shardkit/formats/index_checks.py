"""What must hold in an index, whoever wrote it: then readers need not check sizes and offsets again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError, SchemaError

from .compression import extension, normalise_compression
from .texts import Texts

if TYPE_CHECKING:
    from .index import ShardIndex

__all__ = ["MAX_BLOCK_BYTES", "check_index"]

MAX_BLOCK_BYTES = 8 << 30
"""A sample of 5 GiB and its framing fit; no size in an index may ask for more."""


def check_index(index: ShardIndex) -> None:
    """Refuse an index whose parts contradict one another.

    Raises:
        FormatError: names the part.
    """
    _check_numbers(index)
    _check_blocks(index)
    _check_rows(index)
    _check_fields(index)


def _check_array(name: str, array: NDArray[Any] | None, dtype: type, shape: tuple[int, ...]) -> None:
    if array is None or array.dtype != np.dtype(dtype) or array.shape != shape:
        got = "nothing" if array is None else f"{array.dtype.name}{list(array.shape)}"
        raise FormatError(f"index: column {name} is {got}, expected {np.dtype(dtype).name}{list(shape)}")


def _check_numbers(index: ShardIndex) -> None:
    try:
        extension(index.format, index.compression)
        normal = normalise_compression(index.compression)
    except SchemaError as error:
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
    index.key_texts.check("keys", rows)
    lengths = np.diff(index.key_texts.offsets)
    if rows and (
        int(lengths.min()) < 1 or int(lengths.max()) > 80 or not _KEY_BYTES[index.key_texts.data].all()
    ):
        raise FormatError("index: a key is not 1 to 80 of A-Z a-z 0-9 _ -")
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


def _check_fields(index: ShardIndex) -> None:
    if index.format != "tar":
        if index.field_offset is not None or index.field_size is not None:
            raise FormatError("index: an arrow shard has no field offsets")
        if index.field_is_payload is not None:
            raise FormatError("index: an arrow shard cannot be adopted")
        return
    if index.field_is_payload is not None:
        _check_array("field_is_payload", index.field_is_payload, np.uint8, (len(index.schema),))
        if index.compression != "none" or int(index.field_is_payload.max()) > 1:
            raise FormatError(
                "index: an adopted tar is compressed, or a flag of its fields is neither 0 nor 1"
            )
    shape = (index.rows, len(index.schema))
    _check_array("field_offset", index.field_offset, np.uint64, shape)
    _check_array("field_size", index.field_size, np.uint64, shape)
    offset, size = cast(NDArray[np.uint64], index.field_offset), cast(NDArray[np.uint64], index.field_size)
    raw = np.repeat(index.block_raw_size, np.diff(index.block_start))[:, None]
    # Compared by subtraction: a sum of hostile offsets could wrap around.
    if bool((offset > raw).any()) or bool((size > raw - np.minimum(offset, raw)).any()):
        raise FormatError("index: a field lies outside its block")


_KEY_BYTES = np.zeros(256, bool)
_KEY_BYTES[list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")] = True
