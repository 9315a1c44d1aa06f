"""Canonical payloads of Arrow columns in the types of a shard, as views of their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .block import JoinedPayloads, PayloadColumn, payloads_of
from .schema import FieldType, Schema


def stored_columns(schema: Schema, batch: Any) -> list[PayloadColumn]:
    """Return the payloads of the stored columns of a batch of samples, as views of its memory if possible."""
    columns: list[PayloadColumn] = []
    for (_, kind), array in zip(schema.items(), batch.columns, strict=True):
        if not kind.optional:
            columns.append(_bool_bytes(kind, array))
            continue
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        columns += [_without_absent(kind, array, valid), valid.astype(np.uint8).reshape(-1, 1)]
    return columns


def _without_absent(kind: FieldType, array: Any, valid: NDArray[np.bool_]) -> PayloadColumn:
    """Return the payloads of a column; absent values become zero bytes, or empty."""
    column = _bool_bytes(kind, array)
    if valid.all():
        return column
    if not isinstance(column, JoinedPayloads):
        return np.where(valid[:, None], column, np.uint8(0))
    if not column.sizes[~valid].any():
        return column
    return [
        payload if is_valid else b"" for payload, is_valid in zip(payloads_of(column), valid, strict=True)
    ]


def _bool_bytes(kind: FieldType, array: Any) -> NDArray[np.uint8] | JoinedPayloads:
    """Return the `payload_column` of an array of `arrow_type`, where bools are bits."""
    if kind.dtype != "bool":
        return payload_column(kind, array)
    rows = len(array)
    inner, borders = array, None
    if kind.kind == "ragged":
        borders = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + rows + 1]
        inner = array.values[int(borders[0]) : int(borders[-1])]
    for size in kind.shape:
        inner = _items(inner, size)
    known = inner.fill_null(False) if inner.null_count else inner
    octets = known.to_numpy(zero_copy_only=False).view(np.uint8)
    return octets.reshape(rows, -1) if borders is None else JoinedPayloads(octets, np.diff(borders))


def payload_column(kind: FieldType, array: Any) -> NDArray[np.uint8] | JoinedPayloads:
    """Return the payloads of an array made by `spool_array`, as a view of its memory."""
    rows = len(array)
    width = kind.numpy_dtype.itemsize
    if kind.item_bytes is not None:
        for size in kind.shape:
            array = _items(array, size)
        data = np.frombuffer(array.buffers()[1], np.uint8) if len(array) else np.empty(0, np.uint8)
        return data[array.offset * width : (array.offset + len(array)) * width].reshape(rows, kind.item_bytes)
    borders = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + rows + 1]
    base, buffer = (
        (0, array.buffers()[2]) if kind.is_opaque else (array.values.offset, array.values.buffers()[1])
    )
    data = np.frombuffer(buffer, np.uint8) if buffer is not None and buffer.size else np.empty(0, np.uint8)
    first, last = (base + int(borders[0])) * width, (base + int(borders[-1])) * width
    return JoinedPayloads(data[first:last], np.diff(borders) * width)


def _items(array: Any, size: int) -> Any:
    """Return the items of fixed-size lists, including the items of null lists, which `flatten` leaves out."""
    first = array.offset * size
    return array.values[first : first + len(array) * size]
