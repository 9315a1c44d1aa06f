"""Blocks of the `tar` format: consecutive ustar members `key.field.extension` (SPEC.md §3)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError, SampleError

from .block import Column, FixedColumn, VariableColumn, check_text
from .compression import compress_frame, zstd_level
from .rows import RowBlock, payloads_of
from .schema import FieldType, Schema, presence_of
from .tar_members import (
    BLOCK,
    RAGGED_HEADER_BYTES,
    TRAILER,
    member_extension,
    member_header,
    member_headers,
    member_names,
    npy_header,
    padded,
)

_PADDING = tuple(bytes(size) for size in range(BLOCK))
_MAX_DIGITS = 20  # of a 64-bit integer, sign included
_DECIMAL = re.compile(rb"0|-?[1-9][0-9]*")
_FEW_ROWS = 64


class TarEncoder:
    """Rows to stored tar blocks."""

    def __init__(self, schema: Schema, compression: str) -> None:
        self._fields = [
            (f".{name}.", kind) for name, kind in zip(member_names(schema), schema.values(), strict=True)
        ]
        self._schema = schema
        self._level = zstd_level(compression)

    def head(self) -> bytes:
        """Nothing precedes the first block."""
        return b""

    def encode(
        self, block: RowBlock
    ) -> tuple[bytes | memoryview, int, NDArray[np.uint64] | None, NDArray[np.uint64] | None]:
        """Stored bytes of a block, its raw size, and offsets and sizes of its fields in the raw block."""
        lengths = {len(key) for key in block.keys}
        is_matrix = (
            len(lengths) == 1
            and self._schema.stored is self._schema
            and all(isinstance(column, np.ndarray) for column in block.columns)
        )
        raw, offsets, sizes = (self._matrix if is_matrix else self._members)(block)
        stored = raw if self._level is None else compress_frame(raw, self._level)
        return stored, len(raw), offsets, sizes

    def _members(self, block: RowBlock) -> tuple[bytes | memoryview, NDArray[np.uint64], NDArray[np.uint64]]:
        """Member by member: names and payloads of any length."""
        parts: list[bytes | memoryview] = []
        offsets: list[int] = []
        sizes: list[int] = []
        position = 0
        stored = dict(zip(self._schema.stored, map(payloads_of, block.columns), strict=True))
        columns = [_members_of(stored, name) for name in self._schema]
        for key, *payloads in zip(block.keys, *columns, strict=True):
            for (dotted, kind), payload in zip(self._fields, payloads, strict=True):
                if payload is None:
                    offsets.append(0)
                    sizes.append(0)
                    continue
                prefix, content = _member_parts(kind, payload)
                size = len(prefix) + len(content)
                name = f"{key}{dotted}{member_extension(kind, payload)}"
                parts += (member_header(name.encode(), size), prefix, content, _PADDING[-size % BLOCK])
                offsets.append(position + BLOCK)
                sizes.append(size)
                position += BLOCK + padded(size)
            if payloads.count(None) == len(payloads):
                raise SampleError(
                    f"key {key!r}: no field has a value, and a sample of a tar is its members; leave it out, or "
                    'store them as arrow (--format arrow, format="arrow")'
                )
        shape = (len(block), len(self._fields))
        return (
            b"".join(parts),
            np.array(offsets, np.uint64).reshape(shape),
            np.array(sizes, np.uint64).reshape(shape),
        )

    def _matrix(self, block: RowBlock) -> tuple[bytes | memoryview, NDArray[np.uint64], NDArray[np.uint64]]:
        """The same bytes where keys are equally long and every field is of a fixed size: all rows at once."""
        rows = len(block)
        keys = np.frombuffer("".join(block.keys).encode(), np.uint8).reshape(rows, -1)
        members = [
            _fixed_members(kind, np.asarray(column), keys, dotted)
            for (dotted, kind), column in zip(self._fields, block.columns, strict=True)
        ]
        widths = [BLOCK + padded(int(sizes.max())) for _, _, _, sizes in members]
        starts = np.cumsum([0, *widths])
        raw = np.empty((rows, int(starts[-1])), np.uint8)
        for start, stop, (headers, prefix, content, _) in zip(starts, starts[1:], members, strict=False):
            raw[:, start : start + BLOCK] = headers
            at = start + BLOCK
            raw[:, at : at + len(prefix)] = np.frombuffer(prefix, np.uint8)
            at += len(prefix)
            raw[:, at : at + content.shape[1]] = content
            raw[:, at + content.shape[1] : stop] = 0
        before = np.arange(rows)[:, None] * raw.shape[1]
        offsets = (before + starts[None, :-1] + BLOCK).astype(np.uint64)
        sizes = np.stack([sizes for *_, sizes in members], axis=1).astype(np.uint64)
        return raw.reshape(-1).data, offsets, sizes

    def tail(self) -> bytes:
        """The two zero blocks that end an archive, in a frame of their own where blocks are compressed."""
        return TRAILER if self._level is None else compress_frame(TRAILER, self._level)


def _members_of(
    stored: Mapping[str, Sequence[bytes | memoryview]], name: str
) -> Sequence[bytes | memoryview | None]:
    """The payloads of a field, None where it has no value."""
    presence = stored.get(presence_of(name))
    if presence is None:
        return stored[name]
    return [payload if present[0] else None for payload, present in zip(stored[name], presence, strict=True)]


def _member_parts(kind: FieldType, payload: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
    """(prefix, content) whose concatenation is the member of a canonical payload."""
    if kind.is_opaque:
        return b"", payload
    dtype = kind.numpy_dtype
    if kind.is_whole:
        value = int.from_bytes(payload, "little", signed=dtype.kind == "i")
        return b"", b"%d" % value
    return npy_header(kind, len(payload) // dtype.itemsize), payload


def _fixed_members(
    kind: FieldType, payloads: NDArray[np.uint8], keys: NDArray[np.uint8], dotted: str
) -> tuple[NDArray[np.uint8], bytes, NDArray[np.uint8], NDArray[np.int64]]:
    """Headers, common prefix, contents (zero-padded) and sizes of the members of one field of many rows."""
    rows, dtype = len(keys), kind.numpy_dtype
    if kind.is_whole:
        whole = np.ascontiguousarray(payloads).view(np.uint8 if dtype.kind == "b" else dtype).ravel()
        texts = [b"%d" % value for value in whole.tolist()]
        sizes = np.fromiter(map(len, texts), np.int64, rows)
        prefix, content = b"", np.array(texts, f"S{_MAX_DIGITS}").view(np.uint8).reshape(rows, _MAX_DIGITS)
    else:
        prefix, content = npy_header(kind), payloads
        sizes = np.full(rows, len(prefix) + payloads.shape[1], np.int64)
    suffix = f"{dotted}{member_extension(kind, b'')}".encode()
    names = np.empty((rows, keys.shape[1] + len(suffix)), np.uint8)
    names[:, : keys.shape[1]] = keys
    names[:, keys.shape[1] :] = np.frombuffer(suffix, np.uint8)
    return member_headers(names, sizes), prefix, content, sizes


def member_bytes(kind: FieldType, payload_bytes: int) -> int:
    """Bytes of the tar member, header and padding included, of a payload of so many bytes."""
    if kind.is_whole:
        return 2 * BLOCK
    return BLOCK + padded(payload_bytes + (0 if kind.is_opaque else len(npy_header(kind))))


def tar_column(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    kind: FieldType,
    name: str,
    *,
    is_payload: bool = False,
) -> Column:
    """One field of a raw block from the members that hold it; views of `data` where the layout allows.

    Args:
        data: The raw block, uint8.
        starts: Where each row's member content begins in it; inside it with its size (`ShardIndex` has
            checked).
        sizes: Bytes of each member.
        kind: The field's type.
        name: The field's name, for messages.
        is_payload: `starts` and `sizes` are those of the canonical payload itself, whatever stands before it
            (adopted tars, whose headers were read once).

    Raises:
        FormatError: a member is not what shardkit writes for `kind`.
    """
    if kind.is_opaque:
        if kind.kind == "str":
            check_text(data, starts, starts + sizes, name)
        return VariableColumn(data, starts, starts + sizes, kind)
    dtype = kind.numpy_dtype
    if kind.is_whole and not is_payload:
        parse = _parse_few if len(starts) <= _FEW_ROWS else parse_decimals
        return FixedColumn(parse(data, starts, sizes, dtype, name))
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
    values = _gather(data, starts, kind)
    if dtype.kind == "b" and bool((values.view(np.uint8) > 1).any()):
        raise FormatError(f"field {name!r}: a bool is neither 0 nor 1")
    return FixedColumn(values)


def optional_column(
    present: NDArray[np.bool_], kind: FieldType, load: Callable[[NDArray[np.bool_]], Column]
) -> Column:
    """A field of which some rows have no member.

    Returns:
        The column of all rows; the others have zeros, or nothing.
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
    """Every run of `size` bytes of `data`, as overlapping rows: indexing it copies whole runs."""
    return np.lib.stride_tricks.as_strided(data, (len(data) - size + 1, size), (1, 1), writeable=False)


def _check_headers(
    data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64], kind: FieldType, name: str
) -> None:
    """Each npy header is the very one that its type and length call for; so none needs to be interpreted."""
    if kind.kind == "ragged":
        distinct, which = np.unique(lengths, return_inverse=True)
        headers = b"".join([npy_header(kind, length) for length in distinct.tolist()])
        expected = np.frombuffer(headers, np.uint8).reshape(len(distinct), -1)[which]
    else:
        expected = np.frombuffer(npy_header(kind), np.uint8)[None, :]
    found = _windows(data, expected.shape[1])[starts]
    _refuse_rows((found != expected).any(axis=1), name, f"npy header is not that of {kind}")


def _gather(data: NDArray[np.uint8], starts: NDArray[np.int64], kind: FieldType) -> NDArray[Any]:
    """Items of one size as (rows, *shape): a strided view where the pitch is constant, else one copy."""
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
    """Magnitudes of the smallest and the largest value, and the type's name: numpy takes 40 µs to say them."""
    top = 1 if dtype.kind == "b" else int(np.iinfo(dtype).max)
    return (-int(np.iinfo(dtype).min) if dtype.kind == "i" else 0), top, dtype.name


def _parse_few(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    dtype: np.dtype[Any],
    name: str,
) -> NDArray[Any]:
    """`parse_decimals` one by one: for some dozen rows two dozen numpy calls cost more."""
    bottom, top, type_name = _integer_range(dtype)
    found: list[int] = []
    view = data.data
    for row, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        text = bytes(view[start : start + size]) if 0 < size <= _MAX_DIGITS else b""
        value = int(text) if _DECIMAL.fullmatch(text) else top + 1
        if not -bottom <= value <= top:
            raise FormatError(f"field {name!r}, row {row} of the block: no canonical decimal of {type_name}")
        found.append(value)
    values = np.array(found, dtype)
    values.flags.writeable = False
    return values


def parse_decimals(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    dtype: np.dtype[Any],
    name: str,
    *,
    first: NDArray[np.int64] | int = 0,
) -> NDArray[Any]:
    """Canonical decimals at any places at once, by Horner's rule in uint64 over right-aligned digits.

    Args:
        data: Bytes.
        starts: Where each text begins in them, (n,).
        sizes: Bytes of each.
        dtype: Of the result, an integer type or bool.
        name: The field's, for messages.
        first: No byte before this place is looked at; of the block that each text lies in.

    Returns:
        (n,) of `dtype`, read-only.

    Raises:
        FormatError: a text is not what shardkit writes for a value of `dtype`.
    """
    if not len(starts):
        return np.empty(0, dtype)
    _refuse_rows((sizes < 1) | (sizes > _MAX_DIGITS), name, "expected a decimal of 1 to 20 characters")
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
