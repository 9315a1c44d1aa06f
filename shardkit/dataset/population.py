"""What the plan needs to know of a dataset, as columns; and whether a plan is that of a dataset."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import UsageError
from shardkit.manifest import Manifest, ShardTable
from shardkit.plan import Plan, Population


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


def check_plan(plan: object, manifest_id: str) -> None:
    """Refuse what is no plan of this version.

    Raises:
        UsageError: no plan at all, such as the size of a batch, or that of another version.
    """
    if not isinstance(plan, Plan):
        batch = plan if isinstance(plan, int) and not isinstance(plan, bool) and plan > 0 else 512
        raise UsageError(
            f"ds.loader({plan!r:.60}): a loader takes a plan; make one first: "
            f"ds.loader(ds.plan(global_batch={batch}, seed=0))"
        )
    if plan.population.identity != manifest_id:
        raise UsageError(
            f"this plan was made for manifest {plan.population.identity[:19]}…, the dataset is "
            f"{manifest_id[:19]}…; make the plan with ds.plan(…) of the same dataset"
        )
