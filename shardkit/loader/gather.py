"""Rows of many blocks → one buffer per field, without a Python step per row for fixed-size fields.

`numpy.take` gathers from one array; a batch comes from dozens of blocks. All of them lie in one address space, so
their rows are gathered from *that*: one overlapping array of items over the whole of it, indexed by the absolute
addresses of the rows. The copy then runs at the speed of `numpy.take` on a single array, whichever blocks the rows
come from. Safety rests on three facts, each held here: addresses are computed only from arrays of blocks that
`read_block` verified, those blocks are referenced until the copy is done, and row numbers are checked against the
block's row count before the copy.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError
from shardkit.formats import Block, FieldType, FixedColumn, Schema, VariableColumn

__all__ = ["GatherColumns", "RowAddresses"]

Int64s = NDArray[np.int64]

_FIRST_ADDRESS = 1 << 12  # the zero page is never mapped
_ADDRESSES = 1 << 47  # user addresses on x86-64 and on arm64 with 4-level tables
_MAX_ITEM = 1 << 15  # items · addresses must stay below 2**63; larger rows amortise a copy each


class GatherColumns:
    """Where the columns of one loaded block lie: start address and row pitch per fixed field.

    Holds the block, so that the addresses stay valid while this object is alive.
    """

    __slots__ = ("_keep", "addresses", "block", "nbytes", "pitches", "rows", "views")

    def __init__(self, block: Block, fields: Sequence[str]) -> None:
        self.block = block
        self.rows = block.rows
        self.nbytes = int(block.nbytes)
        self.addresses: list[tuple[int, ...]] = []
        self.pitches: list[int] = []
        self._keep: list[Any] = []
        self.views: list[memoryview | None] = []  # of variable fields: their bytes
        for name in fields:
            column = block.column(name)
            if isinstance(column, FixedColumn):
                self._add_fixed(column)
            else:
                self._add_variable(column)

    def _add_fixed(self, column: FixedColumn) -> None:
        values = column.values
        if values.size and not values[0].flags.c_contiguous:
            values = np.ascontiguousarray(values)
        self._keep.append(values)
        self.views.append(None)
        self.addresses.append((values.__array_interface__["data"][0],))
        self.pitches.append(values.strides[0] if values.ndim and len(values) > 1 else values[:1].nbytes)

    def _add_variable(self, column: VariableColumn) -> None:
        starts = np.ascontiguousarray(column.starts, dtype=np.int64)
        ends = np.ascontiguousarray(column.ends, dtype=np.int64)
        data = np.asarray(column.data)
        if len(starts) and (
            int(starts.min()) < 0 or int(ends.max()) > data.nbytes or bool((ends < starts).any())
        ):
            raise FormatError(
                "a variable-size column points outside its block; rebuild the shard it came from"
            )
        self._keep.append((starts, ends, data))
        self.views.append(data.data)
        bases = (a.__array_interface__["data"][0] for a in (starts, ends, data))
        self.addresses.append(tuple(bases))
        self.pitches.append(8)


class RowAddresses:
    """Where the rows of a group of steps lie; `take` copies some of them into a buffer of their own.

    Worked out once per group, copied once per step: a step's buffer is then small enough that the allocator hands
    out the memory of the batch before, and page faults do not halve the speed.

    Args:
        schema: types of the fields.
        fields: which of them to gather; the order of `GatherColumns`.
        blocks: loaded blocks; kept alive by this object.
        which: (n,) int64, index into `blocks`.
        row: (n,) int64, row inside the block.

    Raises:
        FormatError: a row number is past the end of its block.
    """

    def __init__(
        self,
        schema: Schema,
        fields: Sequence[str],
        blocks: Sequence[GatherColumns],
        which: Int64s,
        row: Int64s,
    ) -> None:
        limits = np.array([one.rows for one in blocks], dtype=np.int64)
        if row.size and (int(row.min()) < 0 or bool((row >= limits[which]).any())):
            raise FormatError(
                "a block holds fewer rows than the manifest says; run: shardkit verify on this dataset"
            )
        self._blocks = list(blocks)
        self._which = which
        self._fields: list[tuple[str, FieldType, Int64s, Int64s | None, list[memoryview | None]]] = []
        for position, name in enumerate(fields):
            field = schema[name]
            columns = 1 if field.kind in ("scalar", "array") else 3
            bases = np.array([one.addresses[position] for one in blocks], dtype=np.int64).reshape(-1, columns)
            pitches = np.array([one.pitches[position] for one in blocks], dtype=np.int64)
            offsets = row * pitches[which]
            addresses, sizes = bases[which, 0] + offsets, None
            if columns == 3:
                starts = _items(np.dtype(np.int64), addresses)
                sizes = _items(np.dtype(np.int64), bases[which, 1] + offsets) - starts
                # only ragged fields are copied by address; of the others a slice of the block's view is enough
                addresses = bases[which, 2] + starts if field.kind == "ragged" else starts
            self._fields.append((name, field, addresses, sizes, [one.views[position] for one in blocks]))

    def take(self, first: int, last: int) -> dict[str, Any]:
        """Rows `first` … `last - 1`, in order.

        Returns:
            Per field a fresh array (n, *shape), a list (bytes, str, json), or for ragged fields (values, offsets):
            all rows end to end and (n + 1,) int64 borders.
        """
        return {
            name: _fixed(field, addresses[first:last])
            if sizes is None
            else _ragged(field, addresses[first:last], sizes[first:last])
            if field.kind == "ragged"
            else _pieces(field, views, self._which[first:last], addresses[first:last], sizes[first:last])
            for name, field, addresses, sizes, views in self._fields
        }


@lru_cache(maxsize=64)
def _address_space(item: int) -> NDArray[np.void]:
    """All addresses as overlapping items of `item` bytes; element a is the item that begins at address a + 4096."""
    space = (ctypes.c_char * (_ADDRESSES - _FIRST_ADDRESS)).from_address(_FIRST_ADDRESS)
    count = _ADDRESSES - _FIRST_ADDRESS - item
    return np.ndarray((count,), dtype=np.dtype((np.void, item)), buffer=memoryview(space), strides=(1,))


def _items(dtype: np.dtype[Any], addresses: Int64s) -> NDArray[Any]:
    return _address_space(dtype.itemsize)[addresses - _FIRST_ADDRESS].view(dtype)


def _fixed(field: FieldType, addresses: Int64s) -> NDArray[Any]:
    dtype = np.dtype(field.dtype)
    item = dtype.itemsize * int(np.prod(field.shape, dtype=np.int64))
    shape = (len(addresses), *field.shape)
    if item == 0 or not len(addresses):
        return np.empty(shape, dtype=dtype)
    if item < _MAX_ITEM:
        rows = _address_space(item)[addresses - _FIRST_ADDRESS]
        return rows.view(dtype).reshape(shape)
    out = np.empty(shape, dtype=dtype)
    target = out.__array_interface__["data"][0]
    for position, address in enumerate(addresses.tolist()):
        ctypes.memmove(target + position * item, address, item)
    return out


def _pieces(
    field: FieldType, views: Sequence[Any], which: Int64s, starts: Int64s, sizes: Int64s
) -> list[Any]:
    """bytes, str or parsed JSON of each row; one copy each, out of the block."""
    ends = (starts + sizes).tolist()
    parts = [
        views[block][start:end]
        for block, start, end in zip(which.tolist(), starts.tolist(), ends, strict=True)
    ]
    if field.kind == "bytes":
        return [bytes(part) for part in parts]
    if field.kind == "str":
        return [str(part, "utf-8") for part in parts]
    return [json.loads(bytes(part)) for part in parts]


def _ragged(field: FieldType, addresses: Int64s, sizes: Int64s) -> tuple[NDArray[Any], Int64s]:
    dtype = np.dtype(field.dtype)
    borders = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=borders[1:])
    values = np.empty(int(borders[-1]) // dtype.itemsize, dtype=dtype)
    target = values.__array_interface__["data"][0]
    for start, address, size in zip(borders.tolist(), addresses.tolist(), sizes.tolist(), strict=False):
        ctypes.memmove(target + start, address, size)
    return values, borders // dtype.itemsize
