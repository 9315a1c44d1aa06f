"""Another sample of the same stratum for one that does not decode: a function of the place in the grid alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shardkit.formats import sha256_digest
from shardkit.plan import Population

__all__ = ["SubstituteDraw"]


class SubstituteDraw:
    """Draws by SHA-256 of (seed, sample, step, slot, attempt), uniform over the stratum's selected rows.

    Args:
        population: strata and where their rows lie.
        seed: of the plan.
        fetch: reads one sample, verified.
    """

    def __init__(self, population: Population, seed: int, fetch: Callable[[int], dict[str, Any]]) -> None:
        self._population, self._seed, self._fetch = population, seed, fetch
        self._ends = np.cumsum(np.asarray(population.segment_rows, dtype=np.int64))

    def __call__(self, sample: int, step: int, slot: int, attempt: int) -> tuple[int, dict[str, Any]]:
        """(another sample, its fields)."""
        population = self._population
        stratum = population.segment_stratum[int(np.searchsorted(self._ends, sample, side="right"))]
        segments = np.flatnonzero(population.segment_stratum == stratum)
        rows = population.segment_rows[segments].astype(np.int64)
        place = f"{self._seed} {sample} {step} {slot} {attempt}".encode()
        draw = int(sha256_digest(place).removeprefix("sha256:")[:16], 16) % int(rows.sum())
        ends = np.cumsum(rows)
        inside = int(np.searchsorted(ends, draw, side="right"))
        segment = segments[inside]
        other = (
            int(self._ends[segment] - population.segment_rows[segment])
            + draw
            - int(ends[inside] - rows[inside])
        )
        return other, self._fetch(other)
