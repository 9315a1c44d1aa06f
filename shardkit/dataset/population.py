"""What the plan needs to know of a dataset, as columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardkit.manifest import Manifest, ShardTable
from shardkit.plan import Population

__all__ = ["population_of"]


def population_of(manifest: Manifest, table: ShardTable) -> Population:
    """The selected rows of each segment, and how many of them one block holds.

    Where only some rows of a shard are selected, the plan counts blocks in selected rows: `block_rows` shrinks in
    proportion, so that a window of the plan still touches about as many stored blocks.
    """
    rows = np.maximum(np.asarray(table.rows, dtype=np.int64), 1)
    selected = np.asarray(table.selected, dtype=np.int64)
    block_rows = np.asarray(table.block_rows, dtype=np.int64)
    scaled = np.where(selected < rows, -(-block_rows * selected // rows), block_rows)
    return Population(
        identity=manifest.id,
        strata=tuple(stratum.name for stratum in manifest.strata),
        segment_shard=np.asarray(table.segment_shard, dtype=np.int32),
        segment_stratum=np.asarray(table.segment_stratum, dtype=np.int32),
        segment_rows=np.asarray(table.segment_selected, dtype=np.int64),
        shard_block_rows=np.maximum(scaled, 1).astype(np.int32),
        shard_bytes=np.asarray(table.size, dtype=np.int64),
        mean_block_bytes=_mean_block_bytes(table, block_rows),
    )


def _mean_block_bytes(table: ShardTable, block_rows: NDArray[np.int64]) -> int:
    """Raw bytes of a block, of all that are stored: blocks restart at segment borders."""
    of_segment = np.maximum(block_rows[np.asarray(table.segment_shard, dtype=np.int64)], 1)
    blocks = int((-(-np.asarray(table.segment_rows, dtype=np.int64) // of_segment)).sum())
    return int(np.asarray(table.raw_bytes).sum()) // max(1, blocks)
