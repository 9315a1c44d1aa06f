"""Where the rows of a verified block lie, without making a column of it.

A gather by address needs a few integers of each block. `read_block` finds them by way of a block and its columns, forty
objects and as many microseconds; what is the same for every block of a shard (the layout of an Arrow message, the
places of tar members) is known after the first one. This is a shorter way to the same integers, never to others:
whatever it has not seen to be the same, it leaves to `read_block`.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from shardkit.errors import FormatError
from shardkit.formats import FieldType, FixedPlace, Schema, ShardIndex, StoredBlock, fixed_places
from shardkit.loader.gather import DECIMALS, GatherColumns

__all__ = ["BlockPlacer"]

_MOST_LAYOUTS = 64

# Metadata of an Arrow message, its rows and raw size → bytes before the body, and (offset in it, pitch) per field;
# None where some field needs a look at its bytes.
_Layout = tuple[tuple[int, int], ...]


class BlockPlacer:
    """Finds `GatherColumns` of verified blocks of one dataset.

    Args:
        fields: to be gathered, in order.
    """

    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = list(fields)
        self._layouts: dict[tuple[bytes, int, int, int], _Layout | None] = {}
        self._suits: WeakKeyDictionary[ShardIndex, bool] = WeakKeyDictionary()
        self._members: WeakKeyDictionary[ShardIndex, list[tuple[int, int, int]]] = WeakKeyDictionary()
        self._metadata_bytes = 0  # of the last message; nearly always that of the next

    def suits(self, shard: ShardIndex) -> bool:
        """Whether blocks of a shard can be placed, as far as its index tells; else their bytes need a closer look."""
        found = self._suits.get(shard)
        if found is None:
            kinds = [shard.schema[name] for name in self._fields]
            if shard.format == "arrow":  # bits are unpacked, and offsets and text are checked
                found = all(kind.item_bytes is not None and kind.dtype != "bool" for kind in kinds)
            else:  # text is checked, arrays have headers
                found = not shard.is_adopted and all(
                    is_decimal(kind) or kind.kind == "bytes" for kind in kinds
                )
            self._suits[shard] = found
        return found

    def __call__(self, stored: StoredBlock) -> GatherColumns | None:
        """Where the rows of an uncompressed, verified block lie; None where only `read_block` can tell."""
        if not self.suits(stored.shard):
            return None
        return (self._arrow if stored.shard.format == "arrow" else self._tar)(*stored)

    def _arrow(self, view: memoryview, address: int, index: ShardIndex, block: int) -> GatherColumns | None:
        if address % 8:
            return None  # read from a copy that is aligned
        span = index.spans[block]
        rows = span.end_row - span.first_row
        key = bytes(view[: self._metadata_bytes]), rows, span.raw_size, len(view)
        layout = self._layouts.get(key)
        if layout is None:
            if key in self._layouts:
                return None
            layout = self._read_layout(view, index.schema, rows, span.raw_size)
            if layout is None:
                return None
        facts = [rows]
        for offset, pitch in layout:
            facts += (address + offset, 0, 0, pitch)
        return GatherColumns.of_facts(rows, facts, [None] * len(layout), view)

    def _read_layout(self, view: memoryview, schema: Schema, rows: int, raw_size: int) -> _Layout | None:
        try:
            body, places = fixed_places(view, schema, rows, raw_size)
        except FormatError:
            return None  # `read_block` says so
        layout = None
        if all(name in places for name in self._fields):
            layout = tuple((body + places[name].offset, _pitch(places[name])) for name in self._fields)
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts.clear()
        self._metadata_bytes = body
        self._layouts[bytes(view[:body]), rows, raw_size, len(view)] = layout
        return layout

    def _tar(self, view: memoryview, address: int, index: ShardIndex, block: int) -> GatherColumns | None:
        span = index.spans[block]
        members = self._members.get(index)
        if members is None:
            members = self._members[index] = _read_members(index, self._fields)
        if len(view) != span.raw_size:
            return None
        first = 8 * span.first_row
        rows = span.end_row - span.first_row
        facts, views = [rows], []
        for starts, ends, pitch in members:
            facts += (starts + first, ends + first, address, pitch)
            views.append(None if pitch == DECIMALS else view)
        return GatherColumns.of_facts(rows, facts, views, (view, index))


def _read_members(index: ShardIndex, fields: Sequence[str]) -> list[tuple[int, int, int]]:
    """Of each field, where starts and ends of its members lie, and the pitch."""
    members = []
    for name in fields:
        kind = index.schema[name]
        number = index.schema.position(name)
        # the index has seen that all of them lie inside their blocks; both arrays are contiguous, and stay
        starts, ends = index.member_places(number)[0], index.member_ends(number)
        places = [one.__array_interface__["data"][0] for one in (starts, ends)]
        members.append((places[0], places[1], DECIMALS if is_decimal(kind) else 8))
    return members


def is_decimal(kind: FieldType) -> bool:
    """Whether a tar member of this type is a decimal number."""
    return kind.kind == "scalar" and kind.numpy_dtype.kind in "biu"


def _pitch(place: FixedPlace) -> int:
    size = place.dtype.itemsize
    for length in place.shape[1:]:
        size *= length
    return size
