"""Find the rows that steps need, and copy them out of many blocks into one buffer per field.

Planning is pure and costs the same for a group of steps as for one step. A batch comes from dozens of blocks at
arbitrary addresses, so rows are copied from absolute addresses, without Python work per row. Three rules make this
safe: addresses are computed only from verified blocks, the blocks are referenced until the copy is done, and row
numbers are checked against the block's row count before the copy.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Int64s
from shardkit.errors import FormatError
from shardkit.formats import Block, FieldType, FixedColumn, Schema, VariableColumn, parse_decimals
from shardkit.formats.schema import decode_payload
from shardkit.formats.values import HEAD_BYTES, array_place, check_bools
from shardkit.loader import plain_rows
from shardkit.plan import Plan

block_rows: Any
try:
    import shardkit.loader.block_rows as block_rows
except ImportError:  # installed without the compiled module
    block_rows = plain_rows

__all__ = [
    "DECIMALS",
    "FACTS",
    "OBJECTS",
    "PLACED",
    "Allocate",
    "GatherColumns",
    "LocateRows",
    "RowAddresses",
    "StepGroup",
    "first_lanes",
    "group_rows",
    "is_only_copied",
    "most_steps",
    "plan_group",
    "rows_of",
    "steps_that_fit",
]

# ---- which rows

# Planning costs the same for a group as for a step. At these sizes its share of the time is negligible.
_GROUP_ROWS = 32768
_GROUP_BYTES = 256 << 20
_MAX_GROUP_STEPS = 512

LocateRows = Callable[[Int64s], tuple[Int64s, Int64s, Int64s, Int64s]]
"""Maps sample numbers to (shard, row, block, row in block), each (n,); `RowMap.locate`."""


class StepGroup(NamedTuple):
    """Consecutive steps of one rank, planned together so that a step costs microseconds.

    Arrays over rows concatenate all steps; the rows of step `numbers[i]` are `borders[i]:borders[i + 1]`.
    """

    numbers: range  # the steps, counted over the whole run
    samples: Int64s  # (n,) sample numbers, without empty slots
    slots: Int64s  # (n,) places in the grid: lane · cell_size + slot
    lane_counts: Int64s  # (steps, lanes) rows of each cell
    borders: Int64s  # (steps + 1,)
    block_of: Int64s  # (n,) dataset-wide block number
    row: Int64s  # (n,) row inside the block
    blocks: Int64s  # (blocks,) distinct block numbers, ordered by first use
    which: Int64s  # (n,) index into `blocks`
    first: Int64s  # (blocks,) index in `numbers` of the first step that needs each block
    last: Int64s  # (blocks,) index of the last step that needs it

    def split(self, steps: int) -> tuple[StepGroup, StepGroup | None]:
        """Return the first `steps` steps, and the rest or None."""
        if steps >= len(self.numbers):
            return self, None
        at = int(self.borders[steps])
        return (
            group_rows(self.numbers[:steps], self.samples[:at], self.slots[:at], self.lane_counts[:steps],
                     self.block_of[:at], self.row[:at]),
            group_rows(self.numbers[steps:], self.samples[at:], self.slots[at:], self.lane_counts[steps:],
                     self.block_of[at:], self.row[at:]),
        )  # fmt: skip


def plan_group(plan: Plan, locate: LocateRows, lanes: list[int], numbers: range) -> StepGroup:
    """Plan the steps `numbers` (ascending) of the rank that owns `lanes` (ascending)."""
    cells = _cells(plan, lanes, numbers)  # (steps, lanes, m)
    places = np.broadcast_to(
        np.array(lanes, dtype=np.int64)[:, None] * plan.cell_size + np.arange(plan.cell_size), cells.shape
    )
    present = cells >= 0
    samples = cells[present]
    _, _, block, row = locate(samples)
    return group_rows(numbers, samples, places[present], present.sum(axis=2, dtype=np.int64), block, row)


def group_rows(
    numbers: range, samples: Int64s, slots: Int64s, lane_counts: Int64s, block_of: Int64s, row: Int64s
) -> StepGroup:
    """Make a group from its rows and their places; see `StepGroup`."""
    borders = np.zeros(len(lane_counts) + 1, dtype=np.int64)
    np.cumsum(lane_counts.sum(axis=1), out=borders[1:])
    blocks, first, last, which = _distinct(block_of)
    by_deadline = np.argsort(first)
    rank = np.empty_like(by_deadline)
    rank[by_deadline] = np.arange(len(by_deadline))
    first, last = (np.searchsorted(borders, one[by_deadline], side="right") - 1 for one in (first, last))
    return StepGroup(
        numbers, samples, slots, lane_counts, borders, block_of, row, blocks[by_deadline], rank[which],
        first, last,
    )  # fmt: skip


def _distinct(values: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Return the distinct values (ascending), the first and last index of each, and the inverse indices.

    Equivalent to `np.unique` for values from 0 to 2**40, in a third of the time: a sort is cheaper than an argsort.
    """
    bits = len(values).bit_length()
    ordered = np.sort(values << bits | np.arange(len(values)))
    place, ordered = ordered & ((1 << bits) - 1), ordered >> bits
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    which = np.empty_like(place)
    which[place] = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(place)))
    ends = np.append(begins[1:], len(place))[: len(begins)] - 1
    return ordered[begins], place[begins], place[ends], which


def steps_that_fit(group: StepGroup, sizes: Int64s, held: NDArray[np.bool_], room: int) -> tuple[int, int]:
    """Return how many of a group's steps fit into `room` bytes, and the bytes that the first step needs.

    A block takes memory from the first to the last step that needs it; a block that is `held` takes it from the start.
    At least one step is returned.
    """
    change = np.zeros(len(group.numbers) + 1, dtype=np.int64)
    np.add.at(change, np.where(held, 0, group.first), sizes)
    np.add.at(change, group.last + 1, -sizes)
    over = np.flatnonzero(np.cumsum(change) > room)
    return max(1, int(over[0])) if len(over) else len(group.numbers), int(sizes[group.first == 0].sum())


def first_lanes(group: StepGroup, cell_size: int) -> list[int]:
    """Return the lane that needs each of `group.blocks` first.

    Lanes share blocks only at the boundaries of the plan's hands.
    """
    first = np.empty(len(group.blocks), dtype=np.int64)
    first[group.which[::-1]] = group.slots[::-1]  # of equal indices the last assignment holds: the first row
    lanes: list[int] = (first // cell_size).tolist()
    return lanes


def _cells(plan: Plan, lanes: list[int], numbers: range) -> Int64s:
    if numbers.step == 1:
        return plan.steps(numbers.start, numbers.stop, lanes)
    return np.concatenate([plan.steps(step, step + 1, lanes) for step in numbers])


def most_steps(rows_per_step: int, bytes_per_step: int) -> int:
    """Return the largest number of steps of a group."""
    by_size = min(_GROUP_ROWS // max(1, rows_per_step), _GROUP_BYTES // max(1, bytes_per_step))
    return max(1, min(_MAX_GROUP_STEPS, by_size))


# ---- where they are in memory

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
"""Allocates the array of one field of one batch; `numpy.empty` by default."""

FACTS = 4
"""Number of int64 facts per field of a block: address of values or starts, of ends, of data, and the row pitch.

The pitch is the number of bytes from one row to the next, or one of the codes below.
"""
DECIMALS = -8
"""Pitch code: the values of a fixed-size field are stored as decimal texts, as in shardkit's tar shards.

The addresses are those of starts, ends and data.
"""
PLACED = -24
"""Pitch code: rows of one size at arbitrary offsets; the addresses are those of starts, ends and data."""
OBJECTS = -16
"""Pitch code: block_rows.c has read the rows into bytes objects, which are handed out without a copy."""


def is_only_copied(field: FieldType) -> bool:
    """Return True if a field is gathered by a copy of many rows in C, during which other threads run."""
    return field.item_bytes is not None or (
        block_rows is not plain_rows and field.kind != "json" and not field.is_packed
    )


class GatherColumns:
    """Number of rows of a loaded block, and the address and row pitch of each field.

    Holds the verified block, so that the addresses stay valid while this object is alive. `facts` are the bytes of
    1 + FACTS · fields int64.
    """

    __slots__ = ("_keep", "facts")

    def __init__(self, block: Block, fields: Sequence[str]) -> None:
        self._keep: Any = [block]
        facts = array("q", (block.rows,))
        for name in fields:
            column = block.column(name)
            if isinstance(column, FixedColumn):
                facts.extend(self._add_fixed(column.values))
            else:
                facts.extend(self._add_variable(column))
        self.facts = facts.tobytes()

    def _add_fixed(self, values: NDArray[Any]) -> tuple[int, int, int, int]:
        if values.size and not values[0].flags.c_contiguous:
            values = np.ascontiguousarray(values)
        self._keep.append(values)
        pitch = values.strides[0] if values.ndim and len(values) > 1 else values[:1].nbytes
        return values.__array_interface__["data"][0], 0, 0, pitch

    def _add_variable(self, column: VariableColumn) -> tuple[int, int, int, int]:
        starts, ends = _checked_spans(column)
        data = np.asarray(column.data)
        self._keep.append((starts, ends, data))
        first, second, third = (one.__array_interface__["data"][0] for one in (starts, ends, data))
        return first, second, third, 8


def _checked_spans(column: VariableColumn) -> tuple[Int64s, Int64s]:
    """Return the offsets at which rows begin and end in the column's data, after a bounds check."""
    starts = np.ascontiguousarray(column.starts, dtype=np.int64)
    ends = np.ascontiguousarray(column.ends, dtype=np.int64)
    if len(starts) and (
        int(starts.min()) < 0
        or int(ends.max()) > np.asarray(column.data).nbytes
        or bool((ends < starts).any())
    ):
        raise FormatError("a variable-size column points outside its block; rebuild the shard it came from")
    return starts, ends


class RowAddresses:
    """The rows of a group of steps, by slot and row number; `take` copies some of them.

    Args:
        schema: types of the fields.
        fields: names of the fields to gather, in the order of `GatherColumns`.
        which: (n,) int64 slot that holds the block of each row.
        row: (n,) int64 row number inside the block.
        allocate: makes the arrays that `take` fills.
    """

    def __init__(
        self,
        schema: Schema,
        fields: Sequence[str],
        which: Int64s,
        row: Int64s,
        allocate: Allocate = np.empty,
    ) -> None:
        self._allocate, self._which, self._row = allocate, which, row
        self._names = list(fields)
        gathered = [_GatheredField.of(n, name, schema[name]) for n, name in enumerate(fields)]
        self._fixed = [one for one in gathered if one.is_fixed]
        self._others = [one for one in gathered if not one.is_fixed]
        self._columns = tuple(one.column for one in self._fixed)

    def take(self, facts: Int64s, borders: Sequence[int]) -> list[dict[str, Any]]:
        """Copy rows `borders[i]` … `borders[i + 1] - 1` for each i into separate buffers.

        Returns:
            For each i a dict of fields. A fixed-size field is a new array (n, *shape); bytes, str, json and lists are a
            list. A ragged field is (values, offsets): all rows end to end and (n + 1,) int64 offsets. Arrays of varying
            shape are (values, offsets, shapes) with (n, dimensions) int64 shapes.
        """
        found: dict[str, list[Any]] = {}
        if self._fixed:
            found |= self._take_fixed(facts, borders)
        for one in self._others:
            found[one.name] = self._variable(facts, one, borders)
        return [{name: found[name][part] for name in self._names} for part in range(len(borders) - 1)]

    def _take_fixed(self, facts: Int64s, borders: Sequence[int]) -> dict[str, list[Any]]:
        counts = [b - a for a, b in pairwise(borders)]
        targets = [self._allocate((n, *one.type.shape), one.dtype) for one in self._fixed for n in counts]
        which, row = self._which[borders[0] : borders[-1]], self._row[borders[0] : borders[-1]]
        found = {
            one.name: targets[n * len(counts) : (n + 1) * len(counts)] for n, one in enumerate(self._fixed)
        }
        if block_rows.gather_rows(targets, facts, which, row, self._columns) != block_rows.COPIED:
            for one in self._fixed:
                own = found[one.name]
                if block_rows.gather_rows(own, facts, which, row, (one.column,)) != block_rows.COPIED:
                    self._parse(facts, one, own, borders)
        return found

    def _parse(
        self, facts: Int64s, one: _GatheredField, targets: list[NDArray[Any]], borders: Sequence[int]
    ) -> None:
        """Copy rows of a field that some blocks store as decimal texts."""
        row = self._row[borders[0] : borders[-1]]
        values, ends, data, pitch = self._facts_of(facts, one, borders[0], borders[-1])
        addresses, texts = values + row * pitch, pitch == DECIMALS
        offsets = 8 * row[texts]
        parsed = _parse_decimals(one, values[texts] + offsets, ends[texts] + offsets, data[texts])
        addresses[texts] = parsed.__array_interface__["data"][0] + parsed.itemsize * np.arange(len(parsed))
        for target, (a, b) in zip(targets, pairwise(borders), strict=True):
            block_rows.copy_rows(target, addresses[a - borders[0] : b - borders[0]], one.type.item_bytes)

    def _variable(self, facts: Int64s, one: _GatheredField, borders: Sequence[int]) -> list[Any]:
        places = [slice(a - borders[0], b - borders[0]) for a, b in pairwise(borders)]
        row = self._row[borders[0] : borders[-1]]
        if one.type.kind not in ("ragged", "varying"):
            which = self._which[borders[0] : borders[-1]]
            _check_rows(facts, which, row)
            objects = _objects(one, facts, which, row)
            return [objects[place] for place in places]
        values, ends, data, _ = self._facts_of(facts, one, borders[0], borders[-1])
        starts = _int64s(values + 8 * row)
        addresses, sizes = data + starts, _int64s(ends + 8 * row) - starts
        if one.type.kind == "ragged":
            return [_gather_ragged(one, addresses[place], sizes[place], self._allocate) for place in places]
        return [_varying(one, addresses[place], sizes[place], self._allocate) for place in places]

    def _facts_of(self, table: Int64s, one: _GatheredField, first: int, end: int) -> Int64s:
        """Return (4, n) facts of a field for the block of each row; see `GatherColumns`."""
        which = self._which[first:end]
        _check_rows(table, which, self._row[first:end])
        return table[which, 1 + FACTS * one.column : 1 + FACTS * (one.column + 1)].T


def _check_rows(table: Int64s, which: Int64s, row: Int64s) -> None:
    if len(row) and (int(row.min()) < 0 or bool((row >= table[which, 0]).any())):
        raise FormatError("a block holds fewer rows than the manifest says; verify the dataset")


class _GatheredField(NamedTuple):
    column: int  # index among the gathered fields
    name: str
    type: FieldType
    dtype: np.dtype[Any]
    is_fixed: bool  # all rows have the same size

    @classmethod
    def of(cls, column: int, name: str, field: FieldType) -> _GatheredField:
        return cls(column, name, field, field.numpy_dtype, field.item_bytes is not None)


def _int64s(addresses: Int64s) -> Int64s:
    """Read the int64 at each address."""
    found = np.empty(len(addresses), np.int64)
    block_rows.copy_rows(found, addresses, 8)
    return found


def _parse_decimals(one: _GatheredField, starts_at: Int64s, ends_at: Int64s, data: Int64s) -> NDArray[Any]:
    """Parse decimal texts, given the addresses of their starts, of their ends and of the data."""
    starts = _int64s(starts_at)
    addresses, sizes, dtype = data + starts, _int64s(ends_at) - starts, one.dtype
    found = block_rows.decimals_at(addresses, sizes)
    if found is not None:
        values = np.frombuffer(found, np.int64)
        least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        if not len(values) or least <= int(values.min()) <= int(values.max()) <= most:
            return values.astype(dtype, copy=False)
    # texts of more than 18 digits, or invalid ones, for which this raises
    texts = np.frombuffer(b"".join(block_rows.bytes_at(addresses, sizes)), np.uint8)
    return parse_decimals(texts, np.cumsum(sizes) - sizes, sizes, dtype, one.name, first=0)


def _objects(one: _GatheredField, facts: Int64s, which: Int64s, row: Int64s) -> list[Any]:
    """Return the bytes, str, list or parsed JSON of each row."""
    field = one.type
    try:
        found: list[Any] = block_rows.objects_of(facts, which, row, one.column, field.kind in ("str", "json"))
    except UnicodeDecodeError as error:
        raise FormatError(
            f"field {one.name!r}: a text is not UTF-8 ({error.reason}); verify the dataset"
        ) from None
    if field.kind in ("bytes", "str"):
        return found
    if field.kind == "list":
        return [
            decode_payload(field, payload, one.name) if payload or not field.optional else None
            for payload in found
        ]
    return [json.loads(payload) if payload or not field.optional else None for payload in found]


def _gather_ragged(
    one: _GatheredField, addresses: Int64s, sizes: Int64s, allocate: Allocate
) -> tuple[NDArray[Any], Int64s]:
    """Return the values of all rows, end to end, and their (n + 1,) offsets."""
    borders = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=borders[1:])
    values = allocate((int(borders[-1]) // one.dtype.itemsize,), one.dtype)
    block_rows.copy_rows(values, addresses, sizes)
    return values, borders // one.dtype.itemsize


def _varying(
    one: _GatheredField, addresses: Int64s, sizes: Int64s, allocate: Allocate
) -> tuple[NDArray[Any], Int64s, Int64s]:
    """Return the values of all rows, end to end, their (n + 1,) offsets and (n, dimensions) shapes.

    Headers are copied and parsed first; the items are then copied from block to batch once.
    """
    items = one.type.items
    assert items is not None, "an array of varying shape says what it holds"
    shapes = np.empty((len(sizes), len(items.shape)), np.int64)
    starts = np.zeros(len(sizes), np.int64)
    heads = block_rows.bytes_at(addresses, np.minimum(sizes, HEAD_BYTES))
    try:
        for row, (head, size) in enumerate(zip(heads, sizes.tolist(), strict=True)):
            if size or not one.type.optional:
                shapes[row], starts[row] = array_place(head, size, items.numpy_dtype, items.shape)
            else:
                shapes[row] = items.shape  # no value: free dimensions are 0
        found = one._replace(dtype=items.numpy_dtype)
        values, borders = _gather_ragged(found, addresses + starts, sizes - starts, allocate)
        check_bools(values, items.numpy_dtype)
    except ValueError as error:
        raise FormatError(f"field {one.name!r}: a payload is no {one.type}: {error}") from None
    return values, borders, shapes


def rows_of(value: Any, place: slice) -> Any:
    """Return some rows of a column that `RowAddresses.take` returned; a view of arrays."""
    if isinstance(value, tuple):
        values, borders, *shapes = value
        part = borders[place.start : place.stop + 1]
        return values[part[0] : part[-1]], part - part[0], *[shape[place] for shape in shapes]
    return value[place]
