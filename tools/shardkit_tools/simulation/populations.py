"""The rows that are simulated: those of a manifest, or as many made up."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import shardkit
from shardkit.dataset.dataset import population_of
from shardkit.errors import ConfigurationError
from shardkit.plan import Population
from shardkit_tools.simulation.cluster import Data

Int64s = NDArray[np.int64]
_SHARD_BYTES = 256 << 20
_ROW_BYTES = 100_000


def open_population(data: Data) -> Population:
    """The rows of ``data.root`` (its manifest alone is read), or synthetic ones."""
    if data.root:
        dataset = shardkit.open(data.root)
        return population_of(dataset.manifest, dataset.table)
    return synthetic_population(data)


def synthetic_population(data: Data) -> Population:
    """Rows spread evenly over the shards, strata of sizes 1, 1/2, 1/3 … of the first.

    Raises:
        ConfigurationError: fewer rows than shards or strata.
    """
    total = data.bytes or data.rows * _ROW_BYTES
    shards = data.shards or max(1, -(-total // _SHARD_BYTES))
    if data.rows < shards or data.rows < data.strata:
        raise ConfigurationError(
            f"{data.rows} rows in {shards} shards and {data.strata} strata: at least one row of each is expected"
        )
    shares = np.array([2**40 // (s + 1) for s in range(data.strata)], dtype=object)
    ends = [int(data.rows * int(c) // int(shares.sum())) for c in np.cumsum(shares)]
    rows = np.diff(np.array([0, *ends], dtype=np.int64))
    borders = (np.arange(shards + 1, dtype=object)[:, None] * rows[None, :].astype(object)) // shards if (
        data.rows * shards >= 2**62
    ) else np.arange(shards + 1, dtype=np.int64)[:, None] * rows[None, :] // shards  # fmt: skip
    counts = np.diff(borders.astype(np.int64), axis=0)  # (shards, strata)
    row_bytes = max(1, total // data.rows)
    recipe = f"synthetic {data.rows} {shards} {data.strata} {total} {data.block}"
    return Population(
        identity=f"sha256:{hashlib.sha256(recipe.encode()).hexdigest()}",
        strata=tuple(f"stratum-{s}" for s in range(data.strata)),
        segment_shard=np.repeat(np.arange(shards, dtype=np.int32), data.strata),
        segment_stratum=np.tile(np.arange(data.strata, dtype=np.int32), shards),
        segment_rows=np.ascontiguousarray(counts.ravel()),
        shard_block_rows=np.full(shards, max(1, data.block // row_bytes), dtype=np.int32),
        shard_bytes=counts.sum(axis=1) * row_bytes,
    )


@dataclass(frozen=True, eq=False)
class BlockMap:
    """From sample numbers to blocks, and what blocks weigh; the plan's own blocks, restarting at every segment."""

    first_sample: Int64s  # int64[n + 1], first sample of each segment
    first_block: Int64s  # int64[n + 1], first dataset-wide block of each segment
    block_rows: Int64s  # int64[n], rows of a whole block of the segment's shard
    row_bytes: NDArray[np.float64]  # float64[n], stored bytes per row of the segment's shard
    shard: NDArray[np.int32]  # int32[n]

    @classmethod
    def of(cls, population: Population) -> BlockMap:
        """Columns over the segments of a population."""
        rows, shard = population.segment_rows, population.segment_shard
        size = population.shard_block_rows[shard].astype(np.int64)
        per_shard = np.bincount(shard, rows, population.num_shards)
        stored = population.shard_bytes if population.shard_bytes is not None else per_shard
        each = stored / np.maximum(per_shard, 1)
        return cls(_sums(rows), _sums(-(-rows // size)), size, each[shard], shard)

    @property
    def num_blocks(self) -> int:
        return int(self.first_block[-1])

    @property
    def num_samples(self) -> int:
        return int(self.first_sample[-1])

    def blocks_of(self, samples: Int64s) -> Int64s:
        """Dataset-wide block of each sample."""
        segment = np.searchsorted(self.first_sample, samples, side="right") - 1
        inside = samples - self.first_sample[segment]
        blocks: Int64s = self.first_block[segment] + inside // self.block_rows[segment]
        return blocks

    def weigh(self, blocks: Int64s) -> tuple[Int64s, NDArray[np.int32]]:
        """Stored bytes of each block, and its shard."""
        segment = np.searchsorted(self.first_block, blocks, side="right") - 1
        before = (blocks - self.first_block[segment]) * self.block_rows[segment]
        left = self.first_sample[segment + 1] - self.first_sample[segment] - before
        rows = np.minimum(left, self.block_rows[segment])
        return np.maximum(1, (rows * self.row_bytes[segment])).astype(np.int64), self.shard[segment]


def _sums(values: Int64s) -> Int64s:
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums
