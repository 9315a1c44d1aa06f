"""What a plan is made over: the selected rows of one manifest, as columns over segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardkit.errors import PlanError

__all__ = ["Population"]


@dataclass(frozen=True, eq=False)
class Population:
    """Selected rows of a manifest, in manifest order (shard order, then row order).

    Sample numbers count selected rows in that order: segment ``i`` covers
    ``[sum(segment_rows[:i]), sum(segment_rows[:i + 1]))``. The arrays are not copied and must not change.

    Attributes:
        identity: manifest id; part of the plan's digest.
        strata: names; a stratum's number is its place here.
        segment_shard: int32[n], shard of each segment, not decreasing.
        segment_stratum: int32[n], stratum of each segment.
        segment_rows: int64[n], selected rows of each segment; 0 is allowed.
        shard_block_rows: int32[S], rows of a whole block of each shard (scaled down where rows are selected).
        shard_bytes: int64[S] or None, bytes of each shard, for reports and placement.
        mean_block_bytes: raw bytes of a block, for the default window; 0 where nobody knows.
    """

    identity: str
    strata: tuple[str, ...]
    segment_shard: NDArray[np.int32]
    segment_stratum: NDArray[np.int32]
    segment_rows: NDArray[np.int64]
    shard_block_rows: NDArray[np.int32]
    shard_bytes: NDArray[np.int64] | None = None
    mean_block_bytes: int = 0

    def __post_init__(self) -> None:
        num = len(self.segment_shard)
        for name in ("segment_stratum", "segment_rows"):
            if len(getattr(self, name)) != num:
                raise PlanError(f"population: {name} has {len(getattr(self, name))} entries, expected {num}")
        if self.shard_bytes is not None and len(self.shard_bytes) != len(self.shard_block_rows):
            raise PlanError(
                f"population: shard_bytes has {len(self.shard_bytes)} entries, "
                f"expected {len(self.shard_block_rows)}"
            )
        if num and not _valid(self):
            raise PlanError(
                "population: segment columns are out of range; expected shards in order, strata below "
                f"{len(self.strata)}, rows >= 0 and rows per block >= 1"
            )

    @classmethod
    def of(
        cls,
        identity: str,
        strata: Sequence[str],
        segments: ArrayLike,
        block_rows: int | ArrayLike = 64,
        shard_bytes: ArrayLike | None = None,
    ) -> Population:
        """A population from (shard, stratum, rows) triples: for tests and examples, not for 10⁵ shards."""
        table = np.asarray(segments, dtype=np.int64).reshape(-1, 3)
        shards = int(table[:, 0].max()) + 1 if len(table) else 0
        rows = np.broadcast_to(np.asarray(block_rows, dtype=np.int32), (shards,))
        return cls(
            identity,
            tuple(strata),
            table[:, 0].astype(np.int32),
            table[:, 1].astype(np.int32),
            np.ascontiguousarray(table[:, 2]),
            np.ascontiguousarray(rows),
            None if shard_bytes is None else np.asarray(shard_bytes, dtype=np.int64),
        )

    @property
    def rows(self) -> int:
        """All selected rows."""
        return int(self.segment_rows.sum(dtype=np.int64)) if len(self.segment_rows) else 0

    @property
    def num_shards(self) -> int:
        """Shards, those without a selected row included."""
        return len(self.shard_block_rows)


def _valid(population: Population) -> bool:
    shard, stratum = population.segment_shard, population.segment_stratum
    return bool(
        shard[0] >= 0
        and shard[-1] < population.num_shards
        and (shard[1:] >= shard[:-1]).all()
        and stratum.min() >= 0
        and stratum.max() < len(population.strata)
        and population.segment_rows.min() >= 0
        and population.shard_block_rows.min() >= 1
    )
