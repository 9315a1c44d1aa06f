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
from array import array
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError
from shardkit.formats import Block, FieldType, FixedColumn, Schema, VariableColumn, parse_decimals

block_rows: Any
try:
    from shardkit.loader import block_rows
except ImportError:  # not compiled where this was installed: the same in numpy, whose copies others wait for
    block_rows = None

__all__ = ["DECIMALS", "GatherColumns", "RowAddresses", "is_only_copied", "own_rows_of", "rows_of"]

Int64s = NDArray[np.int64]

_FIRST_ADDRESS = 1 << 12  # the zero page is never mapped
_ADDRESSES = 1 << 47  # user addresses on x86-64 and on arm64 with 4-level tables
_MAX_ITEM = 1 << 15  # bytes of an item; times the addresses must stay below 2**63
_FREE_ITEMS = 501
"""numpy lets other threads run during an indexed copy only if it is of more than 500 items. A copy of fewer, which
holds the interpreter for a tenth of a millisecond, costs the threads that verify blocks four fifths of their speed."""
_MIN_PIECE = 128  # bytes; an item costs some nanoseconds beside its copy
_FACTS = 4  # per field of a block: addresses of values, or of starts, ends and data; bytes between rows
DECIMALS = -8
"""Stands for the bytes between rows where a fixed-size field lies in its block as decimal texts, as in our tars: the
addresses are then those of starts, ends and data."""
_HOLD_BYTES = 1 << 15  # copies below this are too short to disturb anybody


def is_only_copied(field: FieldType) -> bool:
    """Whether gathering a field is one copy of many rows, beside which other threads run."""
    return field.item_bytes is not None or (block_rows is not None and field.kind != "json")


class GatherColumns:
    """Where the columns of one loaded block lie: start address and row pitch per fixed field.

    Holds the block, so that the addresses stay valid while this object is alive.

    Args:
        block: verified.
        fields: which of its fields to gather.
    """

    __slots__ = ("_keep", "facts", "rows", "views")

    def __init__(self, block: Block, fields: Sequence[str]) -> None:
        self.rows = block.rows
        self._keep: list[Any] = [block]
        self.views: list[memoryview | None] = []  # of variable fields: their bytes
        facts = array("q", (block.rows,))
        for name in fields:
            column = block.column(name)
            if isinstance(column, FixedColumn):
                facts.extend(self._add_fixed(column.values))
            else:
                facts.extend(self._add_variable(column))
        self.facts = facts.tobytes()  # thousands of blocks at a time are put into one table

    @classmethod
    def of_facts(
        cls, rows: int, facts: Sequence[int], views: list[memoryview | None], keep: Any
    ) -> GatherColumns:
        """The same from what is known already; `keep` holds what the addresses in `facts` refer to."""
        self = cls.__new__(cls)
        self.rows, self.views, self._keep = rows, views, [keep]
        self.facts = array("q", facts).tobytes()
        return self

    def _add_fixed(self, values: NDArray[Any]) -> tuple[int, int, int, int]:
        if values.size and not values[0].flags.c_contiguous:
            values = np.ascontiguousarray(values)
        self._keep.append(values)
        self.views.append(None)
        pitch = values.strides[0] if values.ndim and len(values) > 1 else values[:1].nbytes
        return values.__array_interface__["data"][0], 0, 0, pitch

    def _add_variable(self, column: VariableColumn) -> tuple[int, int, int, int]:
        starts, ends = _checked_spans(column)
        data = np.asarray(column.data)
        self._keep.append((starts, ends, data))
        self.views.append(data.data)
        first, second, third = (one.__array_interface__["data"][0] for one in (starts, ends, data))
        return first, second, third, 8


def _checked_spans(column: VariableColumn) -> tuple[Int64s, Int64s]:
    """Where rows begin and end in the column's data, seen to lie inside of it."""
    starts = np.ascontiguousarray(column.starts, dtype=np.int64)
    ends = np.ascontiguousarray(column.ends, dtype=np.int64)
    if len(starts) and (
        int(starts.min()) < 0
        or int(ends.max()) > np.asarray(column.data).nbytes
        or bool((ends < starts).any())
    ):
        raise FormatError("a variable-size column points outside its block; rebuild the shard it came from")
    return starts, ends


class _FieldAddresses(NamedTuple):
    """Where the rows of a group lie, for one field."""

    name: str
    field: FieldType
    addresses: Int64s  # of bytes and text copied by numpy: where they begin in the view of their block
    sizes: Int64s | None  # bytes; None where all are equal
    views: list[memoryview | None]  # by block
    pieces: dict[int, Int64s]  # places of so many pieces per row in the address space, once they are known


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
        table = np.frombuffer(b"".join([one.facts for one in blocks]), np.int64)
        table = (
            table.reshape(len(blocks), -1) if blocks else np.empty((0, 1 + _FACTS * len(fields)), np.int64)
        )
        if row.size and (int(row.min()) < 0 or bool((row >= table[:, 0][which]).any())):
            raise FormatError(
                "a block holds fewer rows than the manifest says; run: shardkit verify on this dataset"
            )
        self._blocks: list[Any] = list(blocks)  # what the addresses refer to
        self._which = which
        self._fields: list[_FieldAddresses] = []
        for position, name in enumerate(fields):
            field = schema[name]
            first, second, third, pitch = table[:, 1 + _FACTS * position : 1 + _FACTS * (position + 1)].T
            offsets = row * np.abs(pitch)[which]
            addresses, sizes, views = first[which] + offsets, None, []
            if bool((pitch == DECIMALS).any()):
                texts = np.flatnonzero((pitch == DECIMALS)[which])
                ends = second[which[texts]] + offsets[texts]
                addresses[texts] = self._parsed(name, field, addresses[texts], ends, third[which[texts]])
            if field.kind not in ("scalar", "array"):
                starts = _items(np.dtype(np.int64), addresses)
                sizes = _items(np.dtype(np.int64), second[which] + offsets) - starts
                by_address = field.kind == "ragged" or block_rows is not None
                # else a slice of the block's view is copied
                addresses = third[which] + starts if by_address else starts
                views = [one.views[position] for one in blocks]
            self._fields.append(_FieldAddresses(name, field, addresses, sizes, views, {}))

    def _parsed(
        self, name: str, field: FieldType, starts_at: Int64s, ends_at: Int64s, data: Int64s
    ) -> Int64s:
        """Addresses of the values of decimal texts, of which it is given where starts, ends and blocks lie."""
        int64 = np.dtype(np.int64)
        starts, ends = _items(int64, starts_at), _items(int64, ends_at)
        values = _few_digits(data + starts, ends - starts, field.numpy_dtype)
        if values is None:  # long ones, or such that an error is due
            space = _address_space(1).view(np.uint8)
            values = parse_decimals(
                space, data + starts - _FIRST_ADDRESS, ends - starts, field.numpy_dtype, name,
                first=data - _FIRST_ADDRESS,
            )  # fmt: skip
        self._blocks.append(values)
        address: int = values.__array_interface__["data"][0]
        return address + np.arange(len(values), dtype=np.int64) * values.itemsize

    def take(self, first: int, last: int) -> dict[str, Any]:
        """Rows `first` … `last - 1`, in order.

        Returns:
            Per field a fresh array (n, *shape), a list (bytes, str, json), or for ragged fields (values, offsets):
            all rows end to end and (n + 1,) int64 borders.
        """
        columns: dict[str, Any] = {}
        for one in self._fields:
            name, field, addresses, sizes, views, _ = one
            if sizes is None:
                columns[name] = _fixed(one, first, last)
            elif field.kind == "ragged":
                columns[name] = _ragged(field, addresses[first:last], sizes[first:last])
            else:
                which = self._which[first:last]
                columns[name] = _opaque(field, views, which, addresses[first:last], sizes[first:last])
        return columns


def _few_digits(addresses: Int64s, sizes: Int64s, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Values of decimals that fit int64 and `dtype`; None where one does not, or nothing is compiled."""
    found = None if block_rows is None else block_rows.decimals_at(addresses, sizes)
    if found is None:
        return None
    values = np.frombuffer(found, np.int64)
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if len(values) and not least <= int(values.min()) <= int(values.max()) <= most:
        return None
    return values.astype(dtype, copy=False)


@lru_cache(maxsize=64)
def _address_space(item: int) -> NDArray[np.void]:
    """All addresses as overlapping items of `item` bytes; element a is the item that begins at address a + 4096."""
    space = (ctypes.c_char * (_ADDRESSES - _FIRST_ADDRESS)).from_address(_FIRST_ADDRESS)
    count = _ADDRESSES - _FIRST_ADDRESS - item
    return np.ndarray((count,), dtype=np.dtype((np.void, item)), buffer=memoryview(space), strides=(1,))


def _items(dtype: np.dtype[Any], addresses: Int64s) -> NDArray[Any]:
    """The item at each address."""
    return _address_space(dtype.itemsize)[addresses - _FIRST_ADDRESS].view(dtype)


def _fixed(one: _FieldAddresses, first: int, last: int) -> NDArray[Any]:
    field, rows = one.field, last - first
    dtype = np.dtype(field.dtype)
    item = dtype.itemsize * prod(field.shape)
    shape = (rows, *field.shape)
    if item == 0 or not rows:
        return np.empty(shape, dtype=dtype)
    if block_rows is not None:
        out = np.empty(shape, dtype=dtype)
        block_rows.copy_rows(out, one.addresses[first:last], item)
        return out
    pieces = _pieces_per_row(item, rows)
    if not pieces:
        return _one_by_one(np.empty(shape, dtype=dtype), one.addresses[first:last], item)
    found = one.pieces.get(pieces)
    if found is None:  # for the whole group: all of its steps ask for the same, but for a short one
        found = one.addresses[:, None] + _piece_offsets(item // pieces, pieces)
        found = one.pieces[pieces] = (found - _FIRST_ADDRESS).ravel()
    # a piece need not be a multiple of an item of `dtype`, all of them together are
    copied = _address_space(item // pieces)[found[first * pieces : last * pieces]]
    return copied.view(np.uint8).view(dtype).reshape(shape)


def _one_by_one(out: NDArray[Any], addresses: Int64s, item: int) -> NDArray[Any]:
    target = out.__array_interface__["data"][0]
    for position, address in enumerate(addresses.tolist()):
        ctypes.memmove(target + position * item, address, item)
    return out


@lru_cache(maxsize=256)
def _pieces_per_row(item: int, rows: int) -> int:
    """In how many equal pieces to copy each row of `item` bytes: the fewest that other threads can run beside.

    As many as there may be where that would take pieces of less than `_MIN_PIECE`; 0 where none is small enough to be
    one item.
    """
    if item * rows < _HOLD_BYTES:
        return 1
    possible = [pieces for pieces in range(1, max(1, item // _MIN_PIECE) + 1) if item % pieces == 0]
    possible = [pieces for pieces in possible if item // pieces <= _MAX_ITEM]
    return next((pieces for pieces in possible if pieces * rows >= _FREE_ITEMS), max(possible, default=0))


@lru_cache(maxsize=64)
def _piece_offsets(size: int, pieces: int) -> Int64s:
    return np.arange(pieces, dtype=np.int64) * size


def _opaque(
    field: FieldType, views: Sequence[Any], which: Int64s, starts: Int64s, sizes: Int64s
) -> list[Any]:
    """bytes, str or parsed JSON of each row; one copy each, out of the block."""
    if block_rows is not None:
        if field.kind == "str":
            texts: list[str] = block_rows.texts_at(starts, sizes)
            return texts
        found: list[bytes] = block_rows.bytes_at(starts, sizes)
        return found if field.kind == "bytes" else [json.loads(one) for one in found]
    spans = zip(which.tolist(), starts.tolist(), (starts + sizes).tolist(), strict=True)
    if field.kind == "bytes":
        return [bytes(views[block][start:end]) for block, start, end in spans]
    if field.kind == "str":
        return [str(views[block][start:end], "utf-8") for block, start, end in spans]
    return [json.loads(bytes(views[block][start:end])) for block, start, end in spans]


def _ragged(field: FieldType, addresses: Int64s, sizes: Int64s) -> tuple[NDArray[Any], Int64s]:
    dtype = np.dtype(field.dtype)
    borders = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=borders[1:])
    values = np.empty(int(borders[-1]) // dtype.itemsize, dtype=dtype)
    if block_rows is not None:
        block_rows.copy_rows(values, addresses, sizes)
        return values, borders // dtype.itemsize
    target = values.__array_interface__["data"][0]
    for start, address, size in zip(borders.tolist(), addresses.tolist(), sizes.tolist(), strict=False):
        ctypes.memmove(target + start, address, size)
    return values, borders // dtype.itemsize


def rows_of(value: Any, first: int, last: int) -> Any:
    """Rows of a column as `RowAddresses.take` gives it; of an array, a view."""
    if isinstance(value, tuple):
        values, borders = value
        part = borders[first : last + 1]
        return values[part[0] : part[-1]], part - part[0]
    return value[first:last]


def own_rows_of(value: Any, first: int, last: int) -> Any:
    """The same in memory of their own: whoever keeps them keeps no other rows."""
    found = rows_of(value, first, last)
    if isinstance(found, tuple):
        return found[0].copy(), found[1]
    return found if isinstance(found, list) else found.copy()
