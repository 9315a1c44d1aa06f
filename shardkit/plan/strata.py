"""Which strata are dealt alone and which together: the groups of a plan (SPEC.md §1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .population import Population

__all__ = ["Groups", "each_alone", "group_strata", "stratum_rows"]


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
