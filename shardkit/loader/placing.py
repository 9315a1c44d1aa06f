"""Where the rows of a verified block lie, without making a column of it.

A gather by address needs a few integers of each block. `read_block` finds them by way of a block and its columns, forty
objects and as many microseconds; what is the same for every block of a shard (the layout of an Arrow message, the
places of tar members) is known after the first one. This is a shorter way to the same integers, never to others:
whatever it has not seen to be the same, it leaves to `read_block`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from shardkit.errors import FormatError
from shardkit.formats import BlockSpan, Schema, ShardIndex, fixed_places
from shardkit.loader.gather import DECIMALS, GatherColumns

__all__ = ["BlockPlacer", "StoredBlock"]

_MOST_LAYOUTS = 64


class StoredBlock(NamedTuple):
    """The stored bytes of a block, verified, as they lie in memory.

    Attributes:
        view: of the bytes; keeps them where they are.
        address: of the first of them.
        shard: its index.
        block: number in the shard; it has one of this number.
    """

    view: memoryview
    address: int
    shard: ShardIndex
    block: int


class BlockPlacer:
    """Finds `GatherColumns` of verified blocks of one dataset.

    Args:
        fields: to be gathered, in order.
    """

    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = list(fields)
        self._shards: WeakKeyDictionary[ShardIndex, _ArrowShard | _TarShard | None] = WeakKeyDictionary()

    def suits(self, shard: ShardIndex) -> bool:
        """Whether blocks of a shard can be placed, as far as its index tells; else their bytes need a closer look."""
        return self._of(shard) is not None

    def __call__(self, stored: StoredBlock) -> GatherColumns | None:
        """Where the rows of an uncompressed, verified block lie; None where only `read_block` can tell."""
        shard = self._of(stored.shard)
        return None if shard is None else shard.place(stored, stored.shard.spans[stored.block])

    def _of(self, shard: ShardIndex) -> _ArrowShard | _TarShard | None:
        if shard not in self._shards:
            self._shards[shard] = (_ArrowShard if shard.format == "arrow" else _TarShard).of(
                shard, self._fields
            )
        return self._shards[shard]


class _ArrowShard:
    """Messages of equal metadata, length, rows and raw size have equal layouts."""

    def __init__(self, schema: Schema, pitches: dict[str, int]) -> None:
        self._schema, self._pitches = schema, pitches
        # metadata, rows, raw size, length → per field its offset in the message and the bytes between rows
        self._layouts: dict[tuple[bytes, int, int, int], list[tuple[int, int]]] = {}
        self._metadata_bytes = 0  # of the last message; nearly always that of the next

    @classmethod
    def of(cls, shard: ShardIndex, fields: Sequence[str]) -> _ArrowShard | None:
        kinds = {name: shard.schema[name] for name in fields}
        # of others offsets and text are checked; bits are unpacked
        pitches = {name: kind.item_bytes for name, kind in kinds.items() if kind.item_bytes is not None}
        if len(pitches) < len(fields) or any(kind.dtype == "bool" for kind in kinds.values()):
            return None
        return cls(shard.schema, pitches)

    def place(self, stored: StoredBlock, span: BlockSpan) -> GatherColumns | None:
        view, address = stored.view, stored.address
        if address % 8:
            return None  # read from a copy that is aligned
        rows = span.end_row - span.first_row
        known = self._layouts.get((bytes(view[: self._metadata_bytes]), rows, span.raw_size, len(view)))
        layout = self._read_layout(view, rows, span.raw_size) if known is None else known
        if layout is None:
            return None
        facts = [rows]
        for offset, pitch in layout:
            facts += (address + offset, 0, 0, pitch)
        return GatherColumns.of_facts(rows, facts, [None] * len(layout), view)

    def _read_layout(self, view: memoryview, rows: int, raw_size: int) -> list[tuple[int, int]] | None:
        try:
            body, places = fixed_places(view, self._schema, rows, raw_size)
        except FormatError:
            return None  # `read_block` says so
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts.clear()
        layout = [(body + places[name].offset, pitch) for name, pitch in self._pitches.items()]
        self._metadata_bytes = body
        self._layouts[bytes(view[:body]), rows, raw_size, len(view)] = layout
        return layout


class _TarShard:
    """The index has seen that all members lie inside their blocks."""

    def __init__(self, members: list[tuple[int, int, int]]) -> None:
        self._members = members  # of each field, where starts and ends lie in memory, and the pitch

    @classmethod
    def of(cls, shard: ShardIndex, fields: Sequence[str]) -> _TarShard | None:
        members = []
        for name in fields:
            kind, number = shard.schema[name], shard.schema.position(name)
            if shard.is_adopted or not (kind.is_whole or kind.kind == "bytes"):
                return None  # text is checked, arrays have headers
            starts, ends = (  # contiguous, and kept by the index
                one.__array_interface__["data"][0]
                for one in (shard.member_places(number)[0], shard.member_ends(number))
            )
            members.append((starts, ends, DECIMALS if kind.is_whole else 8))
        return cls(members)

    def place(self, stored: StoredBlock, span: BlockSpan) -> GatherColumns | None:
        if len(stored.view) != span.raw_size:
            return None
        first, rows = 8 * span.first_row, span.end_row - span.first_row
        facts, views = [rows], []
        for starts, ends, pitch in self._members:
            facts += (starts + first, ends + first, stored.address, pitch)
            views.append(None if pitch == DECIMALS else stored.view)
        return GatherColumns.of_facts(rows, facts, views, (stored.view, stored.shard))
