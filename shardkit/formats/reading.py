"""Read a block: size, checksum, decompression, decoding, in this order (SPEC.md §6)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardkit.documents import xxh3
from shardkit.errors import FormatError, IntegrityError, NotFoundError, UsageError

from .arrow_reading import BatchReader
from .block import Block, Column, FixedColumn, VariableColumn, check_text
from .columns import Texts
from .compression import decompress_frame
from .index import BlockSpan, ShardIndex
from .schema import KEY_FIELD, FieldType, presence_of
from .tar_members import MAX_DIGITS, RAGGED_HEADER_BYTES, npy_header

Verify = Literal["fast", "strong"]
"""Checksum that verifies blocks: XXH3-64 ("fast") or SHA-256 ("strong")."""


def verify_block(
    stored: bytes | memoryview, index: ShardIndex, block: int, *, verify: Verify = "fast"
) -> None:
    """Compare size and checksum of a block with the index.

    Args:
        stored: Bytes of the block in the shard.
        index: Index of the shard; its digest has been checked.
        block: Number of the block.
        verify: ``fast`` compares XXH3-64, ``strong`` SHA-256.

    Raises:
        IntegrityError: Size or checksum differ.
        NotFoundError: The shard has no such block.
        UsageError: `verify` is neither ``fast`` nor ``strong``.
    """
    if not 0 <= block < index.blocks:
        raise NotFoundError(f"block {block}: the shard has blocks 0 to {index.blocks - 1}")
    span = index.spans[block]
    _verify(stored, span.size, span.xxh3, index.block_sha256[block].tobytes(), verify, f"block {block}")


def _verify(stored: bytes | memoryview, size: int, fast: int, strong: bytes, verify: str, what: str) -> None:
    """Compare size and checksum of some bytes of a shard."""
    if len(stored) != size:
        raise IntegrityError(
            f"{what}: {len(stored)} bytes, expected {size}; read another copy or repair the shard"
        )
    if verify == "fast":
        if (found := xxh3(stored)) == fast:
            return
        name, got, expected = "XXH3", f"{found:016x}", f"{fast:016x}"
    elif verify == "strong":
        got, expected = hashlib.sha256(stored).hexdigest(), strong.hex()
        if got == expected:
            return
        name = "SHA-256"
    else:
        raise UsageError(f"verify={verify!r}: expected 'fast' or 'strong'; there is no 'off'")
    raise IntegrityError(
        f"{what}: {name} mismatch (expected {expected}, got {got}); read another copy or repair the shard"
    )


def read_block(
    stored: bytes | bytearray | memoryview,
    index: ShardIndex,
    block: int,
    *,
    verify: Verify = "fast",
    keys: bool = True,
    fields: Iterable[str] | None = None,
) -> Block:
    """Verify and decode one block.

    Columns of uncompressed blocks are views of `stored`, which must not change while they are used.

    Args:
        stored: Bytes of the block in the shard: ``block_size[block]`` bytes from ``block_offset[block]``.
        index: Index of the shard; its digest has been checked.
        block: Number of the block.
        verify: ``fast`` (XXH3-64) or ``strong`` (SHA-256, for data from a network).
        keys: Compare the keys in an Arrow block with the index. Digests cover both in any case, so a caller that uses
            no keys can skip this.
        fields: Fields that will be read; others are not decompressed. None: all.

    Raises:
        IntegrityError: `stored` differs from the block that was written; none of it has been parsed.
        FormatError: The digest is correct, but the content is not valid.
        NotFoundError: The shard has no such block.
        UsageError: `verify` is neither ``fast`` nor ``strong``.
    """
    view = memoryview(stored).cast("B")
    verify_block(view, index, block, verify=verify)
    span = index.spans[block]
    rows = span.end_row - span.first_row
    if index.encoding == "zstd":
        view = memoryview(decompress_frame(view, span.raw_size, f"block {block}"))
    elif index.encoding is not None:
        names = _fields_of(index, fields or ()) or list(index.schema)  # at least one: the rows are counted
        return _foreign_block(index, block, {span.offset: view.toreadonly()}, names)
    if index.format != "arrow":
        return (_array_block if index.row_bytes else _located_block)(view, index, block, span)
    columns = None if fields is None else [*fields, *([KEY_FIELD] if keys else [])]
    batch = BatchReader(view, index.schema, index.compression.partition(":")[0], rows, span.raw_size, columns)
    if keys:
        _compare_keys(batch.keys(checked_later=True), index, block)
    return Block(index.schema, rows, span.raw_size, batch.column)


def separate_fields(index: ShardIndex, fields: Iterable[str] | None) -> list[str] | None:
    """Return the fields whose ranges suffice for a read of `fields`; None if the whole block must be read.

    A read of no field reads the whole block, so that at least one checksum is compared.
    """
    if index.range_size is None or fields is None:
        return None
    names = _fields_of(index, fields)
    return names if 0 < len(names) < len(index.schema) else None


def _fields_of(index: ShardIndex, columns: Iterable[str]) -> list[str]:
    """Return the fields that stored columns belong to, in the order of the schema."""
    chosen = set(columns)
    return [name for name in index.schema if name in chosen or presence_of(name) in chosen]


def read_fields(
    stored: Mapping[str, bytes | bytearray | memoryview],
    index: ShardIndex,
    block: int,
    *,
    verify: Verify = "fast",
) -> Block:
    """Verify and decode some fields of a block, given their own ranges only (`separate_fields`).

    Args:
        stored: Field → bytes of its range (`ShardIndex.field_range`).
        index: Index of the shard; its digest has been checked.
        block: Number of the block.
        verify: ``fast`` (XXH3-64) or ``strong`` (SHA-256).

    Raises:
        IntegrityError: A range differs from what was adopted; none of it has been parsed.
        FormatError: The digests are correct, but the content is not valid.
    """
    parts: dict[int, memoryview] = {}
    for name, data in stored.items():
        view, found = memoryview(data).cast("B").toreadonly(), index.field_range(block, name)
        _verify(view, found.size, found.xxh3, found.sha256, verify, f"block {block} field {name!r}")
        if found.size:  # otherwise the file lacks the field
            parts[found.offset] = view
    return _foreign_block(index, block, parts, list(stored))


def _foreign_block(
    index: ShardIndex, block: int, parts: Mapping[int, memoryview], fields: Sequence[str]
) -> Block:
    from .foreign_blocks import foreign_block  # pyarrow takes longer to import than a dataset to open

    return foreign_block(index, block, parts, fields)


def _compare_keys(keys: VariableColumn, index: ShardIndex, block: int) -> None:
    span = index.spans[block]
    texts = index.key_texts
    assert isinstance(texts, Texts), "keys of an Arrow shard are texts"
    offsets = texts.offsets[span.first_row : span.end_row + 1]
    start, end = int(offsets[0]), int(offsets[-1])
    # Comparing bytes is several times faster than comparing arrays of a hundred items.
    if (keys.ends + start).tobytes() != offsets[1:].tobytes() or (
        keys.data.tobytes() != texts.data[start:end].tobytes()
    ):
        raise FormatError(f"block {block}: its keys are not those of the index")


def _array_block(view: memoryview, index: ShardIndex, block: int, span: BlockSpan) -> Block:
    """Return a block of rows of one size, whose payloads follow one another in schema order."""
    data, rows = np.frombuffer(view.toreadonly(), np.uint8), span.end_row - span.first_row
    sizes = [kind.item_bytes or 0 for kind in index.schema.values()]

    def load(name: str) -> Column:
        kind, place = index.schema[name], index.schema.position(name)
        starts = sum(sizes[:place]) + index.row_bytes * np.arange(rows)
        return FixedColumn(_check_bools(_gather(data, starts, kind), name))

    return Block(index.schema, rows, span.raw_size, load)


def _located_block(view: memoryview, index: ShardIndex, block: int, span: BlockSpan) -> Block:
    """Return a block whose payloads, or members of a tar, are located by the index."""
    if len(view) != span.raw_size:
        raise FormatError(
            f"block {block}: {len(view)} stored and {span.raw_size} raw bytes, expected equal sizes"
        )
    data = np.frombuffer(view.toreadonly(), np.uint8)

    presences = {presence_of(name): name for name, kind in index.schema.items() if kind.optional}

    def load(name: str) -> Column:
        field = presences.get(name, name)
        kind, place = index.schema[field], index.schema.position(field)
        starts, sizes = (column[span.first_row : span.end_row] for column in index.member_places[place])
        present = starts != 0  # every member follows a header, so none begins at 0
        if field != name:
            return FixedColumn(present)
        bare = index.field_is_payload is not None and bool(index.field_is_payload[place])

        def column(rows: NDArray[np.bool_] | slice) -> Column:
            return tar_column(data, starts[rows], sizes[rows], kind, name, is_payload=bare)

        return optional_column(present, kind, column) if kind.optional else column(slice(None))

    return Block(index.schema, span.end_row - span.first_row, span.raw_size, load)


# ---- Columns of a tar block


def tar_column(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    kind: FieldType,
    name: str,
    *,
    is_payload: bool = False,
) -> Column:
    """Return one column of a tar block, as views of `data` if the layout allows.

    Args:
        data: The raw block.
        starts: Offset of each member's content, or of its payload, (rows,).
        sizes: Bytes of each, (rows,).
        kind: Type of the field.
        name: Field name in messages.
        is_payload: `starts` and `sizes` locate payloads without npy header (adopted files).

    Raises:
        FormatError: A member is not what shardkit writes for this type.
    """
    if kind.is_opaque:
        if kind.kind == "str":
            check_text(data, starts, starts + sizes, name)
        return VariableColumn(data, starts, starts + sizes, kind)
    dtype = kind.numpy_dtype
    if kind.is_whole and not is_payload:
        return FixedColumn(parse_decimals(data, starts, sizes, dtype, name))
    header_bytes = RAGGED_HEADER_BYTES if kind.kind == "ragged" else len(npy_header(kind))
    header_bytes = 0 if is_payload else header_bytes
    lengths = sizes - header_bytes
    wrong = (
        lengths != kind.item_bytes
        if kind.item_bytes is not None
        else (lengths < 0) | (lengths % dtype.itemsize != 0)
    )
    _refuse_rows(wrong, name, f"member size does not fit {kind}")
    if not is_payload:
        _check_headers(data, starts, lengths // dtype.itemsize, kind, name)
    starts = starts + header_bytes
    if kind.kind == "ragged":
        column = VariableColumn(data, starts, starts + lengths, kind)
        if dtype.kind == "b":
            for row, (start, end) in enumerate(
                zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
            ):
                if bool((data[start:end] > 1).any()):
                    raise FormatError(f"field {name!r}, row {row} of the block: a bool is neither 0 nor 1")
        return column
    return FixedColumn(_check_bools(_gather(data, starts, kind), name))


def _check_bools(values: NDArray[Any], name: str) -> NDArray[Any]:
    if values.dtype.kind == "b" and bool((values.view(np.uint8) > 1).any()):
        raise FormatError(f"field {name!r}: a bool is neither 0 nor 1")
    return values


def optional_column(
    present: NDArray[np.bool_], kind: FieldType, load: Callable[[NDArray[np.bool_]], Column]
) -> Column:
    """Return the column of an optional field; missing values are zeros, or empty if sizes vary.

    Args:
        present: Mask of the rows with a value, (rows,).
        kind: Type of the field.
        load: Returns the column of the masked rows.
    """
    if bool(present.all()):
        return load(present)
    rows = len(present)
    if kind.item_bytes is not None:
        values = np.zeros((rows, *kind.shape), kind.numpy_dtype)
        if bool(present.any()):
            found = load(present)
            assert isinstance(found, FixedColumn), "payloads of one size are a column of one size"
            values[present] = found.values
        values.flags.writeable = False
        return FixedColumn(values)
    starts, ends = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    if not present.any():
        return VariableColumn(np.empty(0, np.uint8), starts, ends, kind)
    found = load(present)
    assert isinstance(found, VariableColumn), "payloads of any size are a column of any size"
    starts[present], ends[present] = found.starts, found.ends
    return VariableColumn(found.data, starts, ends, kind)


def _refuse_rows(wrong: NDArray[np.bool_], name: str, why: str) -> None:
    if bool(wrong.any()):
        raise FormatError(f"field {name!r}, row {int(np.argmax(wrong))} of the block: {why}")


def _windows(data: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Return every run of `size` bytes of `data` as overlapping rows, so that indexing copies whole runs."""
    return np.lib.stride_tricks.as_strided(data, (len(data) - size + 1, size), (1, 1), writeable=False)


def _check_headers(
    data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64], kind: FieldType, name: str
) -> None:
    """Compare each npy header with the only valid header for its type and length; none is interpreted."""
    if kind.kind == "ragged":
        distinct, which = np.unique(lengths, return_inverse=True)
        headers = b"".join([npy_header(kind, length) for length in distinct.tolist()])
        expected = np.frombuffer(headers, np.uint8).reshape(len(distinct), -1)[which]
    else:
        expected = np.frombuffer(npy_header(kind), np.uint8)[None, :]
    found = _windows(data, expected.shape[1])[starts]
    _refuse_rows((found != expected).any(axis=1), name, f"npy header is not that of {kind}")


def _gather(data: NDArray[np.uint8], starts: NDArray[np.int64], kind: FieldType) -> NDArray[Any]:
    """Return items of one size as (rows, *shape): a strided view if the distance is constant, otherwise a copy."""
    size, dtype = int(kind.item_bytes or 0), kind.numpy_dtype
    pitches = np.diff(starts)
    if len(starts) == 1 or bool((pitches == pitches[0]).all() and pitches[0] >= 0):
        inner = np.empty(kind.shape, dtype).strides
        pitch = int(pitches[0]) if len(pitches) else size
        values: NDArray[Any] = np.ndarray(
            (len(starts), *kind.shape), dtype, buffer=data, offset=int(starts[0]), strides=(pitch, *inner)
        )
    else:
        values = _windows(data, size)[starts].view(dtype).reshape(len(starts), *kind.shape)
    values.flags.writeable = False
    return values


@lru_cache(maxsize=16)
def _integer_range(dtype: np.dtype[Any]) -> tuple[int, int, str]:
    """Return the magnitudes of the smallest and largest value, and the name; cached, because numpy takes 40 µs."""
    top = 1 if dtype.kind == "b" else int(np.iinfo(dtype).max)
    return (-int(np.iinfo(dtype).min) if dtype.kind == "i" else 0), top, dtype.name


def parse_decimals(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    dtype: np.dtype[Any],
    name: str,
    *,
    first: NDArray[np.int64] | int = 0,
) -> NDArray[Any]:
    """Parse many canonical decimals at once, by Horner's rule in uint64 over right-aligned digits.

    Args:
        data: Buffer that contains the texts, uint8.
        starts: Offset of each text, (n,).
        sizes: Bytes of each text, (n,).
        dtype: Integer type or bool of the result.
        name: Field name in messages.
        first: Offset before which no byte is read: one for all texts, or (n,).

    Returns:
        (n,) of `dtype`, read-only.

    Raises:
        FormatError: A text is not what shardkit writes for a value of `dtype`.
    """
    if not len(starts):
        return np.empty(0, dtype)
    _refuse_rows((sizes < 1) | (sizes > MAX_DIGITS), name, "expected a decimal of 1 to 20 characters")
    width = int(sizes.max())
    places = (starts + sizes)[:, None] + np.arange(-width, 0)
    digits = data[np.maximum(places, np.reshape(first, (-1, 1)))] - np.uint8(ord("0"))
    negative = data[starts] == ord("-")
    used = sizes - negative
    present = np.arange(-width, 0) >= -used[:, None]
    leading = data[starts + np.where(sizes > 1, negative, 0)]
    bad = (used < 1) | ((digits > 9) & present).any(axis=1)
    bad |= (leading == ord("0")) & (sizes > 1)  # leading zeros and "-0"
    digits = np.where(present, digits, 0).astype(np.uint64)
    high = np.zeros(len(starts), np.uint64)
    for place in range(width - 1):
        high = high * np.uint64(10) + digits[:, place]
    last = digits[:, -1]
    limit = np.uint64(2**64 - 1)
    bad |= (high > limit // np.uint64(10)) | (
        (high == limit // np.uint64(10)) & (last > limit % np.uint64(10))
    )
    magnitude = high * np.uint64(10) + last
    bottom, top, type_name = _integer_range(dtype)
    bad |= magnitude > np.where(negative, np.uint64(bottom), np.uint64(top))
    _refuse_rows(bad, name, f"no canonical decimal of {type_name}")
    values: NDArray[Any] = np.where(negative, np.uint64(0) - magnitude, magnitude).astype(dtype)
    values.flags.writeable = False
    return values
