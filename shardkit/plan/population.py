"""What a plan is made over: the selected rows of one manifest, their strata in groups, and the strata's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import gcd

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardkit.errors import PlanError


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


@dataclass(frozen=True, eq=False)
class Groups:
    """Strata in dealing order; the rare ones pooled as the last group.

    Attributes:
        masses: what each group weighs in the deal: rows (natural) or weights, as Python integers.
        rows: selected rows of each group.
        strata: strata numbers of each group; one, except in the pool.
        group_of: int32[strata], group of each stratum; strata without mass are in none (-1).
        pooled: the last group holds the rare strata.
    """

    masses: tuple[int, ...]
    rows: tuple[int, ...]
    strata: tuple[tuple[int, ...], ...]
    group_of: NDArray[np.int32]
    pooled: bool

    def __len__(self) -> int:
        return len(self.masses)

    @property
    def total(self) -> int:
        """Sum of the masses."""
        return sum(self.masses)

    def cumulative(self) -> list[int]:
        """Masses of groups 0..g, for each g."""
        sums, total = [], 0
        for mass in self.masses:
            total += mass
            sums.append(total)
        return sums


def each_alone(rows: Sequence[int]) -> Groups:
    """Every stratum a group of its own, whatever its size; group numbers are stratum numbers."""
    counts = tuple(int(r) for r in rows)
    strata = tuple((s,) for s in range(len(counts)))
    return Groups(counts, counts, strata, np.arange(len(counts), dtype=np.int32), pooled=False)


def stratum_rows(population: Population) -> list[int]:
    """Selected rows of each stratum, as Python integers."""
    rows = np.zeros(len(population.strata), dtype=np.int64)
    slab = 1 << 18  # bounded temporaries; the float64 sums of bincount stay exact below 2**53 rows a slab
    for first in range(0, len(population.segment_rows), slab):
        part = slice(first, first + slab)
        sums = np.bincount(
            population.segment_stratum[part], population.segment_rows[part], len(population.strata)
        )
        rows += sums.astype(np.int64)
    return [int(r) for r in rows]


def group_strata(
    names: Sequence[str] | range, rows: Sequence[int], masses: Sequence[int], global_batch: int
) -> Groups:
    """Sort strata by (-mass, name); those expected less than once per global batch are pooled last.

    A rare stratum cannot be dealt alone anywhere but in the last place: its cumulative counts would not be monotone.
    """
    total = sum(m for m, r in zip(masses, rows, strict=True) if r)
    alive = [s for s in range(len(names)) if rows[s] and masses[s]]
    alive.sort(key=lambda s: (-masses[s], names[s]))
    common = [s for s in alive if global_batch * masses[s] >= total]
    rare = alive[len(common) :]
    members = [(s,) for s in common] + ([tuple(rare)] if rare else [])
    group_of = np.full(len(names), -1, dtype=np.int32)
    for group, strata in enumerate(members):
        group_of[list(strata)] = group
    return Groups(
        tuple(sum(masses[s] for s in strata) for strata in members),
        tuple(sum(rows[s] for s in strata) for strata in members),
        tuple(members),
        group_of,
        bool(rare),
    )


WeightsLike = Mapping[str, int]
"""Stratum → integer weight."""

MAX_WEIGHT = 2**30
"""Largest sum of the weights of a plan, common factors taken out: draws of a pool times masses stay in int64."""


def resolve_weights(
    weights: WeightsLike | None, strata: Sequence[str], rows: Sequence[int]
) -> tuple[int, ...]:
    """One weight per stratum.

    Args:
        weights: glob over stratum names to integer weight of *each* stratum that it matches; of several globs the
            last that matches counts; 1 where none matches, 0 leaves a stratum out. None: weights like the rows.
        strata: names.
        rows: selected rows; strata without rows weigh nothing.

    Raises:
        PlanError: a glob matches nothing, a weight is no integer >= 0, all weigh nothing, or they are too large.
    """
    if weights is None:
        masses = [int(r) for r in rows]
    else:
        masses = [1] * len(strata)
        for pattern, weight in weights.items():
            if not _is_integer(weight) or weight < 0:
                raise PlanError(
                    f"plan: weight of {pattern!r} is {weight!r}, expected an integer >= 0; scale fractions up"
                )
            hits = [s for s, name in enumerate(strata) if fnmatchcase(name, pattern)]
            if not hits:
                known = ", ".join(strata[:8]) + (", …" if len(strata) > 8 else "")
                raise PlanError(f"plan: weight {pattern!r} matches no stratum; expected a glob over: {known}")
            for stratum in hits:
                masses[stratum] = int(weight)
        masses = [mass if rows[s] else 0 for s, mass in enumerate(masses)]
    if not any(masses):
        raise PlanError("plan: no stratum with rows has a weight above 0")
    common = gcd(*masses)
    masses = [mass // common for mass in masses]
    total = sum(masses)
    if total >= MAX_WEIGHT:
        if weights is not None:
            raise PlanError(
                f"plan: weights add up to {total}, expected less than {MAX_WEIGHT}; use smaller integers"
            )
        masses = [max(1, mass * (MAX_WEIGHT // 2) // total) if mass else 0 for mass in masses]
    return tuple(masses)


def resolve_stages(
    weights: WeightsLike | None,
    stages: Sequence[tuple[int, WeightsLike | None]] | None,
    strata: Sequence[str],
    rows: Sequence[int],
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(from_step, weights per stratum) in ascending order, the first from step 0; empty for natural weights."""
    if weights is None and not stages:
        return ()
    resolved = [(0, resolve_weights(weights, strata, rows))]
    for step, stage in stages or ():
        if not _is_integer(step) or step < resolved[-1][0]:
            raise PlanError(f"plan: stage from step {step!r}, expected integers in ascending order from 0")
        if step == resolved[-1][0]:
            resolved.pop()
        resolved.append((int(step), resolve_weights(stage, strata, rows)))
    return tuple(resolved)


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
