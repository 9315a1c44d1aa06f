"""Where samples lie: sample number → shard, row, block. Columns in, columns out; no bytes are read but selections."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import NotFoundError
from shardkit.manifest import Selection, ShardTable

Int64s = NDArray[np.int64]


class RowPlaces(NamedTuple):
    """Where n samples lie; all arrays are (n,) int64 and in the order of the samples asked for."""

    shard: Int64s  # ordinal of the shard in the manifest
    row: Int64s  # row inside the shard
    block: Int64s  # block number counted over the whole dataset
    row_in_block: Int64s


class RowMap:
    """The arithmetic that block layout rests on: blocks restart at segment borders and hold `block_rows` rows.

    Everything here follows from the pages of the manifest (formats/SPEC.md, "blocks"); no index is needed. Costs
    O(segments) once and O(n log segments) per look-up of n samples.

    Args:
        table: columns over all shards and segments.
        load_selection: gives the bitmap of a shard; called once per shard that has one and is asked for.
    """

    def __init__(self, table: ShardTable, load_selection: Callable[[int], Selection]) -> None:
        self._load_selection = load_selection
        self._selections: dict[int, Selection] = {}
        shards = len(table.rows)
        segment_shard = np.asarray(table.segment_shard, dtype=np.int64)
        rows = np.asarray(table.segment_rows, dtype=np.int64)
        self._segment_shard = segment_shard
        self._block_rows = np.asarray(table.block_rows, dtype=np.int64)
        self._segment_sample = _starts(np.asarray(table.segment_selected, dtype=np.int64))
        self._shard_sample = _starts(np.asarray(table.selected, dtype=np.int64))
        row_starts = _starts(rows)
        first_segment = np.searchsorted(segment_shard, np.arange(shards + 1))
        self._first_segment = first_segment
        self._segment_row = row_starts[:-1] - row_starts[first_segment[:-1]][segment_shard]
        per_block = self._block_rows[segment_shard]
        block_starts = _starts(-(-rows // np.maximum(per_block, 1)))
        self._segment_block = block_starts[:-1]
        self.shard_first_block: Int64s = block_starts[first_segment]  # (shards + 1,)
        self._first_blocks: list[int] = self.shard_first_block.tolist()  # to ask for one block at a time
        self._selected_shards = table.has_selection
        self._any_selection = bool(self._selected_shards.any())

    def __len__(self) -> int:
        return int(self._segment_sample[-1])

    @property
    def blocks(self) -> int:
        return int(self.shard_first_block[-1])

    @property
    def segment_blocks(self) -> Int64s:
        return np.diff(self._segment_block, append=self.blocks)

    def shard_of_block(self, block: int) -> tuple[int, int]:
        """(shard, block inside it) of a dataset-wide block number."""
        shard = bisect.bisect_right(self._first_blocks, block) - 1
        return shard, block - self._first_blocks[shard]

    def locate(self, samples: Int64s) -> RowPlaces:
        """Where `samples` ((n,) int64, any order) lie.

        Raises:
            NotFoundError: a sample number is outside the dataset.
        """
        samples = np.asarray(samples, dtype=np.int64)
        if samples.size and (int(samples.min()) < 0 or int(samples.max()) >= len(self)):
            bad = int(samples.min()) if int(samples.min()) < 0 else int(samples.max())
            raise NotFoundError(f"sample {bad} does not exist: this dataset has samples 0 to {len(self) - 1}")
        segment = np.searchsorted(self._segment_sample, samples, side="right") - 1
        offset = samples - self._segment_sample[segment]
        if self._any_selection:
            segment, offset = self._through_selections(samples, segment, offset)
        shard = self._segment_shard[segment]
        block_in_segment, row_in_block = np.divmod(offset, self._block_rows[shard])
        return RowPlaces(
            shard,
            self._segment_row[segment] + offset,
            self._segment_block[segment] + block_in_segment,
            row_in_block,
        )

    def _through_selections(self, samples: Int64s, segment: Int64s, offset: Int64s) -> tuple[Int64s, Int64s]:
        """Correct (segment, offset) of samples that lie in shards of which only some rows are selected."""
        shard = self._segment_shard[segment]
        segment, offset = segment.copy(), offset.copy()
        for number in np.unique(shard[self._selected_shards[shard]]):
            mine = np.flatnonzero(shard == number)
            ordinals = samples[mine] - self._shard_sample[number]
            rows = np.asarray(self.selection(int(number)).select(ordinals), dtype=np.int64)
            first, last = self._first_segment[number], self._first_segment[number + 1]
            inside = np.searchsorted(self._segment_row[first:last], rows, side="right") - 1
            segment[mine] = first + inside
            offset[mine] = rows - self._segment_row[first + inside]
        return segment, offset

    def selection(self, shard: int) -> Selection:
        """The bitmap of a shard that has one; loaded once and kept."""
        found = self._selections.get(shard)
        if found is None:
            found = self._selections[shard] = self._load_selection(shard)
        return found

    def rows_of_shard(self, shard: int) -> Int64s:
        """Rows of a shard that the dataset holds, ascending, (selected,) int64."""
        selected = int(self._shard_sample[shard + 1] - self._shard_sample[shard])
        if self._selected_shards[shard]:
            return np.asarray(self.selection(shard).select(np.arange(selected)), dtype=np.int64)
        return np.arange(selected, dtype=np.int64)


def _starts(counts: Int64s) -> Int64s:
    """Exclusive prefix sums: (n + 1,) int64."""
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts
